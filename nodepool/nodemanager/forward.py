"""``nodepool-nm-forward``: the login shell of delegates, and forced command of the account that they share.

SSH has established who it is; this passes one request on to the node manager's socket (nodemanager.md A.9, C.5).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import xmlrpc.client

from nodepool.nodemanager.http_exchange import FORWARD_HEADER
from nodepool.nodemanager.rspec import check_name

MAX_REQUEST = 1 << 20
#: Seconds for everything.
TIME_LIMIT = 120
SOCKET = "/run/nodepool/nodemanager.api"


def _fault(text: str) -> int:
    body = xmlrpc.client.dumps(xmlrpc.client.Fault(1, text), methodresponse=True)
    sys.stdout.buffer.write(body.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
    return 1


def _read_request() -> bytes:
    """Standard input until its end.

    :raises ValueError: it is too long.
    """
    data = sys.stdin.buffer.read(MAX_REQUEST + 1)
    if len(data) > MAX_REQUEST:
        raise ValueError(f"read: the request has more than {MAX_REQUEST} bytes")
    return data


def _exchange(path: str, delegate: str | None, request: bytes) -> None:
    header = f"{FORWARD_HEADER}: {delegate}\r\n" if delegate else ""
    head = f"POST / HTTP/1.0\r\nContent-Type: text/xml\r\nContent-Length: {len(request)}\r\n{header}\r\n".encode("ascii")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(head + request)
        connection.shutdown(socket.SHUT_WR)
        data, body = b"", False
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                if not body:
                    raise
                break  # all that matters was there
            if not piece:
                break
            if body:
                sys.stdout.buffer.write(piece)
                continue
            data += piece
            end = data.find(b"\r\n\r\n")
            if end >= 0:
                body = True
                sys.stdout.buffer.write(data[end + 4:])
    sys.stdout.buffer.flush()


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"the node manager did not answer within {TIME_LIMIT} s")


def main() -> int:
    """Arguments other than ``--as NAME`` are ignored: sshd passes what the client asked for."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(TIME_LIMIT)
    delegate = None
    step = "read"
    try:
        if len(sys.argv) >= 3 and sys.argv[1] == "--as":
            delegate = check_name(sys.argv[2])
        request = _read_request()
        step = "connect"
        _exchange(os.environ.get("NODEPOOL_NM_SOCKET", SOCKET) if os.geteuid() == 0 else SOCKET, delegate, request)
    except ValueError as error:
        return _fault(str(error))
    except OSError as error:
        return _fault(f"{step}: {error.strerror or error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
