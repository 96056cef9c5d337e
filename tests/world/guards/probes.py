"""Probes of idle nodes."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Module.
_IN_PROBES = "nodepool.launcher.nodes.probes"
#: Files of tests.
_PROBES = "tests/integration/launcher/nodes/test_probes.py::"
_BACKING = "tests/integration/metastatic/test_probes.py::"
_STATIC = "tests/integration/static/test_probes.py::"
_STEPS = "tests/unit/launcher/test_probes.py::"

GUARDS: dict[str, Mutation] = {
    "probes-lock-changed-nodes": Mutation(
        _IN_PROBES,
        '        txn.check(paths.node(node.id or ""), node.version)\n',
        "",
        f"{_PROBES}test_node_that_somebody_changes_before_it_is_locked_is_not_locked",
    ),
    "probes-replace-without-a-lock": Mutation(
        _IN_PROBES,
        "        txn.delete(lock.path)\n",
        "",
        f"{_PROBES}test_node_whose_lock_we_have_lost_is_not_replaced",
    ),
    "probes-keep-locks": Mutation(
        _IN_PROBES,
        "            self.state.zk.unlock_soon(held)\n",
        "            pass\n",
        f"{_PROBES}test_node_that_answers_the_second_probe_is_kept_and_unlocked",
    ),
    "probes-disturb-users": Mutation(
        _IN_PROBES,
        "node.version == probe.node.version and not taken",
        "not taken",
        f"{_PROBES}test_node_that_is_assigned_during_its_probe_is_left_to_its_user",
    ),
    "probes-replace-all-nodes-in-an-outage": Mutation(
        _IN_PROBES,
        "if failed < OUTAGE or 2 * failed <= len(results):",
        "if True:",
        f"{_STEPS}test_no_node_is_replaced_while_most_of_the_provider_fail",
    ),
    "answers-before-a-failure-prove-that-the-network-works": Mutation(
        _IN_PROBES,
        "if e[0] >= since or (not e[2] and e[0] >= early)]",
        "]",
        f"{_STEPS}test_answers_before_the_failure_are_no_evidence_against_an_outage",
    ),
    "last-nodes-of-an-outage-are-replaced": Mutation(
        _IN_PROBES,
        " or (not e[2] and e[0] >= early)",
        "",
        f"{_STEPS}test_last_nodes_of_an_outage_are_kept_like_the_first",
    ),
    "every-launcher-probes-every-node": Mutation(
        _IN_PROBES,
        "return owner in self.state.workers",
        "return True",
        f"{_STEPS}test_one_launcher_probes_the_node[of another]",
    ),
    "commands-run-beside-jobs": Mutation(
        _IN_PROBES,
        """            yield from self._lock(probe)
            if probe.lock is None:
                return self._postpone(node, PAUSE)
""",
        "            pass\n",
        f"{_PROBES}test_node_is_locked_while_the_command_runs_so_that_no_job_shares_it",
    ),
    "commands-outlive-their-launcher": Mutation(
        _IN_PROBES,
        """        for probe in list(self._probes.values()):
            probe.programs.stop()
""",
        "",
        f"{_PROBES}test_running_command_ends_with_the_launcher_and_with_its_node[launcher stops]",
    ),
    "commands-without-limit": Mutation(
        _IN_PROBES,
        "self._running_commands() >= MOST_COMMANDS",
        "False",
        f"{_STEPS}test_commands_at_a_time_are_limited_and_the_next_begins_when_one_has_ended",
    ),
    "launchers-without-a-key-blame-the-nodes": Mutation(
        _IN_PROBES,
        "probe.unable = isinstance(job.exception(), OSError | ValueError)",
        "pass",
        f"{_PROBES}test_key_that_cannot_be_used_is_a_problem_and_costs_no_node[None]",
    ),
    "keys-open-to-all-users": Mutation(
        "nodepool.ssh",
        "if os.stat(path).st_mode & 0o007:",
        "if False:",
        f"{_PROBES}test_key_that_cannot_be_used_is_a_problem_and_costs_no_node[388]",
    ),
    "static-hosts-are-ready-untried": Mutation(
        "nodepool.driver.static.provider",
        "if slots.empty:  # the others are in use, or are probed while they are idle",
        "if False:",
        f"{_STATIC}test_host_that_comes_back_from_its_user_is_tried_before_it_is_ready",
    ),
    "trials-that-end-with-the-launcher-remove-nodes": Mutation(
        "nodepool.driver.static.provider",
        """            if self._idle:
                return False  # the end of this provider has ended the command
""",
        "",
        f"{_STATIC}test_end_of_the_launcher_during_a_trial_removes_no_node",
    ),
    "probes-of-nodes-that-launchers-do-not-reach": Mutation(
        "nodepool.driver.statemachine.provider",
        "return bool(node.host_keys) or all(label.host_key_checking for label in labels)",
        "return True",
        f"{_PROBES}test_node_without_host_key_checking_is_only_probed_if_its_keys_are_known",
    ),
    "backing-nodes-are-probed-beside-jobs": Mutation(
        _IN_PROBES,
        "return any(tree.get(user) is not None for user in found[1].allocations.values())",
        "return False",
        f"{_STEPS}test_backing_node_is_probed_when_the_last_node_in_its_slots_has_ended",
    ),
    "marks-that-11.0.0-does-not-notice": Mutation(
        _IN_PROBES,
        "            if pool.provider_name == provider\n",
        "            if False\n",
        f"{_STEPS}test_backing_node_of_a_launcher_that_does_not_know_probes_is_not_probed",
    ),
    "jobs-that-fail-soon-keep-a-dead-backing-node": Mutation(
        _IN_PROBES,
        "if since - first < AGAIN:",
        "if False:",
        f"{_STEPS}test_backing_node_that_is_used_between_two_failures_gets_no_more_nodes",
    ),
    "old-failures-of-backing-nodes-count": Mutation(
        _IN_PROBES,
        "if since - first < AGAIN:",
        "if first > 0:",
        f"{_STEPS}test_failure_of_a_backing_node_is_forgotten_when_it_answers_or_after_some_time",
    ),
    "marks-undo-the-slots-of-others": Mutation(
        _IN_PROBES,
        """            backing.version,
            tree=facade.node_tree,
""",
        """            -1,
            tree=facade.node_tree,
""",
        f"{_BACKING}test_slot_that_is_assigned_meanwhile_is_not_undone",
    ),
    "dead-backing-nodes-of-idle-slots-get-more": Mutation(
        _IN_PROBES,
        "if backing is not None and self._is_backing(backing):",
        "if probe.is_backing:",
        f"{_STEPS}test_idle_slot_that_fails_twice_takes_its_backing_node_out_of_use",
    ),
    "probes-are-not-spread": Mutation(
        _IN_PROBES,
        "(zlib.crc32(node_id.encode()) % 1000 + 1) / 1000",
        "1.0",
        f"{_STEPS}test_nodes_that_became_ready_together_are_probed_at_different_times",
    ),
}
