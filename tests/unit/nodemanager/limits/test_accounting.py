"""Daily byte limits of slivers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodepool.nodemanager.limits.daily_bytes import PERIOD, Accounting, DailyLimits


class World:
    """A clock and a store that outlives an Accounting; what was said goes to `told`."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.stored: str | None = None
        self.told: list[tuple[Any, ...]] = []

    def new(self) -> Accounting:
        return Accounting(
            lambda: json.loads(self.stored) if self.stored else None,
            self._save,
            lambda: self.now,
            notify=lambda *what: self.told.append(what),
        )

    def _save(self, content: dict[str, Any]) -> None:
        self.stored = json.dumps(content)


LIMITS = {"alice": DailyLimits(plain=1_000_000, exempt=2_000_000)}
RSPECS = {"alice": {"nm_net_min_rate": 8, "nm_net_max_rate": 10**9}}


@pytest.mark.spec("NM-B.4: past 80 % of the daily limit the ceiling is (limit - used) * 8 / seconds left")
def test_ceiling_past_the_threshold() -> None:
    world = World()
    accounting = world.new()
    assert accounting.update({"alice": (0, 0)}, RSPECS, LIMITS) == {}
    world.now += PERIOD / 2
    assert accounting.update({"alice": (799_999, 0)}, RSPECS, LIMITS) == {}
    assert accounting.update({"alice": (900_000, 0)}, RSPECS, LIMITS) == {
        "alice": {"nm_net_max_rate": int(100_000 * 8 / (PERIOD / 2))}
    }


@pytest.mark.spec("NM-B.4: the ceiling is never below min")
def test_never_below_the_minimum() -> None:
    world = World()
    accounting = world.new()
    rspecs = {"alice": {"nm_net_min_rate": 5000, "nm_net_max_rate": 10**9}}
    accounting.update({"alice": (0, 0)}, rspecs, LIMITS)
    assert accounting.update({"alice": (5_000_000, 0)}, rspecs, LIMITS) == {"alice": {"nm_net_max_rate": 5000}}


@pytest.mark.spec("NM-B.4: exempt destinations have a limit of their own")
def test_exempt_bytes_are_counted_apart() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMITS)
    assert set(accounting.update({"alice": (0, 1_900_000)}, RSPECS, LIMITS)["alice"]) == {"nm_net_exempt_max_rate"}
    assert accounting.used("alice") == (0, 1_900_000)


@pytest.mark.spec("NM-B.4: the owner is told once per period; the end of the period restores")
def test_told_once_and_restored_by_the_end_of_the_period() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMITS)
    for sent in (850_000, 900_000, 950_000):
        world.now += 10
        assert accounting.update({"alice": (sent, 0)}, RSPECS, LIMITS)
    assert world.told == [("alice", "plain", 850_000, 1_000_000)]
    world.now += PERIOD
    assert accounting.update({"alice": (950_100, 0)}, RSPECS, LIMITS) == {}
    assert accounting.used("alice") == (100, 0)


@pytest.mark.spec("NM-B.4: totals of deleted slivers are remembered until the period ends")
def test_deleting_and_making_again_does_not_reset() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMITS)
    accounting.update({"alice": (700_000, 0)}, RSPECS, LIMITS)
    accounting.update({}, {}, LIMITS)
    world.now += 60
    # A restart of the daemon in between changes nothing.
    accounting = world.new()
    assert accounting.used("alice") == (700_000, 0)
    assert accounting.update({"alice": (150_000, 0)}, RSPECS, LIMITS)
    assert accounting.used("alice") == (850_000, 0)
    accounting.update({}, {}, LIMITS)
    world.now += PERIOD + 1
    accounting.update({}, {}, LIMITS)
    assert accounting.used("alice") == (0, 0)


def test_a_new_device_that_already_shows_more_counts_from_nothing() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (1000, 0)}, RSPECS, LIMITS)
    accounting.forget_device("alice")
    accounting.update({"alice": (3000, 0)}, RSPECS, LIMITS)
    assert accounting.used("alice") == (4000, 0)


def test_a_clock_that_was_set_back_begins_a_new_period() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (900_000, 0)}, RSPECS, LIMITS)
    world.now -= 500_000
    assert accounting.update({"alice": (900_000, 0)}, RSPECS, LIMITS) == {}


def test_a_damaged_account_costs_only_itself() -> None:
    world = World()
    good = {"began": world.now, "used": {"plain": 5, "exempt": 6}, "seen": {"plain": 5, "exempt": 6}}
    world.stored = json.dumps({"alice": good, "bob": {"began": "?"}, "carol": None})
    accounting = world.new()
    assert accounting.used("alice") == (5, 6)
    assert accounting.used("bob") == accounting.used("carol") == (0, 0)


def test_an_operator_can_pardon() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMITS)
    assert accounting.update({"alice": (999_000, 0)}, RSPECS, LIMITS)
    accounting.reset("alice")
    assert accounting.update({"alice": (999_000, 0)}, RSPECS, LIMITS) == {}
