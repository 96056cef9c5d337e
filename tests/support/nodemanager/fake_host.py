"""A node manager that answers what a test wants, at a Unix socket."""

from __future__ import annotations

import contextlib
import http.server
import pathlib
import socketserver
import threading
import xmlrpc.client
from collections.abc import Iterator, Mapping
from typing import Any

#: What a real one answers.
CAPACITY: dict[str, Any] = {
    "host": "fake",
    "group": "",
    "cores": 8,
    "memory": 65536,
    "disk": 1 << 30,
    "slivers": 100,
    "cpu": 1000,
    "allocated": {"slivers": 0, "cpu": 0, "memory": 0, "disk": 0},
    "default": {"memory": 0, "disk": 0},
    "images": [],
}
SLIVER: dict[str, Any] = {
    "name": "s",
    "state": "ready",
    "error": "",
    "metadata": {"nodepool_node_id": "1"},
    "effective": {"nm_mem_limit": 128},
    "ssh_address": "127.0.0.1",
    "ssh_port": 2200,
    "host_keys": ["ssh-ed25519 AAAA"],
    "username": "root",
    "index": 1,
    "expiry": 0,
}


@contextlib.contextmanager
def fake_host(path: pathlib.Path, answers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL. Answers are values by method; exceptions become faults, bytes are sent as
    they are.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            _, method = xmlrpc.client.loads(content)
            answer = answers.get(str(method), xmlrpc.client.Fault(101, "no such method"))
            if not isinstance(answer, bytes):
                value = answer if isinstance(answer, xmlrpc.client.Fault) else (answer,)
                answer = xmlrpc.client.dumps(value, methodresponse=True, allow_none=True).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def address_string(self) -> str:
            return "fake"

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="fake-host")
        thread.start()
        try:
            yield f"unix:{path}"
        finally:
            server.shutdown()
            thread.join()
