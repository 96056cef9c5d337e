"""Replacing idle nodes."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_ROTATION = "nodepool.launcher.nodes.rotation"
_IN_RECORD = "nodepool.zk.rotations"
#: Files of tests.
_DIRECTED = "tests/world/directed/test_rotation.py::"
_UNIT = "tests/unit/launcher/test_rotation.py::"

GUARDS: dict[str, Mutation] = {
    "rotations-replace-younger-nodes": Mutation(
        _IN_RECORD,
        "node.stat.czxid < self.zxid",
        "True",
        f"{_UNIT}test_rotation_replaces_nodes_that_were_created_before_it[target0]",
    ),
    "surpluses-of-a-moment-are-deleted": Mutation(
        _IN_ROTATION, "< LASTING:", "< 0:", f"{_DIRECTED}test_surplus_of_a_moment_is_kept"
    ),
    "waves-delete-nodes-that-have-changed": Mutation(
        _IN_ROTATION,
        "txn.set(path, data, node.version,",
        "txn.set(path, data, -1,",
        f"{_DIRECTED}test_node_that_somebody_gets_at_the_same_time_is_not_deleted[changed]",
    ),
    "waves-delete-locked-nodes": Mutation(
        _IN_ROTATION,
        "add_unlocked_check(txn, paths.node_lock(node_id), exists)",
        "pass",
        f"{_DIRECTED}test_node_that_somebody_gets_at_the_same_time_is_not_deleted[locked]",
    ),
    "launchers-delete-waves-at-the-same-time": Mutation(
        _IN_ROTATION,
        "if not mark.take():",
        "if not mark.take() and False:",
        f"{_DIRECTED}test_launcher_waits_for_its_turn",
    ),
    "files-without-min-ready-delete-the-stock-of-others": Mutation(
        _IN_ROTATION,
        "if made and not keep and not label.sets_min_ready:",
        "if False:",
        f"{_DIRECTED}test_rotation_waits_for_the_launcher_that_keeps_the_stock",
    ),
    "stocks-of-unknown-launchers-shrink": Mutation(
        _IN_ROTATION,
        "return known.issuperset(offering) and not any(",
        "return not any(",
        f"{_DIRECTED}test_stock_is_not_shrunk_below_that_of_a_launcher_that_reports_none",
    ),
    "canaries-are-replaced-again-and-again": Mutation(
        _IN_ROTATION,
        " or node.stat.czxid > upload.stat.mzxid",
        "",
        f"{_DIRECTED}test_nodes_that_canaries_keep_on_the_earlier_build_are_launched_once",
    ),
}
