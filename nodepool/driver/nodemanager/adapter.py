"""Node managers as the state machine framework needs them (nodemanager.md C.8)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nodepool import exceptions
from nodepool.driver import statemachine
from nodepool.driver.nodemanager.hosts import HostError, Hosts, ManagedHost
from nodepool.driver.utils import QuotaInformation
from nodepool.nodemanager.rpc_client import RpcError, RpcFault

#: Seconds of one wait for a sliver; repeated until the launch time-out.
WAIT = 20.0
#: Faults of the API (nodemanager.md A.8).
BAD_ARGUMENT, INTERNAL = 102, 104
WORKERS = 16
UPLOAD_TIMEOUT = 3600.0


def rspec_of(label: Any, cores: int) -> dict[str, int]:
    """Resources of a label on a host with so many cores; only what the label names."""
    wanted: dict[str, int] = {}
    if label.cpus:
        wanted["nm_cpu_guaranteed_share"] = max(1, round(1000 * label.cpus / cores))
    if label.cpu_limit:
        wanted["nm_cpu_limit"] = min(1000, max(1, round(1000 * label.cpu_limit / cores)))
    for name, value, factor in (
        ("nm_mem_limit", label.ram, 1), ("nm_disk_quota", label.disk, 1 << 20), ("nm_pids_max", label.pids, 1),
        ("nm_net_max_rate", label.net_max, 1), ("nm_net_min_rate", label.net_min, 1),
    ):  # fmt: skip
        if value:
            wanted[name] = int(value) * factor
    return {**wanted, **label.rspec}


class NodeManagerInstance(statemachine.Instance):
    """A sliver."""

    def __init__(self, host: ManagedHost, sliver: dict[str, Any], provider: Any) -> None:
        super().__init__()
        self._effective = sliver.get("effective") or {}
        self._cores = host.cores
        self.external_id = {"host": host.name, "sliver": sliver["name"]}
        self.metadata = sliver.get("metadata") or {}
        self.ready = sliver.get("state") == "ready"
        self.interface_ip = host.ssh_address or sliver.get("ssh_address")
        self.public_ipv4 = self.private_ipv4 = self.interface_ip
        self.connection_port = sliver.get("ssh_port") or 22
        self.host_keys = list(sliver.get("host_keys") or [])
        self.host_id = host.name
        self.az = host.group
        self.cloud = provider.name
        self.slot = sliver.get("index")
        self.driver_data = {"rspec": self._effective}
        if sliver.get("username"):
            self.username = sliver["username"]

    def getQuotaInformation(self) -> QuotaInformation:
        return quota_of(self._effective, self._cores)


def quota_of(rspec: dict[str, Any], cores: int) -> QuotaInformation:
    return QuotaInformation(
        cores=rspec.get("nm_cpu_guaranteed_share", 0) * cores / 1000, instances=1, ram=rspec.get("nm_mem_limit", 0))


class NodeManagerResource(statemachine.Resource):
    def __init__(self, host: str, sliver: dict[str, Any]) -> None:
        super().__init__(sliver.get("metadata") or {}, "instance")
        self.host = host
        self.id = sliver["name"]


class CreateMachine(statemachine.StateMachine):
    """Choose a host, put the record, wait until the sliver is ready."""

    PLACING, WAITING, COMPLETE = "placing", "waiting for the sliver", "complete"

    def __init__(self, adapter: NodeManagerAdapter, name: str, label: Any, image: str, metadata: dict[str, str],
                 az: str | None, log: Any) -> None:
        super().__init__()
        self._adapter = adapter
        self._name = name
        self._label = label
        self._image = image
        self._metadata = metadata
        self._az = az
        self._log = log
        self._host: ManagedHost | None = None

    def advance(self) -> NodeManagerInstance | None:
        if self.state == self.START:
            self.waiting_future = self._adapter.submit(
                self._adapter.place, self._name, self._label, self._image, self._metadata, self._az, self._choose)
            self.state = self.PLACING
        while self.waiting_future is not None and self.waiting_future.done():
            future, self.waiting_future = self.waiting_future, None
            sliver = future.result()
            assert self._host is not None
            if sliver.get("state") == "failed":
                raise exceptions.LaunchStatusException(f"sliver {self._name} on {self._host.name}: {sliver.get('error')}")
            if sliver.get("state") == "ready":
                self.state = self.COMPLETE
                self.complete = True
                return NodeManagerInstance(self._host, sliver, self._adapter.provider)
            self.state = self.WAITING
            self.waiting_future = self._adapter.submit(
                self._host.call, "WaitSliver", self._name, "ready", WAIT, timeout=WAIT + 10)
        return None

    def _choose(self, host: ManagedHost) -> None:
        """Before the record goes out: whatever happens, deletion knows where to look."""
        self._host = host
        self.external_id = {"host": host.name, "sliver": self._name}


class DeleteMachine(statemachine.StateMachine):
    DELETING, COMPLETE = "deleting", "complete"

    def __init__(self, adapter: NodeManagerAdapter, external_id: Any, log: Any) -> None:
        super().__init__()
        self._adapter = adapter
        self.external_id = external_id
        self._log = log

    def advance(self) -> None:
        if self.state == self.START:
            if not isinstance(self.external_id, dict):
                raise exceptions.NotFound
            self.waiting_future = self._adapter.submit(
                self._adapter.delete, str(self.external_id.get("host")), str(self.external_id.get("sliver")))
            self.state = self.DELETING
        if self.waiting_future is not None and self.waiting_future.done():
            future, self.waiting_future = self.waiting_future, None
            if future.result():
                self.state = self.COMPLETE
                self.complete = True
            else:
                self.waiting_future = self._adapter.submit(
                    self._adapter.delete, str(self.external_id.get("host")), str(self.external_id.get("sliver")))


class NodeManagerAdapter(statemachine.Adapter):
    def __init__(self, provider_config: Any) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self.log = logging.getLogger(f"nodepool.NodeManagerAdapter.{provider_config.name}")
        self.hosts = Hosts(provider_config, self.log)
        self._executor = ThreadPoolExecutor(WORKERS, thread_name_prefix=f"ThreadPoolExecutor-{provider_config.name}")
        self._renewed = 0.0

    def stop(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        return self._executor.submit(function, *arguments, **keywords)

    # -- launching

    def getCreateStateMachine(
        self, hostname: str, label: Any, image_external_id: Any, metadata: dict[str, str], request: Any,
        az: str | None, log: Any,
    ) -> CreateMachine:  # fmt: skip
        image = f"image:{image_external_id}" if image_external_id else str(label.cloud_image.root)
        return CreateMachine(self, hostname, label, image, metadata, az, log)

    def place(self, name: str, label: Any, image: str, metadata: dict[str, str], az: str | None,
              chosen: Callable[[ManagedHost], None]) -> dict[str, Any]:
        """Put the record on the best host that takes it; what the sliver is like then.

        :raises QuotaException: no host has room.
        """
        refusals: list[str] = []
        source = label.cloud_image or self.provider.diskimages[label.diskimage.name]
        for host in self.hosts.candidates(az, self.provider.placement):
            record = {
                "account_type": "sliver", "name": name, "image": image, "rspec": rspec_of(label, host.cores),
                "ssh_keys": label.ssh_keys, "metadata": dict(metadata), "username": source.username or "root",
                "expiry": int(time.time()) + self.provider.lease_time, "plc_instantiated": True, "hostname": name,
                **({"network": label.network} if label.network else {})}
            chosen(host)
            try:
                sliver: dict[str, Any] = host.call("PutRecord", record)
            except RpcFault as fault:
                if fault.code == INTERNAL and fault.text.startswith("quota:"):
                    refusals.append(f"{host.name}: {fault.text}")
                    continue
                raise exceptions.LaunchStatusException(f"host {host.name} refused {name}: {fault.text}") from fault
            except RpcError as error:
                host.failed(error)
                raise exceptions.LaunchStatusException(str(error)) from error
            host.forget()
            return sliver
        if refusals:
            raise exceptions.QuotaException("; ".join(refusals))
        raise exceptions.LaunchStatusException(
            f"no host of provider {self.provider.name} answers: {self.hosts.problems() or 'none is known'}")

    def getDeleteStateMachine(self, external_id: Any, log: Any) -> DeleteMachine:
        return DeleteMachine(self, external_id, log)

    def delete(self, host_name: str, sliver: str) -> bool:
        """True when it is gone.

        :raises RpcError: the host does not answer; the lease ends it if it never comes back.
        """
        host = self.hosts.get(host_name)
        if host is None:
            raise exceptions.NotFound(f"host {host_name} is not in provider {self.provider.name} any more")
        try:
            host.call("DeleteSliver", sliver)
        except RpcFault as fault:
            if fault.code == BAD_ARGUMENT:  # no such sliver, as far as records go
                pass
            else:
                raise
        finally:
            host.forget()
        answer: dict[str, Any] = host.call("WaitSliver", sliver, "gone", WAIT, timeout=WAIT + 10)
        return answer.get("state") == "absent"

    # -- looking

    def _all(self) -> Iterable[tuple[ManagedHost, dict[str, Any]]]:
        """Slivers of all hosts that answer; lists serve to find what is too much, so what is missing does no harm."""
        answers = [(host, self.submit(host.slivers)) for host in self.hosts.all() if host.usable]
        for host, future in answers:
            try:
                slivers = future.result(timeout=60)
            except (RpcError, RpcFault) as error:
                if not host.problem:
                    self.log.warning("Host %s cannot be listed: %s", host.name, error)
                host.failed(error)
                continue
            for sliver in slivers:
                yield host, sliver

    def listInstances(self) -> Iterable[NodeManagerInstance]:
        for host, sliver in self._all():
            yield NodeManagerInstance(host, sliver, self.provider)

    def listResources(self) -> Iterable[NodeManagerResource]:
        found = list(self._all())
        self._renew(found)
        return [NodeManagerResource(host.name, sliver) for host, sliver in found]

    def deleteResource(self, resource: Any) -> None:
        self.delete(resource.host, resource.id)

    def _renew(self, found: list[tuple[ManagedHost, dict[str, Any]]]) -> None:
        """Part of the periodic pass: leases of our slivers go on as long as a launcher lives."""
        now = time.time()
        lease = self.provider.lease_time
        for host, sliver in found:
            if (sliver.get("metadata") or {}).get("nodepool_provider_name") != self.provider.name:
                continue
            if (sliver.get("expiry") or 0) - now > lease * 0.75:
                continue
            try:
                host.call("RenewSliver", sliver["name"], int(now) + lease)
            except (RpcError, RpcFault) as error:
                self.log.warning("The lease of %s on %s is not renewed: %s", sliver["name"], host.name, error)

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        capacities = [c for host in self.hosts.all() if (c := host.capacity()) is not None]
        if not capacities:
            return QuotaInformation(default=math.inf)
        return QuotaInformation(
            cores=sum(c["cores"] * c["cpu"] / 1000 for c in capacities), instances=sum(c["slivers"] for c in capacities),
            ram=sum(c["memory"] for c in capacities), default=math.inf)

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        return QuotaInformation(cores=label.cpus, instances=1, ram=label.ram)

    def getAZs(self) -> list[str | None]:
        groups = sorted({host.group for host in self.hosts.all() if host.group})
        return list(groups) if groups else [None]

    def labelReady(self, label: Any) -> bool:
        return True

    def getConsoleLog(self, label: Any, external_id: Any) -> str | None:
        host = self.hosts.get(str(external_id.get("host")))
        return None if host is None else str(host.call("GetConsole", external_id["sliver"]))

    def notifyNodescanFailure(self, label: Any, external_id: Any) -> None:
        """Restart it once; the next attempt makes another."""
        host = self.hosts.get(str(external_id.get("host")))
        if host is not None:
            host.call("Stop", external_id["sliver"])
            host.call("Start", external_id["sliver"])

    # -- images

    def uploadImage(
        self, provider_image: Any, image_name: str, filename: str, image_format: str | None = None,
        metadata: dict[str, Any] | None = None, md5: str | None = None, sha256: str | None = None,
    ) -> str:
        """To all hosts at the same time; a host that cannot take it makes the upload fail."""
        def send(host: ManagedHost) -> None:
            with open(filename, "rb") as stream:
                host.client.put_image(image_name, stream, sha256, UPLOAD_TIMEOUT)

        uploads = [(host, self.submit(send, host)) for host in self.hosts.all()]
        failures = []
        for host, future in uploads:
            try:
                future.result(timeout=UPLOAD_TIMEOUT + 60)
            except (RpcError, RpcFault) as error:
                failures.append(f"{host.name}: {error}")
        if failures:
            for host, _ in uploads:
                try:
                    host.client.delete_image(image_name)
                except (RpcError, RpcFault) as error:
                    self.log.warning("Image %s stays on %s: %s", image_name, host.name, error)
            raise HostError(f"image {image_name} was not taken by {'; '.join(failures)}")
        return image_name

    def deleteImage(self, external_id: Any) -> None:
        for host in self.hosts.all():
            host.client.delete_image(str(external_id))
