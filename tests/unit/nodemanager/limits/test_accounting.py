"""Daily byte limits of slivers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodepool.nodemanager.limits.daily_bytes import PERIOD, Accounting


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

    def used(self, name: str) -> tuple[int, int]:
        """Bytes in this period: below the cap, exempt."""
        used = json.loads(self.stored or "{}").get(name, {}).get("used", {})
        return used.get("plain", 0), used.get("exempt", 0)


LIMIT = 1_024_000
RSPECS = {"alice": {"nm_net_min_rate": 8, "nm_net_max_rate": 10**9}}


@pytest.mark.spec(
    "NM-B.4: past 80 % of the daily limit the ceiling is (limit - used) * 8 / seconds left"
)
def test_ceiling_past_the_threshold() -> None:
    world = World()
    accounting = world.new()
    assert accounting.update({"alice": (0, 0)}, RSPECS, LIMIT) == {}
    world.now += PERIOD / 2
    assert accounting.update({"alice": (819_199, 0)}, RSPECS, LIMIT) == {}
    assert accounting.update({"alice": (900_000, 0)}, RSPECS, LIMIT) == {
        "alice": {"nm_net_max_rate": int(124_000 * 8 / (PERIOD / 2))}
    }


@pytest.mark.spec("NM-B.4: the ceiling is never below min")
def test_never_below_the_minimum() -> None:
    world = World()
    accounting = world.new()
    rspecs = {"alice": {"nm_net_min_rate": 5000, "nm_net_max_rate": 10**9}}
    accounting.update({"alice": (0, 0)}, rspecs, LIMIT)
    assert accounting.update({"alice": (5_000_000, 0)}, rspecs, LIMIT) == {
        "alice": {"nm_net_max_rate": 5000}
    }


@pytest.mark.spec("NM-B.4: exempt destinations have a limit of their own")
def test_exempt_bytes_are_counted_apart() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMIT)
    assert set(accounting.update({"alice": (0, 900_000)}, RSPECS, LIMIT)["alice"]) == {
        "nm_net_exempt_max_rate"
    }
    assert world.used("alice") == (0, 900_000)


@pytest.mark.spec("NM-B.4: the owner is told once per period; the end of the period restores")
def test_cap_is_reported_once_and_lifted_by_the_end_of_the_period() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMIT)
    for sent in (850_000, 900_000, 950_000):
        world.now += 10
        assert accounting.update({"alice": (sent, 0)}, RSPECS, LIMIT)
    assert world.told == [("alice", "plain", 850_000, 1_024_000)]
    world.now += PERIOD
    assert accounting.update({"alice": (950_100, 0)}, RSPECS, LIMIT) == {}
    assert world.used("alice") == (100, 0)


@pytest.mark.spec("NM-B.4: totals of deleted slivers are remembered until the period ends")
def test_deleting_and_making_again_does_not_reset() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (0, 0)}, RSPECS, LIMIT)
    accounting.update({"alice": (700_000, 0)}, RSPECS, LIMIT)
    accounting.update({}, {}, LIMIT)
    world.now += 60
    # A restart of the daemon in between changes nothing.
    accounting = world.new()
    assert world.used("alice") == (700_000, 0)
    assert accounting.update({"alice": (150_000, 0)}, RSPECS, LIMIT)
    assert world.used("alice") == (850_000, 0)
    accounting.update({}, {}, LIMIT)
    world.now += PERIOD + 1
    accounting.update({}, {}, LIMIT)
    assert world.used("alice") == (0, 0)


def test_a_new_device_that_already_shows_more_counts_from_nothing() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (1000, 0)}, RSPECS, LIMIT)
    accounting.forget_device("alice")
    accounting.update({"alice": (3000, 0)}, RSPECS, LIMIT)
    assert world.used("alice") == (4000, 0)


def test_a_clock_that_was_set_back_begins_a_new_period() -> None:
    world = World()
    accounting = world.new()
    accounting.update({"alice": (900_000, 0)}, RSPECS, LIMIT)
    world.now -= 500_000
    assert accounting.update({"alice": (900_000, 0)}, RSPECS, LIMIT) == {}


def test_a_damaged_account_costs_only_itself() -> None:
    world = World()
    good = {
        "began": world.now,
        "used": {"plain": 50, "exempt": 60},
        "seen": {"plain": 5, "exempt": 6},
    }
    world.stored = json.dumps({"alice": good, "bob": {"began": "?"}, "carol": None})
    world.new().update(dict.fromkeys(("alice", "bob", "carol"), (5, 6)), RSPECS, LIMIT)
    assert world.used("alice") == (50, 60)
    assert world.used("bob") == world.used("carol") == (5, 6)


@pytest.mark.spec("NM-B.2: net_max_kbyte and net_thresh_kbyte limit what a sliver sends in a day")
def test_the_lower_limit_of_rspec_and_host_counts() -> None:
    world = World()
    accounting = world.new()
    rspecs = {
        "alice": {"nm_net_min_rate": 0, "nm_net_max_kbyte": 100, "nm_net_exempt_max_kbyte": 10_000},
        "bob": {**RSPECS["alice"], "nm_net_max_kbyte": 1000, "nm_net_thresh_kbyte": 10},
    }
    accounting.update({"alice": (0, 0), "bob": (0, 0)}, rspecs, LIMIT)
    found = accounting.update({"alice": (82_000, 820_000), "bob": (10_240, 0)}, rspecs, LIMIT)
    assert found == {
        "alice": {
            "nm_net_max_rate": 1,
            "nm_net_exempt_max_rate": int((LIMIT - 820_000) * 8 / PERIOD),
        },
        "bob": {"nm_net_max_rate": int((1_024_000 - 10_240) * 8 / PERIOD)},
    }
