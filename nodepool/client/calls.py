"""Calls of a launcher's API: errors, connections, answers."""

from __future__ import annotations

import contextlib
import email.message
import http.client
import json
import logging
import os
import pathlib
import re
import socket
import ssl
import stat
import struct
import sys
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool import ssh

log = logging.getLogger("nodepool.client")

SOCKET = "unix:///run/nodepool/api.sock"
#: Machines to which tokens are also sent without encryption: this one.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: What is wrong with other texts than tokens.
_NO_TOKEN = "must be one line of printable ASCII characters"
#: Seconds of one long poll, and beyond it until the server counts as gone.
POLL, TIMEOUT = 30.0, 30.0
#: Seconds between two attempts to reach the server.
RETRY = 2.0
#: Least seconds between two polls, or two attempts of a call.
LEAST_PAUSE = 1.0
#: Codes of answers after which a call is repeated.
UNAVAILABLE = ("unreachable", "no-zookeeper", "busy")
#: Bytes of each stream of a program that are kept; adapters show only the end.
MOST_OUTPUT, SHOWN = 64 << 20, 64 << 10
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

#: Seconds, or a text such as ``90s``, ``10m``, ``4h``, ``2d``.
Duration = float | str


class NodepoolError(Exception):
    """The server refuses a call, or cannot be reached.

    :ivar code: of the server, for programs; ``unreachable`` if there is no answer.
    :ivar pause: seconds after which a call that may be repeated should be.
    """

    def __init__(self, code: str, text: str, pause: float = RETRY) -> None:
        super().__init__(text)
        self.code = code
        self.pause = pause


class NotAllowed(NodepoolError):
    """The token is missing or invalid, or does not permit the call."""


class NoCapacity(NodepoolError):
    """The nodes were not ready in time, or cannot be had; the text says why."""


class LeaseEnded(NodepoolError):
    """The lease has been returned, has expired, or its nodes were deleted."""


@dataclass(frozen=True)
class Done:
    """The result of a command; the middle of long output is replaced by ``[N bytes omitted]``."""

    status: int
    stdout: bytes
    stderr: bytes


def seconds(duration: Duration) -> float:
    """Return a duration in seconds.

    :raises ValueError: it is not one.
    """
    if isinstance(duration, int | float):
        return float(duration)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration.strip())
    if found is None:
        raise ValueError(f"{duration!r} is not a duration such as 90s, 10m, 4h or 2d")
    return float(found[1]) * _UNITS.get(found[2], 1)


def is_protected(url: str) -> bool:
    """Return whether nobody else reads what is sent to a URL."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)


def read_secret(path: str, any_text: bool = False) -> str:
    """Return the text of a file that not everybody may read.

    :param any_text: also accept what is not a token, such as a private key.
    :raises OSError: it cannot be read. :raises ValueError: everybody may read it, it is empty, or
        it is not a token.
    """
    if stat.S_IMODE(os.stat(path).st_mode) & 0o007:
        raise ValueError(f"{path} can be read by everyone: chmod o= {path}")
    text = pathlib.Path(path).read_text().strip()
    if not text:
        raise ValueError(f"{path} is empty")
    if not any_text and not _is_token(text):
        raise ValueError(f"{path} {_NO_TOKEN}")
    return text


def _is_token(text: str) -> bool:
    """Return whether HTTP can carry it; libraries repeat in their error what they cannot send."""
    return text.isascii() and text.isprintable()


class SecretFile:
    """A secret in a file that not everybody may read; each call returns the current one.

    While the file cannot be read, as during its replacement, the last secret is returned.

    :raises OSError, ValueError: as :func:`read_secret`, at the beginning only.
    """

    def __init__(self, path: str, any_text: bool = False) -> None:
        self._path, self._any_text = path, any_text
        self._secret, self._readable = read_secret(path, any_text), True

    def __call__(self) -> str:
        try:
            self._secret, self._readable = read_secret(self._path, self._any_text), True
        except (OSError, ValueError) as error:
            if self._readable:
                log.warning("The former secret is used: %s", error)
            self._readable = False
        return self._secret


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Calls:
    """The API of a launcher.

    :param url: ``unix:///path``, ``http://127.0.0.1:8005`` or ``https://pool.example.org``;
        default: ``NODEPOOL_URL``, or the socket of this machine.
    :param token: default: ``NODEPOOL_TOKEN``. The socket needs none. A function, such as a
        :class:`SecretFile`, returns it for each call.
    :param key_file: private key for SSH; default: ``NODEPOOL_SSH_KEY``, or what ``ssh`` finds.
    :param ssh_directory: of the files of one lease, which several programs share until it is
        returned.
    :param most_output: bytes that are kept of each stream of a program: the first and the last
        ones.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | Callable[[], str] | None = None,
        key_file: str | None = None,
        ssh_directory: str | None = None,
        most_output: int = MOST_OUTPUT,
    ) -> None:
        self.url = (url or os.environ.get("NODEPOOL_URL") or SOCKET).rstrip("/")
        self._token = token or os.environ.get("NODEPOOL_TOKEN")
        self.key_file = key_file or os.environ.get("NODEPOOL_SSH_KEY")
        self.ssh_directory = ssh_directory
        self.most_output = most_output
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("unix", "http", "https") or not (
            parts.path if parts.scheme == "unix" else parts.hostname
        ):
            raise ValueError(
                f"{self.url!r} is not a URL such as https://pool.example.org or "
                "unix:///run/nodepool/api.sock"
            )
        self._parts = parts

    @property
    def token(self) -> str | None:
        return self._token() if callable(self._token) else self._token

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry: float | None = None,
        longest: float = POLL + TIMEOUT,
    ) -> Any:
        """Return the answer of a call below ``/api/v1``: parsed JSON, or a text.

        :param retry: monotonic time until which it is repeated while the server cannot be reached,
            or is busy.
        :param longest: seconds without any data after which the server counts as gone.
        """
        while True:
            try:
                return self._call(method, path, body, token or self.token, headers or {}, longest)
            except NodepoolError as error:
                if (
                    error.code not in UNAVAILABLE
                    or retry is None
                    or time.monotonic() + error.pause >= retry
                ):
                    raise
                pause = error.pause
            time.sleep(pause)

    def relay(
        self, path: str, body: Mapping[str, Any], token: str | None, stream: bool = False
    ) -> Done:
        """Return what the program of a call has written, and its status.

        :param stream: its output is written to that of this program instead.
        :raises TimeoutError: it has not ended within the body's ``timeout``.
        """
        deadline = time.monotonic() + body["timeout"]
        outputs = self.outputs(stream)
        with contextlib.closing(self._frames(path, body, token or self.token)) as frames:
            for kind, data in frames:
                if kind == 3:
                    # Minus the number of a signal, as shells report it.
                    status = int(data or b"255")
                    return Done(status if status >= 0 else 128 - status, *map(content_of, outputs))
                if kind in (1, 2):
                    outputs[kind - 1].write(data)
                    outputs[kind - 1].flush()
                if time.monotonic() >= deadline:
                    break
        if time.monotonic() >= deadline:
            raise TimeoutError
        raise NodepoolError(
            "broken",
            "The program was ended: its token was revoked or has expired, or the node, or the "
            "launcher's connection to it, no longer exists",
        )

    def _frames(
        self, path: str, body: Mapping[str, Any], token: str | None
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield the parts of an answer; errors of their use are not those of the connection."""
        with self._streamed("POST", path, json.dumps(body), token) as answer:
            while len(head := answer.read(5)) == 5:
                kind, length = struct.unpack(">BI", head)
                yield kind, answer.read(length)

    def events(self, *types: str) -> Iterator[Mapping[str, Any] | None]:
        """Follow events of the cluster: yield None once none is missed any more, then each event.

        The iteration ends when the server ends the answer, as it does when the token is revoked or
        expires: the next call then raises :class:`NotAllowed`.

        :raises NodepoolError: the server cannot be reached, or the connection breaks.
        """
        path = f"/events?type={','.join(types)}"
        with self._streamed("GET", path, None, self.token) as answer:
            for line in answer:
                if line.startswith((b"retry:", b"data:")):
                    yield json.loads(line[5:]) if line.startswith(b"data:") else None

    @contextlib.contextmanager
    def _streamed(
        self, method: str, path: str, body: str | None, token: str | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer that arrives in parts.

        :raises NodepoolError: the call is refused, or the connection ends.
        """
        connection = self._connection()
        try:
            connection.request(
                method, f"/api/v1{path}", body, self._headers(token, body is not None)
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise _error(answer.status, answer.headers, answer.read())
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise NodepoolError(
                "unreachable", f"{self.url} does not answer: {str(error) or type(error).__name__}"
            ) from error
        finally:
            connection.close()

    def outputs(self, stream: bool) -> list[ssh.Output]:
        """Return where the output of a program goes: to that of this one, or to memory."""
        return (
            [sys.stdout.buffer, sys.stderr.buffer]
            if stream
            else [ssh.Kept(self.most_output), ssh.Kept(self.most_output)]
        )

    def _headers(self, token: str | None, body: bool) -> dict[str, str]:
        if token and self._parts.scheme != "unix" and not is_protected(self.url):
            raise NodepoolError(
                "insecure",
                f"{self.url}: a token is sent by https only, or to {', '.join(LOOPBACK)}; use "
                "https",
            )
        if token and not _is_token(token):
            raise NodepoolError("token", f"The token {_NO_TOKEN}")
        found = {"Authorization": f"Bearer {token}"} if token else {}
        return {**found, "Content-Type": "application/json"} if body else found

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        token: str | None,
        headers: Mapping[str, str],
        longest: float,
    ) -> Any:
        connection = self._connection(longest)
        sent = {**headers, **self._headers(token, body is not None)}
        try:
            connection.request(
                method, f"/api/v1{path}", None if body is None else json.dumps(body), sent
            )
            answer = connection.getresponse()
            data, status, kind = answer.read(), answer.status, answer.headers.get_content_type()
        except (OSError, http.client.HTTPException) as error:
            raise NodepoolError(
                "unreachable", f"{self.url} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        if status >= 400:
            raise _error(status, answer.headers, data)
        return (
            json.loads(data)
            if kind == "application/json" and data
            else data.decode("utf-8", "replace")
        )

    def _connection(self, timeout: float = POLL + TIMEOUT) -> http.client.HTTPConnection:
        parts = self._parts
        if parts.scheme == "unix":
            return _UnixConnection(parts.path, timeout)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=timeout, context=context
            )
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def content_of(output: ssh.Output) -> bytes:
    return output.content() if isinstance(output, ssh.Kept) else b""


def _error(status: int, headers: email.message.Message, data: bytes) -> NodepoolError:
    """Return the exception for an answer."""
    problem: object = None
    after = headers.get("Retry-After", "")
    pause = min(max(LEAST_PAUSE, float(after)), POLL) if after.isdecimal() else RETRY
    if headers.get_content_type().endswith("json"):
        with contextlib.suppress(ValueError):
            problem = json.loads(data)
    code, text = f"http-{status}", data[:200].decode("utf-8", "replace") or f"status {status}"
    if isinstance(problem, dict):
        code, text = str(problem.get("code", code)), str(problem.get("detail", text))
    kinds = {401: NotAllowed, 403: NotAllowed, 410: LeaseEnded, 429: NoCapacity}
    if code in ("failed", "try-again"):
        return NoCapacity(code, text, pause)
    return kinds.get(status, NodepoolError)(code, text, pause)


def path_of(lease_id: str) -> str:
    return f"/leases/{urllib.parse.quote(lease_id, safe='')}"
