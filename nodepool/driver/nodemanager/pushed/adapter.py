"""Adapter for node managers that are pushed to backing nodes over SSH (NM-C.8)."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import exceptions
from nodepool.base.files import lock_file
from nodepool.config.model import ProviderConfig
from nodepool.driver.backing.records import BackingNodeRecord, parse_user_data
from nodepool.driver.nodemanager.adapter import NodeManagerAdapter
from nodepool.driver.nodemanager.config import NodeManagerHost, NodeManagerLabel
from nodepool.driver.nodemanager.pushed.machines import BackedCreateMachine, BackedDeleteMachine
from nodepool.driver.nodemanager.pushed.slots import BackingNodes
from nodepool.driver.nodemanager.pushed.ssh_link import Link, LinkBusy, LinkError, Target
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk import zookeeper as zk
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

_PREFIX = "nodepool-backing-"
#: Bytes; socket paths must be short, and the SSH client appends to ours.
MAX_DIRECTORY = 60
#: Seconds.
NEW = 10.0
#: First user id of slivers, and the number of id ranges among backing nodes, which may be on one machine.
ID_BASE, ID_RANGES = 2_000_000, 50


class PrivateDirectory:
    """Locked directory for sockets and keys of hosts; those of ended processes are removed."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > MAX_DIRECTORY:
            base = "/tmp"
        for entry in os.scandir(base):
            with contextlib.suppress(OSError):
                if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    self._remove_unused(entry.path)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        lock_file(self._lock, NEW)

    @staticmethod
    def _remove_unused(path: str) -> None:
        """Remove the directory. Raises OSError: it is in use."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            lock_file(descriptor)
            # A new one may not be locked yet.
            if time.time() - os.fstat(descriptor).st_mtime > NEW:
                shutil.rmtree(path)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class BackedAdapter(NodeManagerAdapter):
    """Adapter whose hosts are created and deleted on demand."""

    def __init__(self, provider_config: ProviderConfig) -> None:
        super().__init__(provider_config)
        self.slots = BackingNodes(provider_config, lambda: self._zk, self)
        self._links: dict[str, Link] = {}
        self._links_lock = threading.Lock()
        self._directory: PrivateDirectory | None = None
        self._stopped = False

    # -- life

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self._zk = zk_conn
        self._directory = PrivateDirectory()
        self.slots.in_background(self._begin)

    def _begin(self) -> None:
        self.slots.initialize()
        self._follow_book()
        with self.slots.lock:
            empty = [record for record in self.slots.book if record.isEmpty()]
        for record in empty:
            self.slots.housekeeping.became_idle(record)

    def stop(self) -> None:
        self.slots.stop()
        self.hosts.stop()
        with self._links_lock:
            self._stopped = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.stop()
        for link in links:
            link.join()
        if self._directory is not None:
            self._directory.remove()

    # -- backing nodes

    def _target(self, node: zk.Node) -> Target:
        options = self.provider.backing
        address, port = str(node.interface_ip or ""), int(node.connection_port or 22)
        text = "\n".join(map(str, (self.provider.name, node.provider, address, port, node.username, node.slot)))
        place = hashlib.sha256(text.encode()).hexdigest()[:12]
        config = dict(options.config)
        if "id-base" not in config:
            span = (options.max_slivers + 1) * 65536
            config["id-base"] = ID_BASE + int(place, 16) % max(1, min(ID_RANGES, (2**32 - ID_BASE) // span)) * span
        unfit = ""
        if node.connection_type not in (None, "", "ssh"):
            unfit = f"its connection-type is {node.connection_type}, and a node manager needs ssh"
        elif not address or not node.username:
            unfit = "its record has no address or no username"
        elif not node.host_keys:
            unfit = (
                "its record has no host keys, so that it is not known to be the right machine; its provider must "
                "find them (host-key-checking)"
            )
        python = str(node.python_path or "")
        return Target(
            owner=str(node.id),
            place=place,
            address=address,
            port=port,
            username=str(node.username),
            host_keys=tuple(node.host_keys or ()),
            python=python if python.startswith("/") else "python3",
            key_file=options.ssh_key,
            since=float(node.created_time or 0),
            config=config,
            base=options.directory,
            idle=self.provider.lease_time,
            unfit=unfit,
        )

    def connect(self, record: BackingNodeRecord) -> None:
        """Have a connection to this backing node."""
        node_id = record.node_id
        if node_id is None or node_id in self._links or record.lost or record.releasing:
            return
        node = self.slots.zk.getNode(node_id, cached=True)
        if node is None or self._directory is None:
            return
        with self._links_lock:
            if node_id in self._links or self._stopped:
                return
            link = Link(self._target(node), self._directory.path, self.log, lambda up: self._link_changed(record, up))
            self._links[node_id] = link
        link.start()

    def _link_changed(self, record: BackingNodeRecord, up: bool) -> None:
        """Handle a change of a link, on its thread."""
        node_id = str(record.node_id)
        link = self._links.get(node_id)
        if link is None:
            return
        if up:
            options = NodeManagerHost({"name": node_id, "url": link.url, "ssh-address": link.target.address})
            options.expected_name = node_id
            self.hosts.announced(options)
            return
        host = self.hosts.get(node_id)
        if host is not None:
            host.failed(LinkError(link.problem))
        if link.target.unfit or link.down_for() > self.provider.boot_timeout:
            self.slots.give_up(record)
        self._wake_waiting()

    def _disconnect(self, node_id: str) -> Link | None:
        with self._links_lock:
            link = self._links.pop(node_id, None)
        self.hosts.remove(node_id)
        if link is not None:
            link.stop()
            link.join()
        return link

    def problem(self, node_id: str) -> str:
        link = self._links.get(node_id)
        return link.problem if link is not None and link.problem else "it does not answer"

    def _follow_book(self) -> None:
        """Connect to all our backing nodes, and to no others."""
        with self.slots.lock:
            records = {record.node_id: record for record in self.slots.book if record.node_id is not None and not record.lost}
        for record in records.values():
            self.connect(record)
        for node_id in [node_id for node_id in list(self._links) if node_id not in records]:
            self._disconnect(node_id)

    def lost(self, record: BackingNodeRecord) -> None:
        """Disconnect from a backing node that is not ours any more."""
        if record.node_id is not None:
            self._disconnect(record.node_id)
            self._wake_waiting()
            self.slots.retire(record)

    def vacate(self, record: BackingNodeRecord) -> bool:
        """Remove our node manager from an idle backing node; return False to keep the node.

        An unreachable one is released as it is: the remains there end automatically, or with the next push.
        """
        node_id = str(record.node_id)
        try:
            if self._has_slivers(node_id) or not self.slots.close(record) or self._has_slivers(node_id):
                return False
        except KazooException as error:
            self.log.warning("Backing node %s is kept for now: %r", node_id, error)
            return False
        link = self._disconnect(node_id)
        if link is None:
            node = self.slots.zk.getNode(node_id)
            if node is None or self._directory is None:
                return True
            link = Link(self._target(node), self._directory.path, self.log, lambda up: None)
            link.stop()
        if link.target.unfit:
            return True
        try:
            link.remove()
        except LinkBusy as busy:
            self.log.info("Backing node %s is kept: it has slivers %s", node_id, busy)
            return False
        except LinkError as error:
            self.log.warning("The node manager on backing node %s cannot be removed: %s", node_id, error)
        return True

    def _has_slivers(self, node_id: str) -> bool:
        host = self.hosts.get(node_id)
        if host is None or not host.usable:
            return False
        try:
            return bool(host.call("ListSlivers"))
        except (RpcError, RpcFault) as error:
            self.log.info("Listing the slivers of backing node %s failed: %s", node_id, error)
            return False

    # -- what the framework asks

    def getCreateStateMachine(
        self, hostname: str, label: DriverLabel, image_external_id: object, metadata: dict[str, str], request: NodeRequest,
        az: str | None, log: Log,
    ) -> BackedCreateMachine:  # fmt: skip
        return BackedCreateMachine(self, hostname, label, str(label.cloud_image.root), metadata, request, log)

    def getDeleteStateMachine(self, external_id: object, log: Log) -> BackedDeleteMachine:
        return BackedDeleteMachine(self, external_id, log)

    def delete(self, host_name: str, sliver: str) -> Future[bool]:
        """Delete a sliver; if the backing node is not ours any more, it is deleted already.

        :raises NotFound: it is not.
        :raises RpcError: it cannot be reached at present.
        """
        record = self.slots.book.by_backing_node.get(host_name)
        if record is None or record.lost:
            if record is None and self._may_have(host_name):
                self.slots.housekeeping.queue.add(host_name)
                raise RpcError(f"backing node {host_name} is not known yet")
            self.log.info("Backing node %s no longer exists, and neither does its sliver %s", host_name, sliver)
            raise exceptions.NotFound
        self.connect(record)
        if self.hosts.get(host_name) is None:
            raise RpcError(f"backing node {host_name}: {self.problem(host_name)}")
        return super().delete(host_name, sliver)

    def periodic(self) -> None:
        self.slots.initialize()
        self._follow_book()
        try:
            super().periodic()
        finally:
            self.slots.housekeeping.run()

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return missing slivers, also of backing nodes that ended while no launcher was running."""
        if not self.slots.performed_init:
            return []
        missing = super().findMissingInstances(external_ids)
        return missing + [
            external_id
            for external_id in external_ids
            if external_id not in missing and isinstance(external_id, dict) and not self._may_have(str(external_id.get("host")))
        ]

    def _may_have(self, node_id: str) -> bool:
        record = self.slots.book.by_backing_node.get(node_id)
        if record is not None:
            return not record.lost
        node = self.slots.zk.getNode(node_id)
        return node is not None and node.state == zk.IN_USE and parse_user_data(node.user_data, self.slots.my_id) is not None

    def getQuotaLimits(self) -> QuotaInformation:
        """Return the capacity of all backing nodes, once no more may be requested."""
        with self.slots.lock:
            full, count = self.slots.full, sum(1 for record in self.slots.book if not record.lost)
        capacities = [c for host in self.hosts.all() if (c := host.capacity) is not None]
        if not full or len(capacities) < count:
            return QuotaInformation(default=math.inf)
        return super().getQuotaLimits()

    def getAZs(self) -> list[str | None]:
        return [None]

    def labelReady(self, label: NodeManagerLabel) -> bool:
        return True
