"""One thread for many descriptors, timers and listeners; and worker threads (C.5)."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("nodepool.nodemanager.server")

IN, OUT = select.EPOLLIN, select.EPOLLOUT
#: Connections that are accepted from one listener before it is the turn of others.
BATCH = 4
#: Seconds to wait when the process has no descriptor left.
DESCRIPTOR_WAIT = 0.1
#: Seconds until a listener that has been shut is opened again.
SHUT_WAIT = 1.0
#: Connections that wait to be accepted; the kernel has its own limit.
BACKLOG = 4096
#: Errors of accept(2) that concern one connection only.
_PASSING = frozenset(
    (
        errno.EAGAIN,
        errno.EINTR,
        errno.ECONNABORTED,
        errno.EPERM,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
    )
)
#: Seconds between two log lines about the same problem.
SILENCE = 60.0
#: Threads that are started in advance.
AHEAD = 4
#: Seconds until the next attempt to start a thread after a failure.
SHORTAGE_WAIT = 1.0


class Waiter:
    """A descriptor and a timer that the loop watches; used by the loop's thread only."""

    #: Of several that are ready, the lowest goes first.
    rank = 0

    def __init__(self) -> None:
        self.number = -1
        self.mask: int | None = None
        self.due: float | None = None

    def ready(self) -> None:
        """Handle a descriptor that is ready or whose other end is closed."""

    def late(self) -> None:
        """Handle the end of the time limit."""


class EventLoop:
    """The loop.

    :param name: of the thread.
    :param afterwards: called after each round.
    """

    def __init__(self, name: str, afterwards: Callable[[], None] = lambda: None) -> None:
        self._poll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake_read, IN)
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._waiters: dict[int, Waiter] = {}
        self._times: list[tuple[float, int, Waiter]] = []
        self._count = itertools.count()
        self._running = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._afterwards = afterwards

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop the thread; return whether it has ended."""
        self._running = False
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close the descriptors, after the thread has ended."""
        with self._lock:
            if self._wake_write >= 0:
                self._poll.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    # -- from any thread

    def post(self, step: Callable[[], None]) -> None:
        """Have it done by the loop's thread."""
        self._posted.append(step)
        self._wake()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    # -- from the loop's thread

    def watch(self, waiter: Waiter, mask: int | None) -> None:
        """Set the events to wait for; 0: only the end of the connection; None: nothing."""
        if mask == waiter.mask:
            return
        if mask is None:
            self._waiters.pop(waiter.number, None)
            self._poll.unregister(waiter.number)
        elif waiter.mask is None:
            self._poll.register(waiter.number, mask)
            self._waiters[waiter.number] = waiter
        else:
            self._poll.modify(waiter.number, mask)
        waiter.mask = mask

    def at(self, waiter: Waiter, when: float | None) -> None:
        """Set the time limit by the monotonic clock; None: never."""
        waiter.due = when
        if when is None:
            return
        heapq.heappush(self._times, (when, next(self._count), waiter))
        if len(self._times) > 4 * len(self._waiters) + 4096:
            # Most belong to waiters that ended before their time limit.
            self._times = [entry for entry in self._times if entry[2].due == entry[0]]
            heapq.heapify(self._times)

    def _run(self) -> None:
        while self._running:
            self._do(self._round)

    def _round(self) -> None:
        while self._times and self._times[0][2].due != self._times[0][0]:
            heapq.heappop(self._times)
        events = self._poll.poll(
            max(0.0, self._times[0][0] - time.monotonic()) if self._times else None
        )
        ready = [self._waiters[number] for number, _ in events if number in self._waiters]
        if len(ready) < len(events):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for _ in range(len(self._posted)):
            self._do(self._posted.popleft())
        for waiter in sorted(ready, key=lambda waiter: waiter.rank):
            if waiter.mask is not None:
                self._do(waiter.ready)
        now = time.monotonic()
        while self._times and self._times[0][0] <= now:
            when, _, waiter = heapq.heappop(self._times)
            if waiter.due == when:
                waiter.due = None
                self._do(waiter.late)
        self._do(self._afterwards)

    @staticmethod
    def _do(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("Error in %s:", threading.current_thread().name)


class Watched(Waiter):
    """A descriptor or timer with these handlers."""

    def __init__(
        self, number: int, ready: Callable[[], None], late: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.number = number
        self._steps = ready, late

    def ready(self) -> None:
        self._steps[0]()

    def late(self) -> None:
        self._steps[1]()


def listen(address: str, port: int, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening TCP socket. Raises OSError."""
    listener = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


class Acceptor(Waiter):
    """Accepts the connections of a listening socket, in the loop's thread."""

    #: When the lack of descriptors was last logged, for each class.
    told = float("-inf")
    _shut = False
    #: Of the socket when it is opened again.
    backlog = BACKLOG
    #: What is accepted, for the log.
    what = "Connections"

    def __init__(self, stream: socket.socket, loop: EventLoop) -> None:
        super().__init__()
        stream.setblocking(False)
        self.socket = stream
        self.number = stream.fileno()
        self._loop = loop

    def start(self) -> None:
        """Start accepting; called by the loop's thread."""
        self._loop.watch(self, IN)

    def end(self) -> None:
        """Accept no more, and close the socket."""
        self._loop.watch(self, None)
        self._loop.at(self, None)
        self.socket.close()

    def accepted(self, stream: socket.socket, address: tuple[str, int], begun: float) -> float:
        """Handle a new connection; return the seconds to wait before the next one.

        After an exception the connection is closed.

        :param begun: processor time of the thread before it was accepted.
        """
        raise NotImplementedError

    def ready(self) -> None:
        for _ in range(BATCH):
            begun = time.thread_time()
            try:
                stream, address = self.socket.accept()
            except OSError as error:
                self._cannot_accept(error)
                return
            wait = 0.0
            try:
                stream.setblocking(False)
                wait = self.accepted(stream, address, begun)
            except OSError:
                stream.close()
            except Exception:
                log.exception("Accepting a new connection failed:")
                stream.close()
            if wait:
                self._pause(wait)
                return

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
            if time.monotonic() - type(self).told > SILENCE:
                type(self).told = time.monotonic()
                log.error("%s are queued until descriptors are free: %s", self.what, error.strerror)
            # It stays ready: without a pause this would be a busy loop.
            self._pause(DESCRIPTOR_WAIT)
        elif error.errno not in _PASSING:
            # A sliver's root with network rights can destroy the socket, which is then always
            # ready.
            self._shut = True
            self._pause(SHUT_WAIT)

    def _pause(self, seconds: float) -> None:
        self._loop.watch(self, None)
        self._loop.at(self, time.monotonic() + seconds)

    def late(self) -> None:
        if self._shut:
            try:
                self.socket.listen(self.backlog)  # it is still bound
            except OSError:
                self._pause(SHUT_WAIT)
                return
            self._shut = False
        self._loop.watch(self, IN)


class Workers:
    """Threads that are started on demand, as long as there can be more.

    One separate thread starts them: without memory for the first step of a new thread, Python lets
    the caller of start() wait forever (CPython issue 140746). In that case the existing threads do
    all the work.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        lock = threading.Lock()
        self._work, self._need, self._idle = (
            threading.Condition(lock),
            threading.Condition(lock),
            threading.Condition(lock),
        )
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        #: Threads without a job.
        self._free = 0
        #: Jobs that are waiting or running.
        self._working = 0
        self._running = True

    def start(self) -> None:
        """Start the first threads. Raises RuntimeError: the host has none available."""
        for _ in range(min(AHEAD, self._most)):
            with self._work:
                self._threads += 1
            self._add()
        if self._threads < self._most:
            threading.Thread(target=self._make, name=f"{self._name}_more", daemon=True).start()

    def _add(self) -> None:
        threading.Thread(
            target=self._run, name=f"{self._name}_{self._threads}", daemon=True
        ).start()

    def do(self, job: Callable[[], None]) -> None:
        with self._work:
            if not self._running:
                return
            self._working += 1
            self._jobs.append(job)
            if len(self._jobs) <= self._free:
                self._work.notify()
            else:
                self._need.notify()

    def _make(self) -> None:
        while True:
            with self._need:
                self._need.wait_for(
                    lambda: (
                        not self._running
                        or (self._threads < self._most and len(self._jobs) > self._free)
                    )
                )
                if not self._running:
                    return
                self._threads += 1
            try:
                self._add()
            except RuntimeError as error:
                log.error(
                    "Starting a thread for the API failed, continuing with %s threads: %s",
                    self._threads - 1,
                    error,
                )
                with self._need:
                    self._threads -= 1
                    self._need.wait(SHORTAGE_WAIT)

    def _run(self) -> None:
        while True:
            with self._work:
                self._free += 1
                self._work.wait_for(lambda: self._jobs or not self._running)
                self._free -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                log.exception("Error in %s:", threading.current_thread().name)
            with self._work:
                self._working -= 1
                self._idle.notify_all()

    def stop(self, timeout: float) -> bool:
        """Drop waiting jobs; return whether all others have ended."""
        with self._work:
            self._running = False
            self._working -= len(self._jobs)
            self._jobs.clear()
            self._work.notify_all()
            self._need.notify_all()
            return self._idle.wait_for(lambda: self._working <= 0, max(0.0, timeout))
