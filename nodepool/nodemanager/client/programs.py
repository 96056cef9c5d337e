"""Programs in slivers, run through the API without SSH: ``Exec`` (NM-C.5)."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from typing import BinaryIO, TypeVar

from nodepool.nodemanager.client import frames
from nodepool.nodemanager.client.rpc import CALL_TIMEOUT, Client, RpcError
from nodepool.nodemanager.client.texts import clean

STDOUT, STDERR = frames.STDOUT, frames.STDERR
#: Seconds for a file to be copied.
COPY_TIMEOUT = 3600.0
#: Maximum bytes of the message of a program that copies.
MAX_MESSAGE = 4096
#: Two steps: whatever happens to the daemon or this process during the first one, an incomplete
#: file never gets the name.
_WRITE = (
    'umask 077; [ ! -d "$1" ] || { echo "$1 is a directory" >&2; exit 1; }; exec cat > "$1.part"'
)
_RENAME = 'chmod "$2" "$1.part" && exec mv -f "$1.part" "$1"'

T = TypeVar("T")
#: Gets each piece of output.
Sink = Callable[[bytes], object]


class ProgramError(Exception):
    """A program that copies a file failed; the text is its message."""


class Running:
    """A program that runs in a sliver. It ends, at the latest, when its connection does.

    One thread may read while another one writes. :meth:`close` kills the program if it still runs.
    """

    def __init__(self, client: Client, connection: HTTPConnection, where: str) -> None:
        self._client = client
        self._connection = connection
        self._stream: socket.socket = connection.sock
        self._arrived = bytearray()
        self._where = where
        # An object of TLS is for one thread at a time.
        self._lock = threading.Lock()
        #: Exit status, or minus the number of the signal that ended it; None: not known (yet).
        self.status: int | None = None
        self._ended = False

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next output, STDOUT or STDERR and its data; None: the program has ended.

        :raises TimeoutError: there was no output for ``timeout`` seconds.
        :raises RpcError: the connection broke; the program is killed.
        """
        deadline = time.monotonic() + timeout
        if timeout < 0:
            raise TimeoutError(f"{self._where}: the program does not proceed")
        try:
            while not self._ended:
                found = frames.take(self._arrived)
                if found is None:
                    data = self._when(
                        select.POLLIN, lambda: self._stream.recv(frames.PIECE), deadline
                    )
                    if not data:
                        raise RpcError(
                            f"{self._where}: the connection ended before the program did"
                        )
                    self._arrived += data
                elif found[0] in (STDOUT, STDERR):
                    return found
                elif found[0] != frames.EXIT:
                    raise ValueError(f"a frame of type {found[0]}")
                else:
                    self._ended = True
                    self.status = int(found[1]) if found[1] else None
        except ValueError as error:
            raise RpcError(f"{self._where}: not an answer of a node manager: {error}") from None
        return None

    def write(self, data: bytes, timeout: float) -> None:
        """Send input; empty data is its end. Returns when all of it is sent.

        :raises TimeoutError: the program did not read for ``timeout`` seconds.
        :raises RpcError: the connection broke, because the program has ended, or was closed.
        """
        pieces = [
            data[start : start + frames.PIECE] for start in range(0, len(data), frames.PIECE)
        ] or [b""]
        for piece in pieces:
            left = memoryview(frames.pack(frames.STDIN, piece))
            while left:
                send = functools.partial(self._stream.send, left)
                left = left[self._when(select.POLLOUT, send, time.monotonic() + timeout) :]

    def _when(self, event: int, action: Callable[[], T], deadline: float) -> T:
        """Return the result of an action as soon as it is possible without waiting."""
        while True:
            wanted = event
            try:
                with self._lock:
                    return action()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except BlockingIOError:
                pass
            except OSError as error:
                raise RpcError(f"{self._where}: {error}") from error
            poll = select.poll()
            try:
                poll.register(self._stream, wanted)
            except ValueError:
                raise RpcError(f"{self._where}: closed") from None
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"{self._where}: the program does not proceed")

    def close(self) -> None:
        """Disconnect, from any thread."""
        with contextlib.suppress(OSError):
            # Of the plain socket: another thread may wait for the TLS object.
            socket.socket.shutdown(self._stream, socket.SHUT_RDWR)
        with self._lock:
            self._client.end(self._connection)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(
    client: Client,
    sliver: str,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    user: str = "",
    timeout: float = CALL_TIMEOUT,
) -> Running:
    """Start a program in a sliver.

    :param user: an account in the sliver; default: its login user.
    :raises RpcFault: refused; the text says why.
    :raises RpcError: no usable answer within ``timeout`` seconds.
    """
    options = {"env": {key: os.fsencode(value) for key, value in (env or {}).items()}, "user": user}
    connection = client.begin(
        "Exec", sliver, [os.fsencode(word) for word in argv], options, timeout=timeout
    )
    return Running(client, connection, f"{client.url}: {sliver}")


def run(
    client: Client,
    sliver: str,
    argv: Sequence[str],
    stdin: BinaryIO | None = None,
    stdout: Sink | None = None,
    stderr: Sink | None = None,
    env: Mapping[str, str] | None = None,
    user: str = "",
    timeout: float = COPY_TIMEOUT,
) -> int | None:
    """Run a program in a sliver to its end; return its status as in :attr:`Running.status`.

    :param stdin: is read on a separate thread; default: empty. For interactive input it must not be
        buffered.
    :raises RpcFault: refused; the text says why.
    :raises RpcError: the connection broke.
    :raises TimeoutError: the program, which is killed now, has not ended within ``timeout``
        seconds.
    """
    deadline = time.monotonic() + timeout
    with start(client, sliver, argv, env, user, min(timeout, CALL_TIMEOUT)) as running:

        def send() -> None:
            try:
                while data := stdin.read(frames.PIECE) if stdin is not None else b"":
                    running.write(data, max(0.0, deadline - time.monotonic()))
                running.write(b"", timeout)
            except (RpcError, TimeoutError):
                pass  # the reader notices it, too
            except BaseException:
                running.close()  # the end of the input would say that it is complete
                raise

        threading.Thread(target=send, name=f"Thread-exec-{sliver}", daemon=True).start()

        def output() -> tuple[int, bytes] | None:
            try:
                return running.read(deadline - time.monotonic())
            except TimeoutError:
                raise TimeoutError(
                    f"{client.url}: {sliver}: the program has not ended within {timeout:g} s"
                ) from None

        for kind, data in iter(output, None):
            sink = stdout if kind == STDOUT else stderr
            if sink is not None:
                sink(data)
        return running.status


def put(
    client: Client,
    sliver: str,
    source: BinaryIO,
    path: str,
    mode: int = 0o644,
    user: str = "",
    timeout: float = COPY_TIMEOUT,
) -> None:
    """Copy a stream to a file in a sliver, with the rights of an account there.

    The file is replaced when all of it has arrived.

    :param path: relative ones are in the home directory.
    :raises ProgramError: it cannot be written; the text is the message from inside.
    :raises RpcFault: refused; the text says why.
    :raises RpcError: the connection broke.
    :raises TimeoutError: it has taken more than ``timeout`` seconds.
    """
    names = ["sh", _path(path), f"{mode & 0o7777:o}"]
    _copy(client, sliver, ["/bin/sh", "-c", _WRITE, *names], source, None, user, timeout)
    _copy(client, sliver, ["/bin/sh", "-c", _RENAME, *names], None, None, user, timeout)


def get(
    client: Client,
    sliver: str,
    path: str,
    target: BinaryIO,
    user: str = "",
    timeout: float = COPY_TIMEOUT,
) -> None:
    """Copy a file in a sliver to a stream; the rest as in :func:`put`."""
    _copy(client, sliver, ["cat", _path(path)], None, target.write, user, timeout)


def _path(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path


def _copy(
    client: Client,
    sliver: str,
    argv: list[str],
    source: BinaryIO | None,
    target: Sink | None,
    user: str,
    timeout: float,
) -> None:
    # The last pieces: a hostile sliver may send any number of them.
    message: deque[bytes] = deque(maxlen=4)
    status = run(client, sliver, argv, source, target, message.append, user=user, timeout=timeout)
    if status != 0:
        text = clean(b"".join(message)[-MAX_MESSAGE:].decode(errors="replace").strip())
        raise ProgramError(f"{sliver}: {text or f'exit status {status}'}")
