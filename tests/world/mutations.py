"""Defects that are planted on purpose: each removes one guard, and the world or a test has to
notice.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests import REPOSITORY
from tests.world.guards import GUARDS
from tests.world.mutation import Mutation

_LIFE, _WRITES, _ENGINE = (
    f"nodepool.driver.request.{name}" for name in ("life", "writes", "engine")
)
_CLEANUP, _RECONCILER = "nodepool.launcher.cleanup", "nodepool.launcher.nodes.reconciler"
_EVENTS, _ASSIGNMENT = "nodepool.launcher.events", "nodepool.launcher.requests.assignment"
_MIN_READY, _WORKER = "nodepool.launcher.requests.minready", "nodepool.launcher.pools.worker"
_FACADE = "nodepool.zk.facade.base"
_BACKING = "nodepool.driver.backing.transactions"
_HOUSEKEEPING = "nodepool.driver.backing.housekeeping"
_LEAKS = "nodepool.driver.statemachine.leaks"
_LOCKS, _NODES, _MIRROR = "nodepool.zk.locks", "nodepool.zk.facade.nodes", "nodepool.zk.mirror.tree"
_ABANDONED, _COMPONENTS = "nodepool.zk.connection.abandoned", "nodepool.zk.components"
_LAUNCHER = "nodepool.driver.statemachine.launcher"
_SLIVERS, _HOSTS = "nodepool.driver.nodemanager.adapter", "nodepool.driver.nodemanager.hosts"
_HOST = "nodepool.driver.nodemanager.host"
_MACHINES = "nodepool.driver.nodemanager.machines"
_RECORDS, _UPLOAD = "nodepool.builder.cleanup.records", "nodepool.builder.upload.job"

#: Files of tests.
_SAFETY = "tests/integration/launcher/safety/"
_CAS, _GUARDS = f"{_SAFETY}test_compare_and_set.py::", f"{_SAFETY}test_guards.py::"
_WOKEN, _POOL = "tests/unit/launcher/test_events.py::", "tests/unit/launcher/test_pool_worker.py::"
_BACKLOG, _BACKLOG_TESTS = (
    "nodepool.launcher.pools.backlog",
    "tests/unit/launcher/test_backlog.py::",
)
_ZK, _FAULTS = "tests/integration/zk/test_guards.py::", "tests/integration/zk/test_faults.py::"
_META, _SLOTS = (
    "tests/integration/metastatic/test_compare_and_set.py::",
    "tests/integration/metastatic/test_slots.py::",
)
_MIRRORED, _LEAK_SEARCH = (
    "tests/unit/zk/test_mirror.py::",
    "tests/unit/driver/statemachine/test_leaks.py::",
)
_BUILDER, _BUILDS = (
    "tests/integration/builder/test_guards.py::",
    "tests/integration/builder/test_builds.py::",
)
_UPLOADS = "tests/integration/builder/test_uploads.py::"
_LEAK_TESTS = "tests/unit/driver/openstack/test_leaks.py::"

MUTATIONS: dict[str, Mutation] = {
    **GUARDS,
    # -- the ten of the study that the simulation began with
    "writes-ignore-versions": Mutation(
        "nodepool.zk.writer",
        "SetData(self.client.full_path(path), data, version)",
        "SetData(self.client.full_path(path), data, -1)",
        2,
    ),
    "leaks-are-not-looked-for": Mutation(
        _LEAKS,
        "    if node is None:\n        return True\n",
        "    if node is None:\n        return False\n",
        f"{_LEAK_SEARCH}test_machine_without_a_record_is_deleted_when_it_was_seen_twice[2-"
        "deleted1]",
    ),
    "components-do-not-register-again": Mutation(
        _COMPONENTS,
        "        if state == KazooState.CONNECTED and not self._unregistered.is_set() and not "
        "is_current:\n",
        "        if False:\n",
        f"{_FAULTS}test_component_without_a_mirror_registers_again_in_a_new_session",
    ),
    "abandoned-locks-are-forgotten": Mutation(
        _ABANDONED, "            self._paths[path] = ephemeral\n", "            pass\n", 5
    ),
    "mirror-is-not-read-again": Mutation(
        _MIRROR,
        "        if state == KazooState.CONNECTED:\n",
        "        if state == KazooState.CONNECTED and not self._generation:\n",
        f"{_MIRRORED}test_record_that_vanished_during_a_lost_connection_is_forgotten",
    ),
    "claims-are-always-granted": Mutation(
        _WRITES,
        "            if node_id in held or claims.setdefault(node_id, claim) is not claim:\n",
        "            if node_id in held or (claims.setdefault(node_id, claim) is None):\n",
        "tests/unit/driver/request/test_states.py::test_free_node_is_claimed_by_one_handler_at_a_"
        "time_and_for_one_label",
    ),
    "work-queue-forgets-keys-in-work": Mutation(
        "nodepool.base.workqueue",
        "            self._again[key] = self._again.get(key, False) or urgent\n",
        "",
        "tests/unit/base/test_workqueue.py::test_a_key_added_while_worked_on_is_handed_out_again",
    ),
    "mirror-drops-deferred-creations": Mutation(
        _MIRROR,
        "            for path in paths:\n",
        "            for path in ():\n",
        f"{_MIRRORED}test_concurrent_creation_of_another_client_is_read_after_the_answer",
    ),
    "locks-are-taken-without-looking": Mutation(
        _LOCKS,
        "    if exists:\n        txn.delete(directory)\n    txn.create(directory)\n    return",
        "    if not exists:\n        txn.create(directory)\n    return",
        f"{_ZK}test_lock_of_another_client_makes_the_transaction_fail[known directory-taken]",
    ),
    "backing-recovery-trusts-the-mirror": Mutation(
        _HOUSEKEEPING,
        "            present = slots.zk.getNode(node.id)\n            if present is None:",
        "            present = node\n            if present is None:",
        f"{_SLOTS}test_backing_node_just_adopted_by_another_launcher_stays_locked[record read "
        "after]",
    ),
    # -- requests are accepted and get their nodes
    "accept-ignores-version": Mutation(
        _WRITES,
        "set_request(txn, handler.zk, changed, request.version)",
        "set_request(txn, handler.zk, changed, -1)",
        f"{_CAS}test_accept_is_refused_if_the_request_changed",
    ),
    "accept-ignores-lock": Mutation(
        _WRITES,
        'self.indexes["lock", "request"] = add_lock(txn, directory, exists)',
        "self.indexes['lock', 'request'] = txn.create(f'{directory}/0__lock__', ephemeral=True, "
        "sequence=True)",
        f"{_CAS}test_accept_is_refused_if_the_request_is_locked",
    ),
    "reuse-ignores-lock": Mutation(
        _WRITES,
        'self.indexes["lock", node.id] = add_lock(txn, directory, exists)',
        "self.indexes['lock', node.id] = txn.create(f'{directory}/0__lock__', ephemeral=True, "
        "sequence=True)",
        f"{_CAS}test_ready_node_is_not_given_out_if_it_is_locked[with a new node as well]",
    ),
    "reuse-ignores-version": Mutation(
        _WRITES,
        "set_node(txn, handler.zk, node, node.version)",
        "set_node(txn, handler.zk, node, -1)",
        2,
    ),
    "fused-reuse-ignores-lock": Mutation(
        _WRITES,
        "            if self.fused:\n                add_unlocked_check(txn, directory, exists)\n",
        "            if self.fused:\n                pass\n",
        f"{_CAS}test_ready_node_is_not_given_out_if_it_is_locked[with ready nodes only]",
    ),
    "fused-ignores-request-lock": Mutation(
        _WRITES,
        "            add_unlocked_check(txn, directory, exists)\n            changed.nodes",
        "            changed.nodes",
        f"{_CAS}test_request_is_not_fulfilled_immediately_if_it_is_locked",
    ),
    "creation-ignores-request-lock": Mutation(
        _WRITES,
        "txn.check(handler.request.lock.path)\n        for",
        "for",
        f"{_CAS}test_new_node_is_not_launched_if_the_lock_of_the_request_is_lost",
    ),
    "launch-ignores-version": Mutation(
        _WRITES,
        "set_node(txn, handler.zk, node, 0)",
        "set_node(txn, handler.zk, node, -1)",
        f"{_CAS}test_new_node_is_not_launched_if_another_client_changed_it",
    ),
    "fill-ignores-request-lock": Mutation(
        _WRITES,
        "txn.check(request.lock.path)\n            return",
        "return",
        f"{_CAS}test_paused_request_creates_no_node_if_its_lock_is_lost",
    ),
    "request-that-changes-again-and-again-is-kept": Mutation(
        _LIFE,
        "if self._conflicts > CONFLICT_RETRIES and not handler.accepted:",
        "if False:",
        f"{_GUARDS}test_request_that_changes_again_and_again_goes_back_to_the_queue",
    ),
    # -- requests end
    "launch-result-ignores-lock": Mutation(
        _LIFE,
        "            txn.check(node.lock.path)\n",
        "",
        f"{_CAS}test_ready_node_of_a_paused_request_is_not_saved_if_its_lock_is_lost",
    ),
    "release-ignores-request-lock": Mutation(
        _LIFE,
        "add_unlocked_check(txn, directory, self._known.get(directory, False))",
        "pass",
        f"{_CAS}test_locked_request_is_not_declined[by a pool]",
    ),
    "request-end-ignores-version": Mutation(
        _WRITES,
        "set_request(txn, facade, request, request.version)",
        "set_request(txn, facade, request, -1)",
        f"{_CAS}test_end_of_a_request_keeps_what_another_client_wrote",
    ),
    "fulfilment-ignores-locks-of-nodes": Mutation(
        _WRITES,
        "        txn.delete(node.lock.path)\n",
        "        pass\n",
        f"{_CAS}test_request_is_not_fulfilled_if_the_lock_of_a_node_is_lost",
    ),
    "dropped-requests-keep-their-locks": Mutation(
        _ENGINE,
        "                    handler.zk.kazoo_client.abandoned.add(lock.path)  # the session may "
        "live on\n",
        "                    pass\n",
        "tests/integration/launcher/requests/test_lost_requests.py::test_request_dropped_with_a_"
        "living_session_is_served_again_soon",
    ),
    "locks-obtained-too-late-are-kept": Mutation(
        _ENGINE,
        "                    self.handler.zk.kazoo_client.abandoned.add(result)\n",
        "                    pass\n",
        f"{_GUARDS}test_locks_that_a_handler_obtains_after_its_end_are_released",
    ),
    "declines-ignore-locks": Mutation(
        _FACADE,
        "        locks.add_unlocked_check(txn, directory, known if exists is None else exists)\n",
        "",
        f"{_CAS}test_locked_request_is_not_declined[by nobody's label]",
    ),
    "declines-ignore-version": Mutation(
        _FACADE,
        "changed.serialize(), seen.version, tree",
        "changed.serialize(), -1, tree",
        f"{_CAS}test_decline_keeps_what_another_client_wrote[by nobody's label]",
    ),
    "machines-are-recorded-without-the-lock": Mutation(
        _LAUNCHER,
        "        txn.check(node.lock.path)\n        record = node.copy()\n",
        "        record = node.copy()\n",
        f"{_CAS}test_machine_is_not_recorded_and_its_request_is_served_again_if_the_lock_of_the_"
        "node_is_lost",
    ),
    "end-of-orphaned-machines-does-not-wake": Mutation(
        _LAUNCHER,
        "            self.handler.pw.progress(self.handler)  # its request has waited for this\n",
        "            pass\n",
        f"{_CAS}test_machine_is_not_recorded_and_its_request_is_served_again_if_the_lock_of_the_"
        "node_is_lost",
    ),
    "declines-do-not-wait-for-registrations": Mutation(
        _ASSIGNMENT,
        "        self.others_return_until = self.state.clock.monotonic() + REGISTRATION_GRACE\n",
        "        pass\n",
        "tests/unit/launcher/test_assignment.py::test_nothing_is_declined_until_other_launchers_"
        "had_time_to_register_again",
    ),
    # -- what a dead launcher left
    "lost-requests-are-not-looked-for": Mutation(
        _CLEANUP, "        if not candidates:\n", "        if True:\n", 5
    ),
    "recycle-handled-requests": Mutation(
        _CLEANUP,
        "if i not in self.state.handlers]",
        "]",
        f"{_GUARDS}test_zookeeper_is_not_asked_who_holds_our_own_requests",
    ),
    "recycle-ignores-request-lock": Mutation(
        _CLEANUP,
        "        add_unlocked_check(txn, paths.request_lock(request_id), directory_exists)\n",
        "",
        f"{_CAS}test_lost_request_is_not_reset_if_it_is_locked",
    ),
    "recycle-ignores-contenders": Mutation(
        _CLEANUP,
        "            if not contenders:\n",
        "            if True:\n",
        f"{_GUARDS}test_nothing_is_written_for_a_request_that_another_launcher_holds",
    ),
    "recycle-ignores-version": Mutation(
        _CLEANUP,
        "request.serialize(), seen.version, tree",
        "request.serialize(), -1, tree",
        f"{_CAS}test_lost_request_is_not_reset_if_it_changed",
    ),
    "recycle-ignores-versions-of-nodes": Mutation(
        _CLEANUP,
        "changed.serialize(), node.version, tree",
        "changed.serialize(), -1, tree",
        f"{_CAS}test_node_of_a_lost_request_is_not_freed_if_it_changed[ready]",
    ),
    "recycle-ignores-locks-of-nodes": Mutation(
        _CLEANUP,
        "            add_unlocked_check(\n"
        "                txn, directory, isinstance(told, NodeExistsError) if told else node_id in "
        "facade.node_tree.lock_dirs\n"
        "            )\n",
        "",
        f"{_CAS}test_node_of_a_lost_request_is_not_freed_while_it_is_locked[ready]",
    ),
    "dropped-requests-are-not-told": Mutation(
        _WORKER,
        "                self._request_dropped(request_id)\n",
        "                pass\n",
        f"{_POOL}test_clean_up_is_notified_of_requests_that_were_dropped[How.DROPPED]",
    ),
    "handlers-outlive-their-session": Mutation(
        "nodepool.launcher.pool",
        "            self.post(handler, handler.drop)\n",
        "            pass\n",
        f"{_POOL}test_handlers_are_dropped_when_the_session_is_lost",
    ),
    # -- nodes
    "reconciler-ignores-locks": Mutation(
        _RECONCILER,
        "if tree.is_locked(node_id) or tree.is_changing(node_id):",
        "if tree.is_changing(node_id):",
        f"{_GUARDS}test_nothing_is_written_for_a_node_that_is_known_to_be_locked[used]",
    ),
    "node-change-ignores-version": Mutation(
        _FACADE,
        "changed.serialize(), seen.version, tree",
        "changed.serialize(), -1, tree",
        f"{_CAS}test_node_is_not_unallocated_if_it_changed",
    ),
    "node-change-ignores-lock": Mutation(
        _FACADE,
        "        locks.add_unlocked_check(txn, directory, known if exists is None else exists)\n",
        "",
        f"{_CAS}test_node_is_not_unallocated_while_it_is_locked",
    ),
    "deletion-ignores-version": Mutation(
        _RECONCILER,
        "changed.serialize(), node.version, tree",
        "changed.serialize(), -1, tree",
        f"{_CAS}test_used_node_is_not_deleted_if_it_changed",
    ),
    "removal-of-empty-nodes-ignores-version": Mutation(
        _RECONCILER,
        "txn.delete(paths.node(node_id), 0)",
        "txn.delete(paths.node(node_id), -1)",
        f"{_CAS}test_empty_node_is_not_removed_if_it_got_a_record",
    ),
    "min-ready-ignores-locks": Mutation(
        _MIN_READY,
        "            add_unlocked_check(txn, paths.node_lock(node_id), node_id in "
        "zk.node_tree.lock_dirs)\n",
        "",
        f"{_GUARDS}test_min_ready_node_is_not_freed_while_it_is_locked",
    ),
    "min-ready-ignores-version": Mutation(
        _MIN_READY,
        "node.serialize(), seen.version, tree",
        "node.serialize(), -1, tree",
        f"{_CAS}test_min_ready_node_is_not_freed_if_it_changed",
    ),
    "making-room-ignores-version": Mutation(
        _FACADE,
        "changed.serialize(), seen.version, tree",
        "changed.serialize(), -1, tree",
        f"{_ZK}test_idle_node_is_not_deleted_if_it_changed",
    ),
    "making-room-ignores-lock": Mutation(
        _FACADE,
        "        locks.add_unlocked_check(txn, directory, known if exists is None else exists)\n",
        "",
        f"{_ZK}test_idle_node_is_not_deleted_while_it_is_locked",
    ),
    "locked-nodes-are-written-without-the-lock": Mutation(
        _NODES,
        "            txn.check(node.lock.path)\n",
        "            pass\n",
        f"{_ZK}test_locked_node_is_written_only_while_its_lock_stands",
    ),
    "force-unlock-ignores-version": Mutation(
        _NODES,
        '            txn.check(paths.node(node.id or ""), version)\n',
        "",
        f"{_ZK}test_lock_is_removed_by_force_only_if_the_record_is_unchanged",
    ),
    # -- who is woken
    "nodes-are-not-rechecked-when-unlocked": Mutation(
        _EVENTS,
        "        self._nodes.check_soon(node_id)\n        if node._state == READY",
        "        if node._state == READY",
        f"{_WOKEN}test_node_that_is_unlocked[in-use-woken1]",
    ),
    "nodes-are-not-rechecked-when-changed": Mutation(
        _EVENTS,
        "            self._nodes.check_soon(node_id)\n        freed",
        "            pass\n        freed",
        f"{_WOKEN}test_change_of_a_node[used]",
    ),
    "nodes-of-vanished-requests-are-kept": Mutation(
        _EVENTS,
        "by_request.get(request_id, ())):\n                self._nodes.check_soon(node_id)",
        "by_request.get(request_id, ())):\n                pass",
        f"{_WOKEN}test_nodes_of_a_deleted_request_are_checked_and_its_handler_continues",
    ),
    "vanished-requests-do-not-wake": Mutation(
        _EVENTS,
        "            if handler is not None:\n                handler.pw.progress(handler)\n       "
        "     for",
        "            for",
        f"{_WOKEN}test_nodes_of_a_deleted_request_are_checked_and_its_handler_continues",
    ),
    "min-ready-is-not-woken-by-nodes": Mutation(
        _EVENTS,
        "                    self._min_ready.wake()\n\n    # -- requests",
        "                    pass\n\n    # -- requests",
        f"{_WOKEN}test_change_of_a_node[of a label that is kept ready gone]",
    ),
    "capacity-does-not-wake": Mutation(
        _EVENTS,
        "                worker.capacity_changed()\n        self._assignment.wake()",
        "                pass",
        f"{_WOKEN}test_change_of_a_node[gone]",
    ),
    "lost-session-is-ignored-by-pools": Mutation(
        _EVENTS,
        "                worker.session_lost()\n",
        "                pass\n",
        f"{_WOKEN}test_lost_session_is_reported_to_all_that_hold_something",
    ),
    "dead-launchers-are-not-noticed": Mutation(
        _EVENTS,
        "        if gone:\n            self._cleanup.wake()",
        "        if False:\n            pass",
        f"{_WOKEN}test_change_of_a_pool[True]",
    ),
    "complete-mirror-wakes-nobody": Mutation(
        _EVENTS,
        "        if zk is not None and zk.synced:\n            self.all_synced()",
        "        if False:\n            self.all_synced()",
        f"{_WOKEN}test_complete_mirror_has_everything_looked_at",
    ),
    "returned-connection-does-not-wake": Mutation(
        _EVENTS,
        "                self._assignment.session_lost()\n            self._cleanup.wake()",
        "                self._assignment.session_lost()",
        f"{_WOKEN}test_lost_session_is_reported_to_all_that_hold_something",
    ),
    "forgotten-claims-are-kept": Mutation(
        _ASSIGNMENT,
        "            del claims[request_id]\n",
        "            pass\n",
        "tests/unit/launcher/test_assignment.py::test_a_forgotten_claim_is_found",
    ),
    # -- leaks
    "leaks-are-deleted-at-first-sight": Mutation(
        _LEAKS,
        "            if key not in before:\n                continue\n",
        "",
        f"{_LEAK_SEARCH}test_machine_without_a_record_is_deleted_when_it_was_seen_twice[1-"
        "deleted0]",
    ),
    "leak-search-trusts-the-mirror": Mutation(
        _LEAKS,
        "            if node_id is not None and not _leaked(resource, zk.getNode(node_id)):\n",
        "            if False:\n",
        f"{_LEAK_SEARCH}test_machine_whose_record_the_mirror_does_not_show_yet_is_not_deleted",
    ),
    "leak-search-ignores-history": Mutation(
        _LEAKS,
        "        if self._stop(view, zk, ours, nodes, uploads):\n",
        "        if False:\n",
        f"{_LEAK_SEARCH}test_nothing_is_deleted_while_a_machine_is_not_of_this_history",
    ),
    "leak-search-ignores-lost-connections": Mutation(
        _LEAKS,
        "            if not zk.cluster.is_current(view):\n",
        "            if False:\n",
        f"{_LEAK_TESTS}test_nothing_is_deleted_if_the_connection_was_lost_since_the_records_were_"
        "read",
    ),
    "doubtful-launches-are-no-leaks": Mutation(
        _LEAKS,
        "return bool(node.state in SETTLED and",
        "return bool(False and",
        f"{_LEAK_TESTS}test_a_second_server_of_a_node_is_leaked[ready-b-left0]",
    ),
    # -- backing nodes
    "backing-writes-ignore-version": Mutation(
        _BACKING,
        "    version = node.version\n    txn.set",
        "    version = -1\n    txn.set",
        f"{_META}test_take_over_keeps_what_another_client_wrote",
    ),
    "backing-take-over-ignores-lock": Mutation(
        _BACKING,
        '    locks.add_lock(txn, paths.node_lock(node.id or ""), lock_exists, owner)\n',
        '    directory = paths.node_lock(node.id or "")\n    if not lock_exists:\n        '
        "txn.create(directory)\n"
        "    txn.create(locks.contender_prefix(directory), owner.encode(), sequence=True)\n",
        f"{_META}test_take_over_waits_for_the_lock",
    ),
    "backing-take-over-ignores-request": Mutation(
        _BACKING,
        "    txn.delete(paths.request(request_id))\n",
        "",
        f"{_META}test_node_is_not_adopted_if_its_request_was_deleted",
    ),
    "backing-nodes-are-adopted-without-our-lock": Mutation(
        _HOUSEKEEPING,
        "        if not self._is_locked(node):\n            again =",
        "        if False:\n            again =",
        f"{_META}test_node_that_names_us_as_owner_without_our_lock_is_not_used",
    ),
    "backing-locks-are-removed-whatever-was-written": Mutation(
        _HOUSEKEEPING,
        "self._slots.zk.forceUnlockNode(node, node.version)",
        "self._slots.zk.forceUnlockNode(node)",
        f"{_SLOTS}test_backing_node_just_adopted_by_another_launcher_stays_locked[record read "
        "before]",
    ),
    "backing-locks-are-removed-at-first-sight": Mutation(
        _HOUSEKEEPING,
        "if time.monotonic() - since >= SIGNING_TIME:",
        "if True:",
        f"{_SLOTS}test_ready_node_locked_by_a_dead_release_11_launcher_is_unlocked",
    ),
    "busy-backing-nodes-are-released": Mutation(
        _HOUSEKEEPING,
        "if not record.isEmpty() or record.busy or record.taking or record.releasing:",
        "if not record.isEmpty():",
        f"{_SLOTS}test_backing_node_that_something_is_done_with_is_not_released[busy]",
    ),
    "warns-of-idle-backing-nodes": Mutation(
        "nodepool.driver.backing.slots",
        "if not record.lost and not record.isEmpty():",
        "if not record.lost:",
        8,
    ),
    "warns-of-released-backing-nodes": Mutation(
        _HOUSEKEEPING,
        "if again is None or again.state != zk.IN_USE or again.version != node.version:",
        "if False:",
        72,
    ),
    # -- locks and sessions
    "waiting-contenders-hold-the-lock": Mutation(
        _LOCKS,
        "            if place == 0:\n",
        "            if True:\n",
        f"{_ZK}test_contender_that_gives_up_leaves_the_queue",
    ),
    "locks-of-missing-nodes-are-taken": Mutation(
        "nodepool.zk.facade.base",
        "directory, path, blocking",
        "directory, None, blocking",
        f"{_ZK}test_lock_of_a_missing_node_is_not_taken_and_leaves_nothing",
    ),
    "taking-for-free-ignores-the-holder": Mutation(
        _LOCKS,
        "        txn.create(directory)\n    txn.delete(directory)\n",
        "        txn.create(directory)\n        txn.delete(directory)\n",
        f"{_ZK}test_lock_of_another_client_makes_the_transaction_fail[known directory-taken for "
        "free]",
    ),
    "doubtful-locks-are-forgotten": Mutation(
        "nodepool.zk.writer",
        "                    self._client.abandoned.add(self._client.unchroot(operation.path))\n",
        "                    pass\n",
        "tests/unit/zk/test_writer.py::test_locks_of_a_lost_transaction_are_abandoned",
    ),
    "locks-of-others-are-given-back": Mutation(
        _ABANDONED,
        "if stat is None or stat.ephemeralOwner != (client_id[0] if ephemeral else 0):",
        "if stat is None:",
        f"{_FAULTS}test_marks_of_others_stay",
    ),
    "long-held-locks-outlive-their-session": Mutation(
        "nodepool.zk.locks.long_held",
        "return handle is not None and handle.session_id == self._client.session_id",
        "return handle is not None",
        "tests/integration/zk/test_long_held.py::test_lock_is_taken_again_before_a_result_is_"
        "written_in_a_new_session",
    ),
    "released-locks-are-taken-again": Mutation(
        "nodepool.zk.locks.long_held",
        "            if self._released:\n                return False\n",
        "",
        "tests/integration/zk/test_long_held.py::test_released_lock_is_not_taken_again",
    ),
    "turns-are-taken-by-all": Mutation(
        "nodepool.zk.locks.turn",
        "        except NodeExistsError:\n            return False\n",
        "        except NodeExistsError:\n            return True\n",
        f"{_ZK}test_turn_of_another_launcher_is_not_taken",
    ),
    "elections-outlive-their-session": Mutation(
        "nodepool.launcher.statistics",
        "        self.elected = False\n        self._step_down.set()\n",
        "        pass\n",
        "tests/unit/launcher/test_statistics.py::test_election_won_in_a_lost_session_ends",
    ),
    "removed-components-stay-away": Mutation(
        _COMPONENTS,
        "        if path == self.path and not self._unregistered.is_set():\n",
        "        if False:\n",
        f"{_FAULTS}test_removed_component_registers_again[noticed by the mirror]",
    ),
    "doubtful-registrations-are-made-twice": Mutation(
        _COMPONENTS,
        "self._adopt(kazoo, session) if key in self.client.unsure_components else None",
        "None",
        f"{_FAULTS}test_a_doubtful_registration_is_found_again",
    ),
    "sessions-of-killed-processes-live-on": Mutation(
        "nodepool.zk.connection.client",
        "        if left_behind is not None:\n",
        "        if False:\n",
        "tests/integration/zk/test_previous_session.py::test_the_session_of_a_killed_process_is_"
        "ended",
    ),
    "sessions-of-living-processes-are-ended": Mutation(
        "nodepool.zk.connection.previous_session",
        "            lock_file(fd)\n",
        "            pass\n",
        "tests/integration/zk/test_previous_session.py::test_a_living_process_keeps_its_session",
    ),
    "sessions-of-other-machines-are-ended": Mutation(
        "nodepool.zk.connection.previous_session",
        '        if not value.get("boot") or value["boot"] != boot_id():\n',
        "        if False:\n",
        "tests/integration/zk/test_previous_session.py::test_the_session_of_another_machine_is_"
        "not_changed",
    ),
    # -- the mirror
    "mirror-trusts-its-own-writes": Mutation(
        _MIRROR,
        "        if own is not None and own[1] > 0 and own[0] <= 0:\n",
        "        if False:\n",
        f"{_MIRRORED}test_record_that_another_client_writes_too_is_read_after_the_answer",
    ),
    "mirror-forgets-changes-during-refused-writes": Mutation(
        _MIRROR,
        "                if own[1] > 0:\n                    self._read(path, parts, None)\n",
        "                if own[1] > 0:\n                    pass\n",
        f"{_MIRRORED}test_record_that_another_client_changed_is_read_when_our_write_is_refused",
    ),
    "mirror-keeps-what-is-gone": Mutation(
        _MIRROR,
        "        for path in sorted(self._stale, key=len, reverse=True):\n",
        "        for path in ():\n",
        f"{_MIRRORED}test_record_that_vanished_during_a_lost_connection_is_forgotten",
    ),
    "mirror-counts-answers-of-an-earlier-reading": Mutation(
        _MIRROR,
        "            if generation != self._generation:\n                return\n"
        "            self._note_error(error)\n            if error is None:\n"
        "                self._note(",
        "            self._note_error(error)\n            if error is None:\n"
        "                self._note(",
        f"{_MIRRORED}test_answers_of_an_earlier_reading_do_not_count",
    ),
    "mirror-does-not-arm-its-watches-again": Mutation(
        _MIRROR,
        "        kazoo.arm_persistent_watch(self.root, Reply(armed))\n",
        "        if generation > 1:\n"
        "            armed(None, None, 0)\n"
        "        else:\n"
        "            kazoo.arm_persistent_watch(self.root, Reply(armed))\n",
        "tests/integration/zk/test_protocol.py::test_the_mirror_arms_its_watches_again",
    ),
    "mirror-expects-events-of-a-lost-connection": Mutation(
        _MIRROR,
        "                self._own.clear()\n",
        "                pass\n",
        f"{_MIRRORED}test_expected_events_are_forgotten_with_the_connection",
    ),
    "cluster-record-ignores-version": Mutation(
        "nodepool.zk.cluster",
        "cluster.serialize(), stat.version)",
        "cluster.serialize(), -1)",
        "tests/integration/zk/test_cluster.py::test_change_of_another_process_is_kept",
    ),
    # -- builds
    "build-starts-without-looking-again": Mutation(
        "nodepool.builder.building.worker",
        "            if not self._still_wanted(wanted):\n                return False\n",
        "",
        f"{_BUILDER}test_image_that_another_builder_has_built_is_not_built_again",
    ),
    "build-ignores-lock": Mutation(
        "nodepool.builder.building.worker",
        "            return False  # another worker or builder has it; its end is an event\n",
        "            lock = HeldLock(self._zk.client, '/nodepool/no/lock')\n",
        f"{_BUILDER}test_image_that_another_builder_builds_is_not_built",
    ),
    "build-is-stored-although-another-builder-was-quicker": Mutation(
        "nodepool.builder.building.run",
        "            if self.lock.regained and self._somebody_built():\n",
        "            if False:\n",
        f"{_BUILDS}test_result_of_a_build_in_a_lost_session_is_stored_unless_another_builder_built_"
        "the_image"
        "[another builder built it]",
    ),
    "stored-builds-are-taken-for-interrupted": Mutation(
        "nodepool.builder.building.worker",
        "        if build is not None and build.state != BUILDING:\n            continue\n",
        "",
        f"{_BUILDER}test_result_that_was_stored_before_the_builder_was_killed_is_kept[ready-ready]",
    ),
    # -- uploads
    "upload-starts-without-looking-again": Mutation(
        _UPLOAD,
        "            if not self._still_wanted():\n                return False\n",
        "",
        f"{_BUILDER}test_build_that_another_builder_has_uploaded_is_not_uploaded_again",
    ),
    "builds-being-deleted-are-uploaded": Mutation(
        _UPLOAD,
        "and build.state == READY and not zk.getUploads",
        "and not zk.getUploads",
        f"{_BUILDER}test_build_that_is_being_deleted_is_not_uploaded",
    ),
    "upload-ignores-lock": Mutation(
        _UPLOAD,
        "        except ZKLockException:\n            return False\n",
        "        except ZKLockException:\n            self._lock = HeldLock(self._state.zk.client, "
        "'/nodepool/no/lock')\n",
        f"{_BUILDER}test_build_that_another_builder_uploads_is_not_uploaded",
    ),
    "upload-is-stored-although-another-builder-was-quicker": Mutation(
        _UPLOAD,
        "            if record.state == READY and self._lock.regained:\n",
        "            if False:\n",
        f"{_UPLOADS}test_image_that_another_builder_has_uploaded_in_a_lost_session_is_not_stored_"
        "twice",
    ),
    "one-image-is-uploaded-by-two-workers": Mutation(
        "nodepool.builder.upload.claims",
        "            ours = pair not in self._claims\n",
        "            ours = True\n",
        f"{_BUILDER}test_two_workers_of_a_builder_never_upload_one_image_to_one_provider",
    ),
    "left-images-are-not-looked-for": Mutation(
        "nodepool.builder.upload.journal",
        "                    manager.discardImage(name, external_id)\n",
        "                    pass\n",
        f"{_LEAK_TESTS}test_a_snapshot_of_a_node_is_nothing_that_an_upload_has_left[image_type]",
    ),
    "stored-images-are-taken-for-left": Mutation(
        "nodepool.builder.upload.journal",
        "                if record is not None and record.external_id == external_id:\n            "
        "        continue\n",
        "",
        f"{_UPLOADS}test_note_of_a_stored_upload",
    ),
    # -- the clean-up of builds and uploads
    "uploads-under-way-are-dropped": Mutation(
        _RECORDS,
        "            if not free:\n"
        "                return\n"
        "            found = self._zk.getImageUpload(*key)\n"
        "            if found is not None and found.state == UPLOADING:\n",
        "            found = self._zk.getImageUpload(*key)\n            if found is not None and "
        "found.state == UPLOADING:\n",
        f"{_BUILDER}test_upload_under_way_is_not_dropped",
    ),
    "ended-uploads-are-dropped": Mutation(
        _RECORDS,
        "            if found is not None and found.state == UPLOADING:\n",
        "            if found is not None:\n",
        f"{_BUILDER}test_upload_that_has_ended_meanwhile_is_not_dropped",
    ),
    "changed-uploads-are-marked": Mutation(
        _RECORDS,
        "with self._upload(key, state, DELETING) as found:",
        'with self._upload(key, state, DELETING, "ready") as found:',
        f"{_BUILDER}test_upload_that_has_changed_meanwhile_is_not_marked_for_deletion",
    ),
    "locked-uploads-are-marked": Mutation(
        _RECORDS,
        "found = self._zk.getImageUpload(*key) if free else None",
        "found = self._zk.getImageUpload(*key)",
        f"{_BUILDER}test_upload_that_somebody_deletes_is_not_marked_for_deletion",
    ),
    "records-of-images-are-removed-before-the-images": Mutation(
        _RECORDS,
        "if found is not None and not found.external_id:",
        "if found is not None:",
        f"{_BUILDER}test_upload_that_has_got_an_image_meanwhile_keeps_its_record",
    ),
    "ready-images-are-deleted": Mutation(
        _RECORDS,
        "self._upload(key, DELETING) as found, state",
        'self._upload(key, DELETING, "ready") as found, state',
        f"{_BUILDER}test_image_of_an_upload_that_is_not_to_be_deleted_stays_in_the_cloud",
    ),
    "images-are-deleted-without-the-lock": Mutation(
        _RECORDS,
        "found = self._zk.getImageUpload(*key) if free else None",
        "found = self._zk.getImageUpload(*key)",
        f"{_BUILDER}test_image_that_another_builder_deletes_is_not_deleted_twice",
    ),
    "builds-with-new-uploads-are-removed": Mutation(
        _RECORDS,
        "        if any(upload is None or upload.state != DELETING for upload in left):\n",
        "        if left is None:\n",
        f"{_BUILDER}test_build_that_has_got_an_upload_meanwhile_is_not_removed",
    ),
    "builds-being-uploaded-are-removed": Mutation(
        _RECORDS,
        "        if any(key[:2] == (image, build_id) for key in snapshot.data.upload_locks):\n     "
        "       return False\n",
        "",
        f"{_BUILDER}test_build_that_is_being_uploaded_is_not_removed",
    ),
    "builds-under-way-are-removed": Mutation(
        _RECORDS,
        "                return free and self._finish(plan, bool(left))\n",
        "                return self._finish(plan, bool(left))\n",
        f"{_BUILDER}test_build_under_way_is_not_removed",
    ),
    # -- builders, operators, tenants and static hosts, as the world sees them
    "abandoned-uploads-stay": Mutation(
        "nodepool.builder.retention",
        "                plan.drop.append(upload)\n",
        "                pass\n",
        146,
    ),
    "builders-do-not-watch-images": Mutation(
        "nodepool.builder.builder",
        "zk.image_tree.listeners.append(lambda _image: self._wake_all())",
        "pass",
        24,
    ),
    "failed-uploads-stay": Mutation(
        "nodepool.builder.retention",
        "(everything and upload.state == FAILED)",
        "False",
        "tests/unit/builder/test_retention.py::test_tidying_of_kept_builds",
    ),
    "files-without-build-stay": Mutation(
        "nodepool.builder.cleanup.files",
        "if absent(image, build_id) and (image, build_id) not in running():",
        "if False:",
        24,
    ),
    "images-of-failed-uploads-are-not-looked-for": Mutation(
        "nodepool.builder.cleanup.worker", "self._strays.sweep(config)", "pass", 7
    ),
    "interrupted-builds-are-not-looked-for": Mutation(
        "nodepool.builder.builder",
        "interrupted = build_journal.clean_all(config.images_dir, self.log)",
        "pass",
        15,
    ),
    "results-are-stored-without-lock": Mutation(
        "nodepool.zk.locks.long_held",
        "if handle is not None and self.held:",
        "if handle is not None:",
        "tests/integration/zk/test_long_held.py::test_result_is_lost_when_another_client_has_taken_"
        "the_lock",
    ),
    "results-do-not-check-the-lock": Mutation(
        "nodepool.zk.facade.images",
        "            txn.check(lock)\n",
        "            txn.check(path.rpartition('/')[0])\n",
        "tests/integration/zk/test_long_held.py::test_result_is_not_written_without_the_lock_that_"
        "was_held_at_its_check[upload]",
    ),
    "expired-holds-never-end": Mutation(
        "nodepool.launcher.nodes.reconciler",
        'return self._expire(node, [limit + ahead for limit in limits], "it has exceeded its hold '
        'time")',
        "return None",
        3,
    ),
    "held-nodes-are-deleted": Mutation(
        "nodepool.launcher.nodes.reconciler",
        "DELETABLE = frozenset({zk.USED,",
        "DELETABLE = frozenset({zk.HOLD, zk.USED,",
        1,
    ),
    "reload-does-not-refresh-pools": Mutation(
        "nodepool.launcher.launcher",
        "                worker.refresh()\n",
        "                pass\n",
        53,
    ),
    "reload-keeps-removed-pools": Mutation(
        "nodepool.launcher.pools.worker",
        "        self._unregister()\n        self._tasks.put((self._retire_when_idle, ()))\n",
        "",
        1,
    ),
    "static-slots-are-not-counted": Mutation(
        "nodepool.driver.static.provider",
        "for slot in self._slots(host).empty]",
        "for slot in range(len(self._slots(host).nodes))]",
        1,
    ),
    "stop-keeps-the-session": Mutation(
        "nodepool.launcher.launcher",
        "        if self.zk is not None:\n            self.zk.disconnect()",
        "        if self.zk is not None:\n            pass",
        6,
    ),
    "stop-keeps-threads": Mutation(
        "nodepool.launcher.launcher",
        "Part(each.name, each.start, each.stop, each.join)",
        "Part(each.name, each.start, None, each.join)",
        6,
    ),
    "tenant-limits-are-not-checked": Mutation(
        "nodepool.launcher.requests.tenants",
        "exact(limit - used.get(name, 0) - need) < 0",
        "False",
        13,
    ),
    "tenant-promises-are-not-counted": Mutation(
        "nodepool.launcher.requests.tenants",
        "promised = state.zk.reservations.tenant(tenant)",
        "promised = {}",
        13,
    ),
    "builders-do-not-reload": Mutation(
        "nodepool.builder.builder",
        "changed = self.config_state.update(self.config, self._apply)",
        "changed = False",
        31,
    ),
    "max-hold-age-is-ignored": Mutation(
        _RECONCILER,
        "(node.hold_expiration, self.state.config.max_hold_age)",
        "(node.hold_expiration,)",
        23,
    ),
    "hold-expiration-exceeds-max-hold-age": Mutation(
        _RECONCILER,
        '[limit + ahead for limit in limits], "it has',
        '[max(limits, default=math.inf)], "it has',
        32,
    ),
    # -- capacity
    "last-node-of-a-limit-is-not-used": Mutation(
        "nodepool.driver.quota.support",
        "if exact(left - need) < 0:",
        "if exact(left - need) <= 0:",
        12,
    ),
    "last-node-of-a-tenant-is-not-used": Mutation(
        "nodepool.launcher.requests.tenants",
        "exact(limit - used.get(name, 0) - need) < 0",
        "exact(limit - used.get(name, 0) - need) <= 0",
        28,
    ),
    "idle-nodes-keep-their-room": Mutation(
        _LIFE,
        "                handler.zk.make_room(host.provider_name, host.pool_name)",
        "                pass",
        12,
    ),
    "better-pools-are-not-preferred": Mutation(
        "nodepool.launcher.requests.choice",
        "if best is not None and best < pool.priority:",
        "if False:",
        4,
    ),
    # -- what seeds have shown
    "requests-return-to-the-pool-they-left": Mutation(
        _ASSIGNMENT,
        "worker = self.state.workers.get(hand_to) if hand_to is not None else None",
        "worker = None",
        "tests/world/directed/test_hoarding.py::test_a_request_with_nodes_moves_to_the_best_pool_"
        "with_capacity[names0]",
    ),
    "all-pools-are-asked-at-once": Mutation(
        "nodepool.launcher.requests.moves",
        "                workers[0].ask(handler, question.unanswered, workers[1:])\n",
        "                for worker in workers:\n                    worker.ask(handler, "
        "question.unanswered, [])\n",
        "tests/unit/launcher/test_moves.py::test_the_best_pool_is_asked_first",
    ),
    "refused-nodes-of-waiting-requests-count": Mutation(
        _LIFE,
        "        if handler.launchesComplete():\n            self._drop_aborted()\n",
        "",
        "tests/world/directed/test_quota.py::test_a_refused_node_of_a_request_that_waits_already",
    ),
    "classes-of-requests-have-no-timer": Mutation(
        "nodepool.launcher.requests.queue",
        "candidate.cls.reasons, candidate.cls.again_at = reasons, again_at",
        "candidate.cls.reasons = reasons",
        "tests/unit/launcher/test_assignment.py::test_a_request_that_replaces_one_during_the_grace_"
        "time_is_declined_after_it",
    ),
    "disconnected-launchers-loop": Mutation(
        _ASSIGNMENT,
        "self._moves.due, self._check_moves = math.inf, True",
        "self._check_moves = True",
        "tests/unit/launcher/test_assignment.py::test_disconnected_launcher_does_not_loop_until_it_"
        "may_check_moves",
    ),
    "idle-nodes-count-for-their-last-tenant": Mutation(
        "nodepool.zk.records",
        "return None if self.state == READY and self.allocated_to is None else self.tenant_name",
        "return self.tenant_name",
        "tests/world/directed/test_tenant.py::test_nodes_of_a_withdrawn_request_do_not_count",
    ),
    "own-builds-are-taken-for-others": Mutation(
        "nodepool.builder.building.run",
        "not in (self._wanted.newest, self.build_id)",
        "!= self._wanted.newest",
        f"{_BUILDS}test_result_of_a_build_in_a_lost_session_is_stored_unless_another_builder_built_"
        "the_image"
        "[it was stored without an answer]",
    ),
    "all-requests-wait-for-the-backlog": Mutation(
        _WORKER,
        "self.assignment.recheck(Code.BUSY)",
        "self.assignment.wake()",
        f"{_POOL}test_requests_that_a_busy_pool_refused_are_offered_again",
    ),
    "full-pool-is-flooded": Mutation(
        _BACKLOG,
        "self._accepts = 1 if paused else min(LIMIT, 2 * self._accepts)",
        "self._accepts = LIMIT",
        f"{_BACKLOG_TESTS}test_pool_that_was_paused_accepts_one_request_then_more_and_more",
    ),
    "refused-requests-are-forgotten": Mutation(
        _BACKLOG,
        "self._refused = True",
        "self._refused = False",
        f"{_BACKLOG_TESTS}test_requests_that_were_refused_are_offered_again_when_half_of_the_"
        "backlog_is_done",
    ),
    "requests-that-are-looked-at-are-launched": Mutation(
        "nodepool.launcher.launcher",
        "because(Code.LAUNCHING if handler.accepted else Code.NOT_LOOKED_AT)",
        "because(Code.LAUNCHING)",
        "tests/unit/launcher/test_reasons.py::test_request_that_no_pool_has_accepted_is_not_shown_"
        "as_launching"
        "[False-False-expected2]",
    ),
    # -- slivers of node managers
    "strays-are-not-looked-for": Mutation(
        _MACHINES,
        'external_id == {"host": self.host, "sliver": self.id}',
        "True",
        "tests/integration/nodemanager/daemon/test_hosts.py::test_sliver_of_a_lost_history_is_no_"
        "stray",
    ),
    "slivers-of-nodes-are-strays": Mutation(
        _MACHINES, 'external_id == {"host": self.host, "sliver": self.id}', "False", 2
    ),
    "slivers-younger-than-a-list-are-missing": Mutation(
        _SLIVERS,
        "self._lists(PASS_TIMEOUT, now=True)",
        "self._lists(PASS_TIMEOUT)",
        "tests/integration/nodemanager/daemon/test_hosts.py::test_new_sliver_is_not_missing_"
        "although_an_older_list_is_known",
    ),
    "leases-are-not-renewed": Mutation(
        _SLIVERS,
        'host.call("RenewSliver", name, int(time.time()) + self.provider.lease_time)',
        "pass",
        "tests/integration/nodemanager/daemon/test_hosts.py::test_launcher_renews_leases",
    ),
    "deletion-of-slivers-is-not-awaited": Mutation(
        _HOSTS,
        'answer: dict[str, Any] = host.call("WaitSliver", sliver, "gone", WAIT, timeout=WAIT + '
        "MARGIN)",
        "return True",
        4,
    ),
    "failed-hosts-are-not-probed-again": Mutation(
        _HOST,
        "idle = self._probe is None or self._probe.done()",
        "idle = self._probe is None",
        "tests/integration/nodemanager/daemon/test_hosts.py::test_deletion_on_a_host_that_is_away",
    ),
    "stop-keeps-threads-of-hosts": Mutation(
        _HOST,
        "        for executor in (self._probes, self._calls, self._waits):\n",
        "        for executor in (self._probes,):\n",
        7,
    ),
    "starting-slivers-are-ready": Mutation(
        _MACHINES,
        '        return state == "ready"\n',
        '        return state in ("ready", "creating")\n',
        2,
    ),
}


def path(module: str) -> pathlib.Path:
    """Return the file of a module, which may be a package."""
    plain = REPOSITORY / module.replace(".", "/")
    return plain / "__init__.py" if plain.is_dir() else plain.with_suffix(".py")


def change(name: str) -> Callable[[str, str], str]:
    """For :mod:`tests.world.lines`."""
    mutation = MUTATIONS[name]

    return lambda module, text: mutation.apply(text) if module == mutation.module else text
