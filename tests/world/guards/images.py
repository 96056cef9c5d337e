"""Roll-backs of images."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_ROLLBACK = "nodepool.zk.rollback"
_IN_COUNT = "nodepool.driver.statemachine.upload_trials"
_IN_LAUNCHER = "nodepool.driver.statemachine.launcher"
_IN_VERIFICATION = "nodepool.launcher.verification"
#: Files of tests.
_ROLLBACK = "tests/integration/zk/test_rollback.py::"
_TRIALS = "tests/unit/driver/statemachine/test_upload_trials.py::"
_DIRECTED = "tests/world/directed/test_image_rollback.py::"
_VERIFIED = "tests/integration/launcher/nodes/test_verification.py::"

GUARDS: dict[str, Mutation] = {
    "lost-requests-of-verifications-stay": Mutation(
        _IN_VERIFICATION,
        "        self._delete_lost_requests()\n",
        "",
        f"{_VERIFIED}test_request_whose_creation_was_not_answered_is_deleted",
    ),
    "uploads-are-held-back-without-their-lock": Mutation(
        _IN_ROLLBACK,
        "                txn.check(lock)\n",
        "                pass\n",
        f"{_ROLLBACK}test_upload_whose_lock_was_lost_is_not_stored",
    ),
    "verifications-count-against-labels": Mutation(
        _IN_LAUNCHER,
        "self._blameless or self._verifies",
        "self._blameless",
        f"{_VERIFIED}test_upload_whose_machines_do_not_start_is_bad_and_counts_against_no_label",
    ),
    "machines-of-verifications-are-assigned": Mutation(
        "nodepool.zk.mirror.nodes",
        "        and node.requestor != VERIFIER\n",
        "",
        "tests/integration/zk/test_mirror.py::test_machine_of_a_verification_is_not_free",
    ),
    "machines-of-dead-verifications-are-kept": Mutation(
        "nodepool.launcher.nodes.reconciler",
        "if node.requestor == VERIFIER and missing:",
        "if False:",
        f"{_VERIFIED}test_machine_of_a_dead_verification_is_given_to_nobody",
    ),
    "machines-of-other-images-verify": Mutation(
        _IN_VERIFICATION,
        "if node.image_id != upload_path(upload):",
        "if False:",
        f"{_VERIFIED}test_machine_of_another_image_proves_nothing",
    ),
    "refused-creations-blame-images": Mutation(
        "nodepool.driver.request.life",
        "code = Declined.NODES_FAILED if created else Declined.NOT_CREATED",
        "code = Declined.NODES_FAILED if True or created else Declined.NOT_CREATED",
        f"{_VERIFIED}test_refused_creations_of_the_cloud_do_not_blame_the_image",
    ),
    "ends-of-launchers-blame-images": Mutation(
        "nodepool.ssh",
        "            or status < 0\n",
        "",
        f"{_VERIFIED}test_end_of_the_launcher_blames_no_image_whose_shell_has_no_frame",
    ),
    "uploads-are-verified-twice": Mutation(
        _IN_ROLLBACK,
        "if any(upload_path(each) == upload_path(upload) for each in uploads.ready):",
        "if False:",
        f"{_ROLLBACK}test_upload_that_is_held_back_is_used_only_once_it_is_verified",
    ),
    "first-uploads-are-used-unverified": Mutation(
        "nodepool.zk.mirror.images",
        "            and not u.held_back\n",
        "",
        f"{_ROLLBACK}test_first_upload_is_used_only_once_it_is_verified",
    ),
    "first-uploads-are-used-unverified-without-the-mirror": Mutation(
        "nodepool.zk.facade.images",
        " == wanted and not u.held_back",
        " == wanted",
        f"{_ROLLBACK}test_first_upload_is_used_only_once_it_is_verified",
    ),
    "first-uploads-are-never-tried": Mutation(
        "nodepool.driver.statemachine.handler",
        "if self.request.requestor == VERIFIER:",
        "if False:",
        f"{_VERIFIED}test_first_upload_is_verified_before_any_request_gets_it",
    ),
    "uploads-that-hold-nothing-back-become-older": Mutation(
        _IN_ROLLBACK,
        "elif mark.names(switch.used):",
        "else:",
        f"{_ROLLBACK}test_upload_that_is_held_back_is_not_used_when_the_one_in_use_is_deleted[True]",
    ),
    "users-hold-uploads-back-by-their-name": Mutation(
        "nodepool.web.actions.operators",
        'f"user {call.identity.owner}"',
        "call.identity.owner",
        "tests/integration/lease/test_api.py::test_operators_roll_images_back_and_forward",
    ),
    "others-uploads-are-launched": Mutation(
        _IN_ROLLBACK,
        "(each.state, each.image_name, each.provider_name) == (READY, image, provider)",
        "each.state == READY",
        f"{_ROLLBACK}test_request_of_a_verification_names_an_upload_of_its_image_and_provider",
    ),
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
        f"{_ROLLBACK}test_replaced_upload_is_not_returned_to",
    ),
    "images-that-have-worked-are-rolled-back": Mutation(
        _IN_COUNT,
        "return not trial.started and trial.failures >= most",
        "return trial.failures >= most",
        f"{_TRIALS}test_launches_of_the_previous_upload_do_not_count_for_the_new_one",
    ),
    "nodes-of-others-are-ignored": Mutation(
        _IN_COUNT,
        "if machines := _machines(zk, upload):",
        "if machines := 0:",
        f"{_DIRECTED}test_image_of_running_nodes_of_others_is_not_rolled_back",
    ),
    "all-launches-try-new-images": Mutation(
        _IN_COUNT,
        "trial.launches.add(launch)",
        "pass",
        f"{_DIRECTED}test_burst_uses_the_previous_image_until_the_new_one_has_started",
    ),
    "ended-launches-try-images": Mutation(
        _IN_COUNT,
        """        with self._lock:
            self._trial(upload).launches.discard(launch)
""",
        "        pass\n",
        f"{_TRIALS}test_ended_launch_lets_another_one_try",
    ),
    "each-attempt-tries-new-images": Mutation(
        _IN_COUNT,
        "if first and trial",
        "if trial",
        f"{_DIRECTED}test_one_launch_tries_a_new_image_and_no_request_fails",
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
