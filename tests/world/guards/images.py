"""Roll-backs of images."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_ROLLBACK = "nodepool.zk.rollback"
_IN_COUNT = "nodepool.driver.statemachine.failing_uploads"
_IN_LAUNCHER = "nodepool.driver.statemachine.launcher"
#: Files of tests.
_ROLLBACK = "tests/integration/zk/test_rollback.py::"
_DIRECTED = "tests/world/directed/test_image_rollback.py::"

GUARDS: dict[str, Mutation] = {
    "uploads-that-others-change-are-rolled-back": Mutation(
        _IN_ROLLBACK,
        "changed.serialize(), upload.version)",
        "changed.serialize())",
        f"{_ROLLBACK}test_nothing_is_changed_if_somebody_changes_a_record_meanwhile[current]",
    ),
    "builds-that-others-delete-are-used-again": Mutation(
        _IN_ROLLBACK,
        'txn.check(paths.build(build.image_name or "", build.id or ""), build.version)',
        "pass",
        f"{_ROLLBACK}test_nothing_is_changed_if_somebody_changes_a_record_meanwhile[build]",
    ),
    "second-operator-rolls-back-further": Mutation(
        _IN_ROLLBACK,
        "if replaced is not None and replaced.rolled_back is not None:",
        "if replaced is not None and replaced.rolled_back is not None and False:",
        f"{_ROLLBACK}test_second_operator_is_informed_that_somebody_has_rolled_back",
    ),
    "replaced-uploads-are-used-again": Mutation(
        _IN_ROLLBACK,
        "                and (mark is None or mark.undone)\n",
        "",
        f"{_ROLLBACK}test_newer_upload_becomes_current_and_replaced_ones_are_not_used_again",
    ),
    "images-that-have-worked-are-rolled-back": Mutation(
        _IN_COUNT,
        "if failures is None:",
        "if failures is None and False:",
        f"{_DIRECTED}test_image_that_has_worked_once_is_not_rolled_back",
    ),
    "nodes-of-others-are-ignored": Mutation(
        _IN_COUNT,
        "if any(node.image_id == path and node.state in STARTED for node in zk.nodeIterator()):",
        "if False:",
        f"{_DIRECTED}test_image_of_running_nodes_of_others_is_not_rolled_back",
    ),
    "decisions-of-operators-are-ignored": Mutation(
        _IN_ROLLBACK,
        "or current.rolled_back is not None",
        "",
        f"{_DIRECTED}test_image_that_an_operator_has_returned_to_is_not_rolled_back_again",
    ),
    "failures-of-replaced-uploads-roll-back": Mutation(
        _IN_ROLLBACK,
        "upload_path(current) != upload_path(failed) or ",
        "",
        f"{_ROLLBACK}test_failed_upload_that_is_not_current_changes_nothing",
    ),
    "launches-without-a-machine-count": Mutation(
        _IN_LAUNCHER,
        "            or self._external_id() is None\n",
        "",
        f"{_DIRECTED}test_machine_that_was_not_created_does_not_count",
    ),
    "last-launch-gets-no-further-attempt": Mutation(
        _IN_LAUNCHER,
        "            self.retries = max(self.retries, self.attempts + 1)\n",
        "            pass\n",
        f"{_DIRECTED}test_request_whose_attempts_cause_the_rollback_is_served",
    ),
}
