"""Parts start in the order of the table and stop in reverse, whatever one of them does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nodepool.process.parts import Group, Part
from tests.support.deadline import limit


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging part waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


class Log:
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, what: str) -> Callable[[], object]:
        return lambda: self.calls.append(what)

    def part(self, name: str) -> Part:
        return Part(
            name, self.note(f"start {name}"), self.note(f"stop {name}"), self.note(f"join {name}")
        )


def fail() -> None:
    raise SystemExit("of a driver")


def test_parts_start_in_order_and_stop_in_reverse() -> None:
    log = Log()
    group = Group(5, log.part("a"), log.part("b"))
    group.start()
    group.stop()
    assert log.calls == ["start a", "start b", "stop b", "stop a", "join b", "join a"]


def test_part_that_is_started_elsewhere_is_stopped_in_its_place() -> None:
    log = Log()
    group = Group(5, log.part("a"), Part("b", stop=log.note("stop b")), log.part("c"))
    group.start()
    log.calls.clear()
    group.stop()
    assert log.calls[:3] == ["stop c", "stop b", "stop a"]


def test_failed_start_is_continued_where_it_failed() -> None:
    log, failures = Log(), iter((True, False))

    def start() -> None:
        if next(failures):
            fail()

    bad = Part("bad", start, log.note("stop bad"), log.note("join bad"))
    group = Group(5, log.part("a"), bad, log.part("b"))
    with pytest.raises(SystemExit, match="of a driver"):
        group.start()
    assert log.calls == ["start a"]
    group.start()
    assert log.calls == ["start a", "start b"]


def test_parts_that_have_not_started_are_asked_to_end_and_not_waited_for() -> None:
    log = Log()
    group = Group(5, log.part("a"), Part("bad", fail), log.part("b"))
    with pytest.raises(SystemExit, match="of a driver"):
        group.start()
    log.calls.clear()
    group.stop()
    assert log.calls == ["stop b", "stop a", "join a"]
    group.stop()
    assert log.calls[3:] == ["stop b", "stop a"], "it may be repeated"


def test_added_part_starts_last_and_is_asked_to_end_without_a_start() -> None:
    log = Log()
    group = Group(5, log.part("a"))
    group.add(log.part("b"))
    group.stop()
    group.start()
    assert log.calls == ["stop b", "stop a", "start a", "start b"]


@pytest.mark.parametrize("method", ["stop", "join"])
def test_failing_part_is_logged_and_the_others_are_stopped(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    bad = Part("bad", stop=fail) if method == "stop" else Part("bad", join=fail)
    group = Group(5, log.part("a"), bad, log.part("b"))
    group.start()
    group.stop()
    assert log.calls[2:] == ["stop b", "stop a", "join b", "join a"]
    assert [record.getMessage() for record in caplog.records] == ["Error while stopping bad:"]
    assert "of a driver" in caplog.text


@pytest.mark.parametrize("method", ["stop", "join"])
def test_hanging_part_is_logged_and_the_others_are_stopped_in_time(
    method: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    bad = Part("bad", stop=gate.wait) if method == "stop" else Part("bad", join=gate.wait)
    group = Group(0.3, log.part("a"), bad, log.part("b"))
    group.start()
    began = time.monotonic()
    group.stop()
    assert 0.3 <= time.monotonic() - began < limit(5)
    assert log.calls[2:] == ["stop b", "stop a", "join b", "join a"]
    assert [record.getMessage() for record in caplog.records] == [
        "Stopping bad takes more than 0.3 s; continuing"
    ]


def test_part_has_its_least_time_when_the_time_is_over(gate: threading.Event) -> None:
    ended: list[bool] = []
    slow = Part("slow", join=lambda: ended.append(gate.wait(0.2)), least=10)
    Group(0, slow, Part("bad", stop=gate.wait)).stop()
    assert ended == [False]


def test_part_may_shorten_the_rest_of_the_stop(gate: threading.Event) -> None:
    group = Group(60, Part("bad", join=gate.wait), Part("silent", stop=lambda: shorten()))

    def shorten() -> None:
        group.deadline = time.monotonic()

    began = time.monotonic()
    group.stop()
    assert time.monotonic() - began < limit(10)


def test_part_that_starts_while_the_others_are_stopped_is_stopped() -> None:
    log, stopping = Log(), threading.Event()
    loop = threading.Thread(target=lambda: group.start(), daemon=True)

    def end_loop() -> None:
        stopping.set()
        loop.join()

    late = Part(
        "late", lambda: (stopping.wait(limit(20)), log.calls.append("start")), log.note("stop")
    )
    group = Group(limit(20), late, Part("loop", stop=end_loop))
    loop.start()
    group.stop()
    assert log.calls == ["start", "stop"]


def test_start_that_is_repeated_starts_nothing_twice() -> None:
    log = Log()
    group = Group(5, log.part("a"))
    group.start()
    group.start()
    assert log.calls == ["start a"]
