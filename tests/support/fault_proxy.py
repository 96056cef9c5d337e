"""An HTTP proxy in front of a real API server: records requests, and fails in the ways that
networks and clouds do.

    with FaultProxy(("127.0.0.1", port)) as proxy:
        proxy.fail(lambda r: r.operation == "RunInstances", html(502), times=2)

Faults are used up in the order in which they were added. ``look_alike`` may answer what the server
cannot.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "proxy-connection",
    "content-length",
}


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def operation(self) -> str:
        """AWS: the action; others: method and path."""
        if action := self.params.get("Action"):
            return action
        if target := self.headers.get("x-amz-target"):
            return target.rpartition(".")[2]
        return f"{self.method} {self.path.partition('?')[0]}"

    @property
    def params(self) -> dict[str, str]:
        """The form that AWS's query protocol sends."""
        if "x-www-form-urlencoded" not in self.headers.get("content-type", ""):
            return {}
        return dict(
            urllib.parse.parse_qsl(self.body.decode("utf-8", "replace"), keep_blank_values=True)
        )


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    #: Close the connection after this many bytes of the body.
    cut_after: int | None = None
    #: Sent piece by piece, instead of the body.
    stream: Iterator[bytes] | None = None


Forward = Callable[[Request], Reply]
#: Takes the request and a way to ask the real server; None: close the connection without a word.
Action = Callable[[Request, Forward], "Reply | None"]


def reply(status: int, body: bytes | str, content_type: str = "text/xml") -> Action:
    data = body.encode() if isinstance(body, str) else body
    return lambda _request, _forward: Reply(status, data, [("Content-Type", content_type)])


def html(status: int = 502) -> Action:
    """What a gateway or a captive portal says."""
    return reply(
        status,
        f"<!DOCTYPE html><html><body><h1>{status} gateway<br></h1></body></html>",
        "text/html",
    )


def drop() -> Action:
    """Close without an answer; the server never sees the request."""
    return lambda _request, _forward: None


def lose_answer() -> Action:
    """The server does the work, its answer is lost."""

    def act(request: Request, forward: Forward) -> Reply | None:
        forward(request)
        return None

    return act


def cut_off(keep: float = 0.5) -> Action:
    """The real answer, of which only a part arrives."""

    def act(request: Request, forward: Forward) -> Reply | None:
        answer = forward(request)
        answer.cut_after = int(len(answer.body) * keep)
        return answer

    return act


def half_sent(proxy: FaultProxy, then: Callable[[], object]) -> Action:
    """The server gets half of the body; ``then`` is called, and the connection to the server
    breaks.
    """

    def act(request: Request, _forward: Forward) -> None:
        connection = http.client.HTTPConnection(*proxy.upstream, timeout=60)
        try:
            connection.putrequest(
                request.method, request.path, skip_host=True, skip_accept_encoding=True
            )
            for key, value in request.headers.items():
                if key not in HOP_BY_HOP:
                    connection.putheader(key, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body[: len(request.body) // 2])
            then()
        finally:
            connection.close()

    return act


def hang(until: threading.Event, then: Action | None = None) -> Action:
    """No answer before ``until`` is set."""

    def act(request: Request, forward: Forward) -> Reply | None:
        until.wait(60)
        return then(request, forward) if then else None

    return act


def ec2_error(code: str, status: int = 400, message: str = "made up") -> Action:
    """An error as EC2 writes it."""
    return reply(
        status,
        f'<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{code}</Code>'
        f"<Message>{message}</Message></Error></Errors><RequestID>r-1</RequestID></Response>",
    )


@dataclass
class Fault:
    match: Callable[[Request], bool]
    action: Action
    left: float
    used: int = 0


class FaultProxy:
    """Listens on a separate port on loopback until closed.

    :param tls: certificate and key of this side, and the CA of the server behind it, when both
        speak TLS.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        look_alike: Callable[[Request, Forward], Reply | None] | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        self.upstream = upstream
        self._client_tls = ssl.create_default_context(cafile=tls[2]) if tls else None
        self.look_alike = look_alike
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._local = threading.local()
        self._sockets: set[socket.socket] = set()
        self._streams: set[socket.socket] = set()
        self._closed = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls[0], tls[1])
            # The handshake is made by the thread of the connection.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="fault-proxy",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{'https' if self._client_tls else 'http'}://127.0.0.1:{self.port}"

    def fail(
        self, match: Callable[[Request], bool] | str, action: Action, times: float = 1
    ) -> Fault:
        """Treat the next ``times`` requests that match (or have this operation) so."""
        wanted = match
        test = (lambda request: request.operation == wanted) if isinstance(wanted, str) else wanted
        fault = Fault(test, action, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def seen(self, operation: str) -> list[Request]:
        with self._lock:
            return [request for request in self.requests if request.operation == operation]

    # -- serving

    def answer(self, request: Request) -> Reply | None:
        with self._lock:
            self.requests.append(request)
            fault = next(
                (each for each in self._faults if each.left > 0 and each.match(request)), None
            )
            if fault is not None:
                fault.left -= 1
                fault.used += 1
        if fault is not None:
            return fault.action(request, self.forward)
        return self.forward(request)

    def forward(self, request: Request) -> Reply:
        if self.look_alike is not None:
            answer = self.look_alike(request, self.ask_server)
            if answer is not None:
                return answer
        return self.ask_server(request)

    def ask_server(self, request: Request) -> Reply:
        connection: http.client.HTTPConnection
        if self._client_tls is not None:
            connection = http.client.HTTPSConnection(
                *self.upstream, timeout=60, context=self._client_tls
            )
        else:
            connection = http.client.HTTPConnection(*self.upstream, timeout=60)
        streaming = False
        try:
            headers = {k: v for k, v in request.headers.items() if k not in HOP_BY_HOP}
            connection.request(request.method, request.path, request.body, headers)
            answer = connection.getresponse()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in HOP_BY_HOP]
            streaming = "watch=1" in request.path and answer.status == 200
            if streaming:
                return Reply(answer.status, b"", kept, stream=self._pieces(connection, answer))
            return Reply(answer.status, answer.read(), kept)
        finally:
            if not streaming:
                connection.close()

    def _pieces(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> Iterator[bytes]:
        """Of an answer that is being sent, until it ends here or there."""
        sock = connection.sock
        if sock is not None:
            sock.settimeout(300)
            with self._lock:
                self._sockets.add(sock)
                self._streams.add(sock)
        try:
            while piece := answer.read1():
                yield piece
        except (OSError, ValueError, http.client.HTTPException):
            return
        finally:
            with self._lock:
                self._sockets.discard(sock)
                self._streams.discard(sock)
            answer.close()
            connection.close()

    def cut_streams(self) -> int:
        """Break all answers that are being sent; how many there were."""
        with self._lock:
            streams = list(self._streams)
        for sock in streams:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return len(streams)

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        pass  # clients that went away


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.owner._lock:
            self.owner._sockets.add(self.connection)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._sockets.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or "").lower():
            return b"".join(self._chunks())
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionResetError(f"the client went away after {len(body)} of {size} bytes")
        return body

    def _chunks(self) -> Iterable[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _serve(self) -> None:
        request = Request(
            self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, self._body()
        )
        answer = self.owner.answer(request)
        if answer is None or self.owner._closed.is_set():
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(answer.status)
        for key, value in answer.headers:
            self.send_header(key, value)
        if answer.stream is not None:
            self._send_stream(answer.stream)
            return
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(
                answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
            )
        if answer.cut_after is not None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send_stream(self, pieces: Iterator[bytes]) -> None:
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        # Without the last chunk: it has not come to its end.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _serve
