"""Usage and kills of slivers, as the node manager stores them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.base.boot import boot_id
from nodepool.nodemanager.limits.memory_kills import Kill
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.slivers.events import NAMED, Events
from nodepool.nodemanager.slivers.reconciler import SliverReconciler
from nodepool.nodemanager.slivers.slivers import key_of

KEY = key_of("a")
USED = {"cpu_usec": 5, "memory_peak": 7, "pids": 3}


class Killed(BaseException):
    """kill -9."""


@pytest.fixture
def database(tmp_path: pathlib.Path) -> Iterator[Database]:
    made = Database(str(tmp_path / "database"))
    made.open()
    made.update_local(KEY, handle={}, index=1, made=1000.0, booted=boot_id(), memory=2)
    yield made
    made.close()


def stored(database: Database) -> list[dict[str, Any]]:
    return database.events_after(0, 100)


def reconciler(database: Database, backend: Any) -> SliverReconciler:
    state = os.path.dirname(database.path)
    config: Any = Mock(create_concurrency=1, delete_concurrency=1, state_dir=state)
    events = Events(database, backend.usage, lambda: None)
    slivers = Mock()
    made = SliverReconciler(config, database, backend, slivers, Mock(), events)
    made._copies = Mock()
    return made


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("at", ["end", "ended", "remove"])
def test_one_record_whenever_the_daemon_is_killed(
    database: Database, monkeypatch: pytest.MonkeyPatch, counts: bool, at: str
) -> None:
    backend = Mock(counts_to_the_end=counts)
    alive, there = [True], [True]

    def usage(name: str, handle: Any) -> dict[str, int]:
        # A disk that stalls must not stop all other calls.
        assert database.version is not None, "in a transaction"
        return USED if there[0] and (alive[0] or counts) else {}

    def end(*_: Any) -> None:
        alive[0] = False
        if at == "end":
            backend.end.side_effect = None
            raise Killed

    def remove(*_: Any) -> None:
        there[0] = False
        if at == "remove":
            backend.remove.side_effect = None
            raise Killed

    backend.usage, backend.end.side_effect, backend.remove.side_effect = usage, end, remove
    first = reconciler(database, backend)
    if at == "ended":
        monkeypatch.setattr(first._events, "ended", Mock(side_effect=Killed))
    with pytest.raises(Killed):
        first._remove("a", KEY, database.local(KEY))
    reconciler(database, backend)._remove("a", KEY, database.local(KEY))
    [event] = stored(database)
    assert (event["kind"], event["cpu_usec"], event["memory_peak"]) == ("ended", 5, 7)
    assert event["complete"] is counts and "pids" not in event
    assert database.local(KEY) == {}, "a later sliver of this name inherits nothing"


def test_disk_that_cannot_be_read_does_not_keep_a_sliver(database: Database) -> None:
    backend = Mock(counts_to_the_end=True)
    backend.usage.side_effect = OSError("stale")
    reconciler(database, backend)._remove("a", KEY, database.local(KEY))
    [event] = stored(database)
    assert not event["complete"] and "cpu_usec" not in event


def test_kills_are_named_once_and_not_too_many(database: Database) -> None:
    events = Events(database, lambda *_: {}, lambda: None)

    def kill(sequence: int, when: float, is_new: bool = True) -> None:
        events.killed("a", Kill(sequence, when, 2065536, 7, "x\033[2J", is_new))

    kill(1, 990.0, is_new=False)  # in an earlier sliver with this number
    assert stored(database) == []
    kill(2, 990.0)  # the clock was set back
    kill(2, 990.0, is_new=False)  # the log is read again after a restart
    [event] = stored(database)
    assert (event["kind"], event["pid"], event["memory_limit"]) == ("killed", 7, 2 << 20)
    assert "\033" not in event["program"]
    for number in range(3, 100):
        kill(number, 2000.0)
    assert len(stored(database)) == NAMED
    events.killed("unknown", Kill(500, 2000.0, 1, 1, "x", True))
    assert len(stored(database)) == NAMED


def test_numbers_increase_and_old_events_are_deleted(database: Database) -> None:
    for number in range(400):
        database.add_event({"n": number}, 5 - number, kept=100)  # the clock is set back
    found = database.events_after(0, 1000)
    assert [event["n"] for event in found] == list(range(400 - len(found), 400))
    assert 100 <= len(found) <= 102
    assert [event["number"] for event in found] == sorted({event["number"] for event in found})
