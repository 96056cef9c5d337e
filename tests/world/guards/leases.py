"""Leases and the calls of the API."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_CLIENT = "nodepool.client.lease"
_IN_CERTIFICATES = "nodepool.lease.certificates"
_IN_LEASES = "nodepool.lease.leases"
_IN_ACTIONS = "nodepool.web.actions.actions"
_IN_EXECUTION = "nodepool.web.actions.execution"
_IN_ADMISSIONS = "nodepool.web.admissions"
_IN_CALLS = "nodepool.web.actions.leases"
_IN_ROUTES = "nodepool.web.actions.routes"
_IN_TOKENS = "nodepool.access.tokens"
_IN_WAITING = "nodepool.web.actions.waiting"
#: Files of tests.
_API = "tests/integration/lease/test_api.py::"
_CERTIFICATES = "tests/integration/lease/test_certificates.py::"
_CLOCKS = "tests/integration/lease/test_clocks.py::"
_EXEC = "tests/integration/lease/test_exec.py::"
_HOLD = "tests/integration/lease/test_hold.py::"
_LEASES = "tests/integration/lease/test_leases.py::"
_REVOKED = "tests/integration/lease/test_revoked.py::"
_SSH = "tests/integration/lease/test_ssh.py::"

GUARDS: dict[str, Mutation] = {
    # -- callers of long answers
    "revoked-tokens-are-not-noticed": Mutation(
        _IN_TOKENS,
        "self._read(token_id, self._note)",
        "self._read(token_id)",
        f"{_REVOKED}test_stream_of_events_ends_when_its_token_is_revoked",
    ),
    "revoked-tokens-are-checked-by-the-cached-record": Mutation(
        _IN_ADMISSIONS,
        "                await asyncio.sleep(FRESH)",
        "                pass",
        f"{_REVOKED}test_program_is_ended_when_the_token_of_its_caller_is_revoked",
    ),
    "streams-outlive-their-token": Mutation(
        _IN_ADMISSIONS,
        "_end(scope, _left(identity))",
        "_end(scope, None)",
        f"{_REVOKED}test_stream_of_events_ends_when_its_token_expires",
    ),
    "callers-are-accepted-from-before-the-first-check": Mutation(
        _IN_ADMISSIONS,
        "pause, changed = FRESH, self._changed(identity)",
        "pause, changed = CHECK, self._changed(identity)",
        f"{_REVOKED}test_stream_that_begins_while_its_token_is_revoked_ends",
    ),
    "streams-end-with-the-connection-to-zookeeper": Mutation(
        _IN_ADMISSIONS,
        "if found.status in _REFUSED:",
        "if True:",
        f"{_REVOKED}test_streams_continue_while_zookeeper_cannot_be_reached",
    ),
    "roles-of-running-programs-are-not-checked": Mutation(
        _IN_ACTIONS,
        "            _check_role(found, route, names)",
        "            pass",
        f"{_REVOKED}test_program_is_ended_when_the_role_of_its_token_does_not_suffice_any_more",
    ),
    # -- leases
    "renewals-exceed-max-hold-age": Mutation(
        _IN_LEASES,
        "int(min(wanted, self._most))",
        "int(wanted)",
        f"{_HOLD}test_api_grants_max_hold_age_and_names_it",
    ),
    "requests-of-other-servers-are-not-awaited": Mutation(
        _IN_LEASES,
        "            turn.catch_up(tree)",
        "            pass",
        f"{_LEASES}test_key_of_a_request_of_another_server_is_known_before_the_mirror_shows_it",
    ),
    "leases-are-renewed-at-their-end": Mutation(
        _IN_LEASES,
        "if end - now < TOO_LATE:",
        "if False:",
        f"{_LEASES}test_lease_is_not_renewed_when_it_is_about_to_end",
    ),
    "renewals-shorten-leases": Mutation(
        _IN_LEASES,
        "max(node.hold_expiration or 0, int(min(wanted, self._most)))",
        "int(min(wanted, self._most))",
        f"{_LEASES}test_renewed_lease_ends_later_and_never_earlier",
    ),
    "nodes-of-others-are-handed-over": Mutation(
        _IN_LEASES,
        "if node.state != READY or node.allocated_to != lease_id:",
        "if node.state != READY:",
        f"{_CLOCKS}test_only_ready_nodes_of_the_request_are_handed_over[values0]",
    ),
    "changed-requests-are-handed-over": Mutation(
        _IN_LEASES,
        "txn.delete(paths.request(lease_id), version)",
        "txn.delete(paths.request(lease_id))",
        f"{_CLOCKS}test_request_that_has_changed_since_it_was_read_is_not_handed_over",
    ),
    "failed-hand-overs-keep-their-nodes": Mutation(
        _IN_LEASES,
        (
            "                self._zk.kazoo_client.delete(paths.request(lease_id))\n"
            "            except NoNodeError:\n"
            "                return self._handed_over(lease_id)"
        ),
        (
            "                pass\n            except NoNodeError:\n                return "
            "self._handed_over(lease_id)"
        ),
        f"{_LEASES}test_nothing_is_handed_over_if_one_node_has_changed",
    ),
    "nodes-without-our-lock-are-leased": Mutation(
        _IN_LEASES,
        "                txn.check(node.lock.path)",
        "                pass",
        f"{_LEASES}test_node_whose_lock_is_lost_is_not_changed",
    ),
    "nodes-that-others-lock-are-leased": Mutation(
        _IN_LEASES,
        '                add_unlocked_check(txn, paths.node_lock(node.id or ""), '
        "bool(node.stat.numChildren))",
        "                pass",
        f"{_LEASES}test_locked_node_ends_at_the_end_of_the_lease",
    ),
    "leases-ignore-versions-of-nodes": Mutation(
        _IN_LEASES,
        "node.serialize(), node.stat.version,",
        "node.serialize(), -1,",
        f"{_LEASES}test_nothing_is_handed_over_if_one_node_has_changed",
    ),
    "nodes-of-other-leases-are-renewed": Mutation(
        _IN_LEASES,
        (
            "            if node.state != HOLD or id_of(node) != lease_id:\n"
            '                raise LeaseError(Reason.ENDED, f"Lease {lease_id} has ended")\n'
            "            change(node)"
        ),
        "            change(node)",
        f"{_CLOCKS}test_node_that_was_given_to_another_lease_meanwhile_is_not_renewed",
    ),
    "nodes-of-others-are-returned": Mutation(
        _IN_LEASES,
        (
            "            if node.state != HOLD or id_of(node) != lease_id:\n"
            '                raise LeaseError(Reason.ENDED, f"Lease {lease_id} has ended")\n'
            "            node.state = USED"
        ),
        "            node.state = USED",
        f"{_CLOCKS}test_node_that_is_deleted_meanwhile_is_not_returned",
    ),
    "leased-nodes-are-leased-again": Mutation(
        _IN_LEASES,
        "        if other is not None:",
        "        if False:",
        f"{_HOLD}test_leased_node_cannot_be_leased_by_another",
    ),
    "owners-have-any-number-of-leases": Mutation(
        _IN_LEASES,
        "if found is None and most is not None and len(leases) >= most:",
        "if False:",
        f"{_LEASES}test_limit_per_owner_holds_for_concurrent_calls_of_several_servers[True]",
    ),
    "requests-are-created-without-the-turn": Mutation(
        _IN_LEASES,
        "                txn.delete(turn.path)\n",
        "",
        f"{_LEASES}test_request_is_not_created_without_the_turn",
    ),
    "ended-leases-get-certificates": Mutation(
        _IN_CERTIFICATES,
        "    if left <= 0:",
        "    if False:",
        f"{_CERTIFICATES}test_ended_lease_gets_no_certificate[1.0]",
    ),
    "certificates-open-all-nodes": Mutation(
        _IN_CERTIFICATES,
        '"-n", ",".join(principal(node.id or "") for node in lease.nodes), ',
        "",
        f"{_CERTIFICATES}test_certificate_names_the_nodes_and_ends_with_the_lease",
    ),
    "inventories-run-templates-of-nodes": Mutation(
        "nodepool.lease.ssh",
        'if any("{" in str(value) for value in found.values()):',
        "if False:",
        f"{_SSH}test_node_whose_data_ansible_would_run_is_in_no_inventory",
    ),
    # -- calls of the API
    "autoholds-belong-to-callers-of-their-name": Mutation(
        _IN_CALLS,
        ' and lease.terms.via != "record"',
        "",
        f"{_API}test_autohold_belongs_to_no_caller_who_has_the_name_in_its_record",
    ),
    "events-during-a-reload-are-lost": Mutation(
        _IN_WAITING,
        (
            "        except Refused:  # the mirror is not complete\n"
            "            self._loop.call_later(RETRY, self._changed, lease_id)\n"
        ),
        "        except Refused:  # the mirror is not complete\n",
        f"{_API}test_request_that_was_canceled_while_the_mirror_was_not_complete_is_forgotten",
    ),
    "interrupted-hand-overs-are-not-repeated": Mutation(
        _IN_WAITING,
        "        elif retry:\n",
        "        elif False:\n",
        f"{_API}test_hand_over_that_the_connection_has_interrupted_is_repeated_without_further_"
        "news",
    ),
    "requests-fulfilled-while-they-are-read-wait": Mutation(
        _IN_WAITING,
        "if finished or (changed and not retry):",
        "if finished:",
        f"{_API}test_request_that_is_fulfilled_while_it_is_read_is_handed_over",
    ),
    "requests-fulfilled-before-they-are-expected-wait": Mutation(
        _IN_WAITING,
        ("        self._expected[lease_id] = seconds\n        self._wake(lease_id)\n"),
        "        self._expected[lease_id] = seconds\n",
        f"{_API}test_lease_whose_nodes_were_ready_before_it_was_expected_is_handed_over",
    ),
    "polls-miss-what-happened-before-them": Mutation(
        _IN_WAITING,
        'if not any(each.get("request") == lease_id for each in missed):',
        "if True:",
        f"{_API}test_poll_is_answered_although_its_lease_changed_before_it_waited",
    ),
    "tokens-lease-any-label": Mutation(
        _IN_CALLS,
        "        if forbidden:",
        "        if False:",
        f"{_API}test_lease_beyond_what_the_token_allows_is_refused[change0-not-allowed]",
    ),
    "tokens-lease-for-any-tenant": Mutation(
        _IN_CALLS,
        "if identity.tenant is not None and body.tenant not in (None, identity.tenant):",
        "if False:",
        f"{_API}test_lease_beyond_what_the_token_allows_is_refused[change1-not-allowed]",
    ),
    "borrowers-have-any-priority": Mutation(
        _IN_CALLS,
        'if body.priority == "100" and identity.role < Role.OPERATE:',
        "if False:",
        f"{_API}test_lease_beyond_what_the_token_allows_is_refused[change2-not-allowed]",
    ),
    "renewals-exceed-the-token": Mutation(
        _IN_CALLS,
        "        self._check_end(call.identity, seconds)",
        "        pass",
        f"{_API}test_lease_token_has_the_limit_of_the_token_that_created_the_lease",
    ),
    "leases-of-others-are-changed": Mutation(
        _IN_CALLS,
        "        if not _may_use(call.identity, lease):",
        "        if False:",
        f"{_API}test_others_neither_change_a_lease_nor_see_its_notes",
    ),
    "lease-tokens-read-other-leases": Mutation(
        _IN_ACTIONS,
        ' and identity.lease == names.get("id")',
        "",
        f"{_API}test_lease_token_renews_describes_and_returns_its_own_lease_only",
    ),
    "calls-need-no-role": Mutation(
        _IN_ACTIONS,
        " or identity.role < route.role",
        "",
        f"{_API}test_callers_without_a_token_may_only_read",
    ),
    "invented-tokens-return-leases": Mutation(
        _IN_ACTIONS,
        ".startswith(f\"{LEASE_PREFIX}{names['id']}_\")",
        '.startswith("")',
        f"{_API}test_token_of_an_ended_lease_is_for_the_return_of_this_lease_only",
    ),
    "lease-tokens-see-tables": Mutation(
        "nodepool.web.access",
        "        if identity.lease is not None:",
        "        if False:",
        f"{_API}test_lease_token_renews_describes_and_returns_its_own_lease_only",
    ),
    "leased-nodes-are-deleted-without-force": Mutation(
        "nodepool.web.actions.operators",
        'if terms is not None and call.query.get("force") != "true":',
        "if False:",
        f"{_CLOCKS}test_operator_sees_the_end_of_an_overdue_lease_without_a_negative_time",
    ),
    "owners-take-all-places-for-programs": Mutation(
        _IN_EXECUTION,
        "if not self.places.take(owner, lease_id, part=part):",
        "if False:",
        f"{_EXEC}test_owner_and_lease_have_a_part_of_the_places",
    ),
    "ended-programs-keep-their-place": Mutation(
        _IN_EXECUTION,
        "            self._done()",
        "            pass",
        f"{_EXEC}test_client_waits_for_a_place_within_its_time",
    ),
    "programs-outlive-their-time-limit": Mutation(
        _IN_EXECUTION,
        "while (now := time.monotonic()) < self._deadline:",
        'while (now := time.monotonic()) < float("inf"):',
        f"{_EXEC}test_program_that_never_pauses_is_killed_at_its_time_limit",
    ),
    "sessions-own-any-number-of-requests": Mutation(
        _IN_WAITING,
        "len(self._expected) >= most or",
        "False or",
        f"{_API}test_no_more_leases_wait_than_one_session_should_own",
    ),
    "paths-name-other-records": Mutation(
        _IN_ROUTES,
        "if not paths.are_names(*names.values()):",
        "if False:",
        f"{_API}test_names_that_cannot_exist_are_not_found[..]",
    ),
    "forms-of-other-sites-are-calls": Mutation(
        _IN_ROUTES,
        'if content_type.partition(";")[0].strip().lower() != JSON:',
        "if False:",
        f"{_API}test_calls_need_json_and_a_known_method",
    ),
    "leases-exceed-the-token": Mutation(
        _IN_CALLS,
        "        self._check_end(identity, body.seconds)",
        "        pass",
        f"{_API}test_lease_beyond_what_the_token_allows_is_refused[change3-cap]",
    ),
    "keys-have-any-length": Mutation(
        _IN_ACTIONS,
        "if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isprintable()):",
        "if False:",
        f"{_API}test_key_that_cannot_be_stored_is_refused[]",
    ),
    "directories-that-ssh-cannot-use-are-errors-of-the-server": Mutation(
        _IN_CALLS,
        "except ValueError as error:",
        "except ZeroDivisionError as error:",
        f"{_API}test_directory_that_ssh_cannot_use_is_refused",
    ),
    "signed-keys-have-options": Mutation(
        _IN_CERTIFICATES,
        "if not PUBLIC_KEY.fullmatch(public_key.strip()):",
        "if False:",
        f"{_CERTIFICATES}test_key_with_options_or_further_lines_is_refused[no-pty {{key}}]",
    ),
    "kills-on-other-nodes-are-named": Mutation(
        _IN_CLIENT,
        'kill["node"] == node',
        "True",
        f"{_EXEC}test_only_kills_of_the_command_are_named",
    ),
    "kills-before-the-command-are-named": Mutation(
        _IN_CLIENT,
        'kill["age"] < time.monotonic() - began + CLOCKS',
        "True",
        f"{_EXEC}test_only_kills_of_the_command_are_named",
    ),
    "kills-are-named-twice": Mutation(
        _IN_CLIENT,
        '(kill["pid"], kill["time"]) not in known',
        "True",
        f"{_EXEC}test_only_kills_of_the_command_are_named",
    ),
    "leases-show-any-number-of-kills": Mutation(
        _IN_CALLS,
        "                -MOST_KILLS:\n",
        "                :\n",
        f"{_EXEC}test_only_kills_of_the_command_are_named",
    ),
    "requests-of-others-are-leases": Mutation(
        _IN_LEASES,
        "if request is not None and terms is not None and request.requestor == REQUESTOR:",
        "if request is not None and terms is not None:",
        f"{_LEASES}test_request_of_others_with_the_data_of_a_lease_is_no_lease",
    ),
}
