"""Programs in slivers whose streams the connection of a call carries: ``Exec`` (NM-C.5).

One thread moves the bytes of all programs and never blocks. It holds at most one piece per
direction of a program: a program that writes faster than its caller reads waits, and so does a
caller that sends faster than the program reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable

from nodepool.nodemanager.api.exchange import LINGER_TIME, xml_answer
from nodepool.nodemanager.api.methods import INTERNAL, Program
from nodepool.nodemanager.api.shares import ALL_SAVED, ALL_TIME
from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.client import frames, xml_rpc
from nodepool.nodemanager.eventloop import IN, OUT, EventLoop, Watched
from nodepool.nodemanager.helper import relay
from nodepool.nodemanager.helper.zygote import Pending, SpawnedProcess
from nodepool.nodemanager.kernel.descriptors import readable
from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager.programs")

#: Seconds between SIGHUP, when the caller has disconnected, and SIGKILL.
KILL_AFTER = 5.0
#: Seconds for the helper to report the exit status of an ended program.
STATUS_TIMEOUT = 2.0
STREAM_HEAD = (
    f"HTTP/1.0 200 OK\r\nContent-Type: {frames.CONTENT_TYPE}\r\nConnection: close\r\n\r\n".encode(
        "ascii"
    )
)
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Session:
    """A program and the connection of its caller; used by the loop's thread only.

    :param over: called when nothing of it is left.
    """

    def __init__(
        self,
        loop: EventLoop,
        stream: socket.socket,
        program: Program,
        over: Callable[[_Session], None],
    ) -> None:
        self.sliver = program.sliver
        self._loop = loop
        self._stream = stream
        self._over = over
        #: None: the connection is closed.
        self._caller: Watched | None = Watched(stream.fileno(), self._received, self._end_program)
        self._starting: Pending | None = None
        self._process: SpawnedProcess | None = None
        #: The start of the program, and then its end.
        self._event: Watched | None = None
        #: By type of frame. Of the outputs, the first is read next.
        self._pipes: dict[int, Watched] = {}
        #: Type of frame -> bytes that its pipe still had at the end of the program. Its children
        #: may continue to write.
        self._left: dict[int, int] = {}
        #: From the caller: what is not a whole frame yet, and what the program has not read yet.
        self._arrived, self._inward = bytearray(), memoryview(b"")
        self._outward = memoryview(b"")
        #: The last frame, or the fault that is the answer instead; empty: it is being sent.
        self._last: bytes | None = None

    # -- life

    def begin(self, program: Program) -> None:
        given: list[int] = []
        try:
            for kind in (frames.STDIN, frames.STDOUT, frames.STDERR):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                ours, theirs = (writing, reading) if kind == frames.STDIN else (reading, writing)
                given.append(theirs)
                self._pipes[kind] = Watched(ours, self._move, self._move)
                os.set_blocking(ours, False)
            self._starting = program.start(*given)
        except (BackendError, OSError) as error:
            self.refuse(str(error))
        else:
            self._expect(
                self._starting.fileno(), self._started, self._started, self._starting.deadline
            )
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._move()

    def _expect(
        self,
        descriptor: int,
        ready: Callable[[], None],
        late: Callable[[], None],
        when: float | None = None,
    ) -> None:
        """Wait for the next event in the life of the program."""
        self._event = Watched(descriptor, ready, late)
        self._loop.watch(self._event, IN)
        self._loop.at(self._event, when)

    def _drop(self, watched: Watched | None) -> None:
        if watched is not None:
            self._loop.watch(watched, None)
            self._loop.at(watched, None)

    def refuse(self, reason: str) -> None:
        """Answer with a fault; there is no program."""
        self._last = xml_answer(xml_rpc.fault(INTERNAL, reason))
        self._close_pipes()
        self._move()

    def _started(self) -> None:
        assert self._starting is not None
        self._drop(self._event)
        starting, self._starting = self._starting, None
        try:
            self._process = starting.process()
        except BackendError as error:
            self.refuse(str(error))
        else:
            self._outward = memoryview(STREAM_HEAD)
            self._expect(self._process.pidfd, self._died, lambda: self._signal(signal.SIGKILL))
            self._move()
        if self._caller is None:
            self._hang_up()

    def _died(self) -> None:
        assert self._process is not None
        self._drop(self._event)
        self._expect(
            self._process.fileno(), self._ended, self._ended, time.monotonic() + STATUS_TIMEOUT
        )

    def _ended(self) -> None:
        assert self._process is not None
        self._drop(self._event)
        process, self._process = self._process, None
        found = process.wait(0)
        process.close()
        self._last = frames.pack(
            frames.EXIT, b"" if found is None or found.status is None else b"%d" % found.status
        )
        for kind, pipe in self._pipes.items():
            if kind != frames.STDIN:
                (self._left[kind],) = struct.unpack(
                    "i", fcntl.ioctl(pipe.number, termios.FIONREAD, bytes(4))
                )
        self._move()
        self._check()

    def _signal(self, number: int) -> None:
        """Signal the program and its children, except those that have left its process group."""
        # Once it has ended, its number may belong to another process.
        if self._process is not None and not readable([self._process.pidfd], 0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _end_program(self) -> None:
        """Close the connection; end the program if it still runs."""
        if self._caller is None:
            return
        self._drop(self._caller)
        self._caller = None
        self._stream.close()
        if self._starting is None:
            self._hang_up()

    def _hang_up(self) -> None:
        # Before its input ends: a program must not mistake the end of the connection for the end of
        # the data.
        self._signal(signal.SIGHUP)
        if self._process is not None and self._event is not None:
            self._loop.at(self._event, time.monotonic() + KILL_AFTER)
        if frames.STDIN in self._pipes:
            self._close(frames.STDIN)
        # The others remain open: its last words must not end a program that cleans up.
        for pipe in self._pipes.values():
            self._drop(pipe)
        self._check()

    def _check(self) -> None:
        if self._caller is None and self._process is None:
            self._close_pipes()
            self._over(self)

    def kill(self) -> None:
        """End everything immediately; the loop's thread has ended."""
        self._signal(signal.SIGKILL)
        self._end_program()
        self._close_pipes()
        for each in (self._starting, self._process):
            if each is not None:
                each.close()

    def _close_pipes(self) -> None:
        for kind in list(self._pipes):
            self._close(kind)

    def _close(self, kind: int) -> None:
        pipe = self._pipes.pop(kind)
        self._drop(pipe)
        os.close(pipe.number)
        if kind == frames.STDIN:
            self._inward = memoryview(b"")

    # -- streams

    def _received(self) -> None:
        poll = select.poll()
        poll.register(self._stream.fileno(), _GONE)
        if poll.poll(0):
            self._end_program()
        else:
            self._move()

    def _move(self) -> None:
        """Move what can be moved, and choose what to wait for."""
        if self._caller is None:
            return
        try:
            self._move_inward()
            self._move_outward(self._caller)
        except (OSError, ValueError) as error:
            log.debug("Connection of a program in %s: %s", self.sliver, error)
            self._end_program()
            return
        self._loop.watch(
            self._caller, _GONE | (0 if self._inward else IN) | (OUT if self._outward else 0)
        )
        for kind, pipe in self._pipes.items():
            # A pipe whose other end is closed is always ready: each is watched only while there is
            # a use for it.
            if kind == frames.STDIN:
                self._loop.watch(pipe, OUT if self._inward else None)
            else:
                self._loop.watch(pipe, None if self._outward else IN)

    def _move_inward(self) -> None:
        """Move at most one piece from the caller.

        :raises OSError: it has disconnected.
        :raises ValueError: it sends no frames.
        """
        with contextlib.suppress(*_LATER):
            self._give_input()
            data = self._stream.recv(frames.PIECE)
            if not data:
                raise ConnectionResetError("the caller has disconnected")
            self._arrived += data
            self._give_input()

    def _give_input(self) -> None:
        """Give the program what has arrived. Raises BlockingIOError: it does not read at
        present.
        """
        while True:
            if self._inward:
                try:
                    self._inward = self._inward[
                        os.write(self._pipes[frames.STDIN].number, self._inward) :
                    ]
                except BrokenPipeError:  # nobody will read it
                    self._close(frames.STDIN)
                continue
            found = frames.take(self._arrived)
            if found is None:
                return
            kind, data = found
            if kind != frames.STDIN:
                raise ValueError(f"a caller cannot send frames of type {kind}")
            if frames.STDIN in self._pipes:
                self._inward = memoryview(data)
                if not data:
                    self._close(frames.STDIN)

    def _move_outward(self, caller: Watched) -> None:
        """Move at most one piece to the caller. Raises OSError: it has disconnected."""
        if not self._outward:
            self._fill()
        while self._outward:
            try:
                self._outward = self._outward[self._stream.send(self._outward) :]
            except _LATER:
                return
            if self._last == b"" and not self._outward:
                # Everything is sent. Closing now could destroy what the caller has not received
                # yet.
                self._last = None
                socket.socket.shutdown(self._stream, socket.SHUT_WR)
                self._loop.at(caller, time.monotonic() + LINGER_TIME)

    def _fill(self) -> None:
        """Get the next piece for the caller, if there is one."""
        for kind in (
            [kind for kind in self._pipes if kind != frames.STDIN] if self._starting is None else ()
        ):
            pipe = self._pipes.pop(kind)
            self._pipes[kind] = pipe  # the other one is next
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(pipe.number, min(frames.PIECE, self._left.get(kind, frames.PIECE)))
                if not data:
                    self._close(kind)
            if data:
                self._outward = memoryview(frames.pack(kind, data))
                if kind in self._left:
                    self._left[kind] -= len(data)
                return
        if self._last and self._pipes.keys() <= {frames.STDIN}:
            self._close_pipes()
            self._outward, self._last = memoryview(self._last), b""


class Programs:
    """All programs that were started by calls.

    :param limit: programs of one sliver at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = EventLoop("Thread-nm-programs", self._pace)
        self._sessions: dict[str, set[_Session]] = {}
        #: Processor time of the thread: a sliver that floods its caller must not delay the rest of
        #: the daemon.
        self._time, self._used = Bucket(ALL_TIME, ALL_SAVED), 0.0

    def start(self) -> None:
        self._loop.start()

    def stop(self, timeout: float) -> None:
        """Kill the programs: nobody else would notice that their callers disconnect."""
        if self._loop.stop(timeout):
            for session in [
                session for sessions in list(self._sessions.values()) for session in sessions
            ]:
                session.kill()
            self._loop.close()

    def sessions(self, sliver: str) -> int:
        """Return the number of programs of a sliver."""
        return len(self._sessions.get(sliver, ()))

    def begin(self, stream: socket.socket, program: Program) -> None:
        """Start the program and carry its streams. The connection belongs to it from now on."""
        self._loop.post(lambda: self._begin(stream, program))

    def _begin(self, stream: socket.socket, program: Program) -> None:
        try:
            relay.prepare(stream)
        except OSError:  # it has disconnected
            stream.close()
            return
        sessions = self._sessions.setdefault(program.sliver, set())
        session = _Session(self._loop, stream, program, self._over)
        full = len(sessions) >= self._limit
        sessions.add(session)
        if full:
            session.refuse(
                f"sliver {program.sliver} has {self._limit} programs of callers already "
                "(ssh.connections)"
            )
        else:
            session.begin(program)

    def _over(self, session: _Session) -> None:
        sessions = self._sessions[session.sliver]
        sessions.discard(session)
        if not sessions:
            del self._sessions[session.sliver]

    def _pace(self) -> None:
        used = time.thread_time()
        self._time.use(used - self._used)
        self._used = used
        time.sleep(self._time.wait())
