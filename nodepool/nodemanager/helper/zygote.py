"""The daemon's handle of its helper, which creates slivers and starts programs in them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nodepool.nodemanager.helper.frames import receive_frame, send_frame
from nodepool.nodemanager.kernel.descriptors import readable
from nodepool.nodemanager.outcomes import BackendError, Exit

log = logging.getLogger("nodepool.nodemanager.zygote")


class SpawnedProcess:
    """A process inside a sliver, as seen by the daemon."""

    def __init__(self, pid: int, pidfd: int, events: socket.socket) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._events = events
        self._exit: Exit | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended."""
        return self._events.fileno()

    def wait(self, timeout: float) -> Exit | None:
        """Return the exit status; None while it still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._exit is None:
            if not readable([self._events.fileno()], deadline - time.monotonic()):
                return None
            self._events.settimeout(5.0)
            try:
                frame = receive_frame(self._events)
            except (OSError, ValueError):
                frame = None
            if frame is not None:
                self._exit = Exit(int(frame[0]["exit"]))
            elif readable([self.pidfd], deadline - time.monotonic()):
                self._exit = Exit(None)
            else:
                return None
        return self._exit

    def close(self) -> None:
        """Drop the descriptors; the process keeps running."""
        self._events.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def __enter__(self) -> SpawnedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A process inside a sliver that is being started."""

    def __init__(self, connection: socket.socket, operation: str, timeout: float) -> None:
        self._connection = connection
        self._operation = operation
        self._timeout = timeout
        # Slightly more than the worker's own limit, whose answer has the better text.
        self.deadline = time.monotonic() + timeout + 2.0

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an answer."""
        return self._connection.fileno()

    def answer(self) -> tuple[dict[str, Any], list[int], socket.socket]:
        """Wait for the answer; the caller owns its descriptors and the connection. BackendError."""
        try:
            if not readable([self.fileno()], self.deadline - time.monotonic()):
                raise BackendError(
                    f"{self._operation}: the helper gave no answer within {self._timeout:g} s",
                    retry=True,
                )
            self._connection.settimeout(5.0)
            frame = None
            with contextlib.suppress(ConnectionResetError):  # it has not even been read
                frame = receive_frame(self._connection)
            if frame is None:
                raise BackendError(
                    f"{self._operation}: the worker was killed before it finished, or never ran "
                    "(no memory left in the sliver, "
                    f"no descriptors left for the helper, or over {self._timeout:g} s)",
                    retry=True,
                )
            answer, received = frame
            if "error" in answer:
                for descriptor in received:
                    os.close(descriptor)
                raise BackendError(str(answer["error"]), retry=bool(answer.get("retry")))
        except (OSError, ValueError) as error:
            self.close()
            raise BackendError(
                f"{self._operation}: the helper closed the connection: {error}", retry=True
            ) from error
        except BaseException:
            self.close()
            raise
        return answer, received, self._connection

    def go_on(self, more: Mapping[str, Any] | None = None, descriptor: int | None = None) -> None:
        """Send the rest of the request (`wait_for_daemon`); close the descriptor. Never raises."""
        given = [] if descriptor is None else [descriptor]
        with contextlib.suppress(OSError):
            send_frame(self._connection, more or {}, given)
        for each in given:
            os.close(each)

    def process(self) -> SpawnedProcess:
        """Return the process once it runs. Raises BackendError."""
        answer, received, connection = self.answer()
        return SpawnedProcess(int(answer["pid"]), received[0], connection)

    def close(self) -> None:
        """Drop the request without waiting for the answer."""
        self._connection.close()


class Zygote:
    """The daemon's handle of the helper. Thread-safe; started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the helper."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the helper when none runs. Raises BackendError."""
        with self._lock:
            self._running()

    def _running(self) -> socket.socket:
        if self._closed:
            raise BackendError("the node manager is stopping", retry=True)
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        if self._socket is not None:
            log.warning("The helper that starts slivers ended unexpectedly; restarting it")
            self._socket.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "nodepool.nodemanager.helper_program",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    close_fds=True,
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                ours.close()
                self._socket = None
                raise BackendError(
                    f"the helper that starts slivers cannot be run: {error}", retry=True
                ) from error
        self._socket = ours
        return ours

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the helper; running workers finish, slivers keep running."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._process is not None:
                try:
                    self._process.wait(timeout)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(timeout)
                self._process = None

    def _submit(self, worker_end: socket.socket) -> None:
        for attempt in (1, 2):
            with self._lock:
                connection = self._running()
                try:
                    connection.settimeout(10.0)
                    socket.send_fds(connection, [b"r"], [worker_end.fileno()])
                    return
                except OSError as error:
                    if attempt == 2:
                        raise BackendError(
                            f"the helper that starts slivers does not answer: {error}", retry=True
                        ) from error
                    if self._process is not None:
                        self._process.kill()
                        self._process.wait(5.0)

    def begin(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        timeout: float = 30.0,
    ) -> Pending:
        """Start an operation without waiting for it. Raises BackendError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._submit(theirs)
            ours.settimeout(timeout + 2.0)
            with contextlib.suppress(BrokenPipeError):  # refused already: the answer has the reason
                send_frame(
                    ours, {**arguments, "operation": operation, "timeout": timeout}, descriptors
                )
        except OSError as error:
            ours.close()
            raise BackendError(
                f"{operation}: the helper closed the connection: {error}", retry=True
            ) from error
        except BaseException:
            ours.close()
            raise
        return Pending(ours, operation, timeout)

    def call(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        timeout: float = 30.0,
    ) -> tuple[dict[str, Any], list[int]]:
        """Run an operation; return the answer and its descriptors, which the caller closes."""
        answer, received, connection = self.begin(
            operation, arguments, descriptors, timeout
        ).answer()
        connection.close()
        return answer, received
