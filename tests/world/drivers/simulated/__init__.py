"""Driver for :mod:`tests.world.cloud`: what a driver of a real cloud does, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import voluptuous as v

from nodepool import exceptions
from nodepool.driver import statemachine
from nodepool.driver.common.options import ProviderDiskImage
from nodepool.driver.utils import QuotaInformation
from tests.support.faults.drivers.diskcloud import DiskPool, DiskProviderConfig
from tests.world.cloud import Cloud, CloudError, Image, clouds
from tests.world.logins import address

#: Seconds after which an answer of the cloud is not waited for any more.
DEADLINE = 10.0


class SimulatedPool(DiskPool):
    def load(self, pool_config: dict[str, Any], full_config: Any, provider: Any) -> None:
        """Labels are names, or mappings that name a disk image, too."""
        labels = [
            label if isinstance(label, dict) else {"name": label} for label in pool_config["labels"]
        ]
        super().load(
            {**pool_config, "labels": [label["name"] for label in labels]}, full_config, provider
        )
        self.host_key_checking = False
        self.max_cores, self.max_ram = pool_config.get("max-cores"), pool_config.get("max-ram")
        for options in labels:
            label = self.labels[options["name"]]
            label.host_key_checking = False
            if "diskimage" in options:
                label.cloud_image, label.diskimage = (
                    None,
                    provider.diskimages[options["diskimage"]].diskimage,
                )


class SimulatedProviderConfig(DiskProviderConfig):
    """``cloud-dir`` is the name of a cloud in `clouds`."""

    image_type = "qcow2"
    image_name_format = "{image_name}-{timestamp}"
    post_upload_hook: str | None = None

    @property
    def manage_images(self) -> bool:
        return bool(self.diskimages)

    def getSchema(self) -> Any:
        return v.Schema(
            {"cloud-dir": str, "pools": list, "diskimages": list, "post-upload-hook": str},
            extra=v.ALLOW_EXTRA,
        )

    def load(self, newconfig: Any) -> None:
        self.post_upload_hook = self.provider.get("post-upload-hook")
        for image in self.provider.get("diskimages", []):
            self.diskimages[image["name"]] = ProviderDiskImage(
                self.image_type, image, newconfig.diskimages[image["name"]]
            )
        for pool_config in self.provider["pools"]:
            pool = SimulatedPool()
            pool.load(pool_config, newconfig, self)
            self._pools[pool.name] = pool


class SimulatedInstance(statemachine.Instance):
    def __init__(self, external_id: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.ready = True
        self.external_id = external_id
        self.metadata = metadata
        self.interface_ip = self.public_ipv4 = address(external_id)
        self.cloud = "simulated"

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(cores=1, instances=1, ram=1024)


class SimulatedResource(statemachine.Resource):
    def __init__(self, external_id: str, metadata: dict[str, Any], kind: str = "instance") -> None:
        super().__init__(metadata, kind)
        self.id = external_id

    def belongs_to(self, external_id: Any) -> bool:
        return bool(external_id == self.id)


class Machine(statemachine.StateMachine):
    """Asks the cloud, one call at a time."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__()
        self.cloud = cloud
        self._deadline = 0.0

    def _ask(self, state: str, function: Callable[[], Any]) -> None:
        self.state = state
        self.waiting_future = self.cloud.call(function)
        self._deadline = time.monotonic() + DEADLINE
        self.next_wake = self._deadline

    def _answer(self) -> Any:
        """Return what the cloud has answered, or None while it has not.

        :raises LaunchStatusException: no answer in time.
        """
        future: Future[Any] = self.waiting_future
        if not future.done():
            if time.monotonic() >= self._deadline:
                raise exceptions.LaunchStatusException("the cloud does not answer")
            return None
        self.next_wake = None
        try:
            return future.result(0)
        except CloudError as error:
            if error.code == 404:
                raise exceptions.NotFound from None
            if error.code == 403:
                raise exceptions.QuotaException("the cloud is full") from None
            raise exceptions.LaunchStatusException(f"the cloud answered {error.code}") from None


class Create(Machine):
    def __init__(
        self, cloud: Cloud, hostname: str, metadata: dict[str, Any], image: str | None
    ) -> None:
        super().__init__(cloud)
        self.hostname = hostname
        self.metadata = metadata
        self.image = image

    def advance(self) -> SimulatedInstance | None:
        if self.state == self.START:
            self._ask(
                "creating", lambda: self.cloud.create(self.hostname, self.metadata, self.image)
            )
        elif self.state == "creating":
            answer = self._answer()
            if answer is not None:
                self.external_id = answer
                self._later()
        elif self.state == "booting":
            if time.monotonic() >= (self.next_wake or 0.0):
                self._ask("polling", lambda: self.cloud.status(self.external_id))
        elif self.state == "polling":
            answer = self._answer()
            if answer == "error":
                raise exceptions.LaunchStatusException("the machine went into an error state")
            if answer == "running":
                self.state = "complete"
                self.complete = True
                return SimulatedInstance(self.external_id, self.metadata)
            if answer is not None:
                self._later()
        return None

    def _later(self) -> None:
        self.state = "booting"
        self.waiting_future = None
        self.next_wake = time.monotonic() + 1.0


class Delete(Machine):
    def __init__(self, cloud: Cloud, external_id: str) -> None:
        super().__init__(cloud)
        self.external_id = external_id

    def advance(self) -> None:
        if self.state == self.START:
            self._ask("deleting", lambda: self.cloud.delete(self.external_id))
        elif self.state == "deleting" and self._answer() is not None:
            self.state = "complete"
            self.complete = True


class SimulatedAdapter(statemachine.Adapter):
    def __init__(self, provider_config: SimulatedProviderConfig) -> None:
        self.provider = provider_config
        self.cloud = clouds[provider_config.directory]

    def getCreateStateMachine(
        self,
        hostname: str,
        label: Any,
        image_external_id: Any,
        metadata: dict[str, str],
        request: Any,
        az: str | None,
        log: Any,
    ) -> Create:
        return Create(self.cloud, hostname, metadata, image_external_id)

    def getDeleteStateMachine(self, external_id: Any, log: Any) -> Delete:
        return Delete(self.cloud, external_id)

    def _list(self) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = self.cloud.call(self.cloud.list).result(DEADLINE)
        return found

    def listInstances(self) -> list[SimulatedInstance]:
        return [SimulatedInstance(i, metadata) for i, metadata in self._list()]

    def listResources(self) -> list[SimulatedResource]:
        found = [SimulatedResource(i, metadata) for i, metadata in self._list()]
        if self.provider.diskimages:
            found += [
                SimulatedResource(image.id, image.metadata, "image") for image in self.listImages()
            ]
        return found

    def deleteResource(self, resource: Any) -> None:
        delete = self.cloud.delete_image if resource.type == "image" else self.cloud.delete
        self.cloud.call(lambda: delete(resource.id)).result(DEADLINE)

    def uploadImage(
        self,
        provider_image: Any,
        image_name: str,
        filename: str,
        image_format: str | None = None,
        metadata: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> str:
        with open(filename, "rb"):
            external_id: str = self.cloud.call(
                lambda: self.cloud.upload(image_name, metadata or {})
            ).result(DEADLINE)
        return external_id

    def deleteImage(self, external_id: Any) -> None:
        try:
            self.cloud.call(lambda: self.cloud.delete_image(external_id)).result(DEADLINE)
        except CloudError as error:
            if error.code != 404:
                raise

    def listImages(self) -> list[Image]:
        found: list[Image] = self.cloud.call(self.cloud.list_images).result(DEADLINE)
        return found

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        there = {external_id for external_id, _metadata in self._list()}
        return [external_id for external_id in external_ids if external_id not in there]

    def getQuotaLimits(self) -> QuotaInformation:
        return QuotaInformation(instances=self.cloud.quota, default=float("inf"))

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        return QuotaInformation(cores=1, instances=1, ram=1024)


class SimulatedDriver(statemachine.StateMachineDriver):
    name = "simulated"

    def getProviderConfig(self, provider: dict[str, Any]) -> SimulatedProviderConfig:
        return SimulatedProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> SimulatedAdapter:
        return SimulatedAdapter(provider_config)
