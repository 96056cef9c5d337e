from __future__ import annotations

import threading

from nodepool.cloud import Timers
from tests.conftest import wait_for


def test_functions_run_in_the_order_of_their_time_and_errors_stop_nothing() -> None:
    timers = Timers("test")
    seen: list[str] = []

    def broken() -> None:
        raise ValueError("oops")

    try:
        timers.after(0.1, lambda: seen.append("later"))
        timers.after(0.0, broken)
        timers.after(0.02, lambda: seen.append("soon"))
        timers.after(0.05, lambda: seen.append("cancelled")).cancel()
        wait_for(lambda: len(seen) == 2, 5, "both ran")
        assert seen == ["soon", "later"]
        assert any(thread.name == "Thread-timers-test" for thread in threading.enumerate())
    finally:
        timers.stop()
    assert not any(thread.name == "Thread-timers-test" for thread in threading.enumerate())
    timers.after(0, lambda: seen.append("never"))
    assert len(seen) == 2
