"""Adapter of node managers for the state machine framework (NM-C.8)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from nodepool.driver import statemachine
from nodepool.driver.nodemanager.answers import metadata_of
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.discovery import HostTree
from nodepool.driver.nodemanager.host import (
    BAD_ARGUMENT,
    CALL_TIMEOUT,
    MARGIN,
    HostError,
    ManagedHost,
)
from nodepool.driver.nodemanager.hosts import Hosts
from nodepool.driver.nodemanager.image_copies import ImageSpreader
from nodepool.driver.nodemanager.machines import (
    CreateMachine,
    DeleteMachine,
    NodeManagerInstance,
    NodeManagerResource,
)
from nodepool.driver.nodemanager.sizes import quota_for
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.nodemanager.client import programs
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.drains import Drain
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

#: Maximum seconds that the start waits for ZooKeeper and the first answers of hosts; a timeout is
#: not an error.
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

T = TypeVar("T")


class NodeManagerAdapter(statemachine.Adapter):
    def __init__(self, provider_config: Any) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self.log = logging.getLogger(f"nodepool.NodeManagerAdapter.{provider_config.name}")
        self._lock = threading.Lock()
        self._restarted: set[str] = set()
        self._zk: ZooKeeper | None = None
        self._tree: HostTree | None = None
        self.hosts = Hosts(provider_config, self.log)
        self._spreader = ImageSpreader(provider_config, self.log)

    def start(self, zk_conn: ZooKeeper | None) -> None:
        """Get to know the hosts."""
        self._zk = zk_conn
        notes = zk_conn.note_tree if zk_conn is not None else None
        if notes is not None:
            self.hosts.drain_of = lambda name: notes.get(Drain, f"host {name}")
            notes.listeners.append(self.hosts.wake_waiting)
        if self.provider.discover and zk_conn is not None:
            self._tree = HostTree(zk_conn.client, self.provider, self.hosts)
            self._tree.start()
            self._tree.synced.wait(START_TIMEOUT)
        self.hosts.start(START_TIMEOUT, zk_conn.feed if zk_conn is not None else None)

    def stop(self) -> None:
        if self._tree is not None:
            self._tree.stop()
        notes = self._zk.note_tree if self._zk is not None else None
        if notes is not None and self.hosts.wake_waiting in notes.listeners:
            notes.listeners.remove(self.hosts.wake_waiting)
        self.hosts.stop()

    # -- launching

    def getCreateStateMachine(
        self,
        hostname: str,
        label: DriverLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> CreateMachine:
        image = f"image:{image_external_id}" if image_external_id else str(label.cloud_image.root)
        return CreateMachine(self.hosts, hostname, label, image, metadata, az, log)

    def getDeleteStateMachine(self, external_id: dict[str, Any], log: Log) -> DeleteMachine:
        return DeleteMachine(self.hosts.delete, external_id, log)

    # -- looking

    def describeHosts(self) -> list[dict[str, Any]]:
        return [host.describe() for host in self.hosts.all()]

    @staticmethod
    def _results(
        calls: Iterable[tuple[ManagedHost, Future[T]]], timeout: float
    ) -> Iterator[tuple[ManagedHost, T | None, str]]:
        """Yield the results of calls to all hosts; of one without a result in time None, and
        why.
        """
        deadline = time.monotonic() + timeout
        for host, future in calls:
            try:
                yield host, future.result(max(0.0, deadline - time.monotonic())), ""
            except (RpcError, RpcFault, FutureTimeout) as error:
                yield host, None, str(error) or "no answer in time"

    def _lists(
        self, timeout: float, now: bool = False
    ) -> dict[ManagedHost, list[dict[str, Any]] | None]:
        """Return the slivers of all hosts, queried in parallel; None: no answer in time.

        :param now: as in :meth:`.ManagedHost.list_slivers`.
        """
        hosts = self.hosts.all()
        found: dict[ManagedHost, list[dict[str, Any]] | None] = dict.fromkeys(hosts)
        asked = [(host, host.list_slivers(now)) for host in hosts if host.usable]
        for host, slivers, problem in self._results(asked, timeout):
            found[host] = slivers
            if problem:
                self.log.warning("Listing slivers of host %s failed: %s", host.name, problem)
        for host in hosts:
            host.refresh()
        return found

    def listInstances(self) -> Iterable[NodeManagerInstance]:
        """Return the slivers of all hosts; of a host that does not answer, the last known ones."""
        return [
            NodeManagerInstance(host, sliver, self.provider)
            for host, slivers in self._lists(QUOTA_TIMEOUT).items()
            for sliver in (slivers if slivers is not None else host.slivers)
        ]

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return missing slivers of answering hosts; one that does not run counts as missing."""
        running = {
            host.name: {s["name"] for s in slivers if s.get("state") not in NOT_RUNNING}
            for host, slivers in self._lists(PASS_TIMEOUT, now=True).items()
            if slivers is not None
        }
        return [
            found
            for found in external_ids
            if isinstance(found, dict)
            and found.get("host") in running
            and found.get("sliver") not in running[found["host"]]
        ]

    def listResources(self) -> Iterable[NodeManagerResource]:
        """Return the slivers of hosts that answer: missing ones do not count as deleted."""
        lists = self._lists(PASS_TIMEOUT).items()
        return [
            NodeManagerResource(host.name, sliver)
            for host, slivers in lists
            for sliver in slivers or ()
        ]

    def periodic(self) -> None:
        """Copy images to hosts, renew leases."""
        lists = self._lists(PASS_TIMEOUT)
        if self._zk is not None:
            self._spreader.run(self.hosts.all(), self._zk)
        for host, slivers in lists.items():
            due = [
                sliver["name"]
                for sliver in slivers or ()
                if metadata_of(sliver).get("nodepool_provider_name") == self.provider.name
                and (sliver.get("expiry") or 0) - time.time() < self.provider.lease_time * RENEW_AT
            ]
            if due:
                host.run(lambda host=host, due=due: self._renew(host, due))  # type: ignore[misc]

    def _renew(self, host: ManagedHost, due: list[str]) -> None:
        """Renew leases of our slivers in the periodic pass, as long as a launcher lives."""
        for name in due:
            try:
                host.call("RenewSliver", name, int(time.time()) + self.provider.lease_time)
            except RpcFault as fault:
                if fault.code != BAD_ARGUMENT:  # deleted meanwhile
                    self.log.warning(
                        "Renewing the lease of %s on %s failed: %s", name, host.name, fault.text
                    )

    def deleteResource(self, resource: NodeManagerResource) -> None:
        """Delete a leaked sliver. Raises RpcError, RpcFault: retry later."""
        host = self.hosts.get(resource.host)
        if host is not None:
            host.run(lambda: host.delete(resource.id)).result(CALL_TIMEOUT + MARGIN)

    # -- quota

    def getQuotaLimits(self) -> QuotaInformation:
        """Return the sums of the hosts' last known limits, including briefly silent hosts."""
        capacities = self.hosts.limits()
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
        return quota_for(label, next(iter(self.hosts.capacities()), None))

    def getAZs(self) -> list[str | None]:
        """Return the groups of the hosts that answer, or of all if none does."""
        hosts = self.hosts.all()
        groups = {host.group for host in [h for h in hosts if h.usable] or hosts}
        return sorted(group for group in groups if group) + (
            [None] if None in groups or not groups else []
        )

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
                "Console of %s on %s is not available: %s",
                external_id["sliver"],
                host.name,
                str(error) or "no answer in time",
            )
            return None

    def execute(
        self,
        external_id: object,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        user: str,
        timeout: float,
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
            except RpcFault as fault:
                self.log.info("Restart of sliver %s on %s failed: %s", name, host.name, fault)

        host.run(restart)

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
                host.client.put_image(image_name, stream, sha256, UPLOAD_STALL)
            host.forget()

        failures = self._everywhere(send, UPLOAD_TIMEOUT)
        if failures:
            text = f"image {image_name} was not accepted by {'; '.join(failures)}"
            if len(failures) >= len(self.hosts.all()):
                raise HostError(text)
            self.log.warning("%s", text)
        elif not self.hosts.all():
            raise HostError(
                f"image {image_name}: provider {self.provider.name} has no host at present"
            )
        return image_name

    def deleteImage(self, external_id: str) -> None:
        """Delete the image from all hosts. HostError: a host failed; retry later."""
        failures = self._everywhere(
            lambda host: host.client.delete_image(str(external_id), CALL_TIMEOUT),
            CALL_TIMEOUT + MARGIN,
        )
        if failures:
            raise HostError(f"image {external_id} was not deleted on {'; '.join(failures)}")

    def _everywhere(self, function: Callable[[ManagedHost], object], timeout: float) -> list[str]:
        """Run on all hosts at the same time, also on silent ones; the texts of failures."""
        calls = [
            (host, host.run(lambda host=host: function(host), wait=True, patient=True))  # type: ignore[misc]
            for host in self.hosts.all()
        ]
        return [
            f"{host.name}: {problem}"
            for host, _, problem in self._results(calls, timeout)
            if problem
        ]
