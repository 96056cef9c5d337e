"""Probes idle nodes, so that the next job can use a machine that is listed as ready.

A node whose probe fails is locked, so that no request gets it, and probed again. If that fails as
well, the node is replaced. 11.0.0 does not check this.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from nodepool import metrics, ssh
from nodepool.base import threads
from nodepool.base.problems import Problem, one_line
from nodepool.base.workqueue import Reconciler, WorkQueue
from nodepool.config.model import Probing, probing_of
from nodepool.driver.backing.records import (
    METASTATIC,
    backing_data,
    decode_driver_data,
    with_failure,
)
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.state import LauncherState
from nodepool.lease.ssh import machine
from nodepool.nodescan import NodescanRequest, NodescanWorker, command
from nodepool.nodescan.request import SSH_TYPES
from nodepool.version import get_version_string
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle, add_lock
from nodepool.zk.writer import TransactionFailed, Txn

#: Seconds until a probe has failed, and the pause before the second one. The pause is longer, so
#: that the witnesses of a failure have answered by then.
TIMEOUT, PAUSE = 10.0, 15.0
#: The number of nodes that are probed at a time; and of those on which a command runs, each with a
#: thread and a process.
MOST, MOST_COMMANDS = 20, 8
#: The number of other nodes that are probed when one fails, to recognize an outage.
WITNESSES = 6
#: If at least this many nodes fail, and more than half, none is replaced; they are probed again
#: after this many seconds.
OUTAGE, AGAIN = 3, 300.0
#: This many replaced nodes of a label within this many seconds are a problem.
MANY, WINDOW = 3, 3600.0

#: Yields seconds to wait, or None to wait for an answer.
Steps = Generator[float | None, None, None]
#: Instead of seconds: there are no more steps.
ENDED = -1.0


class Probe:
    """The probe of one node, from the first connection to the decision."""

    def __init__(self, node: zk.Node, probing: Probing, steps: Callable[[Probe], Steps]) -> None:
        #: As it was when the probe began.
        self.node = node
        self.probing = probing
        #: The current or last connection.
        self.scan: NodescanRequest | None = None
        #: The current or last command.
        self.job: Future[str | None] | None = None
        self.programs = ssh.Programs()
        #: This launcher cannot run the command on any node.
        self.unable = False
        self.error: str | None = None
        self.lock: LockHandle | None = None
        #: It is locked by the user of its slots.
        self.is_backing = node.state == zk.IN_USE
        #: A transaction was sent and is not answered.
        self.writing = False
        self.steps = steps(self)

    @property
    def waits(self) -> bool:
        """Return whether the node has not answered yet."""
        return not (
            (self.scan is None or self.scan.complete) and (self.job is None or self.job.done())
        )


def _moment(node_id: str, interval: float) -> float:
    """Return a part of the interval that depends on the id.

    Nodes that were started together are not probed together.
    """
    return interval * (zlib.crc32(node_id.encode()) % 1000 + 1) / 1000


class NodeProbes(Reconciler[str]):
    """The thread ``CleanupWorker-probes``."""

    log = logging.getLogger("nodepool.NodeProbes")

    def __init__(self, state: LauncherState, nodes: NodeReconciler) -> None:
        queue: WorkQueue[str] = WorkQueue(state.clock.monotonic)
        super().__init__("CleanupWorker-probes", self.reconcile, self.log, queue=queue)
        self.state, self._nodes = state, nodes
        self._scans = NodescanWorker("probes")
        self._scans.MAX_REQUESTS = MOST
        self._scans.start()  # its thread starts with the first connection
        self._commands = threads.shared().lane("probe-command", MOST_COMMANDS)
        #: Nodes whose probes are due while as many commands run as may run at a time.
        self._queued: set[str] = set()
        #: Label -> why no command of this launcher can log in to its nodes.
        self._unable: dict[str, str] = {}
        #: When the next probe of an idle node is due (monotonic seconds), and the interval.
        self._due: dict[str, tuple[float, float]] = {}
        self._probes: dict[str, Probe] = {}
        #: Nodes to be probed as witnesses, also those of other launchers.
        self._witnesses: set[str] = set()
        #: When the first probe of backing nodes has failed (monotonic seconds): they are not locked
        #: and can be used before the second one.
        self._suspects: dict[str, float] = {}
        #: When nodes were probed first (monotonic seconds), provider, and whether they answered.
        self._results: deque[tuple[float, str | None, bool]] = deque(maxlen=1000)
        #: Provider -> when most of its nodes failed (monotonic seconds), and the last reason.
        self._outages: dict[str | None, tuple[float, str]] = {}
        #: Label -> when its nodes were replaced (monotonic seconds), and why.
        self._replaced: defaultdict[str, deque[tuple[float, str]]] = defaultdict(
            lambda: deque(maxlen=1000)
        )

    def stop(self) -> None:
        super().stop()
        self._scans.stop()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self._scans.join()
        for probe in list(self._probes.values()):
            probe.programs.stop()
        self._commands.shutdown(cancel_futures=True)

    # -- input, from any thread

    def node_changed(self, node_id: str, free: bool) -> None:
        """Schedule a new idle node; end the probe of one that is not idle any more."""
        due = self._due.get(node_id, (0.0, 0.0))[0]
        if node_id in self._probes or (free and due <= 0.0):
            self.queue.add(node_id)

    def check_soon(self, node_id: str) -> None:
        self.queue.add(node_id)

    def check_all(self) -> None:
        """Schedule all idle nodes, because intervals or the mirror have changed.

        There may be tens of thousands: only those whose probes are due are checked now.
        """
        if self.state.config is None:
            return  # all are scheduled when it is loaded
        labels, tree = self.state.config.labels.values(), self.state.zk.node_tree
        intervals = [label.probe.interval for label in labels if label.probe.interval > 0]
        shortest, due = float(min(intervals, default=0)), self._due.copy()
        with tree.lock:
            nodes = tree.nodes.items()
            ids = [i for i, node in nodes if i in tree.idle or backing_data(node) is not None]
        soon = {*self._probes.copy(), *(i for i, (moment, _) in due.items() if moment <= 0.0)}
        self.queue.add_all(soon)
        later = {i: _moment(i, shortest) for i in ids if shortest and i not in soon}
        now = self.state.clock.monotonic()
        for node_id, moment in later.items():
            self._due.setdefault(node_id, (now + moment, shortest))
        self.queue.add_all_later(later)

    # -- one node

    def reconcile(self, node_id: str) -> float | None:
        """Do the next step for this node; return the seconds until the next, or None."""
        facade = self.state.zk
        if self.state.config is None or not (facade.connected and facade.synced):
            return None  # everything is checked again after the synchronization
        tree = facade.node_tree
        node, probe = tree.get(node_id), self._probes.get(node_id)
        if probe is not None:
            return self._advance(node_id, node, probe)
        probing = None if node is None else self._probing(node)
        if node is None or probing is None:
            self._due.pop(node_id, None)
            self._suspects.pop(node_id, None)
            self._witnesses.discard(node_id)
            return None
        now = self.state.clock.monotonic()
        due, interval = self._due.get(node_id, (0.0, -1.0))
        if interval != probing.interval:
            interval = float(probing.interval)
            due = now + _moment(node_id, interval)
            self._due[node_id] = due, interval
        witness = node_id in self._witnesses
        if due > now and not witness:
            return due - now
        if probing.method == "command" and self._running_commands() >= MOST_COMMANDS:
            self._queued.add(node_id)
            return None  # the end of one triggers the next check
        self._witnesses.discard(node_id)
        if self._is_used(node) or tree.is_changing(node_id):
            # The unlock, a record with which it is idle again, or the end of the last node in its
            # slots triggers the next check.
            self._due[node_id] = 0.0, interval
            return None
        self._due[node_id] = now + interval, interval
        if self.state.drains.of_node(node) is not None or not (witness or self._is_ours(node)):
            return interval
        self._probes[node_id] = probe = Probe(node, probing, self._steps)
        return self._advance(node_id, node, probe)

    def _running_commands(self) -> int:
        return sum(probe.probing.method == "command" for probe in self._probes.values())

    def _advance(self, node_id: str, node: zk.Node | None, probe: Probe) -> float | None:
        if probe.writing:
            return None  # the answer triggers the next step
        taken = probe.lock is None and self._is_used(probe.node)
        again: float | None = ENDED  # if somebody uses, changes or deletes it
        try:
            if node is not None and node.version == probe.node.version and not taken:
                again = next(probe.steps, ENDED)
        finally:
            if again == ENDED:
                self._end(node_id, probe)
        if again != ENDED:
            return again
        due, _interval = self._due.get(node_id, (0.0, 0.0))
        return max(0.0, due - self.state.clock.monotonic())

    def _end(self, node_id: str, probe: Probe) -> None:
        del self._probes[node_id]
        self._scans.removeRequest(probe.scan)
        probe.programs.stop()
        queued, self._queued = self._queued, set()
        for other in queued:
            self.check_soon(other)
        if probe.lock is not None:
            held = probe.node.copy()
            held.lock = probe.lock
            self.state.zk.unlock_soon(held)

    def _probing(self, node: zk.Node) -> Probing | None:
        """Return how an idle node is probed; None if it is not."""
        port, config = node.connection_port, self.state.config
        idle = node.state == zk.READY and node.allocated_to is None
        idle = idle and node.id not in self.state.zk.node_tree.unfit
        if not (idle or self._is_backing(node)):
            return None
        if not node.interface_ip or not isinstance(port, int) or not 0 < port < 65536:
            return None
        probing = probing_of(config.labels, node.type)
        if probing is None or node.provider not in config.providers:
            return None
        if probing.method != "port" and not (node.connection_type in SSH_TYPES and node.host_keys):
            return None
        host = self._backing_node(node) or node  # which decides about connections
        checks = getattr(config.provider_managers.get(host.provider or ""), "checksHost", None)
        return probing if checks is None or checks(host) else None

    def _is_backing(self, node: zk.Node) -> bool:
        """Return whether new nodes can be put on this backing node, and its users notice marks."""
        found, ours = backing_data(node), get_version_string()
        if found is None or found[1].failed:
            return False
        provider = found[0].removeprefix(METASTATIC)
        return all(
            pool.content.get("version") == ours
            for pool in self.state.zk.component_tree.registered_pools()
            if pool.provider_name == provider
        )

    def _is_used(self, node: zk.Node) -> bool:
        """Return whether somebody else has locked the node; of a backing node, uses a slot.

        Idle nodes in its slots are probed themselves.
        """
        tree, found = self.state.zk.node_tree, backing_data(node)
        if found is None:
            return tree.is_locked(node.id or "")
        return any(tree.get(user) is not None for user in found[1].allocations.values())

    def _backing_node(self, node: zk.Node) -> zk.Node | None:
        place = decode_driver_data(node.driver_data)
        return None if place is None else self.state.zk.node_tree.get(place[0])

    def _is_ours(self, node: zk.Node) -> bool:
        """Return whether this launcher probes the node.

        That is the launcher of the node. If it no longer exists, or is of a release that may not
        probe, it is that of the smallest id of those with the pool.
        """
        ours = get_version_string()
        ids = {
            pool.id
            for pool in self.state.zk.component_tree.registered_pools()
            if (pool.provider_name, pool.name) == (node.provider, node.pool)
            and pool.content.get("version") == ours
        }
        owner = node.launcher if node.launcher in ids else min(ids, default=None)
        return owner in self.state.workers

    def _steps(self, probe: Probe) -> Steps:
        node = probe.node
        if probe.probing.method == "command" and not probe.is_backing:
            # Unlike a connection, it could disturb a job that gets the node meanwhile.
            yield from self._lock(probe)
            if probe.lock is None:
                return self._postpone(node, PAUSE)
        yield from self._scan(probe)
        since = self.state.clock.monotonic()
        if probe.unable:
            return None
        self._note(node, "ok" if probe.error is None else "failed")
        if probe.error is None:
            self._suspects.pop(node.id or "", None)
            return None
        self._postpone(node, PAUSE)  # unless more is known by then
        self._call_witnesses(node)
        self.log.info(
            "Probe of node %s failed; repeating it in %.0f s: %s", node.id, PAUSE, probe.error
        )
        if probe.lock is None and not probe.is_backing:
            yield from self._lock(probe)
            if probe.lock is None:
                return None  # somebody uses it
        first = self._suspects.get(node.id or "", -math.inf)
        if since - first < AGAIN:
            yield from self._decide(probe, first)  # it was used before the second one
            return None
        if probe.is_backing:
            self._suspects[node.id or ""] = since
        while (left := since + PAUSE - self.state.clock.monotonic()) > 0:
            yield left
        yield from self._scan(probe)
        self._suspects.pop(node.id or "", None)
        if probe.error is None:
            self._postpone(node, math.inf)
            self.log.info("Node %s answers again and is kept", node.id)
            return None
        yield from self._decide(probe, since)
        return None

    def _decide(self, probe: Probe, since: float) -> Steps:
        """Replace the node after the second failure, unless most nodes fail.

        :param since: when the first probe has failed (monotonic seconds).
        """
        node, error = probe.node, probe.error or ""
        if self.state.drains.of_node(node) is not None or self._is_outage(probe, since, error):
            return
        reason = f"its probe failed twice: {error}"
        backing = node if probe.is_backing else self._backing_node(node)
        if backing is not None and self._is_backing(backing):
            yield from self._retire(probe, backing, reason)
        if not probe.is_backing:
            yield from self._replace(probe, reason)

    def _postpone(self, node: zk.Node, seconds: float) -> None:
        """Let the next probe be due in this time, or after the interval if that is less."""
        _due, interval = self._due[node.id or ""]
        due = self.state.clock.monotonic() + min(seconds, interval)
        self._due[node.id or ""] = due, interval

    # -- the connection

    def _scan(self, probe: Probe) -> Steps:
        """Connect to the node; set ``error`` if it does not answer as it should."""
        node = probe.node
        scan = NodescanRequest(
            node,
            True,
            TIMEOUT,
            self.log,
            on_complete=lambda _scan: self.check_soon(node.id or ""),
            known_keys=node.host_keys,
        )
        probe.error = None
        if not scan.needsNetwork():
            return  # a machine of the fake driver
        if probe.probing.method == "command":
            yield from self._run_command(probe)
            return
        scan.gather_keys = probe.probing.method == "ssh"
        probe.scan = scan
        self._scans.addRequest(scan)
        while not scan.complete:
            yield None
        if scan.exception is not None:
            probe.error = one_line(str(scan.exception) or repr(scan.exception))
        elif scan.gather_keys and set(node.host_keys).isdisjoint(scan.keys.values()):
            probe.error = (
                f"{scan.ip} port {node.connection_port} has other SSH host keys "
                f"({', '.join(scan.keys)}) than when it was launched"
            )

    def _run_command(self, probe: Probe) -> Steps:
        """Run the command of the label; set ``error`` if it does not end with status 0."""
        node, target = probe.node, machine(probe.node)
        if (problem := ssh.unreachable(target)) is not None:
            probe.error = one_line(problem)
            return
        job = self._commands.submit(command.failure, target, probe.probing, probe.programs)
        probe.job = job
        job.add_done_callback(lambda _job: self.check_soon(node.id or ""))
        while not job.done():
            yield None
        for label in node.type:
            self._unable.pop(label, None)
        probe.unable = isinstance(job.exception(), OSError | ValueError)
        if probe.unable:
            reason = one_line(job.exception())
            self._unable.update(dict.fromkeys(node.type, reason))
            self.log.warning("Cannot probe node %s, which is kept: %s", node.id, reason)
        else:
            probe.error = job.result()

    def _note(self, node: zk.Node, result: str) -> None:
        self._results.append((self.state.clock.monotonic(), node.provider, result == "ok"))
        self.state.statsd.incr(metrics.PROBES(node.provider, result))
        if result == "ok":
            self._outages.pop(node.provider, None)

    # -- outages

    def _call_witnesses(self, node: zk.Node) -> None:
        """Probe some other nodes now, preferably of the same provider."""
        tree = self.state.zk.node_tree
        missing = WITNESSES - sum(probe.waits for probe in self._probes.values())

        def order(other: zk.Node) -> tuple[bool, int]:
            # Each node has its own witnesses: some of them may be just as dead.
            return other.provider != node.provider, zlib.crc32(f"{node.id} {other.id}".encode())

        with tree.lock:
            others = list(tree.idle.values())
        for other in sorted(others, key=order):
            if missing <= 0:
                return
            if other.id and other.id not in self._probes and self._probing(other) is not None:
                self._witnesses.add(other.id)
                self.check_soon(other.id)
                missing -= 1

    def _is_outage(self, probe: Probe, since: float, reason: str) -> bool:
        """Return whether most nodes have failed since then, or shortly before; note it."""
        node, probing = probe.node, probe.probing
        # The last nodes of an outage fail when all others have done so; earlier answers prove
        # nothing.
        early = since - PAUSE - (probing.timeout if probing.method == "command" else TIMEOUT)
        recent = [e for e in self._results if e[0] >= since or (not e[2] and e[0] >= early)]
        same = [each for each in recent if each[1] == node.provider]
        # A provider with few nodes is compared with all others.
        results = [ok for _, _, ok in (same if len(same) >= OUTAGE else recent)]
        failed = results.count(False)
        if failed < OUTAGE or 2 * failed <= len(results):
            return False
        if node.provider not in self._outages:
            self.log.warning(
                "%d of %d probed nodes of provider %s fail; none is replaced: %s",
                failed,
                len(results),
                node.provider,
                reason,
            )
        self._outages[node.provider] = self.state.clock.monotonic(), reason
        self._postpone(node, AGAIN)
        return True

    # -- ZooKeeper

    def _submit(self, probe: Probe, txn: Txn, done: Callable[[list[Any]], object]) -> Steps:
        """Send a transaction and wait for the answer; call ``done(results)`` if it succeeds."""
        node_id = probe.node.id or ""

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            try:
                if error is None and results is not None:
                    done(results)
                elif not isinstance(error, TransactionFailed):
                    self.log.warning("Cannot write node %s: %r", node_id, error)
            finally:
                probe.writing = False
                self.check_soon(node_id)

        probe.writing = True
        self.state.zk.writer.submit(txn, answered)
        while probe.writing:
            yield None

    def _lock(self, probe: Probe) -> Steps:
        """Lock the node, unless somebody has locked or changed it."""
        node, facade = probe.node, self.state.zk
        directory = paths.node_lock(node.id or "")
        txn = Txn(facade.kazoo_client)
        txn.check(paths.node(node.id or ""), node.version)
        index = add_lock(txn, directory, node.id in facade.node_tree.lock_dirs)

        def locked(results: list[Any]) -> None:
            probe.lock = LockHandle(directory, str(results[index]), None)

        yield from self._submit(probe, txn, locked)

    def _retire(self, probe: Probe, backing: zk.Node, reason: str) -> Steps:
        """Let the backing node get no more nodes; it is deleted when it is empty."""
        facade, changed = self.state.zk, backing.copy()
        changed.user_data = with_failure(str(backing.user_data), reason)
        txn = Txn(facade.kazoo_client)
        txn.set(
            paths.node(backing.id or ""),
            changed.serialize(),
            backing.version,
            tree=facade.node_tree,
            record=changed,
        )

        def retired(_results: list[Any]) -> None:
            self._nodes.announce("Retiring backing", backing, reason)
            found = backing_data(backing)
            for user in found[1].allocations.values() if found else ():
                self._witnesses.add(user)  # as idle ones are just as dead
                self.check_soon(user)
            self._count_replaced(backing, reason)

        yield from self._submit(probe, txn, retired)

    def _count_replaced(self, node: zk.Node, reason: str) -> None:
        self.state.statsd.incr(metrics.PROBES(node.provider, "replaced"))
        for label in node.type:
            self._replaced[label].append((self.state.clock.monotonic(), reason))

    def _replace(self, probe: Probe, reason: str) -> Steps:
        """Mark the node for deletion and unlock it, if we still hold the lock."""
        node, lock, facade = probe.node, probe.lock, self.state.zk
        assert lock is not None
        changed = node.copy()
        changed.state = zk.DELETING
        txn = Txn(facade.kazoo_client)
        txn.delete(lock.path)
        txn.set(
            paths.node(node.id or ""),
            changed.serialize(),
            node.version,
            tree=facade.node_tree,
            record=changed.copy(),
        )

        def replaced(_results: list[Any]) -> None:
            probe.lock = None
            self._nodes.announce("Deleting", node, reason)
            self._count_replaced(node, reason)

        yield from self._submit(probe, txn, replaced)

    # -- problems

    def problems(self) -> list[Problem]:
        """Return outages, and labels whose idle nodes are replaced again and again."""
        now = self.state.clock.monotonic()
        found = [
            Problem(
                f"idle nodes of label {label} are not probed: {reason}",
                help="repair what the message names; on each launcher with the label",
            )
            for label, reason in sorted(self._unable.copy().items())
            if label in self.state.config.labels
            and self.state.config.labels[label].probe.method == "command"
        ]
        for provider, (moment, reason) in sorted(self._outages.copy().items(), key=str):
            if now - moment < 3 * AGAIN:
                text = f"most idle nodes of provider {provider} fail their probes: {reason}"
                found.append(
                    Problem(
                        text,
                        help="check the network between the launcher and the nodes; none is "
                        "replaced until most of them answer",
                    )
                )
        for label, replaced in sorted(self._replaced.copy().items()):
            reasons = [why for moment, why in replaced.copy() if now - moment < WINDOW]
            if len(reasons) >= MANY:
                # Without provider and label: requests do not wait because of it.
                text = (
                    f"{len(reasons)} idle nodes of label {label} failed their probes within an "
                    f"hour and were replaced, the last one: {reasons[-1]}"
                )
                found.append(
                    Problem(
                        text,
                        help="repair what the message names; `probe: {interval: 0}` of the label "
                        "ends the probes",
                    )
                )
        return found
