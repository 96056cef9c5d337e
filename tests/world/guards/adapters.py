"""Adapters of CI systems."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_API = "nodepool.adapters.gitea.api"
_IN_INSTANCE = "nodepool.adapters.gitea.instance"
_IN_LISTENER = "nodepool.adapters.github.listener"
_IN_SERVICE = "nodepool.adapters.github.service"
_IN_ANSWERS = "nodepool.answers"
_IN_FLEET = "nodepool.adapters.runners.fleet"
_IN_RUNNER = "nodepool.adapters.runners.runner"
#: Files of tests.
_GITEA = "tests/unit/adapters/test_gitea.py::"
_GITEA_API = "tests/unit/adapters/test_gitea_api.py::"
_GITHUB = "tests/unit/adapters/test_github.py::"
_RUNNERS = "tests/unit/adapters/test_runners.py::"

GUARDS: dict[str, Mutation] = {
    # -- adapters
    "webhooks-need-no-signature": Mutation(
        _IN_INSTANCE,
        'if not hmac.compare_digest(expected.encode(), given.get("x-gitea-signature", '
        '"").encode()):',
        "if False:",
        f"{_GITEA}test_webhook_wakes_only_with_the_right_signature"
        '[webhook-secret-{"action": "queued", "workflow_job": {"id": 1}}--workflow_job-403-False]',
    ),
    "registrations-of-unknown-leases-are-removed": Mutation(
        _IN_INSTANCE,
        " and not any(fleet.trouble for fleet in fleets)",
        "",
        f"{_GITEA}test_registrations_are_kept_while_the_leases_are_unknown",
    ),
    "registrations-of-living-runners-are-removed": Mutation(
        _IN_INSTANCE,
        " and each.name not in alive",
        "",
        f"{_GITEA}test_registration_without_a_lease_is_removed_later",
    ),
    "lasting-runners-are-used": Mutation(
        _IN_API,
        'if runner.get("ephemeral") is not True:',
        "if False:",
        f"{_GITEA_API}test_server_that_makes_lasting_runners_is_refused_and_nothing_is_left",
    ),
    "gitea-runners-with-a-job-are-removed": Mutation(
        _IN_API,
        'if any(_number(each.get("runner_id"), "job") == runner for',
        'if False and any(_number(each.get("runner_id"), "job") == runner for',
        f"{_GITEA_API}test_runner_with_a_job_is_disabled_but_not_removed",
    ),
    "gitea-tokens-follow-redirects": Mutation(
        _IN_API,
        "self._session = DirectSession()",
        "self._session = requests.Session()",
        f"{_GITEA_API}test_bad_answer_is_an_error_and_never_an_empty_queue[reply6-redirects to "
        "https://new.example.com/]",
    ),
    "answers-of-forges-have-no-bound": Mutation(
        _IN_ANSWERS,
        "if len(found) > most or time.monotonic() > deadline:",
        "if False:",
        f"{_GITEA_API}test_answer_that_is_compressed_too_long_or_too_slow_is_refused[<lambda>-more "
        "than 5000 bytes]",
    ),
    "errors-of-forges-show-tokens": Mutation(
        _IN_ANSWERS,
        'found.replace(token, b"[token]") if token else found',
        "found",
        f"{_GITEA_API}test_error_that_repeats_the_token_is_shown_without_it[200]",
    ),
    "runners-with-a-new-job-are-killed": Mutation(
        _IN_RUNNER,
        "            if not self.fleet.forge.remove(self.name):\n",
        "            if self.fleet.forge.remove(self.name) is None:\n",
        f"{_RUNNERS}test_runner_that_has_just_got_a_job_is_not_stopped_as_idle",
    ),
    "restarts-of-the-daemon-end-jobs": Mutation(
        _IN_RUNNER,
        ("            if not self.fleet.stopping.is_set():\n                self.enter(ENDING)"),
        ("            if True:\n                self.enter(ENDING)"),
        f"{_RUNNERS}test_job_continues_while_the_daemon_is_restarted",
    ),
    "busy-launchers-count-as-silent-nodes": Mutation(
        _IN_RUNNER,
        "        if busy:  # it says nothing about the node",
        "        if False:",
        f"{_RUNNERS}test_busy_launcher_reports_nothing_about_the_node",
    ),
    "secrets-of-runners-are-readable": Mutation(
        _IN_RUNNER,
        "umask 077; {HOME}; mkdir -p {FOLDER} && mkdir",
        "{HOME}; mkdir -p {FOLDER} && mkdir",
        f"{_RUNNERS}test_secret_of_a_runner_is_for_its_user_only",
    ),
    "registrations-of-failed-runners-stay": Mutation(
        _IN_RUNNER,
        "self._left = not self.fleet.forge.remove(self.name)",
        "pass",
        f"{_RUNNERS}test_runner_that_cannot_start_is_removed_from_the_forge",
    ),
    "leases-of-other-fleets-are-adopted": Mutation(
        _IN_FLEET,
        'notes.get("fleet") == self.kind.mark and ',
        "",
        f"{_RUNNERS}test_only_leases_of_the_own_place_are_adopted",
    ),
    "failing-runners-are-started-together": Mutation(
        _IN_FLEET,
        "range(1 if self.broken.count else missing)",
        "range(missing)",
        f"{_RUNNERS}test_runners_that_fail_are_started_after_a_pause_and_one_at_a_time[False-1]",
    ),
    "failing-runners-are-started-without-a-pause": Mutation(
        _IN_FLEET,
        "if missing > 0 and not (self.drained or max(self.broken.left, self.idled.left)):",
        "if missing > 0 and not self.drained:",
        f"{_RUNNERS}test_runners_that_fail_are_started_after_a_pause_and_one_at_a_time[True-0]",
    ),
    "drained-fleets-start-runners": Mutation(
        _IN_FLEET,
        "not (self.drained or max(",
        "not (max(",
        f"{_RUNNERS}test_fleet_without_nodes_starts_no_runner_and_resumes_when_the_drain_ends",
    ),
    "runners-with-a-job-are-dismissed-by-drains": Mutation(
        _IN_RUNNER,
        'if self._check(1, QUICK)[0] != "idle" and not self.finished:',
        "if False:",
        f"{_RUNNERS}test_runner_that_may_have_a_job_is_not_dismissed[True-busy-idle]",
    ),
    "runners-that-have-just-started-count-as-dead": Mutation(
        _IN_FLEET,
        "now - max(since, runner.since, runner.asked) > patience",
        "now - since > patience",
        f"{_RUNNERS}test_runner_that_may_not_be_able_to_take_a_job_is_not_asked[starting]",
    ),
    "directories-of-others-are-used": Mutation(
        "nodepool.adapters.runners.program",
        " or found.st_uid != os.getuid()",
        "",
        f"{_GITHUB}test_directory_of_somebody_else_is_refused",
    ),
    "github-tokens-are-sent-in-plain-text": Mutation(
        _IN_SERVICE,
        "            if not is_protected(base):",
        "            if False:",
        f"{_GITHUB}test_admin_connection_that_cannot_be_used_is_refused[body0-not https]",
    ),
    "github-runners-with-a-job-count-as-removed": Mutation(
        _IN_SERVICE,
        ('            if "JobStillRunning" in error.kind:\n                return False\n'),
        "",
        f"{_GITHUB}test_name_of_a_former_runner_is_freed",
    ),
    "more-jobs-are-taken-than-can-run": Mutation(
        _IN_LISTENER,
        "free = self.capacity() - self._assigned",
        "free = len(offers)",
        f"{_GITHUB}test_offers_wait_until_there_is_capacity",
    ),
    "messages-with-open-offers-are-acknowledged": Mutation(
        _IN_LISTENER,
        "            if not self._offers[ident]:\n",
        "            if True:\n",
        f"{_GITHUB}test_offers_wait_until_there_is_capacity",
    ),
    "names-of-running-jobs-are-registered-again": Mutation(
        _IN_LISTENER,
        ("        if not self.remove(name):\n            raise ForgeError"),
        ("        if self.remove(name) is None:\n            raise ForgeError"),
        f"{_GITHUB}test_name_of_a_former_runner_is_freed",
    ),
    "calls-with-effects-are-repeated": Mutation(
        _IN_SERVICE,
        "if is_untrusted(error) or not (repeat or unsent):",
        "if is_untrusted(error):",
        f"{_GITHUB}test_call_that_may_have_arrived_is_not_repeated_if_it_would_have_two_effects",
    ),
    "kills-on-other-nodes-are-of-every-runner": Mutation(
        _IN_FLEET,
        "            if place in [(node.id, node.provider) for node in nodes]:\n",
        "            if nodes is not None:\n",
        f"{_RUNNERS}test_kill_is_of_the_runner_of_its_node_and_a_flood_is_bounded",
    ),
    "any-number-of-kills-is-kept": Mutation(
        _IN_RUNNER,
        " and len(self.kills) < MOST_KILLS",
        "",
        f"{_RUNNERS}test_kill_is_of_the_runner_of_its_node_and_a_flood_is_bounded",
    ),
    "messages-of-any-length-are-read": Mutation(
        "nodepool.adapters.runners.program",
        "if not text.isdecimal() or int(text) > MOST_BODY:",
        "if not text.isdecimal():",
        f"{_GITEA}test_message_without_a_usable_length_is_not_read[1048577]",
    ),
}
