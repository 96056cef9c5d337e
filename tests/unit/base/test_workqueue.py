"""The queue of keys: merging, delay, priority, exclusion; and the loop around it."""

from __future__ import annotations

import logging
import threading
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.base.backoff import Backoff
from nodepool.base.workqueue import Reconciler, WorkQueue
from tests.conftest import wait_for


class _WouldWait(Exception):
    pass


def ready(queue: WorkQueue[Any]) -> Any:
    """Return the next key; None if a worker would have to wait for one, or the queue is closed."""
    with mock.patch.object(queue._condition, "wait", side_effect=_WouldWait):
        try:
            return queue.get()
        except _WouldWait:
            return None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


KEYS = st.integers(0, 4)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS, st.booleans()),
        st.tuples(st.just("later"), KEYS, st.integers(0, 5)),
        st.tuples(st.just("get")),
        st.tuples(st.just("done"), KEYS),
        st.tuples(st.just("time"), st.integers(1, 4)),
    ),
    max_size=60,
)


class Model:
    """What the queue should do, said simply: a state per key."""

    def __init__(self) -> None:
        self.urgent: list[int] = []
        self.normal: list[int] = []
        self.due: dict[int, float] = {}
        self.working: set[int] = set()
        self.again: dict[int, bool] = {}

    def ready(self, key: int, urgent: bool) -> None:
        if key in self.working:
            self.again[key] = self.again.get(key, False) or urgent
        elif key not in self.urgent and key not in self.normal:
            (self.urgent if urgent else self.normal).append(key)

    def promote(self, now: float) -> None:
        for key in sorted(self.due, key=lambda k: self.due[k]):
            if self.due[key] <= now:
                del self.due[key]
                self.ready(key, False)


@given(OPERATIONS)
def test_like_the_model(operations: list[tuple[Any, ...]]) -> None:
    clock, model = Clock(), Model()
    queue: WorkQueue[int] = WorkQueue(clock)
    for kind, *values in operations:
        if kind == "add":
            if values[1]:
                queue.add(values[0])
            else:
                queue.add_all([values[0]])
            model.due.pop(values[0], None)
            model.ready(values[0], values[1])
        elif kind == "later":
            # Distinct due times, so that the order among them is defined.
            delay = values[1] + values[0] / 100
            queue.add_later(values[0], delay)
            if values[0] not in model.urgent and values[0] not in model.normal:
                due = clock.now + delay
                model.due[values[0]] = min(due, model.due.get(values[0], due))
        elif kind == "get":
            model.promote(clock.now)
            waiting = model.urgent or model.normal
            expected = waiting.pop(0) if waiting else None
            key = ready(queue)
            assert key == expected
            if key is not None:
                assert key not in model.working, "never to two at once"
                model.working.add(key)
        elif kind == "done":
            queue.done(values[0])
            model.working.discard(values[0])
            urgent = model.again.pop(values[0], None)
            if urgent is not None:
                model.ready(values[0], urgent)
        else:
            clock.now += values[0]
        assert len(queue) == len(model.urgent) + len(model.normal) + len(model.due)


def test_a_key_added_while_worked_on_is_handed_out_again() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("k")
    assert ready(queue) == "k"
    queue.add("k")
    queue.add_all(["k"])
    assert ready(queue) is None
    queue.done("k")
    assert ready(queue) == "k"
    queue.done("k")
    assert ready(queue) is None


def test_an_earlier_time_wins_and_urgent_keys_go_first() -> None:
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add_later("late", 10)
    queue.add_later("late", 5)
    queue.add_later("late", 20)
    queue.add_all(["bulk"])
    queue.add("now")
    assert [ready(queue), ready(queue), ready(queue)] == ["now", "bulk", None]
    clock.now += 5
    assert ready(queue) == "late"
    clock.now += 20
    assert ready(queue) is None


def test_close_wakes_everybody() -> None:
    queue: WorkQueue[str] = WorkQueue()
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(queue.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(5)
    assert results == [None] * 3
    queue.add("k")
    assert ready(queue) is None


def test_the_reconciler_retries_with_growing_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "BACKOFF", Backoff(0.01, 1.0))
    calls: list[str] = []

    def reconcile(key: str) -> float | None:
        calls.append(key)
        if len(calls) < 3:
            raise RuntimeError("induced")
        return 0.01 if len(calls) == 3 else None

    worker: Reconciler[str] = Reconciler("Thread-reconciler", reconcile, logging.getLogger("test"))
    worker.start()
    worker.queue.add("k")
    wait_for(lambda: len(calls) == 4)
    assert all(thread.is_alive() for thread in worker.threads)
    worker.stop()
    worker.join(5)
    assert not any(thread.is_alive() for thread in worker.threads)


def test_several_threads_share_keys_but_never_one_key() -> None:
    lock, active, most = threading.Lock(), set[int](), [0]
    seen: list[int] = []

    def reconcile(key: int) -> None:
        with lock:
            assert key not in active
            active.add(key)
            most[0] = max(most[0], len(active))
        with lock:
            active.remove(key)
            seen.append(key)

    worker: Reconciler[int] = Reconciler(
        "Thread-reconciler", reconcile, logging.getLogger("test"), threads=4
    )
    for key in range(50):
        worker.queue.add(key % 10)
    worker.start()
    wait_for(lambda: set(seen) == set(range(10)))
    for key in range(10):
        worker.queue.add(key)
    wait_for(lambda: len(seen) >= 20)
    worker.stop()
    worker.join(5)
    assert len(seen) == 20


def test_what_fails_for_days_is_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "BACKOFF", Backoff(1e-9, 1e-9))
    calls: list[str] = []

    def reconcile(key: str) -> float | None:
        calls.append(key)
        if len(calls) < 1100:
            raise RuntimeError("induced")
        return None

    log = logging.getLogger("test.days")
    log.disabled = True
    worker: Reconciler[str] = Reconciler("Thread-reconciler", reconcile, log)
    worker.start()
    worker.queue.add("k")
    wait_for(lambda: len(calls) == 1100)
    assert all(thread.is_alive() for thread in worker.threads)
    worker.stop()
    worker.join(5)
