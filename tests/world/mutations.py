"""Defects that are planted on purpose: each removes one guard, and the world has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Mutation:
    """
    :param module: in which text is replaced; it has to be there once.
    """

    module: str
    old: str
    new: str


_HANDLER, _ENDS = "nodepool.driver.request.handler", "nodepool.driver.request.ends"
_CLEANUP, _RECONCILER = "nodepool.launcher.cleanup", "nodepool.launcher.nodes.reconciler"
_EVENTS, _ASSIGNMENT = "nodepool.launcher.events", "nodepool.launcher.requests.assignment"

MUTATIONS: dict[str, Mutation] = {
    "writes-ignore-versions": Mutation(
        "nodepool.zk.writer",
        "SetData(self.client.full_path(path), data, version)",
        "SetData(self.client.full_path(path), data, -1)",
    ),
    "reuse-ignores-lock": Mutation(_HANDLER, "step.lock_index[id(node)] = add_lock(txn, directory, exists)\n", "pass\n"),
    "fused-reuse-ignores-lock": Mutation(
        _HANDLER,
        "            if step.fused:\n                add_unlocked_check(txn, directory, exists)\n",
        "            if step.fused:\n                pass\n",
    ),
    "fused-ignores-request-lock": Mutation(
        _HANDLER,
        "            add_unlocked_check(txn, directory, self._lock_directory_exists)\n            changed.nodes",
        "            changed.nodes",
    ),
    "reuse-ignores-version": Mutation(
        _HANDLER,
        'paths.node(node.id or ""), node.serialize(), version, tree',
        'paths.node(node.id or ""), node.serialize(), -1, tree',
    ),
    "creation-ignores-request-lock": Mutation(_HANDLER, "txn.check(self.request.lock.path)\n        for", "for"),
    "fill-ignores-request-lock": Mutation(_HANDLER, "txn.check(request.lock.path)\n            return", "return"),
    "launch-result-ignores-lock": Mutation(_ENDS, "            txn.check(node.lock.path)\n", ""),
    "release-ignores-request-lock": Mutation(
        _ENDS, 'add_unlocked_check(txn, paths.request_lock(request.id or ""), self._lock_directory_exists)', "pass"
    ),
    "request-end-ignores-version": Mutation(
        _ENDS,
        "            request.version,\n            tree=self.zk.request_tree",
        "            -1,\n            tree=self.zk.request_tree",
    ),
    "recycle-handled-requests": Mutation(_CLEANUP, "if not self.state.is_handled(i)]", "]"),
    "recycle-ignores-request-lock": Mutation(
        _CLEANUP, "        add_unlocked_check(txn, paths.request_lock(request_id), directory_exists)\n", ""
    ),
    "recycle-ignores-contenders": Mutation(_CLEANUP, "            if not contenders:\n", "            if True:\n"),
    "lost-requests-are-not-looked-for": Mutation(_CLEANUP, "        if not candidates:\n", "        if True:\n"),
    "reconciler-ignores-locks": Mutation(
        _RECONCILER, "if tree.is_locked(node_id) or tree.is_changing(node_id):", "if tree.is_changing(node_id):"
    ),
    "nodes-are-not-rechecked-when-unlocked": Mutation(
        _EVENTS, "        self._nodes.look_at(node_id)\n        if node._state == READY", "        if node._state == READY"
    ),
    "nodes-are-not-rechecked-when-changed": Mutation(
        _EVENTS, "            self._nodes.look_at(node_id)\n        freed", "            pass\n        freed"
    ),
    "nodes-of-vanished-requests-are-kept": Mutation(
        _EVENTS,
        "by_request.get(request_id, ())):\n                self._nodes.look_at(node_id)",
        "by_request.get(request_id, ())):\n                pass",
    ),
    "vanished-requests-do-not-wake": Mutation(
        _EVENTS,
        "            if handler is not None:\n                handler.pw.progress(handler)\n            for",
        "            for",
    ),
    "min-ready-is-not-woken-by-nodes": Mutation(
        _EVENTS,
        "                    self._min_ready.wake()\n\n    # -- requests",
        "                    pass\n\n    # -- requests",
    ),
    "capacity-does-not-wake": Mutation(
        _EVENTS, "                worker.capacity_changed()\n        self._assignment.wake()", "                pass"
    ),
    "lost-session-is-ignored-by-pools": Mutation(_EVENTS, "                worker.session_lost()\n", "                pass\n"),
    "dead-launchers-are-not-noticed": Mutation(
        _EVENTS, "        if gone:\n            self._cleanup.wake()", "        if False:\n            pass"
    ),
    "mirror-is-not-read-again": Mutation(
        "nodepool.zk.mirror.tree",
        "        if state == KazooState.CONNECTED:\n",
        "        if state == KazooState.CONNECTED and not self.synced:\n",
    ),
    "components-do-not-register-again": Mutation(
        "nodepool.zk.components", "        if state != KazooState.CONNECTED or not self._registered:\n", "        if True:\n"
    ),
    "abandoned-locks-are-forgotten": Mutation(
        "nodepool.zk.connection.abandoned", "            self._paths[path] = ephemeral\n", "            pass\n"
    ),
    "work-queue-forgets-keys-in-work": Mutation(
        "nodepool.base.workqueue", "            self._again[key] = self._again.get(key, False) or urgent\n", ""
    ),
    "claims-are-always-granted": Mutation(
        "nodepool.launcher.state", "            if node_id in self._ids:\n                return False\n", ""
    ),
    "leaks-are-not-looked-for": Mutation(
        "nodepool.driver.statemachine.leaks",
        "    if node is None:\n        return True\n",
        "    if node is None:\n        return False\n",
    ),
    "doubtful-launches-are-no-leaks": Mutation(
        "nodepool.driver.statemachine.leaks", "return bool(belongs is not None and", "return bool(False and"
    ),
    "backing-take-over-ignores-version": Mutation(
        "nodepool.driver.backing.transactions", "    version = node.version\n    txn.set", "    version = -1\n    txn.set"
    ),
    "warns-of-idle-backing-nodes": Mutation(
        "nodepool.driver.backing.slots", "if not record.lost and not record.isEmpty():", "if not record.lost:"
    ),
    "warns-of-released-backing-nodes": Mutation(
        "nodepool.driver.backing.housekeeping",
        "if again is None or again.state != zk.IN_USE or again.version != node.version:",
        "if False:",
    ),
    "backing-recovery-trusts-the-mirror": Mutation(
        "nodepool.driver.backing.housekeeping", "if time.monotonic() - since >= SIGNING_TIME:", "if True:"
    ),
    "min-ready-ignores-locks": Mutation(
        "nodepool.launcher.requests.minready",
        "            add_unlocked_check(txn, paths.node_lock(node_id), node_id in zk.node_tree.lock_dirs)\n",
        "",
    ),
    "declines-ignore-locks": Mutation(_ASSIGNMENT, "        add_unlocked_check(txn, directory, lock_directory_exists)\n", ""),
}

#: Those that the world finds within 200 seeds. Many of the others are masked by a second guard: the version of a record
#: protects where a lock is ignored, and the other way round.
FOUND = (
    "abandoned-locks-are-forgotten",
    "lost-requests-are-not-looked-for",
    "mirror-is-not-read-again",
    "nodes-are-not-rechecked-when-unlocked",
    "reuse-ignores-lock",
    "reuse-ignores-version",
    "warns-of-idle-backing-nodes",
    "warns-of-released-backing-nodes",
    "writes-ignore-versions",
)


def change(name: str) -> Callable[[str, str], str]:
    """For :func:`nodepool.simulation.lines.instrument`."""
    mutation = MUTATIONS[name]

    def apply(module: str, text: str) -> str:
        if module != mutation.module:
            return text
        if text.count(mutation.old) != 1:
            raise ValueError(f"mutation {name}: {mutation.old!r} occurs {text.count(mutation.old)} times in {module}, not once")
        return text.replace(mutation.old, mutation.new)

    return apply
