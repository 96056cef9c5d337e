"""``nodepool-nm-forward``: login shell of delegates and forced command of their account.

SSH has established the identity; this passes one request on to the node manager's socket (NM-A.9,
NM-C.5).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import xmlrpc.client

from nodepool.nodemanager.records.rspec import check_name
from nodepool.process.program import run_console

MAX_REQUEST = 1 << 20
#: Maximum bytes for any sender.
SMALL_REQUEST = 64 * 1024
#: Maximum bytes of an answer's head.
MAX_HEAD = 64 * 1024
#: Seconds for the whole exchange.
TIME_LIMIT = 120
SOCKET = "/run/nodepool/nodemanager.api"
#: Header in which the shell of the shared account names its delegate; the server accepts it from
#: that account only. Empty: a delegate with its own account, which may send larger requests than
#: others.
FORWARD_HEADER = "x-nodepool-delegate"


class _Failed(Exception):
    """The exchange failed; the text is ``<call>: <error>`` for the fault."""


def _fault(text: str) -> int:
    body = xmlrpc.client.dumps(xmlrpc.client.Fault(1, text), methodresponse=True)
    sys.stdout.buffer.write(body.encode("utf-8", "replace"))
    return 1


def _read_request() -> bytes:
    """Return standard input until its end."""
    try:
        data = sys.stdin.buffer.read(MAX_REQUEST + 1)
    except OSError as error:
        raise _Failed(f"read: {error.strerror or error}") from error
    if len(data) > MAX_REQUEST:
        raise _Failed(f"read: the request has more than {MAX_REQUEST} bytes")
    return data


def _answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the head, and the part of the body that was read with it."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = connection.recv(65536)
        if not piece or len(data) > MAX_HEAD:
            raise _Failed("recv: the node manager gave no answer")
        data += piece
    return data[:end], data[end + 4 :]


def _exchange(path: str, delegate: str | None, request: bytes) -> None:
    header = (
        f"{FORWARD_HEADER}: {delegate or ''}\r\n"
        if delegate or len(request) > SMALL_REQUEST
        else ""
    )
    head = (
        "POST / HTTP/1.0\r\nContent-Type: text/xml\r\nContent-Length: "
        f"{len(request)}\r\n{header}\r\n"
    ).encode("ascii")
    step = "connect"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            try:
                connection.sendall(head + request)
                connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it may have answered without reading all
            step = "recv"
            lines, body = _answer(connection)
            step = "write"
            status = lines.split(b"\r\n", 1)[0].split()
            if len(status) < 2 or status[1] != b"200":
                raise _Failed(
                    "recv: the node manager refused: "
                    f"{(body or lines)[:200].decode(errors='replace').strip()}"
                )
            while body:
                sys.stdout.buffer.write(body)
                try:
                    body = connection.recv(65536)
                except ConnectionResetError:
                    break  # everything important has arrived
            sys.stdout.buffer.flush()
        except OSError as error:
            raise _Failed(f"{step}: {error.strerror or error}") from error


def _out_of_time(*_: object) -> None:
    raise _Failed(f"alarm: the node manager did not answer within {TIME_LIMIT} s")


def _options(arguments: list[str]) -> tuple[str | None, str]:
    """Return delegate and socket.

    A login shell gets ``-c`` and the client's command, which is ignored; only a forced command
    names a delegate.
    """
    delegate, path = None, SOCKET
    while len(arguments) >= 2 and arguments[0] in ("--as", "--socket"):
        option, value, *arguments = arguments
        if option == "--as":
            delegate = check_name(value)
        else:
            path = value
    return delegate, path


def main() -> int:
    """Return exit status 0 when an answer arrived, whatever its content."""
    return run_console("nodepool-nm-forward", _forward, debug=False)


def _forward() -> int:
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(TIME_LIMIT)
    try:
        delegate, path = _options(sys.argv[1:])
        _exchange(
            os.environ.get("NODEPOOL_NM_SOCKET", path) if os.geteuid() == 0 else path,
            delegate,
            _read_request(),
        )
    except (_Failed, ValueError) as error:
        return _fault(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
