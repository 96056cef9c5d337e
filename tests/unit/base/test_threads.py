"""Threads that all lanes of a process share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest

from nodepool.base import threads
from nodepool.base.threads import AT_ONCE, Threads
from tests.conftest import wait_for

DEADLINE = 20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(threads, "IDLE", 0.2)
    return Threads("Thread-test-shared")


def running() -> int:
    return sum(
        thread.name.startswith(("Thread-test-shared-", "Thread-test-lane"))
        for thread in threading.enumerate()
    )


def test_results_errors_and_names_are_of_the_job(pool: Threads) -> None:
    lane = pool.lane("Thread-test-lane", 2)
    assert lane.submit(lambda a, b: (a, b), 1, b=2).result(DEADLINE) == (1, 2)
    assert (
        lane.submit(lambda: threading.current_thread().name).result(DEADLINE) == "Thread-test-lane"
    )
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0).result(DEADLINE)
    with pytest.raises(SystemExit):
        lane.submit(lambda: exec("raise SystemExit")).result(DEADLINE)


def test_lane_runs_no_more_jobs_than_its_limit(pool: Threads) -> None:
    lane, lock, now, most = pool.lane("Thread-test-lane", 3), threading.Lock(), [0], [0]
    blocked = threading.Barrier(3)

    def job(number: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if number < 3:
            blocked.wait(DEADLINE)
        with lock:
            now[0] -= 1
        return number

    futures = [lane.submit(job, number) for number in range(50)]
    assert [future.result(DEADLINE) for future in futures] == list(range(50))
    assert most == [3]


def test_lanes_whose_jobs_hang_delay_no_other_lane(pool: Threads) -> None:
    proceed = threading.Event()
    hanging = [pool.lane(f"Thread-test-lane-{number}", 4) for number in range(10)]
    futures = [lane.submit(proceed.wait, DEADLINE) for lane in hanging for _ in range(10)]
    assert pool.lane("Thread-test-lane", 1).submit(lambda: "done").result(DEADLINE) == "done"
    assert running() <= 10 * 4 + 2
    proceed.set()
    assert all(future.result(DEADLINE) for future in futures)


def test_quick_jobs_of_many_lanes_need_few_threads(
    pool: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 1.0)
    futures = [pool.lane(f"Thread-test-lane-{number}", 8).submit(int) for number in range(500)]
    assert {future.result(DEADLINE) for future in futures} == {0}
    assert pool.count <= AT_ONCE + 1


def test_consecutive_jobs_need_one_thread(pool: Threads) -> None:
    idents = set()
    for number in range(20):
        idents.add(
            pool.lane(f"Thread-test-lane-{number}", 8).submit(threading.get_ident).result(DEADLINE)
        )
        wait_for(lambda: pool.waiting == 1)
    assert len(idents) == 1


def test_threads_without_work_end(pool: Threads) -> None:
    barrier = threading.Barrier(6)
    lane = pool.lane("Thread-test-lane", 6)
    for future in [lane.submit(barrier.wait, DEADLINE) for _ in range(6)]:
        future.result(DEADLINE)
    wait_for(lambda: running() == 0, what="the end of the threads")
    assert lane.submit(lambda: "again").result(DEADLINE) == "again"


def test_shutdown_waits_for_jobs_and_cancels_those_that_have_not_begun(pool: Threads) -> None:
    lane, began, proceed = pool.lane("Thread-test-lane", 1), threading.Event(), threading.Event()

    def job() -> str:
        began.set()
        proceed.wait(DEADLINE)
        return "ended"

    first, second = lane.submit(job), lane.submit(job)
    assert began.wait(DEADLINE)
    lane.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="shut down"):
        lane.submit(job)
    with pytest.raises(CancelledError):
        second.result(DEADLINE)
    assert not first.done()
    threading.Timer(0.05, proceed.set).start()
    lane.shutdown()
    assert first.result(0) == "ended"


def test_shutdown_runs_queued_jobs_unless_they_are_cancelled(pool: Threads) -> None:
    lane = pool.lane("Thread-test-lane", 1)
    futures = [lane.submit(time.sleep, 0.001) for _ in range(20)]
    lane.shutdown()
    assert all(future.done() for future in futures)


def test_canceled_job_does_not_run_and_frees_its_place(pool: Threads) -> None:
    lane, proceed = pool.lane("Thread-test-lane", 1), threading.Event()
    first = lane.submit(proceed.wait, DEADLINE)
    canceled, ran = lane.submit(pytest.fail), lane.submit(lambda: "ran")
    assert canceled.cancel()
    proceed.set()
    assert (first.result(DEADLINE), ran.result(DEADLINE)) == (True, "ran")
    lane.shutdown()
    assert lane.active == 0


def test_jobs_wait_for_other_threads_when_no_more_can_be_started(
    pool: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, proceed = pool.lane("Thread-test-lane", 8), threading.Event()
    first = lane.submit(proceed.wait, DEADLINE)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = lane.submit(lambda: "second")
    assert not second.done()
    proceed.set()
    assert (first.result(DEADLINE), second.result(DEADLINE), pool.count) == (True, "second", 1)
