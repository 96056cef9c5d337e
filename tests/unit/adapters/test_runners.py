"""Fleets whose forge reports the missing runners, instead of the number of all."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.adapters.runners import drains
from nodepool.adapters.runners import runner as runners
from nodepool.adapters.runners.drains import Follower
from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.forge import ForgeError, Kind
from nodepool.adapters.runners.program import ConfigError, adapt
from nodepool.adapters.runners.runner import BUSY, ENDING, IDLE, STARTING, WAITING, Runner
from nodepool.client import Done, LeaseEnded, Node, NodepoolError, Pool
from tests.conftest import wait_for


class NoForge:
    script, worker, shows_kills = "true", "", True

    def register(self, name: str) -> bytes:
        return b""

    def remove(self, name: str) -> bool:
        return True

    def presence(self, name: str) -> bool | None:
        return True

    def failure(self, status: int | None) -> None:
        return None


class NoLeases(Pool):
    def leases(self, owner: str | None = None, state: str | None = None) -> list[Any]:
        return []


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet that runs, in which no runner starts."""
    monkeypatch.setattr(Runner, "start", lambda _self: None)
    stopping = threading.Event()
    found = Fleet(
        Kind("main/noble", "noble", most=5),
        NoForge(),
        lambda _name: NoLeases("http://127.0.0.1:9"),
        stopping,
    )
    found.start()
    yield found
    stopping.set()
    found.need(0)


def states(fleet: Fleet) -> list[str]:
    return sorted(runner.state for runner in fleet.runners())


def test_busy_runners_do_not_count_for_what_is_needed(fleet: Fleet) -> None:
    fleet.need(2)
    wait_for(lambda: states(fleet) == [WAITING, WAITING])
    first = fleet.runners()[0]
    first.enter(IDLE)
    first.works("check")
    fleet.need(1)
    wait_for(lambda: fleet.wanted == 2)
    assert states(fleet) == [BUSY, WAITING]
    fleet.ended(first)
    wait_for(lambda: fleet.wanted == 1)
    assert states(fleet) == [WAITING], "the end of a busy runner starts no other"
    fleet.need(9)
    wait_for(lambda: len(fleet.runners()) == 5)


def test_runner_that_ended_before_the_forge_reported_its_job_is_not_replaced(fleet: Fleet) -> None:
    fleet.need(1)
    wait_for(lambda: states(fleet) == [WAITING])
    [runner] = fleet.runners()
    runner.enter(IDLE)
    fleet.succeeded(runner.had_job)
    fleet.ended(runner)
    wait_for(lambda: fleet.wanted == 0)
    assert fleet.runners() == []


@pytest.mark.parametrize(("state", "after"), [(STARTING, BUSY), (IDLE, BUSY), (WAITING, WAITING)])
def test_runner_with_a_job_is_busy(fleet: Fleet, state: str, after: str) -> None:
    runner = Runner(fleet, "np-a")
    runner.enter(state)
    runner.works("check")
    assert (runner.state, runner.job) == (after, "check")


class Held:
    """A lease whose node gives the answers of the test, in order."""

    state, id, ends = "held", "200-1", None
    drained: str | None = None

    def __init__(self, *answers: str | int | Exception) -> None:
        self.answers, self.nodes = list(answers), [Node("1")]
        self.scripts: list[str] = []
        self.inputs: list[object] = []
        self.timeouts: list[float] = []
        self.returned = threading.Event()
        self.error: NodepoolError | None = None
        self.notes: dict[str, str] = {}
        self.stopping = threading.Event()
        self.kills: list[dict[str, Any]] = []

    def changes(self) -> list[Any]:
        return []

    def find_kills(self, _longest: float) -> list[dict[str, Any]]:
        return self.kills

    def run(self, script: str, **options: Any) -> Done:
        self.scripts.append(script)
        self.inputs.append(options.get("input"))
        self.timeouts.append(options["timeout"])
        answer = self.answers.pop(0) if self.answers else ""
        if isinstance(answer, Exception):
            raise answer
        return (
            Done(answer, b"", b"broken")
            if isinstance(answer, int)
            else Done(0, answer.encode(), b"")
        )

    def _checked(self, **_options: Any) -> None:
        if self.error is not None:
            raise self.error

    note = renew = refresh = lambda self, *_args, **_options: self._checked()

    def give_back(self) -> None:
        self.returned.set()


class Forge(NoForge):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def register(self, name: str) -> bytes:
        self.calls.append("register")
        return b"secret"

    def remove(self, name: str) -> bool:
        self.calls.append("remove")
        return True


BROKEN = OSError("connection lost")
AWAY = NodepoolError("unreachable", "the launcher does not answer")


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a runner live from its lease to the end of its program; return it and its forge."""
    monkeypatch.setattr(runners, "RETRY", 0.01)

    def run(
        lease: Any, adopted: bool = True, job: str = "", finished: bool = False
    ) -> tuple[Runner, Forge]:
        forge, stopping = Forge(), threading.Event()
        lease.stopping = stopping
        pool = NoLeases("http://127.0.0.1:9")
        monkeypatch.setattr(pool, "lease", lambda *_args, **_options: lease)
        made = Fleet(Kind("set", "noble", most=5), forge, lambda _name: pool, stopping)
        monkeypatch.setattr(stopping, "wait", lambda timeout=None: stopping.is_set())
        runner = Runner(made, "np-a", lease if adopted else None)
        runner.job, runner.finished = job, finished
        runner.start()
        runner.join(20)
        return runner, forge

    return run


def test_adopted_runner_is_kept_although_its_node_does_not_answer_at_first(live: Any) -> None:
    lease = Held(BROKEN, 255, AWAY, "idle", "ended 0\n")
    runner, forge = live(lease)
    assert lease.returned.is_set() and len(lease.scripts) == 6 and forge.calls == []
    assert (runner.fleet.done, runner.fleet.failures) == (1, 0)


def test_launcher_that_is_away_for_long_reports_nothing_about_the_node(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    lease = Held("busy", AWAY, AWAY, AWAY, "ended 0\n")

    def away(*_args: Any, **_options: Any) -> None:
        clock[0] += 1000
        raise AWAY

    lease.refresh = away
    assert live(lease)[0].fleet.failures == 0

    def there(*_args: Any, **_options: Any) -> None:
        clock[0] += 400

    lease = Held("busy", BROKEN, BROKEN, "ended 0\n")
    lease.refresh = there
    assert (
        "nothing heard of the node for 600 s; at last: connection lost"
        in live(lease)[0].fleet.broken.text
    )


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether runners were lost, whenever that has changed."""
    found: list[bool] = []
    original = Runner._lose

    def lose(runner: Runner, lost: bool) -> None:
        if lost != runner.lost:
            found.append(lost)
        original(runner, lost)

    monkeypatch.setattr(Runner, "_lose", lose)
    return found


def test_runner_with_a_job_is_lost_until_its_silent_node_answers_again(
    live: Any, losses: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])

    def refreshed(*_args: Any, **_options: Any) -> None:
        clock[0] += 20

    for first, expected in (("busy", [True, False]), ("idle", [])):
        lease = Held(first, BROKEN, BROKEN, BROKEN, first, "ended 0\n")
        lease.refresh = refreshed
        assert live(lease)[0].fleet.failures == 0
        assert losses == expected
        losses.clear()


def test_slow_node_that_was_lost_gets_more_time_afterwards(
    live: Any, losses: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])

    def refreshed(*_args: Any, **_options: Any) -> None:
        clock[0] += runners.QUIET + 1

    lease = Held("busy", BROKEN, "busy", "busy", "busy", "ended 0\n")
    lease.refresh = refreshed
    live(lease)
    assert losses == [True, False]
    soon, later = runners.CHECK + runners.QUICK, runners.CHECK + runners.COMMAND
    assert lease.timeouts[:6] == [soon, soon, later, later, later, later]


@pytest.mark.parametrize(
    "answers", [["busy", LeaseEnded("gone", "it has ended")], ["busy", "lost\n"]], ids=str
)
def test_runner_that_ends_before_its_job_returns_its_node_and_is_lost_until_the_job_ends(
    live: Any, losses: list[bool], monkeypatch: pytest.MonkeyPatch, answers: list[Any]
) -> None:
    lease, removed = Held(*answers), [False, False, True]
    returned: list[bool] = []

    def remove(forge: Forge, _name: str) -> bool:
        forge.calls.append("remove")
        returned.append(lease.returned.is_set())
        return removed.pop(0)

    monkeypatch.setattr(Forge, "remove", remove)
    monkeypatch.setattr(Forge, "failure", lambda _self, _status: ("killed", 0.0))
    monkeypatch.setattr(runners, "COMPARE", 0.0)
    live(lease)
    assert removed == [] and losses == [True]
    assert returned == [False, True, True]


@pytest.mark.parametrize("of_all", [True, False], ids=["GitHub", "Gitea"])
def test_lost_runner_leaves_its_place_to_the_next_job(fleet: Fleet, of_all: bool) -> None:
    resumed = threading.Event()
    fleet.adapt(replace(fleet.kind, most=1))
    fleet.resumed = resumed.set

    def report(running: int, waiting: int) -> None:
        if of_all:
            fleet.want(running + waiting, waiting)
        else:
            fleet.need(waiting)

    report(0, 1)
    wait_for(lambda: states(fleet) == [WAITING])
    [first] = fleet.runners()
    first.enter(BUSY)
    report(1, 0)
    first._lose(True)
    assert resumed.is_set() and fleet.lost_jobs() == 1
    wait_for(lambda: fleet.wanted == 0)
    report(1, 1)
    wait_for(lambda: states(fleet) == [BUSY, WAITING])
    first.finish(True)
    report(0, 1)
    wait_for(lambda: fleet.wanted == 1)
    assert fleet.lost_jobs() == 0 and len(fleet.runners()) == 2


def test_busy_launcher_reports_nothing_about_the_node(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    busy = NodepoolError("busy", "too many programs run here")
    lease = Held("busy", busy, busy, busy, "ended 0\n")

    def refreshed(*_args: Any, **_options: Any) -> None:
        clock[0] += 400

    lease.refresh = refreshed
    assert live(lease)[0].fleet.failures == 0


def test_job_continues_although_it_cannot_be_recorded(live: Any) -> None:
    lease = Held("busy", "busy", "ended 0\n")
    lease.error = AWAY
    runner, _forge = live(lease, job="acme/widget: build")
    assert (runner.fleet.done, runner.fleet.failures) == (1, 0)
    lease.error = LeaseEnded("gone", "it has ended")
    lease.answers = ["busy", "busy"]
    assert live(lease, job="x")[0].fleet.failures == 1


def test_program_that_may_have_started_is_looked_for_before_it_starts_again(live: Any) -> None:
    for uncertain in (BROKEN, AWAY):
        runner, forge = live(Held(uncertain, "idle", "ended 0\n"), adopted=False)
        assert forge.calls == ["register"] and runner.fleet.failures == 0
        runner, forge = live(Held(uncertain, "none", "", "ended 0\n"), adopted=False)
        assert forge.calls == ["register", "register"] and runner.fleet.failures == 0


def test_runner_that_cannot_start_is_removed_from_the_forge(live: Any) -> None:
    lease = Held(1)
    runner, forge = live(lease, adopted=False)
    assert forge.calls == ["register", "remove"] and lease.returned.is_set()
    assert "cannot be started" in runner.fleet.broken.text


def test_adopted_lease_without_a_program_gets_one_unless_it_is_too_many(live: Any) -> None:
    assert live(Held("none", "", "ended 0\n"))[1].calls == ["register"]
    assert "no longer on the node" in live(Held("idle", "none"))[0].fleet.broken.text


def test_only_leases_of_the_own_place_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "start", lambda _self: None)
    kinds = [
        Kind("set", "noble", most=5, home=f"https://github.com/{name}")
        for name in ("acme", "other")
    ]
    found = []
    for number, kind in enumerate(kinds):
        found.append(Held())
        found[-1].id, found[-1].notes = (
            f"200-{number}",
            {"fleet": kind.mark, "runner": f"np-{number}"},
        )
    pool = NoLeases("http://127.0.0.1:9")
    monkeypatch.setattr(pool, "leases", lambda owner: found)
    monkeypatch.setattr(
        pool, "get", lambda lease_id: next(each for each in found if each.id == lease_id)
    )
    stopping = threading.Event()
    made = Fleet(kinds[0], NoForge(), lambda _name: pool, stopping)
    made.start()
    made.want(1)
    wait_for(lambda: [runner.name for runner in made.runners()] == ["np-0"])
    stopping.set()
    made.want(0)


def test_stop_does_not_wait_for_a_launcher_that_is_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    monkeypatch.setattr("nodepool.adapters.runners.fleet.STOP", 0.1)
    monkeypatch.setattr(Runner, "withdraw", lambda _self: blocked.wait(5))
    fleet.need(5)
    wait_for(lambda: len(fleet.runners()) == 5)
    fleet.runners()[0].enter(STARTING)
    fleet.stop()
    assert sum(thread.name.startswith("withdraw-") for thread in threading.enumerate()) == 5
    blocked.set()


def kill(pid: int, node: str = "1") -> dict[str, Any]:
    return {"node": node, "pid": pid, "program": "cc1plus", "memory_limit": 2 << 30}


@pytest.mark.parametrize("job", ["", "acme/widget: build"])
def test_runner_that_died_names_what_was_killed_on_its_node(
    live: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, job: str
) -> None:
    monkeypatch.setattr(Forge, "failure", lambda _self, status: (f"status {status}", 0.0))
    lease = Held("busy" if job else "idle", "ended 137\nlast words")
    lease.kills = [kill(4711), kill(4711)]
    runner, _forge = live(lease, job=job)
    line = "process 4711 (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
    assert runner.kills == [line]
    assert f"status 137; its last output: last words; {line}" in caplog.text
    assert (line in runner.fleet.broken.text) == (not job)
    assert runner.fleet.status()["trouble"] == "" or line in str(runner.fleet.status()["trouble"])


def test_kill_is_of_the_runner_of_its_node_and_a_flood_is_bounded(fleet: Fleet) -> None:
    fleet.need(2)
    wait_for(lambda: len(fleet.runners()) == 2)
    mine: Any
    other: Any
    mine, other = fleet.runners()
    mine.lease = Held()
    for number in range(50):
        fleet.killed(kill(number))
        fleet.killed(kill(number, "2"))
        fleet.killed({**kill(100 + number), "provider": "another"})
    assert len(mine.kills) == 20 and mine.kills[0].startswith("process 0 (cc1plus)")
    assert mine.kills[1].startswith("process 1 (cc1plus)"), "not of the other provider"
    assert other.kills == []
    status: Any = fleet.status()
    [found] = [each for each in status["runners"] if each["kills"]]
    assert (found["name"], found["kills"]) == (mine.name, mine.kills)


@pytest.mark.parametrize("answer", ["", OSError("no route")])
def test_kill_is_written_for_the_log_of_the_job_where_the_forge_shows_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, answer: str | Exception
) -> None:
    lease: Any = Held(answer)
    runner = Runner(fleet, "mine", lease)
    with caplog.at_level("INFO"):
        runner.killed(kill(4711))
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "kill-mine"])
    line = "process 4711 (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
    assert lease.inputs == [f"{line}\n".encode()]
    assert lease.scripts[0].endswith(".nodepool-runner/mine/kills")
    assert ("the log of the job does not name what was killed: no route" in caplog.text) == (
        answer != ""
    )
    runner.killed(kill(4711))
    runner._killed(kill(4712))
    fleet.forge.shows_kills = False
    runner.killed(kill(4713))
    assert len(runner.kills) == 3 and len(lease.scripts) == 1


@pytest.mark.parametrize(
    ("name", "module"),
    [("github", "jwt"), ("gitea", "requests"), ("github", "urllib3"), ("gitea", "urllib3")],
)
def test_missing_package_is_named_with_its_extra(name: str, module: str) -> None:
    script = (
        f"import sys; sys.modules[{module!r}] = None; import nodepool.adapters.{name}.program "
        "as p; p.main(['check'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (
        done.returncode == 1
        and f"{module} is not installed" in done.stderr
        and f"clone[{name}]" in done.stderr
    )


@pytest.mark.parametrize(
    ("presence", "word", "finished", "text", "failures"),
    [
        (False, "idle", False, "has not seen it online for 3", 1),
        (None, "idle", False, "stopped: the forge no longer knows it", 0),
        (None, "busy", False, "stopped: the forge no longer knows it", 0),
        (True, "busy", True, "stopped: its job has ended", 0),
    ],
)
def test_program_without_a_purpose_is_stopped_and_its_node_returned(
    live: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    presence: bool | None,
    word: str,
    finished: bool,
    text: str,
    failures: int,
) -> None:
    caplog.set_level("INFO")
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    lease = watched(clock, word, 20)
    monkeypatch.setattr(Forge, "presence", lambda _self, _name: presence)
    runner, forge = live(lease, finished=finished)
    assert text in caplog.text and runner.fleet.failures == failures
    assert (
        "pkill -KILL" in lease.scripts[-2] and lease.returned.is_set() and forge.calls == ["remove"]
    )


@pytest.mark.parametrize(
    ("presence", "word"),
    [(True, "idle"), (True, "busy"), (False, "busy"), (ForgeError("away"), "idle")],
)
def test_program_that_the_forge_may_need_is_kept(
    live: Any, monkeypatch: pytest.MonkeyPatch, presence: bool | Exception, word: str
) -> None:
    def answer(_self: Forge, _name: str) -> bool:
        if isinstance(presence, Exception):
            raise presence
        return presence

    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Forge, "presence", answer)
    lease = watched(clock, word, 20)
    runner, forge = live(lease)
    assert (runner.fleet.done, runner.fleet.failures, forge.calls) == (1, 0, [])


def test_runner_that_has_just_got_a_job_is_not_stopped_as_idle(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        Forge, "remove", lambda self, _name: bool(self.calls.append("remove"))
    )  # False: it has a job
    lease = watched(clock, "idle", 24)
    runner, forge = live(lease)
    assert forge.calls == ["remove"] and not any("pkill" in script for script in lease.scripts)
    assert (runner.fleet.done, runner.had_job) == (1, True)


def test_place_of_a_runner_whose_job_the_forge_never_ends_is_free_after_the_time_of_jobs(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(runners.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(Forge, "remove", lambda _self, _name: False)
    lease = Held("busy", LeaseEnded("gone", "it has ended"))
    runner, _forge = live(lease)
    alive = runner._thread.is_alive()
    lease.stopping.set()
    assert not alive and runner.fleet.runners() == []


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Runner, str]]:
    """Each runner and the state that it enters."""
    found: list[tuple[Runner, str]] = []
    enter = Runner.enter

    def note(runner: Runner, state: str) -> None:
        found.append((runner, state))
        enter(runner, state)

    monkeypatch.setattr(Runner, "enter", note)
    return found


def test_answer_of_the_node_that_is_none_does_not_make_the_runner_idle(
    live: Any, entered: list[tuple[Runner, str]]
) -> None:
    lease = Held("busy", "motd\n", "ended 0\n")
    assert live(lease)[0].fleet.failures == 0
    assert [state for _runner, state in entered] == [STARTING, BUSY, ENDING]


def test_end_of_a_program_that_was_withdrawn_is_no_failure(
    live: Any, entered: list[tuple[Runner, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Held("idle", "ended 137\n")
    answer = lease.run

    def run(script: str, **options: Any) -> Done:
        entered[0][0].withdrawn = len(lease.answers) == 1
        return answer(script, **options)

    vars(lease)["run"] = run
    monkeypatch.setattr(Forge, "failure", lambda _self, _status: ("killed", 0.0))
    runner, forge = live(lease)
    assert runner.fleet.failures == 0 and forge.calls == []


def test_surplus_runner_may_be_idle_for_a_moment(
    live: Any, entered: list[tuple[Runner, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: clock[0])
    lease = watched(clock, "idle", 9)
    answer = vars(lease)["run"]

    def run(script: str, **options: Any) -> Done:
        entered[0][0].surplus = True
        return answer(script, **options)

    vars(lease)["run"] = run
    _runner, forge = live(lease)
    assert forge.calls == ["remove"]
    assert sum("--pid" in script for script in lease.scripts) == 2


def test_job_continues_while_the_daemon_is_restarted(live: Any) -> None:
    lease = Held("busy", "busy", "busy")
    answer = lease.run

    def run(script: str, **options: Any) -> Done:
        if len(lease.answers) == 1:
            lease.stopping.set()
        return answer(script, **options)

    vars(lease)["run"] = run
    _runner, forge = live(lease)
    assert (
        forge.calls == []
        and not lease.returned.is_set()
        and not any("rm -rf" in script for script in lease.scripts)
    )


def test_secret_of_a_runner_is_for_its_user_only(
    live: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    lease = Held()

    def run(script: str, input: bytes = b"", **_options: Any) -> Done:
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            ["sh", "-c", f"umask 022; {script}"],
            input=input,
            env=environment,
            capture_output=True,
            check=False,
            timeout=60,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    vars(lease)["run"] = run
    monkeypatch.setattr(Forge, "script", "stat -c %a secret . > ../modes")
    runner, _forge = live(lease, adopted=False)
    assert (runner.fleet.done, (tmp_path / ".nodepool-runner/modes").read_text().split()) == (
        1,
        ["600", "700"],
    )


@pytest.mark.parametrize("failed, started", [(True, 0), (False, 1)])
def test_runners_that_fail_are_started_after_a_pause_and_one_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, failed: bool, started: int
) -> None:
    searched = threading.Event()
    monkeypatch.setattr(NoLeases, "leases", lambda *_args, **_options: searched.set() or [])
    if failed:
        fleet.failed("the runner cannot be started")
    else:
        fleet.broken.count = 1  # the pause is over
    fleet.need(3)
    assert searched.wait(20)
    fleet.stopping.set()
    fleet.need(3)
    wait_for(
        lambda: not any(thread.name == "fleet-main/noble" for thread in threading.enumerate()),
        what="the end of the fleet",
    )
    assert len(fleet.runners()) == started


def watched(clock: list[float], word: str, checks: int) -> Held:
    """Return a lease whose program is checked this many times, 40 s apart, before it ends."""
    lease = Held(*[word] * checks, "ended 0\n")
    answer = lease.run

    def run(script: str, **options: Any) -> Done:
        clock[0] += 40
        return answer(script, **options)

    vars(lease)["run"] = run
    return lease


def test_fleet_without_nodes_starts_no_runner_and_resumes_when_the_drain_ends(fleet: Fleet) -> None:
    resumed = threading.Event()
    fleet.resumed = resumed.set
    fleet.drain("label noble is drained: new disks", {})
    fleet.need(2)
    fleet._adjust(2)
    assert fleet.runners() == [] and not resumed.is_set()
    assert (
        fleet.status()["trouble"]
        == "no node noble until a drain ends: label noble is drained: new disks"
    )
    fleet.drain("", {})
    wait_for(lambda: states(fleet) == [WAITING, WAITING])
    assert resumed.is_set() and fleet.status()["trouble"] == ""


def test_idle_runner_leaves_its_drained_node(live: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lease = Held("idle")
    lease.drained = "host a is drained"
    runner, forge = live(lease)
    assert forge.calls == ["remove"] and "pkill -KILL" in lease.scripts[1]
    assert lease.returned.is_set() and "and host a is drained" in caplog.text
    assert (runner.fleet.failures, runner.fleet.idled.count) == (0, 0)


def test_runner_with_a_job_stays_on_its_drained_node(live: Any) -> None:
    lease = Held("busy", "busy", "ended 0\n")
    lease.drained = "host a is drained"
    runner, forge = live(lease)
    assert forge.calls == [] and (runner.fleet.done, runner.had_job) == (1, True)


@pytest.fixture
def idle(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an idle runner whose node gives these answers, and whose thread does not run."""

    def made(removed: bool | ForgeError, *answers: str | int | Exception) -> tuple[Runner, Held]:
        def remove(_self: NoForge, _name: str) -> bool:
            if isinstance(removed, ForgeError):
                raise removed
            return removed

        monkeypatch.setattr(NoForge, "remove", remove)
        monkeypatch.setattr(fleet.stopping, "wait", lambda timeout=None: fleet.stopping.is_set())
        lease: Any = Held(*answers)
        fleet._add("np-a", lease)
        [runner] = fleet.runners()
        runner.enter(IDLE)
        return runner, lease

    return made


def test_runner_of_a_silent_node_is_replaced_immediately_if_the_forge_has_given_it_no_job(
    fleet: Fleet, idle: Any
) -> None:
    for answers in ([BROKEN], ["idle", BROKEN]):
        runner, lease = idle(True, *answers)
        runner.dismiss("host a is drained")
        assert lease.returned.is_set() and len(lease.scripts) == len(answers)
        assert fleet.runners() == [] and fleet.failures == 0


@pytest.mark.parametrize(
    ("removed", "answer", "state"),
    [
        (False, "idle", BUSY),
        (False, BROKEN, BUSY),
        (True, "busy", IDLE),
        (True, "ended 0\n", IDLE),
        (ForgeError("away"), "idle", IDLE),
        (ForgeError("away"), BROKEN, IDLE),
    ],
)
def test_runner_that_may_have_a_job_is_not_dismissed(
    fleet: Fleet, idle: Any, removed: bool | ForgeError, answer: str | Exception, state: str
) -> None:
    runner, lease = idle(removed, answer)
    runner.dismiss("host a is drained")
    assert fleet.runners() == [runner] and runner.state == state and not runner.withdrawn
    assert not lease.returned.is_set() and not any("pkill" in each for each in lease.scripts)


def test_drain_dismisses_idle_runners_of_its_leases_only(
    fleet: Fleet, idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _lease = idle(True)
    told = threading.Event()
    monkeypatch.setattr(runner, "dismiss", lambda _why: told.set())
    fleet.drain("", {"other": "host a is drained", "200-1": ""})
    runner.enter(BUSY)
    fleet.drain("", {"200-1": "host a is drained"})
    assert not any(each.name == "dismiss-np-a" for each in threading.enumerate())
    assert not told.is_set() and runner.drained == "host a is drained"
    runner.enter(IDLE)  # as the end of a job that was none
    fleet.drain("", {"200-1": "host a is drained"})
    assert told.wait(10)


class Launcher(Pool):
    """Its connections end as the test says."""

    def __init__(self, *connections: Exception | int) -> None:
        super().__init__("http://127.0.0.1:9")
        self.connections = list(connections)
        self.read = 0

    def events(self, *_types: str) -> Any:
        found = self.connections.pop(0) if self.connections else AWAY
        if isinstance(found, Exception):
            raise found
        for _ in range(found):
            yield None

    def call(self, method: str, path: str, *_args: Any, **_options: Any) -> Any:
        assert (method, path) == ("GET", "/drains")
        self.read += 1
        return {"drains": [], "labels": {"noble": "label noble is drained"}}


def test_drains_are_followed_again_after_any_error(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drains, "RETRY", 0.01)
    launcher = Launcher(AWAY, AWAY, ValueError("odd"), 2, 1)
    Follower([fleet], launcher, fleet.stopping).start()
    wait_for(lambda: launcher.read == 3 and not launcher.connections)
    assert fleet.drained == "label noble is drained"
    assert caplog.text.count("not followed: the launcher does not answer") <= 2
    assert "not followed: ValueError odd" in caplog.text


def test_events_of_a_launcher_that_is_away() -> None:
    with pytest.raises(NodepoolError, match="does not answer"):
        next(iter(Pool("http://127.0.0.1:9").events("drain-changed")))


class Waiting:
    """A fleet whose thread does not run, with a clock, and who was asked to leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked: list[str] = []
        pool = NoLeases("http://127.0.0.1:9")
        kind = Kind("set", "noble", most=5)
        self.fleet = Fleet(kind, NoForge(), lambda _name: pool, threading.Event())
        monkeypatch.setattr(runners.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Runner, "start", lambda _self: None)
        monkeypatch.setattr(Runner, "dismiss", lambda runner, _why: self.asked.append(runner.name))

    def add(self, name: str, state: str) -> Runner:
        self.fleet._add(name)
        runner = self.fleet.find(name)
        assert runner is not None
        runner.enter(state)
        return runner

    def after(self, seconds: float) -> list[str]:
        """Let time pass; return who is asked to leave then."""
        self.now, self.asked = self.now + seconds, []
        self.fleet._replace_dead()
        for thread in threading.enumerate():
            if thread.name.startswith("dismiss-"):
                thread.join(10)
        return sorted(self.asked)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(monkeypatch)


def test_idle_runner_that_takes_no_job_is_asked_to_leave(waiting: Waiting) -> None:
    waiting.add("np-a", IDLE)
    assert waiting.after(1000) == [], "no job waits"
    waiting.fleet.want(1, 1)
    assert waiting.after(29) == []
    waiting.fleet.want(2, 2)
    assert waiting.after(2) == ["np-a"], "the time counts from the first job"
    waiting.fleet.want(1, 0)
    waiting.fleet.want(2, 1)
    assert waiting.after(29) == []


@pytest.mark.parametrize("state", [WAITING, STARTING, BUSY])
def test_runner_that_may_not_be_able_to_take_a_job_is_not_asked(
    waiting: Waiting, state: str
) -> None:
    runner = waiting.add("np-a", state)
    waiting.fleet.need(1)
    assert waiting.after(1000) == []
    runner.enter(IDLE)
    assert waiting.after(29) == [] and waiting.after(2) == ["np-a"]


def test_runner_whose_job_has_ended_and_that_does_not_is_asked_to_leave(waiting: Waiting) -> None:
    runner = waiting.add("np-a", BUSY)
    waiting.fleet.need(1)
    waiting.now += 1000
    for finished in (False, True):
        runner.finish(finished)
        assert waiting.after(29) == []
    runner.finish(True)
    assert waiting.after(2) == ["np-a"]


def test_as_many_leave_as_jobs_wait_and_less_often_as_long_as_it_helps_no_job(
    waiting: Waiting,
) -> None:
    for name in ("np-a", "np-b", "np-c"):
        waiting.add(name, IDLE)
    waiting.fleet.want(3, 2)
    assert waiting.after(31) == ["np-a", "np-b"]
    assert waiting.after(28) == [] and waiting.after(2) == ["np-c"]
    assert waiting.after(80) == [] and waiting.after(15) == ["np-a", "np-b"]
    waiting.fleet.succeeded(had_job=True)
    assert waiting.after(10) == ["np-c"]
    assert waiting.after(21) == [] and len(waiting.after(40)) == 2


def service_of(stopping: threading.Event, **sets: Kind) -> Any:
    pool = NoLeases("http://127.0.0.1:9")
    fleets = [Fleet(kind, NoForge(), lambda _name: pool, stopping) for kind in sets.values()]
    return SimpleNamespace(fleets=fleets)


def test_changed_configuration_is_applied_to_the_sets_that_exist(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    resumed = threading.Event()
    fleet.resumed = resumed.set
    fleet.want(9)
    wait_for(lambda: len(fleet.runners()) == 5)
    service = SimpleNamespace(fleets=[fleet])
    new = {"a": replace(fleet.kind, most=7, least=1), "b": Kind("new", "noble", most=1)}
    adapt(service, lambda: service_of(fleet.stopping, **new))
    wait_for(lambda: len(fleet.runners()) == 7)
    assert resumed.is_set() and fleet.status()["least"] == 1
    assert "new and removed sets need a restart:  new" in caplog.text


def test_configuration_with_an_error_changes_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise ConfigError("main/noble: min (9) is above max (5)")

    adapt(SimpleNamespace(fleets=[fleet]), fail)
    assert "not applied: main/noble: min (9) is above max (5)" in caplog.text
    assert fleet.kind.most == 5
