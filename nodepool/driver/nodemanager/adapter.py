"""Adapter of node managers for the state machine framework (NM-C.8)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from nodepool import exceptions
from nodepool.driver import statemachine
from nodepool.driver.nodemanager.answers import metadata_of
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.discovery import HostTree
from nodepool.driver.nodemanager.hosts import CALL_TIMEOUT, HostError, Hosts, ManagedHost
from nodepool.driver.nodemanager.image_copies import ImageSpreader
from nodepool.driver.nodemanager.machines import (
    BAD_ARGUMENT,
    MARGIN,
    WAIT,
    CreateMachine,
    DeleteMachine,
    NodeManagerInstance,
    NodeManagerResource,
    needed_by,
    rspec_of,
    too_large,
)
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.nodemanager.client import programs
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk import zookeeper as zk
from nodepool.zk.cluster import NODE_CREATED, NODE_ID, created_times, number_of
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

#: Maximum seconds that the start waits for ZooKeeper and the first answers of hosts; a timeout is not an error.
START_TIMEOUT = 2.0
#: Seconds for the lists of all hosts: while the assignment waits, and in the periodic pass.
QUOTA_TIMEOUT, PASS_TIMEOUT = 2.0, 15.0
#: Seconds for optional data, fetched on the thread that advances all launches.
CONSOLE_TIMEOUT = 2.0
#: States of slivers that need an operator before they can be used.
NOT_RUNNING = ("failed", "stopped", "disabled", "deleting", "absent")
#: Seconds without progress of an upload, and for all of it.
UPLOAD_STALL, UPLOAD_TIMEOUT = 600.0, 7200.0
#: Remaining fraction of a lease at which it is renewed.
RENEW_AT = 0.75


class NodeManagerAdapter(statemachine.Adapter):
    def __init__(self, provider_config: Any) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self.log = logging.getLogger(f"nodepool.NodeManagerAdapter.{provider_config.name}")
        self._lock = threading.Lock()
        self._waiting: set[CreateMachine] = set()
        self._restarted: set[str] = set()
        self._zk: ZooKeeper | None = None
        self._tree: HostTree | None = None
        self.hosts = Hosts(provider_config, self.log, self._wake_waiting)
        self._spreader = ImageSpreader(provider_config, self.log)

    def start(self, zk_conn: ZooKeeper | None) -> None:
        """Get to know the hosts."""
        self._zk = zk_conn
        if self.provider.discover and zk_conn is not None:
            self._tree = HostTree(zk_conn.client, self.provider, self.hosts)
            self._tree.start()
            self._tree.synced.wait(START_TIMEOUT)
        self.hosts.start(START_TIMEOUT)

    def stop(self) -> None:
        if self._tree is not None:
            self._tree.stop()
        self.hosts.stop()

    # -- launching

    def getCreateStateMachine(
        self, hostname: str, label: DriverLabel, image_external_id: object, metadata: dict[str, str], request: NodeRequest,
        az: str | None, log: Log,
    ) -> CreateMachine:  # fmt: skip
        image = f"image:{image_external_id}" if image_external_id else str(label.cloud_image.root)
        return CreateMachine(self, hostname, label, image, metadata, az, log)

    def getDeleteStateMachine(self, external_id: dict[str, Any], log: Log) -> DeleteMachine:
        return DeleteMachine(self, external_id, log)

    def choose(self, label: NodeManagerLabel, image: str, az: str | None, without: Collection[str]) -> ManagedHost | None:
        """Return the best host that answers, by its last known state."""
        found = self.hosts.candidates(az, self.provider.placement, lambda capacity: needed_by(label, capacity), image, without)
        return found[0] if found else None

    def never_fits(self, label: NodeManagerLabel, az: str | None) -> str | None:
        """Return why no host could ever run a sliver of this label; None when one could."""
        reasons = []
        for host in self.hosts.all():
            capacity = host.capacity
            if capacity is None:
                return None
            if az is not None and host.group != az:
                continue
            reason = too_large(label, f"{host.name} has", capacity)
            if reason is None:
                return None
            reasons.append(reason)
        return f"label {label.name} is too large for every host: {'; '.join(reasons)}"

    def record(
        self, name: str, label: NodeManagerLabel, image: str, metadata: dict[str, str], host: ManagedHost
    ) -> dict[str, Any]:
        source = label.cloud_image or self.provider.diskimages[label.diskimage.name]
        return {
            "account_type": "sliver",
            "name": name,
            "image": image,
            "rspec": rspec_of(label, host.cores),
            "ssh_keys": self.provider.keys_of(name, label.ssh_keys),
            "metadata": dict(metadata),
            "username": source.username or "root",
            "expiry": int(time.time()) + self.provider.lease_time,
            "plc_instantiated": True,
            "hostname": name,
            **({"network": label.network} if label.network else {}),
            **({"privileges": list(label.privileges)} if label.privileges else {}),
        }

    def wait_for_hosts(self, machine: CreateMachine) -> None:
        """Have this machine woken when a host can be used."""
        with self._lock:
            self._waiting.add(machine)

    def hosts_changed(self, machine: CreateMachine) -> bool:
        """Return whether hosts have changed for a machine that waits for them."""
        with self._lock:
            return machine not in self._waiting

    def _wake_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for machine in waiting:
            if machine.wake is not None:
                machine.wake()

    # -- deleting

    def delete(self, host_name: str, sliver: str) -> Future[bool]:
        """Delete a sliver; the result is True when it is deleted.

        :raises NotFound: the host is not ours any more.
        :raises RpcError: the host is not available at present.
        """
        host = self.hosts.get(host_name)
        if host is None and not self.provider.discover:
            self.log.warning(
                "Host %s is not in provider %s any more; sliver %s ends with its lease", host_name, self.provider.name, sliver
            )
            raise exceptions.NotFound
        if host is None or host.gone:
            raise RpcError(f"host {host_name} is not announced")

        def run() -> bool:
            if not host.usable:
                host.look()
                raise RpcError(host.problem)
            try:
                self._delete_now(host, sliver)
                answer: dict[str, Any] = host.call("WaitSliver", sliver, "gone", WAIT, timeout=WAIT + MARGIN)
            except RpcError as error:
                host.failed(error)
                raise
            finally:
                host.forget()
            return answer.get("state") == "absent"

        return host.submit(run, wait=True)

    @staticmethod
    def _delete_now(host: ManagedHost, sliver: str) -> None:
        try:
            host.call("DeleteSliver", sliver)
        except RpcFault as fault:
            if fault.code != BAD_ARGUMENT:  # no such sliver, as far as records go
                raise

    # -- looking

    def describeHosts(self) -> list[dict[str, Any]]:
        return [host.describe() for host in self.hosts.all()]

    def _lists(self, timeout: float) -> list[tuple[ManagedHost, list[dict[str, Any]] | None]]:
        """Return the slivers of all hosts, queried in parallel; None: no answer in time."""
        deadline = time.monotonic() + timeout
        asked = [(host, host.list_slivers() if host.usable else None) for host in self.hosts.all()]
        found: list[tuple[ManagedHost, list[dict[str, Any]] | None]] = []
        for host, future in asked:
            slivers = None
            if future is None:
                host.look()
            else:
                try:
                    slivers = future.result(max(0.0, deadline - time.monotonic()))
                except (RpcError, RpcFault, FutureTimeout) as error:
                    self.log.warning("Listing slivers of host %s failed: %s", host.name, str(error) or "no answer in time")
            found.append((host, slivers))
        return found

    def listInstances(self) -> Iterable[NodeManagerInstance]:
        """Return the slivers of all hosts; of a host that does not answer, the last known ones."""
        return [
            NodeManagerInstance(host, sliver, self.provider)
            for host, slivers in self._lists(QUOTA_TIMEOUT)
            for sliver in (slivers if slivers is not None else host.slivers)
        ]

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return missing slivers of answering hosts; one that does not run counts as missing."""
        running = {
            host.name: {s["name"] for s in slivers if s.get("state") not in NOT_RUNNING}
            for host, slivers in self._lists(PASS_TIMEOUT)
            if slivers is not None
        }
        return [
            found
            for found in external_ids
            if isinstance(found, dict) and found.get("host") in running and found.get("sliver") not in running[found["host"]]
        ]

    def listResources(self) -> Iterable[NodeManagerResource]:
        """Return the slivers of hosts that answer: missing ones do not count as deleted."""
        return [NodeManagerResource(host.name, sliver) for host, slivers in self._lists(PASS_TIMEOUT) for sliver in slivers or ()]

    def periodic(self) -> None:
        """Copy images to hosts, renew leases, delete strays."""
        lists = [(host, slivers) for host, slivers in self._lists(PASS_TIMEOUT) if slivers is not None]
        if self._zk is not None:
            self._spreader.run(self.hosts.all(), self._spreader.wanted(self._zk))
        for host, slivers in lists:
            ours = [s for s in slivers if metadata_of(s).get("nodepool_provider_name") == self.provider.name]
            strays = [s["name"] for s in ours if self._is_stray(host, s)]
            due = [
                s["name"]
                for s in ours
                if (s.get("expiry") or 0) - time.time() < self.provider.lease_time * RENEW_AT and s["name"] not in strays
            ]
            if strays or due:
                host.submit(lambda host=host, strays=strays, due=due: self._tend(host, strays, due))  # type: ignore[misc]

    def _is_stray(self, host: ManagedHost, sliver: dict[str, Any]) -> bool:
        """Return whether its node is on another host, as this one did not answer at the launch.

        A sliver of a node that a restore of ZooKeeper has undone is a stray, although another node has its id now.
        """
        metadata = metadata_of(sliver)
        node_id = metadata.get(NODE_ID, "")
        if self._zk is None or not node_id.isdecimal():  # it becomes part of a path
            return False
        node = self._zk.getNode(node_id, cached=True)
        return (
            node is not None
            and (NODE_CREATED not in metadata or number_of(metadata[NODE_CREATED]) in created_times(node))
            and node.state in (zk.READY, zk.IN_USE, zk.USED, zk.HOLD)
            and isinstance(node.external_id, dict)
            and node.external_id.get("host") != host.name
        )

    def _tend(self, host: ManagedHost, strays: list[str], due: list[str]) -> None:
        """Renew leases of our slivers in the periodic pass, as long as a launcher lives."""
        try:
            for name in strays:
                self.log.warning("Deleting sliver %s on %s: its node is on another host", name, host.name)
                self._delete_now(host, name)
            for name in due:
                try:
                    host.call("RenewSliver", name, int(time.time()) + self.provider.lease_time)
                except RpcFault as fault:
                    if fault.code != BAD_ARGUMENT:  # deleted meanwhile
                        self.log.warning("Renewing the lease of %s on %s failed: %s", name, host.name, fault.text)
        except RpcError as error:
            host.failed(error)
        except RpcFault as fault:
            self.log.warning("Slivers without a node on host %s cannot be deleted: %s", host.name, fault.text)

    def deleteResource(self, resource: NodeManagerResource) -> None:
        """Delete a leaked sliver. Raises RpcError, RpcFault: retry later."""
        host = self.hosts.get(resource.host)
        if host is not None:
            host.submit(lambda: self._delete_now(host, resource.id)).result(CALL_TIMEOUT + MARGIN)
            host.forget()

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        """Return the sums of the hosts' last known limits, including briefly silent hosts."""
        capacities = [c for host in self.hosts.all() if (c := host.capacity) is not None]
        if not capacities:
            return QuotaInformation(default=math.inf)
        return QuotaInformation(
            cores=sum(c["cores"] * c["cpu"] / 1000 for c in capacities),
            instances=sum(c["slivers"] for c in capacities),
            ram=sum(c["memory"] for c in capacities),
            disk=sum(c["disk"] for c in capacities) / (1 << 20),
            default=math.inf,
        )

    def getQuotaForLabel(self, label: NodeManagerLabel) -> QuotaInformation:
        # Limits of any suitable host: they differ in cores at most.
        capacity = next((c for host in self.hosts.all() if (c := host.capacity) is not None), None)
        needs = needed_by(label, capacity if capacity is not None else {"cores": 1})
        return QuotaInformation(cores=label.cpus, instances=1, ram=needs.memory, disk=needs.disk / (1 << 20))

    def getAZs(self) -> list[str | None]:
        """Return the groups of the hosts that answer, or of all if none does."""
        hosts = self.hosts.all()
        groups = {host.group for host in [h for h in hosts if h.usable] or hosts}
        return sorted(group for group in groups if group) + ([None] if None in groups or not groups else [])

    def labelReady(self, label: NodeManagerLabel) -> bool:
        """Return whether a host may have the image, including briefly silent hosts."""
        kind, _, what = str(label.cloud_image.root if label.cloud_image else "").partition(":")
        if kind != "image":
            return self.hosts.any_known
        found = [host.capacity for host in self.hosts.all()]
        return any(capacity is None or what in capacity.get("images", ()) for capacity in found)

    def getConsoleLog(self, label: NodeManagerLabel, external_id: dict[str, Any]) -> str | None:
        host = self.hosts.get(str(external_id.get("host")))
        if host is None or not host.usable:
            return None
        future = host.ask("GetConsole", external_id["sliver"], timeout=CONSOLE_TIMEOUT)
        try:
            return str(future.result(CONSOLE_TIMEOUT))
        except (RpcError, RpcFault, FutureTimeout) as error:
            self.log.warning(
                "Console of %s on %s is not available: %s", external_id["sliver"], host.name, str(error) or "no answer in time"
            )
            return None

    def execute(
        self, external_id: object, argv: Sequence[str], env: Mapping[str, str] | None, user: str, timeout: float
    ) -> programs.Running:
        """Start a program in a sliver.

        :raises RpcFault: refused.
        :raises RpcError: the host does not answer.
        """
        place = external_id if isinstance(external_id, dict) else {}
        host = self.hosts.get(str(place.get("host")))
        if host is None:
            raise RpcError(f"host {place.get('host')} is not known at present")
        return programs.start(host.client, str(place.get("sliver")), argv, env, user, timeout)

    def notifyNodescanFailure(self, label: NodeManagerLabel, external_id: dict[str, Any]) -> None:
        """Restart the sliver once, in the background."""
        host = self.hosts.get(str(external_id.get("host")))
        name = str(external_id.get("sliver"))
        with self._lock:
            if host is None or name in self._restarted:
                return
            self._restarted = {*list(self._restarted)[-1000:], name}

        def restart() -> None:
            try:
                host.call("Stop", name)
                host.call("Start", name)
            except (RpcError, RpcFault) as error:
                self.log.info("Restart of sliver %s on %s failed: %s", name, host.name, error)

        host.submit(restart)

    # -- images

    def uploadImage(
        self,
        provider_image: object,
        image_name: str,
        filename: str,
        image_format: str | None = None,
        metadata: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> str:
        """Upload to all hosts in parallel; hosts that refuse it get no slivers of it.

        :raises HostError: no host accepted it.
        """

        def send(host: ManagedHost) -> None:
            # Detects a host that hangs before a large file is sent.
            host.call("GetCapacity")
            with open(filename, "rb") as stream:
                host.upload(image_name, stream, sha256, UPLOAD_STALL)
            host.forget()

        failures = self._everywhere(send, UPLOAD_TIMEOUT)
        if failures:
            text = f"image {image_name} was not accepted by {'; '.join(failures)}"
            if len(failures) >= len(self.hosts.all()):
                raise HostError(text)
            self.log.warning("%s", text)
        elif not self.hosts.all():
            raise HostError(f"image {image_name}: provider {self.provider.name} has no host at present")
        return image_name

    def deleteImage(self, external_id: str) -> None:
        """Delete the image from all hosts. HostError: a host failed; retry later."""
        failures = self._everywhere(lambda host: host.delete_image(str(external_id)), CALL_TIMEOUT + MARGIN)
        if failures:
            raise HostError(f"image {external_id} was not deleted on {'; '.join(failures)}")

    def _everywhere(self, function: Callable[..., Any], timeout: float) -> list[str]:
        """Run on all hosts at the same time; the texts of failures."""
        deadline = time.monotonic() + timeout
        futures = [
            (host, host.submit(lambda host=host: function(host), wait=True))  # type: ignore[misc]
            for host in self.hosts.all()
        ]
        failures = []
        for host, future in futures:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except (RpcError, RpcFault, FutureTimeout) as error:
                failures.append(f"{host.name}: {str(error) or 'no answer in time'}")
        return failures
