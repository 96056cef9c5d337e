from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from nodepool.driver.utils import LazyExecutorTTLCache


class ManualExecutor(Executor):
    """Runs what was submitted on request."""

    def __init__(self) -> None:
        self.queue: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.queue.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        for future, call in self.queue:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        self.queue.clear()


class Source:
    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.calls += 1
        if self.error:
            raise self.error
        return self.calls


@pytest.fixture
def parts() -> Iterator[tuple[Callable[[], int], Source, ManualExecutor, list[float]]]:
    now = [1000.0]
    source, executor = Source(), ManualExecutor()
    wrapped = LazyExecutorTTLCache(10, executor, max_age=100, clock=lambda: now[0])(source)
    yield wrapped, source, executor, now


def test_first_call_is_synchronous_and_raises(parts: Any) -> None:
    wrapped, source, executor, _ = parts
    source.error = ValueError("no cloud")
    with pytest.raises(ValueError, match="no cloud"):
        wrapped()
    source.error = None
    assert wrapped() == 2
    assert executor.queue == []


@pytest.mark.spec(
    "DRV-14.29: the TTL cache returns the old value at once when stale and the new one later"
)
def test_stale_value_is_returned_immediately_and_the_new_one_later(parts: Any) -> None:
    wrapped, source, executor, now = parts
    assert wrapped() == 1
    now[0] += 9.9
    assert wrapped() == 1
    assert executor.queue == []
    now[0] += 500
    assert [wrapped() for _ in range(5)] == [1] * 5
    assert len(executor.queue) == 1, "one refresh at a time"
    now[0] += 9
    executor.run()
    assert wrapped() == 2
    now[0] += 9.9  # the age counts from completion
    assert wrapped() == 2
    assert source.calls == 2


@pytest.mark.spec(
    "DRV-6.6: a failed refresh is logged, the old value kept; raised only when too old"
)
def test_failed_refresh_keeps_the_value(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, source, executor, now = parts
    assert wrapped() == 1
    source.error = ValueError("service unavailable")
    now[0] += 10
    assert wrapped() == 1
    executor.run()
    assert wrapped() == 1
    assert "service unavailable" in caplog.text
    assert executor.queue == [], "the next try comes after the ttl"
    now[0] += 10
    assert wrapped() == 1
    executor.run()
    now[0] += 100
    with pytest.raises(ValueError, match="service unavailable"):
        wrapped()
    source.error = None
    with pytest.raises(ValueError, match="service unavailable"):
        wrapped()
    assert source.calls == 4, "the next try comes after the ttl"
    now[0] += 10
    assert wrapped() == 5
    assert executor.queue == []


def test_an_old_error_is_not_reported_again(parts: Any) -> None:
    wrapped, source, executor, now = parts
    assert wrapped() == 1
    source.error = ValueError("for a moment")
    now[0] += 10
    assert wrapped() == 1
    executor.run()
    source.error = None
    now[0] += 3600
    assert wrapped() == 3, "it is asked for anew"


def test_executor_that_is_down(parts: Any) -> None:
    wrapped, _, executor, now = parts
    assert wrapped() == 1
    executor.down = True
    now[0] += 50
    assert wrapped() == 1


def test_arguments_are_passed_but_not_distinguished() -> None:
    class Adapter:
        def __init__(self, executor: Executor) -> None:
            self.list = LazyExecutorTTLCache(10, executor)(self.fetch)

        def fetch(self, what: str, *, more: int = 0) -> tuple[str, int]:
            return what, more

    adapter = Adapter(ManualExecutor())
    assert adapter.list("a", more=1) == ("a", 1)
    assert adapter.list("b") == ("a", 1)


def test_concurrent_first_calls_fetch_once() -> None:
    entered, release = threading.Event(), threading.Event()
    calls: list[int] = []

    def fetch() -> int:
        calls.append(1)
        entered.set()
        assert release.wait(10)
        return len(calls)

    with ThreadPoolExecutor(4, thread_name_prefix="ttl-test") as executor:
        wrapped = LazyExecutorTTLCache(10, executor)(fetch)
        futures = [executor.submit(wrapped) for _ in range(3)]
        assert entered.wait(10)
        release.set()
        assert [future.result(10) for future in futures] == [1, 1, 1]


def test_refresh_on_a_real_executor() -> None:
    now = [0.0]
    source = Source()
    with ThreadPoolExecutor(1, thread_name_prefix="ttl-test") as executor:
        wrapped = LazyExecutorTTLCache(1, executor, clock=lambda: now[0])(source)
        assert wrapped() == 1
        now[0] = 5
        assert wrapped() == 1
        executor.submit(lambda: None).result(10)  # one worker: the refresh is done when this is
        assert wrapped() == 2
