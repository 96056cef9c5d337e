"""Threads of the API."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from nodepool.nodemanager import eventloop
from nodepool.nodemanager.api import listener
from nodepool.nodemanager.eventloop import AHEAD, EventLoop, Workers
from tests.conftest import wait_for


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("Thread-test-workers", 8)
    made.start()
    yield made
    made.stop(20)
    wait_for(
        lambda: not any(t.name.startswith("Thread-test-workers") for t in threading.enumerate()),
        20,
        "the threads to end",
    )


def refused(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def waiting(_thread: threading.Thread) -> None:
    """As Python does when there is no memory for the first step of the thread."""
    threading.Event().wait(5)


@pytest.mark.spec(
    "issue 10, point 5: a host without further threads keeps nobody from being answered"
)
@pytest.mark.parametrize("start", [refused, waiting])
def test_those_that_are_there_do_all_when_there_are_no_more(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, start: Callable[[threading.Thread], None]
) -> None:
    done, go = threading.Semaphore(0), threading.Event()

    def upload() -> None:
        go.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(AHEAD - 1):
            workers.do(upload)
        for _ in range(20):
            workers.do(done.release)
        for _ in range(20):
            assert done.acquire(timeout=20)
        go.set()


def test_as_many_as_are_needed_and_no_more(workers: Workers) -> None:
    """Each waits for the others, so that there must be eight; the ninth comes after them."""
    together = threading.Barrier(8, timeout=20)
    seen, last = [], threading.Event()

    def work() -> None:
        together.wait()
        seen.append(threading.current_thread().name)

    for _ in range(8):
        workers.do(work)
    workers.do(last.set)
    assert last.wait(20)
    wait_for(lambda: len(seen) == 8, 20, "the eight")
    assert len(set(seen)) == 8


def test_what_fails_ends_no_thread(workers: Workers) -> None:
    done = threading.Semaphore(0)

    def fail() -> None:
        raise SystemExit

    for _ in range(20):
        workers.do(fail)
        workers.do(done.release)
    for _ in range(20):
        assert done.acquire(timeout=20)


def test_stop_waits_for_what_is_done_and_drops_the_rest(workers: Workers) -> None:
    begun, go, never = threading.Semaphore(0), threading.Event(), threading.Event()

    def work() -> None:
        begun.release()
        go.wait(60)

    for _ in range(8):
        workers.do(work)
    for _ in range(8):
        assert begun.acquire(timeout=20)
    workers.do(never.set)
    assert not workers.stop(0.01)
    go.set()
    assert workers.stop(20)
    workers.do(never.set)
    assert not never.is_set()


def test_listener_that_was_destroyed_is_watched_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a socket is always ready: watching it on would take a whole processor."""
    monkeypatch.setattr(eventloop, "SHUT_WAIT", 0.05)
    loop = EventLoop("test")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = listener.Listener(server, loop, lambda _connection: None)
        place.begin(None, lambda *_: None, lambda *_: (0.0, 0.0))  # type: ignore[arg-type]
        server.shutdown(socket.SHUT_RDWR)  # as SOCK_DESTROY does
        place.ready()
        assert place.mask is None and place.due is not None
        place.late()
        assert place.mask is not None
        socket.create_connection(server.getsockname(), 5).close()
        place.ready()
        assert place.mask is not None
    loop.close()
