"""A cloud that is a directory: one file per instance.

Instances outlive the launcher that made them, and a test counts them from outside.
``settings.json`` in the directory may change at any time: ``create_delay``, ``delete_delay``
(seconds), ``quota`` (instances), ``fail_creates`` (how many creations still fail).  Each event
becomes a line in ``log``.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from nodepool import exceptions
from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig, statemachine
from nodepool.driver.utils import QuotaInformation

#: A test's hook: called with the name of each step as it is passed.
checkpoint: Callable[[str], None] = lambda _name: None  # noqa: E731


class DiskImage(ConfigValue):
    name = "none"
    username = "zuul"
    python_path = "auto"
    shell_type = None
    connection_port = 22
    connection_type = "ssh"


class DiskLabel(ConfigValue):
    ignore_equality = ["pool"]

    def __init__(self, name: str, pool: DiskPool) -> None:
        self.name = name
        self.pool = pool
        self.diskimage = None
        self.cloud_image = DiskImage()
        self.host_key_checking = True


class DiskPool(ConfigPool):
    ignore_equality = ["provider"]

    def load(self, pool_config: dict[str, Any], full_config: Any, provider: Any) -> None:
        super().load(pool_config)
        self.name = pool_config["name"]
        self.provider = provider
        self.use_internal_ip = False
        self.host_key_checking = True
        self.max_cores = self.max_ram = None
        self.max_resources: dict[str, float] = {}
        self.labels = {}
        for name in pool_config["labels"]:
            self.labels[name] = DiskLabel(name, self)
            full_config.labels[name].pools.append(self)


class DiskProviderConfig(ProviderConfig):
    def __init__(self, driver: Any, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self._pools: dict[str, DiskPool] = {}
        self.directory = provider["cloud-dir"]
        self.launch_retries = provider.get("launch-retries", 3)
        self.launch_timeout = 60
        self.boot_timeout = 10
        self.diskimages: dict[str, Any] = {}
        self.cloud_images: dict[str, Any] = {}

    @property
    def pools(self) -> dict[str, Any]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return False

    def load(self, newconfig: Any) -> None:
        for pool_config in self.provider.get("pools", []):
            pool = DiskPool()
            pool.load(pool_config, newconfig, self)
            self._pools[pool.name] = pool

    def getSchema(self) -> Any:
        import voluptuous as v

        return v.Schema({"cloud-dir": str, "pools": list}, extra=v.ALLOW_EXTRA)

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {
            label
            for pool in self._pools.values()
            if pool_name in (None, pool.name)
            for label in pool.labels
        }


class DiskInstance(statemachine.Instance):
    def __init__(self, external_id: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.ready = True
        self.external_id = external_id
        self.metadata = metadata
        self.interface_ip = self.public_ipv4 = f"fake-{external_id}"
        self.cloud = "disk"

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(cores=1, instances=1, ram=1024)


class DiskResource(statemachine.Resource):
    def __init__(self, external_id: str, metadata: dict[str, Any]) -> None:
        super().__init__(metadata, "instance")
        self.id = external_id


class DiskCreate(statemachine.StateMachine):
    """start -> asked -> (file exists, id known) building -> booting -> complete."""

    def __init__(self, adapter: DiskAdapter, hostname: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.adapter = adapter
        self.hostname = hostname
        self.metadata = metadata

    def advance(self) -> DiskInstance | None:
        if self.state == self.START:
            self.state = "asked"
        elif self.state == "asked":
            checkpoint("create-before")
            self.external_id = self.adapter.create(self.hostname, self.metadata)
            checkpoint("create-after")
            self._wait("building")
        elif self.state in ("building", "booting"):
            if time.monotonic() < (self.next_wake or 0):
                return None
            self.adapter.check_create()
            if self.state == "building":
                self._wait("booting")
                return None
            self.next_wake = None
            self.state = "complete"
            self.complete = True
            return DiskInstance(self.external_id, self.metadata)
        return None

    def _wait(self, state: str) -> None:
        self.state = state
        self.next_wake = time.monotonic() + self.adapter.setting("create_delay", 0.0) / 2


class DiskDelete(statemachine.StateMachine):
    def __init__(self, adapter: DiskAdapter, external_id: str) -> None:
        super().__init__()
        self.adapter = adapter
        self.external_id = external_id

    def advance(self) -> None:
        if self.state == self.START:
            self.state = "deleting"
            self.next_wake = time.monotonic() + self.adapter.setting("delete_delay", 0.0)
        elif time.monotonic() >= (self.next_wake or 0):
            checkpoint("delete-before")
            self.adapter.remove(self.external_id)
            checkpoint("delete-after")
            self.state = "complete"
            self.complete = True


class DiskAdapter(statemachine.Adapter):
    def __init__(self, provider_config: DiskProviderConfig) -> None:
        self.provider = provider_config
        self.directory = pathlib.Path(provider_config.directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def setting(self, name: str, default: float) -> float:
        try:
            return float(
                json.loads((self.directory / "settings.json").read_text()).get(name, default)
            )
        except (OSError, ValueError):
            return default

    def _log(self, text: str) -> None:
        with open(self.directory / "log", "a", encoding="utf8") as out:
            out.write(f"{time.time():.3f} {os.getpid()} {text}\n")

    def create(self, hostname: str, metadata: dict[str, Any]) -> str:
        if self.setting("quota", float("inf")) <= sum(1 for _ in self._ids()):
            raise exceptions.QuotaException("the cloud is full")
        external_id = f"i-{uuid.uuid4().hex[:16]}"
        path = self.directory / f"{external_id}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"hostname": hostname, "metadata": metadata}))
        new.replace(path)
        self._log(f"created {external_id} for {hostname}")
        return external_id

    def check_create(self) -> None:
        """Fail while there is a file ``fail-N`` (each is used up by one failure)."""
        for path in self.directory.glob("fail-*"):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            raise exceptions.LaunchStatusException("the instance went into an error state")

    def remove(self, external_id: str) -> None:
        try:
            (self.directory / f"{external_id}.json").unlink()
        except FileNotFoundError:
            self._log(f"not found {external_id}")
            raise exceptions.NotFound from None
        self._log(f"deleted {external_id}")

    def _ids(self) -> Iterable[str]:
        return (path.stem for path in self.directory.glob("i-*.json"))

    def _list(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for external_id in self._ids():
            try:
                content = json.loads((self.directory / f"{external_id}.json").read_text())
            except FileNotFoundError:
                continue
            found.append((external_id, content["metadata"]))
        return found

    def getCreateStateMachine(
        self,
        hostname: str,
        label: Any,
        image_external_id: Any,
        metadata: dict[str, str],
        request: Any,
        az: str | None,
        log: Any,
    ) -> DiskCreate:
        return DiskCreate(self, hostname, metadata)

    def getDeleteStateMachine(self, external_id: Any, log: Any) -> DiskDelete:
        return DiskDelete(self, external_id)

    def listInstances(self) -> list[DiskInstance]:
        return [DiskInstance(i, metadata) for i, metadata in self._list()]

    def listResources(self) -> list[DiskResource]:
        self._log("listed resources")
        return [DiskResource(i, metadata) for i, metadata in self._list()]

    def deleteResource(self, resource: Any) -> None:
        self._log(f"leaked {resource.id}")
        self.remove(resource.id)

    def getQuotaLimits(self) -> QuotaInformation:
        return QuotaInformation(default=self.setting("quota", float("inf")))

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        return QuotaInformation(cores=1, instances=1, ram=1024)


class DiskDriver(statemachine.StateMachineDriver):
    name = "diskcloud"

    def getProviderConfig(self, provider: dict[str, Any]) -> DiskProviderConfig:
        return DiskProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> DiskAdapter:
        return DiskAdapter(provider_config)
