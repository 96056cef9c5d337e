"""Launches, and the connection to ZooKeeper."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_LIFE = "nodepool.driver.request.life"
_IN_WRITES = "nodepool.driver.request.writes"
_IN_LAUNCHER = "nodepool.driver.statemachine.launcher"
_IN_FAILURES = "nodepool.launcher.failures"
_IN_PROTOCOL = "nodepool.zk.connection.protocol"
#: Files of tests.
_FAILURES = "tests/integration/zk/test_failures.py::"
_FAILING = "tests/world/directed/test_launch_failures.py::"
_PROTOCOL = "tests/integration/zk/test_protocol.py::"
_STATES = "tests/unit/driver/request/test_states.py::"
_ATTEMPTS = "tests/unit/driver/statemachine/test_launch_attempts.py::"

GUARDS: dict[str, Mutation] = {
    # -- ZooKeeper, builder, commands
    "counters-of-lagging-servers-count": Mutation(
        "nodepool.zk.cluster",
        "        kazoo.sync_async(paths.NODES).get(timeout=TIMEOUT)\n",
        "",
        "tests/integration/zk/test_cluster.py::test_counter_of_a_server_that_lags_behind_is_not_"
        "used",
    ),
    "silent-servers-are-kept": Mutation(
        _IN_PROTOCOL,
        "elif now - self._silent_since > read_timeout:",
        "elif False:",
        f"{_PROTOCOL}test_server_that_owes_an_answer_for_too_long_is_left",
    ),
    "restored-servers-are-refused": Mutation(
        _IN_PROTOCOL,
        "            client.last_zxid = 0\n",
        "",
        f"{_PROTOCOL}test_server_that_was_restored_to_an_older_state_is_accepted_in_the_end",
    ),
    "sessions-that-were-restored-are-kept": Mutation(
        "nodepool.zk.mirror.tree",
        "if self._zxid_found < self._zxid_before:",
        "if False:",
        "tests/unit/zk/test_mirror.py::test_session_is_given_up_if_the_data_are_older_than_before",
    ),
    "leases-take-requests-that-got-their-ids": Mutation(
        "nodepool.lease.leases",
        "_marks(request) != _marks(known)",
        "False",
        "tests/integration/lease/test_leases.py::test_request_of_zuul_with_the_id_of_a_lost_lease_"
        "keeps_its_node",
    ),
    "waiting-leases-are-known-by-their-ids": Mutation(
        "nodepool.web.actions.waiting",
        " or not self._is_expected(lease_id, request)",
        "",
        "tests/integration/lease/test_api.py::test_request_of_others_with_the_id_of_a_lost_lease_"
        "is_kept",
    ),
    "starts-of-builders-end-with-the-connection": Mutation(
        "nodepool.builder.builder",
        "            except BROKEN as error:\n                if self._start_cancelled.is_set():\n",
        "            except BROKEN as error:\n                if True:\n",
        "tests/integration/builder/test_builds.py::test_start_continues_when_the_connection_is_back",
    ),
    "recover-takes-machines-of-other-providers": Mutation(
        "nodepool.cmd.commands.recover",
        '[lost for lost in found if lost.metadata.get("nodepool_provider_name") == '
        "manager.provider.name]",
        "found",
        "tests/integration/cli/test_recover.py::test_machines_of_another_provider_in_the_same_"
        "cloud_are_neither_listed_nor_deleted",
    ),
    "uploads-whose-record-was-removed-are-ready": Mutation(
        "nodepool.builder.upload.job",
        "if own is None or own.state == DELETING:",
        "if False:",
        "tests/integration/builder/test_uploads.py::test_upload_whose_record_was_dropped_is_"
        "repeated",
    ),
    # -- launches
    "two-launchers-start-a-trial": Mutation(
        _IN_FAILURES,
        "found.append((notes.path(record), data, version))",
        "found.append((notes.path(record), data, -1))",
        f"{_FAILURES}test_only_one_launcher_starts_a_trial",
    ),
    "trials-that-are-being-read-are-unknown": Mutation(
        _IN_FAILURES,
        "for path in tree.changing()",
        "for path in ()",
        f"{_FAILURES}test_node_that_is_being_read_may_be_a_trial",
    ),
    "failed-launches-overwrite-each-other": Mutation(
        _IN_FAILURES,
        "txn.set(notes.path(record), data, stored[1], tree=tree, record=record)",
        "txn.set(notes.path(record), data, tree=tree, record=record)",
        f"{_FAILURES}test_failure_that_another_launcher_counted_meanwhile_is_kept",
    ),
    "requests-continue-after-the-last-allowed-failure": Mutation(
        _IN_LAUNCHER,
        "if stopped or self.attempts >= self.retries:",
        "if self.attempts >= self.retries:",
        f"{_FAILING}test_failing_launches_cost_five_machines_an_hour",
    ),
    "min-ready-ignores-failing-launches": Mutation(
        "nodepool.launcher.requests.minready",
        "if self.state.launch_failures.blocked(provider, [label.name]) is not None:",
        "if False:",
        f"{_FAILING}test_min_ready_creates_no_requests_while_launches_are_stopped",
    ),
    "released-backing-nodes-get-nodes": Mutation(
        "nodepool.driver.backing.records",
        " and not self.releasing",
        "",
        "tests/unit/driver/metastatic/test_records.py::test_backing_node_that_is_being_released_"
        "gets_no_node",
    ),
    "doubtful-backing-requests-are-kept": Mutation(
        "nodepool.driver.backing.requests",
        "                self.doubtful.add(backing.created_time)",
        "                pass",
        "tests/integration/metastatic/test_slots.py::test_backing_request_whose_creation_was_not_"
        "acknowledged_is_canceled",
    ),
    "canceled-backing-requests-are-kept": Mutation(
        "nodepool.driver.backing.requests",
        "                    self.doubtful.add(created)",
        "                    pass",
        "tests/integration/metastatic/test_reused_ids.py::test_request_whose_cancellation_is_lost_"
        "is_canceled_with_the_next_connection",
    ),
    "backing-requests-are-known-by-their-ids": Mutation(
        "nodepool.driver.backing.requests",
        "            and request.created_time == record.requested",
        "            or request is not None",
        "tests/integration/metastatic/test_reused_ids.py::test_request_of_zuul_with_the_id_of_a_"
        "lost_one_keeps_its_node",
    ),
    "backing-nodes-are-known-by-their-ids": Mutation(
        "nodepool.driver.backing.requests",
        "            and parse_user_data(node.user_data, self.my_id) is not None",
        "            and node.id is not None",
        "tests/integration/metastatic/test_reused_ids.py::test_node_of_zuul_with_the_id_of_a_lost_"
        "backing_node_is_not_used",
    ),
    "free-nodes-are-claimed-twice": Mutation(
        _IN_WRITES,
        " or claims.setdefault(node_id, claim) is not claim",
        "",
        f"{_STATES}test_free_node_is_claimed_by_one_handler_at_a_time_and_for_one_label",
    ),
    "claims-outlive-their-step": Mutation(
        _IN_WRITES,
        "            self.handler.pw.nodepool.claims.pop(node.id, None)",
        "            pass",
        f"{_STATES}test_free_node_is_claimed_by_one_handler_at_a_time_and_for_one_label",
    ),
    "requests-without-our-lock-are-written": Mutation(
        _IN_LIFE,
        "elif error.path == request.lock.path:",
        "elif False:",
        f"{_STATES}test_request_whose_lock_is_lost_is_not_written_again",
    ),
    "capacity-of-refused-steps-is-not-offered": Mutation(
        _IN_LIFE,
        "                host.capacity.promise_released()  # others",
        "                pass  # others",
        f"{_STATES}test_capacity_of_nodes_that_were_not_created_is_offered_to_others",
    ),
    "machines-refused-by-quota-are-forgotten": Mutation(
        _IN_LAUNCHER,
        (
            "            self.node.external_id = self._external_id()\n            "
            "self._end(zk.ABORTED"
        ),
        "            self._end(zk.ABORTED",
        f"{_ATTEMPTS}test_machine_that_exists_when_the_quota_refuses_the_rest_is_known_for_its_"
        "deletion[first on the loop]",
    ),
    "ids-that-were-not-stored-are-not-written-again": Mutation(
        _IN_LAUNCHER,
        "self._sent_external_id = self._saved_external_id  # written again in the next pass",
        "pass",
        f"{_ATTEMPTS}test_id_of_a_machine_is_written_again_if_zookeeper_did_not_take_it[first on "
        "the loop]",
    ),
}
