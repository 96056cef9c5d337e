"""The thread that advances scans."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace

from nodepool import exceptions
from nodepool.base.problems import log_failure, one_line
from nodepool.nodescan.request import NodescanRequest


class NodescanWorker:
    """Advances at most ``MAX_REQUESTS`` scans at a time in one thread; others wait in order.

    The thread starts with the first scan that needs the network.
    """

    MAX_REQUESTS = 100

    # Only safety nets: every event wakes the loop.
    MAX_WAIT = 60.0
    TICK = 1.0

    def __init__(
        self, name: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.log = logging.getLogger("nodepool.NodescanWorker")
        self.name = name
        self.clock = clock
        self._lock = threading.Lock()
        self._queue: deque[NodescanRequest] = deque()
        self._active: OrderedDict[NodescanRequest, None] = OrderedDict()
        self._ready: set[NodescanRequest] = set()
        self._removed: list[NodescanRequest] = []
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        #: Of the open connections and of `_waker`; while the thread runs.
        self._selector: selectors.BaseSelector
        self._waker = -1

    # From any thread

    def start(self) -> None:
        with self._lock:
            self._running = True
            if self._queue:
                self._ensure_thread()

    def stop(self) -> None:
        """Accept no more requests; running ones fail."""
        with self._lock:
            self._running = False
            self._stopped = True
            idle = self._thread is None
            self._wake()
        if idle:
            self._fail_rest()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def length(self) -> int:
        """Return the number of waiting and running scans."""
        with self._lock:
            return len(self._queue) + len(self._active)

    def addRequest(self, request: NodescanRequest) -> None:
        request.worker = self
        if not request.needsNetwork():
            self._advance(request, False)
            return
        with self._lock:
            if not self._stopped:
                self._queue.append(request)
                if self._running:
                    self._ensure_thread()
                    self._wake()
                return
        request.fail(exceptions.LaunchKeyscanException("The scanner was stopped"))

    def removeRequest(self, request: NodescanRequest | None) -> None:
        """Forget a request, whatever its state."""
        if request is None:
            return
        with self._lock:
            if request in self._active:
                self._removed.append(request)
                self._wake()
            elif request in self._queue:
                self._queue.remove(request)

    def wakeRequest(self, request: NodescanRequest) -> None:
        """Advance the request, because something has happened for it."""
        with self._lock:
            if request in self._active:
                self._ready.add(request)
                self._wake()

    # From the thread that advances

    def registerDescriptor(self, fd: int, request: NodescanRequest | None = None) -> None:
        """Report when a connection is established or refused."""
        if fd not in self._selector.get_map():
            self._selector.register(fd, selectors.EVENT_WRITE, request)

    def unRegisterDescriptor(self, fd: int) -> None:
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._selector.unregister(fd)

    # Internal

    def _ensure_thread(self) -> None:
        """Start the thread if needed. Called with the lock held."""
        if self._thread is None:
            self._open()
            name = f"keyscan-{self.name or hex(id(self))}"
            self._thread = threading.Thread(target=self.run, name=name, daemon=True)
            self._thread.start()

    def _open(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._waker, selectors.EVENT_READ)

    def _close(self) -> None:
        with self._lock:
            os.close(self._waker)
            self._waker = -1
        self._selector.close()

    def _wake(self) -> None:
        """Wake the thread. Called with the lock held."""
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def run(self) -> None:
        try:
            while self._running:
                try:
                    self._step()
                except Exception:
                    self.log.exception("Error in the scan loop:")
            self._fail_rest()
        finally:
            self._close()

    def run_one(self, request: NodescanRequest) -> None:
        """Run one scan in the calling thread, on a worker that was not started."""
        self._open()
        self._running = True
        request.worker = self
        self._queue.append(request)
        try:
            while not request.complete:
                self._step()
        finally:
            self._stopped = True
            request.cleanup()
            self._close()

    def _step(self) -> None:
        with self._lock:
            for request in self._removed:
                self._active.pop(request, None)
            removed, self._removed = self._removed, []
            while self._queue and len(self._active) < self.MAX_REQUESTS:
                request = self._queue.popleft()
                request.start_time = self.clock()
                self._active[request] = None
            ready, self._ready = self._ready, set()
            active = list(self._active)
        for request in removed:
            request.cleanup()
        now = self.clock()
        for request in active:
            if now >= request.deadline:
                request.fail(request.timeoutError())
            elif request in ready or now >= request.wake_at:
                self._advance(request, request in ready)
        done = [request for request in active if request.complete]
        if done:
            with self._lock:
                for request in done:
                    self._active.pop(request, None)
            return  # their slots are free
        self._wait(active)

    def _wait(self, active: list[NodescanRequest]) -> None:
        wake_at = min(
            (min(r.deadline, r.wake_at) for r in active if not r.complete), default=math.inf
        )
        timeout = min(self.MAX_WAIT, max(0.0, wake_at - self.clock()))
        events = self._selector.select(timeout)
        with self._lock:
            for key, _mask in events:
                if key.fd == self._waker:
                    os.eventfd_read(self._waker)
                else:
                    # Once is enough: the request checks the result and continues. For a descriptor
                    # without its request every request does.
                    self._ready.update(self._active if key.data is None else [key.data])
                    self.unRegisterDescriptor(key.fd)

    def _advance(self, request: NodescanRequest, socket_ready: bool) -> None:
        request.wake_at = self.clock() + self.TICK
        try:
            request.advance(socket_ready)
        except Exception as error:
            log_failure(self.log, error, "Error scanning %s", one_line(request.ip))
            request.fail(error)

    def _fail_rest(self) -> None:
        with self._lock:
            rest = [*self._active, *self._queue]
            self._active.clear()
            self._queue.clear()
        for request in rest:
            request.fail(exceptions.LaunchKeyscanException("The scanner was stopped"))


def scan_blocking(ip: str, port: int, timeout: float, gather_hostkeys: bool) -> list[str]:
    """Scan in the calling thread; see ``nodepool.nodeutils.nodescan``."""
    connection = "ssh" if gather_hostkeys else "tcp"
    target = SimpleNamespace(interface_ip=ip, connection_port=port, connection_type=connection)
    request = NodescanRequest(target, True, timeout, logging.getLogger("nodepool.utils"))
    NodescanWorker(ip).run_one(request)
    return request.result()
