from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.cloud import AdaptiveRate, CallsStopped, CallTimeout
from nodepool.cloud.rates import FLOOR, FORGIVEN
from tests.conftest import wait_for
from tests.support.clock import HandClock
from tests.support.deadline import limit


def make(rate: float | None) -> tuple[AdaptiveRate, HandClock]:
    clock = HandClock()
    return AdaptiveRate("test", rate, clock=clock, wait=clock.wait), clock


def test_calls_are_spaced_without_burst() -> None:
    rate, clock = make(2)
    times = []
    for _ in range(3):
        rate.acquire()
        times.append(clock.now)
    clock.now += 10
    for _ in range(2):
        rate.acquire()
        times.append(clock.now)
    assert [round(t - 1000, 3) for t in times] == [0, 0.5, 1.0, 11.0, 11.5]


def test_throttling_halves_down_to_a_floor_and_success_brings_the_pace_back() -> None:
    rate, clock = make(4)
    rate.throttled()
    assert rate.pace == 2
    assert rate.slowed
    assert "throttled" in rate.describe()
    for _ in range(20):
        rate.throttled()
    assert rate.pace == pytest.approx(FLOOR)
    needed = 0
    while rate.slowed:
        needed += 1
        assert needed <= 20
        rate.succeeded()
    assert rate.pace == 4
    assert rate.describe() == "4/s"
    assert clock.waits == []


def test_a_burst_of_refusals_halves_once() -> None:
    rate, clock = make(8)
    started = clock.now
    clock.now += 1
    for _ in range(5):
        rate.throttled(started)
    assert rate.pace == 4
    clock.now += 1
    rate.throttled(clock.now)
    assert rate.pace == 2


def test_an_unlimited_pace_gets_a_limit_while_throttled() -> None:
    rate, clock = make(None)
    for _ in range(100):
        rate.acquire()
    assert clock.waits == []
    rate.throttled()
    assert rate.pace == 5
    while rate.slowed:
        rate.succeeded()
    assert rate.pace is None


def test_no_turn_within_the_deadline() -> None:
    rate, clock = make(0.1)
    rate.acquire()
    with pytest.raises(CallTimeout):
        rate.acquire(clock.now + 5)
    assert clock.waits == [], "it is clear at once"
    rate.acquire(clock.now + 20)


def test_stop_ends_waits_immediately() -> None:
    rate = AdaptiveRate("test", 0.001)
    rate.acquire()
    ends: list[BaseException] = []

    def work() -> None:
        try:
            rate.acquire()
        except CallsStopped as error:
            ends.append(error)

    threads = [threading.Thread(target=work, name=f"waiter-{n}") for n in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(rate._queue) == 3, 5, "all wait")
    started = time.monotonic()
    rate.stop()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - started < limit(2)
    assert len(ends) == 3


def test_recovery_wakes_those_who_wait_at_the_slow_pace() -> None:
    rate = AdaptiveRate("test", 50)
    for _ in range(20):
        rate.throttled()
    rate.acquire()
    thread = threading.Thread(target=rate.acquire, name="waiter")
    thread.start()
    wait_for(lambda: len(rate._queue) == 1, 5, "one waits")
    for _ in range(20):
        rate.succeeded()
    thread.join(5)
    assert not thread.is_alive()


@given(st.floats(0.05, 100), st.lists(st.booleans(), max_size=60))
def test_pace_stays_between_floor_and_configured_rate(
    configured: float, events: list[bool]
) -> None:
    rate, clock = make(configured)
    for good in events:
        before = rate.pace or 0
        clock.now += 0.01
        if good:
            rate.succeeded()
            assert (rate.pace or 0) >= before
        else:
            rate.throttled(clock.now)
            assert (rate.pace or 0) <= before
        assert min(FLOOR, configured) - 1e-9 <= (rate.pace or 0) <= configured + 1e-9
    for _ in range(20):
        rate.succeeded()
    assert not rate.slowed


@given(st.floats(0.1, 50), st.lists(st.floats(0, 5), min_size=2, max_size=20))
def test_never_closer_than_the_pace(configured: float, gaps: list[float]) -> None:
    rate, clock = make(configured)
    last = None
    for gap in gaps:
        clock.now += gap
        rate.acquire()
        if last is not None:
            assert clock.now - last >= 1 / configured - 1e-6
        last = clock.now


@pytest.mark.parametrize("full", [4, None])
def test_time_alone_brings_the_pace_back(full: float | None) -> None:
    """A service that is asked once an hour would stay throttled for days otherwise."""
    rate, clock = make(full)
    rate.throttled()
    rate.throttled()
    assert rate.slowed
    clock.now += FORGIVEN - 1
    assert rate.slowed
    clock.now += 2
    assert (rate.slowed, rate.pace) == (False, full)
    rate.acquire()
    rate.throttled()
    assert rate.pace == (full or 10) / 2
