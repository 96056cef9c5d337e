"""Which slivers are favoured when processors are short."""

from __future__ import annotations

import threading

import pytest

from nodepool.nodemanager.limits.cgroups import pace as cpu_pace
from nodepool.nodemanager.limits.cgroups.pace import HEAVY, LIGHT, CpuPace, heavy
from tests.conftest import wait_for

SHARES = {"alice": 32, "bob": 32, "carol": 96}


def test_who_uses_much_is_not_favoured() -> None:
    assert heavy({"alice": 1.9, "bob": 0.1}, SHARES, 2, set()) == {"alice"}


def test_equals_are_treated_alike() -> None:
    """Proportions of those that use all they can get are those of their shares."""
    assert heavy({"alice": 0.5, "carol": 1.5}, SHARES, 2, set()) == {"alice", "carol"}


def test_who_does_nothing_has_no_part() -> None:
    """Bob's half of the fair part counts among those that run only."""
    assert heavy({"alice": 1.01, "bob": 0.0}, SHARES, 2, set()) == {"alice"}
    assert heavy({"alice": 0.99, "bob": 0.0}, SHARES, 2, set()) == set()


def test_no_change_back_and_forth() -> None:
    between = (HEAVY + LIGHT) / 2
    used = {"alice": between, "bob": 2 - between}  # the fair part of each is 1 core
    assert heavy(used, SHARES, 2, {"alice", "bob"}) == {"alice", "bob"}
    assert heavy(used, SHARES, 2, {"bob"}) == {"bob"}


@pytest.mark.parametrize("used", [{}, {"unknown": 2.0}, {"unknown": 2.0, "alice": 0.001}])
def test_slivers_without_use_or_share_are_not_heavy(used: dict[str, float]) -> None:
    assert heavy(used, SHARES, 2, set()) == set()


@pytest.mark.parametrize("count", [2, 5, 50])
def test_the_favoured_leave_the_rest_its_part(count: int) -> None:
    """However many use just too little to be heavy: what is left is as much as the heavy one's
    fair part.
    """
    shares = dict.fromkeys((f"s{number}" for number in range(count)), 32)
    used = dict.fromkeys(shares, HEAVY * 2 / count) | {"s0": 2.0}
    assert heavy(used, shares, 2, set()) == {"s0"}
    assert 2 - sum(amount for name, amount in used.items() if name != "s0") >= 2 / count


def test_thread_survives_failures_and_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a kernel that does not report pressure: it polls all the time; a failure harms one poll;
    it stops on request.
    """
    monkeypatch.setattr(cpu_pace, "PRESSURE", "/nonexistent")
    monkeypatch.setattr(cpu_pace, "PERIOD", 0.02)
    told: list[set[str]] = []
    spent = {"alice": 0, "bob": 0}
    busy = "alice"

    def times() -> dict[str, int]:
        spent[busy] += 10_000_000_000  # more than any clock's time, however late the look
        if spent["alice"] == 20_000_000_000:
            raise OSError("a group went away")
        return dict(spent)

    pace = CpuPace(2, times, lambda: [SHARES], lambda heavy, active: told.append(heavy))
    pace.start()
    try:
        wait_for(lambda: {"alice"} in told, 20, "alice found")
        busy = "bob"
        wait_for(lambda: {"bob"} in told, 20, "bob found, alice forgotten")
        assert "a group went away" in caplog.text
    finally:
        pace.stop()
    assert "Thread-nm-cpu" not in [thread.name for thread in threading.enumerate()]
