"""A thread that must live and has ended is noticed; one that was asked to end is not."""

from __future__ import annotations

import threading

from nodepool.process.watchdog import Watchdog


def run(watchdog: Watchdog, thread: threading.Thread) -> list[str]:
    """Until it has ended; who was called."""
    called: list[str] = []
    watchdog.on_end = lambda: called.append(threading.current_thread().name)
    thread.start()
    thread.join(10)
    return called


def fail() -> None:
    raise SystemExit("of a driver")


def test_an_error_is_reported() -> None:
    watchdog = Watchdog()
    thread = threading.Thread(target=fail, name="important")
    watchdog.guard(thread, may_end=lambda: True)
    assert run(watchdog, thread) == ["important"]
    assert watchdog.ended == ["thread important has ended (SystemExit: of a driver)"]


def test_an_end_without_an_error_is_reported_unless_it_is_expected() -> None:
    watchdog = Watchdog()
    for may_end in (False, True):
        thread = threading.Thread(target=lambda: None, name=f"may end: {may_end}")
        watchdog.guard(thread, may_end=lambda may_end=may_end: may_end)  # type: ignore[misc]
        run(watchdog, thread)
    assert watchdog.ended == ["thread may end: False has ended (without an error)"]


def test_nothing_is_reported_while_stopping() -> None:
    watchdog = Watchdog()
    thread = threading.Thread(target=fail, name="important")
    watchdog.guard(thread)
    watchdog.release()
    assert run(watchdog, thread) == []
    assert watchdog.ended == []
