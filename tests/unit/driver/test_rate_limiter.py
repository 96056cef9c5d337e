from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from nodepool.driver.utils import RateLimiter, RateLimitInstance


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def make(rate: float | None) -> tuple[RateLimiter, Clock]:
    clock = Clock()
    return RateLimiter(
        "test", rate, clock=clock, wait=lambda _condition, seconds: clock.sleep(seconds)
    ), clock


@pytest.mark.spec("LAU-19: at least 1/rate seconds between entries, no burst")
def test_entries_are_spaced() -> None:
    limiter, clock = make(2)
    entries = []
    for _ in range(3):
        with limiter:
            entries.append(clock.now)
    clock.now += 10  # a pause does not buy a burst afterwards
    for _ in range(2):
        with limiter:
            entries.append(clock.now)
    assert entries == [100.0, 100.5, 101.0, 111.0, 111.5]


@pytest.mark.parametrize("rate", [None, 0])
@pytest.mark.spec("LAU-19: no limit when rate is empty")
def test_calls_are_not_delayed_without_a_rate(rate: float | None) -> None:
    limiter, clock = make(rate)
    for _ in range(100):
        with limiter:
            pass
    assert clock.slept == []


def test_log_line_names_duration_and_delay() -> None:
    limiter, clock = make(1)
    lines: list[str] = []

    def log(fmt: str, *args: Any) -> None:
        lines.append(fmt % args)

    for _ in range(2):
        with limiter(log, "listed servers") as instance:
            assert isinstance(instance, RateLimitInstance)
            clock.now += 0.25
    assert lines == [
        "listed servers in 0.25s after 0.0s delay",
        "listed servers in 0.25s after 0.75s delay",
    ]


def test_error_inside_passes_through_and_is_logged() -> None:
    limiter, _ = make(1)
    lines: list[Any] = []
    with pytest.raises(ValueError, match="boom"), limiter(lambda *a: lines.append(a), "call"):
        raise ValueError("boom")
    assert len(lines) == 1


def test_threads_are_kept_apart_but_work_overlaps() -> None:
    limiter = RateLimiter("threads", 100)
    entries: list[float] = []
    inside = threading.Barrier(4, timeout=10)

    def work() -> None:
        with limiter:
            entries.append(time.monotonic())
            inside.wait()  # passes only when all four are inside together

    began = time.monotonic()
    threads = [threading.Thread(target=work, name=f"limited-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert max(entries) - began >= 0.0299
