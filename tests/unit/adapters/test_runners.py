"""Fleets whose forge reports the missing runners, instead of the number of all."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from nodepool.adapters.runners.fleet import BUSY, IDLE, STARTING, WAITING, Fleet, Kind, Runner
from nodepool.client import Pool
from tests.conftest import wait_for


class NoForge:
    script, worker = "true", ""

    def register(self, name: str) -> bytes:
        return b""

    def remove(self, name: str) -> bool:
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
    found = Fleet(Kind("main/noble", "noble", most=5), NoForge(), lambda _name: NoLeases("http://127.0.0.1:9"), stopping)
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


@pytest.mark.parametrize(("name", "module"), [("github", "jwt"), ("gitea", "requests")])
def test_missing_package_is_named_with_its_extra(name: str, module: str) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; import nodepool.adapters.{name}.program as p; p.main(['check'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and f"{module} is not installed" in done.stderr and f"clone[{name}]" in done.stderr
