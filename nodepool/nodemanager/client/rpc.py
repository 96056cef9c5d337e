"""Client of the node manager's API over its Unix socket, loopback or TLS (NM-C.5)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import struct
import threading
import xmlrpc.client
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from nodepool.base.tls import TlsContext, trusting
from nodepool.exceptions import RemoteException
from nodepool.nodemanager.client import frames, xml_rpc
from nodepool.nodemanager.client.texts import clean

CONNECT_TIMEOUT = 5.0
CALL_TIMEOUT = 30.0
PIECE_TIMEOUT = 60.0
#: Maximum bytes of an answer.
MAX_ANSWER = 64 << 20
UPLOAD_CHUNK = 1 << 20
_XML = {"Content-Type": "text/xml"}


class RpcError(RemoteException):
    """No answer was received; the call may or may not have been executed."""


class RpcFault(RemoteException):
    """The node manager refused; ``code`` as in NM-A.8."""

    def __init__(self, code: int, text: str) -> None:
        text = clean(text)
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files."""

    ca: str
    cert: str
    key: str

    def context(self) -> ssl.SSLContext:
        context = trusting(self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        return context


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect within CONNECT_TIMEOUT, whatever the timeout of the call."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A non-blocking connect would be refused while others wait to be accepted; this one waits
        # its turn.
        limit = struct.pack("@ll", int(CONNECT_TIMEOUT), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect(self._path)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
        except BaseException:
            sock.close()
            raise
        sock.settimeout(self.timeout)
        self.sock = sock


class _TcpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        timeout, self.timeout = self.timeout, CONNECT_TIMEOUT
        super().connect()
        self.timeout = timeout
        self.sock.settimeout(timeout)


class _TlsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        timeout, self.timeout = self.timeout, CONNECT_TIMEOUT
        try:
            super().connect()
        except (
            ConnectionResetError,
            BrokenPipeError,
            ssl.SSLEOFError,
            ssl.SSLZeroReturnError,  # Python 3.11.2
        ) as error:
            self.close()
            raise OSError(
                "the server closed the connection during the TLS handshake; too many connections "
                "there?"
            ) from error
        self.timeout = timeout
        self.sock.settimeout(timeout)


class _Unbuffered(http.client.HTTPResponse):
    """An answer of which only the head is read; what follows stays in the socket."""

    def __init__(self, sock: socket.socket, method: str) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self.fp = sock.makefile("rb", 1)


class Client:
    """Client of the API. Thread-safe: each call has its own connection.

    :param url: ``unix:/path``, ``http://127.0.0.1:812`` or ``https://host:8120`` (with ``tls``).
    :raises ValueError: the URL is none of these, or the files of ``tls`` cannot be used.
    """

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False
        self._connection: Callable[[float], http.client.HTTPConnection]
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            self._connection = lambda timeout: _UnixConnection(path, timeout)
            return
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not an address of a node manager; use unix:/path, http://... or "
                "https://..."
            )
        host, port = parts.hostname, parts.port
        if parts.scheme == "http":
            self._connection = lambda timeout: _TcpConnection(host, port or 812, timeout=timeout)
            return
        if tls is None:
            raise ValueError(f"{url}: https needs ca-cert, client-cert and client-key")
        try:
            context = TlsContext(tls.context, tls.ca, tls.cert, tls.key)
        except OSError as error:
            raise ValueError(
                f"{url}: cannot use {tls.ca}, {tls.cert} and {tls.key}: {error}"
            ) from error
        self._connection = lambda timeout: _TlsConnection(
            host, port or 8120, timeout=timeout, context=context.current()
        )

    def call(self, method: str, *arguments: object, timeout: float = CALL_TIMEOUT) -> Any:
        """Call a method and return its result.

        :raises RpcFault: refused.
        :raises RpcError: no usable answer within ``timeout`` seconds.
        """
        return self._result(
            method, *self._request("POST", "/", xml_rpc.call(method, arguments), _XML, timeout)
        )

    def begin(
        self, method: str, *arguments: object, timeout: float = CALL_TIMEOUT
    ) -> http.client.HTTPConnection:
        """Call a method that continues on its connection; return that.

        Its socket does not block. The connection must be given to :meth:`end`.

        :raises RpcFault: refused.
        :raises RpcError: no usable answer within ``timeout`` seconds.
        """
        connection = self._enter(timeout)
        try:
            connection.request("POST", "/", xml_rpc.call(method, arguments), _XML)
            with _Unbuffered(connection.sock, method="POST") as response:
                response.begin()
                if (
                    response.status == 200
                    and response.headers["Content-Type"] == frames.CONTENT_TYPE
                ):
                    connection.sock.setblocking(False)
                    # Closed, also by the end of this process, it is reset: an ordinary end would
                    # wait behind unread input.
                    connection.sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    return connection
                self._result(method, response.status, response.read(MAX_ANSWER))
                raise RpcError(f"{self.url}: {method}: not a program's answer")
        except (OSError, http.client.HTTPException) as error:
            self.end(connection)
            raise RpcError(f"{self.url}: {str(error) or type(error).__name__}") from error
        except BaseException:
            self.end(connection)
            raise

    def _result(self, method: str, status: int, answer: bytes) -> Any:
        if status != 200:
            text = clean(answer[:200].decode(errors="replace").strip())
            raise RpcError(f"{self.url}: {method}: HTTP status {status}: {text}")
        try:
            (result,), _ = xmlrpc.client.loads(answer, use_builtin_types=True)
        except xmlrpc.client.Fault as fault:
            # The other end also chooses the types of the values.
            code = fault.faultCode if isinstance(fault.faultCode, int) else 0
            raise RpcFault(code, str(fault.faultString)) from None
        except Exception as error:
            raise RpcError(f"{self.url}: {method}: not an XML-RPC answer: {error}") from error
        return result

    def _request(
        self,
        verb: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
        timeout: float,
        stream: BinaryIO | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body; the body of a success is written to the stream instead."""
        connection = self._enter(timeout)
        try:
            try:
                connection.request(verb, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # The server may have refused before it has read everything: the answer has the
                # reason.
            response = connection.getresponse()
            if stream is not None and response.status == 200:
                self._copy(response, stream)
                return response.status, b""
            return response.status, response.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise RpcError(f"{self.url}: {str(error) or type(error).__name__}") from error
        finally:
            self.end(connection)

    def _enter(self, timeout: float) -> http.client.HTTPConnection:
        """Return a new connection, which :meth:`close` aborts."""
        connection = self._connection(timeout)
        with self._lock:
            if self._closed:
                raise RpcError(f"{self.url}: closed")
            self._open.add(connection)
        return connection

    def end(self, connection: http.client.HTTPConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    @staticmethod
    def _copy(response: http.client.HTTPResponse, stream: BinaryIO) -> None:
        left = int(response.headers["Content-Length"] or 0)
        while left:
            piece = response.read(min(left, UPLOAD_CHUNK))
            if not piece:
                raise http.client.IncompleteRead(b"", left)
            stream.write(piece)
            left -= len(piece)

    def close(self) -> None:
        """Abort running calls, from any thread; further ones fail."""
        with self._lock:
            self._closed = True
            sockets = [connection.sock for connection in self._open if connection.sock is not None]
        for sock in sockets:
            with contextlib.suppress(OSError):
                # Of the plain socket: the waiting thread still needs the TLS object.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    # -- images

    def put_image(
        self, name: str, stream: BinaryIO, sha256: str | None = None, timeout: float = 3600
    ) -> None:
        """Upload a tar file.

        :raises RpcFault: refused.
        :raises RpcError: the upload failed.
        """
        size = os.fstat(stream.fileno()).st_size
        path = f"/images/{quote(name, safe='')}" + (f"?sha256={sha256}" if sha256 else "")
        status, answer = self._request(
            "PUT",
            path,
            stream,
            {"Content-Type": "application/x-tar", "Content-Length": str(size)},
            timeout,
        )
        self._check(status, answer)

    def get_image(self, name: str, stream: BinaryIO, timeout: float = PIECE_TIMEOUT) -> None:
        """Download a tar file into a stream.

        :param timeout: seconds for each piece.
        :raises RpcFault: refused, or the image does not exist.
        :raises RpcError: the download is incomplete.
        """
        status, answer = self._request(
            "GET", f"/images/{quote(name, safe='')}", None, {}, timeout, stream
        )
        self._check(status, answer)

    def images(self, timeout: float = CALL_TIMEOUT) -> list[str]:
        """Return names of the images that the node has.

        :raises RpcFault: refused.
        :raises RpcError: no usable answer.
        """
        status, answer = self._request("GET", "/images", None, {}, timeout)
        self._check(status, answer)
        try:
            return [str(name) for name in json.loads(answer)]
        except ValueError as error:
            raise RpcError(f"{self.url}: images: not an answer of a node manager") from error

    def delete_image(self, name: str, timeout: float = CALL_TIMEOUT) -> None:
        """Delete an image; one that is not there is fine."""
        status, answer = self._request(
            "DELETE", f"/images/{quote(name, safe='')}", None, {}, timeout
        )
        if status != 404:
            self._check(status, answer)

    @staticmethod
    def _check(status: int, answer: bytes) -> None:
        if not 200 <= status < 300:
            raise RpcFault(
                status, answer[:500].decode(errors="replace").strip() or f"HTTP status {status}"
            )
