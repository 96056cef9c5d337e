"""Keeps a READY node registered for every slot of every configured host (STA-2 to STA-5)."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future, wait
from typing import Any

from nodepool import exceptions, ssh
from nodepool.base import threads
from nodepool.base.problems import DELETION, one_line
from nodepool.config.model import ConfigPool
from nodepool.driver.request.base import RequestHost
from nodepool.driver.static.check import StaticNodeError, command_failure, host_keys
from nodepool.driver.static.config import NodeTuple, StaticPool, StaticProviderConfig, nodeTuple
from nodepool.driver.static.handler import StaticManager, StaticNodeRequestHandler
from nodepool.driver.static.slots import (
    COMPARED,
    GONE_STATES,
    LAUNCHER,
    Slots,
    in_slot,
    is_free,
    new_record,
)
from nodepool.driver.utils import NodeDeleter, QuotaInformation, QuotaSupport
from nodepool.zk import zookeeper as zk
from nodepool.zk.drains import Drain, covering, names_of
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

__all__ = ["NodeTuple", "StaticNodeError", "StaticNodeProvider", "nodeTuple"]

MAX_WORKERS = 16
START_WAIT = 1.0
"""Seconds that ``start`` waits for the first pass over all hosts; slow hosts continue in the
background.
"""


#: What ends a dispute of launchers about the hosts of a provider.
SAME_NODES = "write the same nodes of the provider in the files of all launchers that have it"


class StaticNodeProvider(StaticManager, QuotaSupport):
    """Reconciles the hosts in parallel, each from its current records.

    No state of slots is kept here: ZooKeeper has it.
    """

    PAUSE_AT_QUOTA = False
    provider: StaticProviderConfig

    def __init__(self, provider: StaticProviderConfig, *args: object) -> None:
        super().__init__()
        self.log = logging.getLogger("nodepool.driver.static.StaticNodeProvider")
        self.provider = provider
        #: None until it is started, and when a configuration is only being checked.
        self.zk: ZooKeeper = None  # type: ignore[assignment]
        self._zk = self.zk
        self._hosts: dict[NodeTuple, tuple[StaticPool, dict[str, Any]]] = {}
        self._idle = False
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        self._host_locks: dict[NodeTuple, threading.Lock] = {}
        # Only one thread registers nodes at a time, for all that wait.
        self._turn = threading.Lock()
        self._to_fill: dict[NodeTuple, zk.Node] = {}
        # Ids of our records by host; only a hint, renewed by every cleanup.
        self._known: dict[NodeTuple, set[str]] = defaultdict(set)
        self._queued: set[NodeTuple] = set()
        self._running: set[NodeTuple] = set()
        self._again: set[NodeTuple] = set()
        # Hosts with an idle record that others had locked; the next cleanup updates them.
        self._skipped: set[NodeTuple] = set()
        # The mirror may show a deleted record for a moment longer.
        self._deleted: deque[str] = deque(maxlen=1000)
        self._programs = ssh.Programs()
        self._warned: dict[NodeTuple, str] = {}
        #: Ids of records of hosts that are not in our file, when they were last deregistered.
        self._unknown: dict[NodeTuple, set[str | None]] = {}
        #: How other launchers register hosts unlike our file.
        self._contested: dict[NodeTuple, str] = {}
        #: Unreachable hosts that were logged; logged again when they are reachable.
        self._announced: set[NodeTuple] = set()

    # Life cycle

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self.zk = self._zk = zk_conn  # type: ignore[assignment]
        self._hosts = self.provider.hosts()
        self._host_locks = {host: threading.Lock() for host in self._hosts}
        if zk_conn is None:
            return
        self._executor = threads.shared().lane(f"Thread-static-{self.provider.name}", MAX_WORKERS)
        try:
            self._read_records()
            jobs = [self._submit(host, update=True) for host in self._hosts]
            self._deregister_unknown()
            wait([job for job in jobs if job is not None], timeout=START_WAIT)
        except Exception:
            self.log.exception("Cannot register the nodes of provider %s:", self.provider.name)

    def idle(self) -> None:
        self._idle = True
        # Current writes are finished before the successor starts to read.
        for lock in self._host_locks.values():
            with lock:
                pass

    def stop(self) -> None:
        self._idle = True
        self._programs.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    # -- reconciliation of a host

    def _submit(self, host: NodeTuple, update: bool = False) -> Future[None] | None:
        """Check this host soon.

        A check that has not started serves all requests meanwhile, and a host is not checked twice
        at a time: an unreachable one must not occupy all threads.
        """
        with self._lock:
            if self._executor is None or self._idle or host in self._queued:
                return None
            if host in self._running:
                self._again.add(host)
                return None
            self._queued.add(host)
            try:
                return self._executor.submit(self._check_host, host, update)
            except RuntimeError:
                return None  # stopped meanwhile

    def _check_host(self, host: NodeTuple, update: bool) -> None:
        with self._lock:
            self._queued.discard(host)
            self._running.add(host)
        reached = False
        try:
            reached = self._sync(host, update)
        finally:
            with self._lock:
                self._running.discard(host)
                again = host in self._again
                self._again.discard(host)
        # One that does not answer is left to the next cleanup.
        if again and reached:
            self._submit(host)

    def _read_records(self) -> None:
        known: dict[NodeTuple, set[str]] = defaultdict(set)
        for node in self.zk.getProviderNodes(self.provider.name):
            known[nodeTuple(node)].add(node.id or "")
        with self._lock:
            # Records that were registered during the check must not be forgotten; deleted ones are
            # dropped when read.
            for host, ids in self._known.items():
                known[host].update(ids)
            self._known = known

    def _records(self, host: NodeTuple) -> list[zk.Node]:
        """Return the current records of a host."""
        with self._lock:
            ids = list(self._known.get(host, ()))
        found = []
        for node_id in ids:
            node = None if node_id in self._deleted else self.zk.getNode(node_id, cached=True)
            if node is None or nodeTuple(node) != host:
                with self._lock:
                    self._known[host].discard(node_id)
            elif node.state not in GONE_STATES:
                found.append(node)
        return found

    def _slots(self, host: NodeTuple) -> Slots:
        return Slots(self._hosts[host][1]["max-parallel-jobs"], self._records(host))

    def _sync(self, host: NodeTuple, update: bool) -> bool:
        """Reconcile a host; return False when it could not be reached."""
        if self._idle:
            return False
        pool, static_node = self._hosts[host]
        if update:
            self._skipped.discard(host)
        try:
            slots = self._slots(host)
            template = None
            if slots.empty or (update and slots.occupied):
                template = new_record(self.provider.name, pool, static_node, host_keys(static_node))
                if slots.empty:  # the others are in use, or are probed while they are idle
                    failure = command_failure(template, static_node, self._programs, self.log)
                    if failure is not None:
                        raise StaticNodeError(f"{template.hostname}: {failure}")
            if template is not None and self._warned.pop(host, None) is not None:
                self._announced.discard(host)
                self.log.info("Static host %s can be used again", host)
        except (StaticNodeError, exceptions.LaunchNetworkException) as error:
            if self._idle:
                return False  # the end of this provider has ended the command
            self._warn(host, error)
            if update:
                for node in self._records(host):
                    self.deregisterNode(node)
            return False
        except Exception as error:
            self._warned[host] = one_line(repr(error))
            self.log.exception("Error checking static host %s:", host)
            return False
        try:
            # Only ZooKeeper from here on: others wait milliseconds for this lock.
            with self._host_locks[host]:
                if self._idle:
                    return False
                slots = self._slots(host)
                for node in slots.excess:
                    self.deregisterNode(node)
                if template is None:
                    return True
                if update:
                    for node in slots.occupied:
                        self._update(node, template)
                if slots.empty:
                    self._fill(host, template)
        except Exception:
            self.log.exception("Error registering the nodes of static host %s:", host)
        return True

    def _fill(self, host: NodeTuple, template: zk.Node) -> None:
        """Register the empty slots, in one batch with those of other waiting hosts.

        The caller holds the lock of its host, also while another thread does its work. Raises the
        error that prevents its own record from being written, so that it affects no other host.
        """
        template.serialize()
        with self._lock:
            self._to_fill[host] = template
        with self._turn:
            with self._lock:
                batch, self._to_fill = self._to_fill, {}
            if batch:
                self._register(batch)

    def _register(self, batch: dict[NodeTuple, zk.Node]) -> None:
        """Register nodes in turns with other launchers: a slot with two records is used twice."""
        mark = TurnLock(self.zk.kazoo_client, self.provider.name, "static", self.provider.name)
        if not mark.take():
            mark.when_free(lambda: [self._submit(host, update=True) for host in batch])
            return
        try:
            mark.catch_up(self.zk.node_tree)
            self._read_records()
            nodes = [
                in_slot(template, slot)
                for host, template in batch.items()
                for slot in self._slots(host).empty
            ]
            self.zk.createNodes(nodes)
        finally:
            mark.drop()
        count = Counter(map(nodeTuple, nodes))
        with self._lock:
            for node in nodes:
                self._known[nodeTuple(node)].add(node.id or "")
        for host, template in batch.items():
            if host not in self._announced:
                self._announced.add(host)
                self.log.info(
                    "Static host %s is registered: %d node(s) of %s",
                    host,
                    count[host],
                    ",".join(template.type),
                )

    def _warn(self, host: NodeTuple, error: Exception) -> None:
        """Log a host once per change: it may be down for days."""
        text = str(error)
        if self._warned.get(host) != text:
            self._warned[host] = text
            self.log.warning("Static host %s cannot be registered now: %s", host, text)

    def describeHosts(self) -> list[dict[str, Any]]:
        """Return the configured hosts with their number of slots, and why one cannot be used
        now.
        """
        names = Counter(host.hostname for host in self._hosts)
        slots = {host: node["max-parallel-jobs"] for host, (_pool, node) in self._hosts.items()}
        problems = {
            **{host: f"{host} {text}; {SAME_NODES}" for host, text in self._contested.items()},
            **{host: f"{host} cannot be used now: {text}" for host, text in self._warned.items()},
        }
        return [
            {
                "name": host.hostname if names[host.hostname] == 1 else str(host),
                "usable": host not in problems,
                "problem": one_line(problems[host]) if host in problems else None,
                "limits": {"slots": slots.get(host, 0)},
            }
            for host in sorted(slots.keys() | self._contested.keys())
        ]

    def checksHost(self, node: zk.Node) -> bool:
        """Return whether the host keys of this node were read from its host."""
        entry = self._hosts.get(nodeTuple(node))
        return entry is not None and bool(entry[1]["host-key-checking"])

    def _update(self, node: zk.Node, template: zk.Node) -> None:
        """Update the record of an idle node, keeping its id."""
        self._change_idle(node, {name: getattr(template, name) for name in COMPARED}, "Updated")

    def deregisterNode(self, node: zk.Node) -> None:
        """Mark an idle node for deletion. One in use may finish; its slot is not filled again."""
        self._change_idle(node, {"state": zk.DELETING}, "Deregistered")

    def _change_idle(self, node: zk.Node, values: Mapping[str, Any], done: str) -> None:
        """Store what differs in the record of an idle node; skip nodes that others have locked."""

        def needed() -> bool:
            return is_free(node) and any(
                getattr(node, name) != value for name, value in values.items()
            )

        if not needed():
            return
        node = node.copy()
        try:
            self.zk.lockNode(node, blocking=False)
        except exceptions.ZKLockException:
            self.log.warning(
                "Node %s of host %s is locked; skipping it for now", node.id, node.hostname
            )
            self._skipped.add(nodeTuple(node))
            return
        try:
            if needed():
                for name, value in values.items():
                    setattr(node, name, value)
                self.zk.storeNode(node)
                self.log.debug("%s node %s of host %s", done, node.id, node.hostname)
        finally:
            self.zk.unlockNode(node)

    def _deregister_unknown(self) -> dict[NodeTuple, str]:
        """Deregister hosts that are not in our file; return those that are registered again."""
        before, self._unknown = self._unknown, {}
        contested: dict[NodeTuple, str] = {}
        for host in [host for host in self._known if host not in self._hosts]:
            nodes = self._records(host)
            if nodes:
                self._unknown[host] = {node.id for node in nodes}
            if host in before and self._unknown.get(host, set()) - before[host]:
                contested[host] = "is deregistered again and again: it is not in this file"
            for node in nodes:
                self.deregisterNode(node)
        return contested

    def cleanupLeakedResources(self) -> None:
        if self._idle or self.zk is None:
            return
        self._read_records()
        for host in self._hosts:
            slots = self._slots(host)
            if slots.empty or slots.excess or host in self._skipped:
                self._submit(host, update=host in self._skipped)
        contested = self._deregister_unknown()
        self._skipped.intersection_update(self._hosts)
        with self._lock:
            checked = self._hosts.keys() - self._queued - self._running - self._skipped
        for host in checked:
            labels = self._hosts[host][1]["labels"]
            for node in self._records(host):
                if is_free(node) and node.type != labels:
                    contested[host] = (
                        f"is registered for {','.join(node.type)}, but this file has "
                        f"{','.join(labels)}"
                    )
        for host in contested.keys() - self._contested.keys():
            self.log.warning("Static host %s %s; %s", host, contested[host], SAME_NODES)
        self._contested = contested

    def nodeDeletedNotification(self, node: zk.Node) -> None:
        if node.id is not None:
            self._deleted.append(node.id)
        if nodeTuple(node) in self._hosts:
            self._submit(nodeTuple(node))

    # Requests

    def getRequestHandler(
        self, poolworker: RequestHost, request: NodeRequest
    ) -> StaticNodeRequestHandler:
        return StaticNodeRequestHandler(poolworker, request)

    def checkNodeLiveness(self, node: zk.Node) -> bool:
        """Return whether the host of this idle node answers with its known keys.

        If not, deregister the node.
        """
        entry = self._hosts.get(nodeTuple(node))
        if entry is None:
            self.deregisterNode(node)
            return False
        static_node = entry[1]
        if not static_node["host-key-checking"]:
            return True
        try:
            if set(node.host_keys) <= set(host_keys(static_node)):
                return True
            error: Exception | str = "its host keys have changed"
        except Exception as problem:
            error = problem
        self.log.warning(
            "Static host %s cannot be used as it is, deregistering node %s: %s",
            nodeTuple(node),
            node.id,
            error,
        )
        try:
            self.deregisterNode(node)
        except Exception:
            self.log.exception("Cannot deregister node %s:", node.id)
        return False

    def getLabelQuota(self) -> dict[str, int]:
        """Free nodes by label."""
        free = dict.fromkeys(self.provider.getSupportedLabels(), 0)
        free.update(self.zk.countFreeReadyNodes(self.provider.name))
        if drains := self.zk.note_tree.of(Drain):
            for node in self.zk.getProviderNodes(self.provider.name):
                if is_free(node) and not node.lock_contenders and covering(drains, names_of(node)):
                    free.update({label: free[label] - 1 for label in node.type if label in free})
        return free

    def getProviderLimits(self) -> QuotaInformation:
        return QuotaInformation(default=math.inf)

    def unmanagedQuotaUsed(self) -> QuotaInformation:
        return QuotaInformation()

    def quotaNeededByLabel(self, ntype: str, pool: ConfigPool) -> QuotaInformation:
        return QuotaInformation(cores=0, instances=1, ram=0, default=1)

    # -- deletion: the machine stays, only its record is deleted

    def startNodeCleanup(self, node: zk.Node) -> NodeDeleter | None:
        if node.external_id and node.launcher and node.launcher != LAUNCHER:
            self._keep(node)
            return None
        deleter = NodeDeleter(self.zk, self, node)
        deleter.start()
        return deleter

    def _keep(self, node: zk.Node) -> None:
        """Report and unlock a node of another driver, whose machine nobody would find later."""
        node_id = node.id or ""
        reason = f"another driver has created it: machine {node.external_id} may still run"
        self.log.warning("Deletion of node %s failed: %s", node_id, reason)
        self.label_problems.note(
            ",".join(map(str, node.type)),
            f"deletion {node_id}",
            f"{DELETION}{node_id} failed: {reason}",
            solved=lambda: self.zk.getCachedNode(node_id) is None,
            remedy="former driver",
        )
        self.zk.unlock_soon(node)

    def cleanupNode(self, node_id: str) -> bool:  # type: ignore[override]
        return True
