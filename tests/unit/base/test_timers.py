from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nodepool.base.threads import Threads
from nodepool.base.timers import Timers
from tests.conftest import wait_for


@pytest.fixture
def process() -> Threads:
    return Threads("test")


@pytest.fixture
def timers(process: Threads) -> Iterator[Timers]:
    timers = process.timers("test")
    yield timers
    timers.stop()
    wait_for(lambda: not running(), 5, "the thread ends with the last timers")


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "Thread-timers"]


def test_functions_run_in_the_order_of_their_time_and_errors_stop_nothing(timers: Timers) -> None:
    seen: list[str] = []

    def broken() -> None:
        raise ValueError("oops")

    timers.after(0.1, lambda: seen.append("later"))
    timers.after(0.0, broken)
    timers.after(0.02, lambda: seen.append("soon"))
    timers.after(0.05, lambda: seen.append("canceled")).cancel()
    wait_for(lambda: len(seen) == 2, 5, "both ran")
    assert seen == ["soon", "later"]


def test_providers_share_a_thread_and_stop_only_their_own_timers(
    process: Threads, timers: Timers
) -> None:
    seen: list[str] = []
    other = process.timers("other")
    begun, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        begun.set()
        go_on.wait(5)

    timers.after(0, hold_up)
    assert begun.wait(5)
    other.after(0, lambda: seen.append("other"))
    timers.after(0, lambda: seen.append("test"))
    assert len(running()) == 1
    other.stop()
    go_on.set()
    other.after(0, lambda: seen.append("after the stop"))
    wait_for(lambda: seen, 5, "timers of the provider that was not stopped")
    assert seen == ["test"]


def test_thread_starts_again_after_the_last_stop(process: Threads) -> None:
    for name in ("first", "second"):
        timers = process.timers(name)
        ran = threading.Event()
        timers.after(0, ran.set)
        assert ran.wait(5)
        timers.stop()
        wait_for(lambda: not running(), 5, f"the thread ends with {name}")


def test_provider_stops_its_timers_in_one_of_them(process: Threads, timers: Timers) -> None:
    other = process.timers("other")
    stopped = threading.Event()

    def stop() -> None:
        other.stop()
        stopped.set()

    other.after(0, stop)
    assert stopped.wait(5)


def test_timers_run_after_a_thread_could_not_be_started(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = threading.Event()

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refused)
        timers.after(0, lambda: None)
    timers.after(0, ran.set)
    assert ran.wait(5)
