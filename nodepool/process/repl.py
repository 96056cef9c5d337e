"""``--repl``: a Python console inside the daemon, on the loopback interface (CLI-2.4).

There is no authentication: everyone who can connect can do everything that the daemon can.
"""

from __future__ import annotations

import code
import contextlib
import io
import socket
import socketserver
import sys
import threading
from typing import Any, TextIO, cast

HOST = "localhost"
PORT = 3000
STOP_TIMEOUT = 5.0


class _ThreadOutput:
    """Standard output; in threads that serve a console, the connection of that console.

    Not an `io.TextIOBase`: those are flushed when they are collected, and the original may be
    closed by then.
    """

    def __init__(self, original: TextIO) -> None:
        self.original = original
        self.local = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.local, "stream", self.original), name)


class _Console(code.InteractiveConsole):
    def __init__(self, handler: _Handler) -> None:
        super().__init__({"self": handler})
        self._handler = handler

    def write(self, data: str) -> None:
        self._handler.send(data)

    def raw_input(self, prompt: str = "") -> str:
        self._handler.send(prompt)
        line = self._handler.rfile.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\r\n")


class _Handler(socketserver.StreamRequestHandler):
    server: ReplServer

    def send(self, text: str) -> None:
        self.wfile.write(text.encode("utf-8", "replace"))

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        output = self.server.output
        with io.TextIOWrapper(
            self.wfile, encoding="utf-8", errors="replace", write_through=True
        ) as stream:  # type: ignore[type-var]
            output.local.stream = stream
            try:
                _Console(self).interact("Console:", exitmsg="")
            except (OSError, ValueError, SystemExit):
                pass  # the client has disconnected, or called exit()
            finally:
                del output.local.stream
                self.server.connections.discard(self.connection)


class ReplServer(socketserver.ThreadingTCPServer):
    """Serves consoles in which ``self.server.app`` is the service object."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, app: object, host: str = HOST, port: int = PORT) -> None:
        super().__init__((host, port), _Handler)
        self.app = app
        self.connections: set[socket.socket] = set()
        self.output = _ThreadOutput(sys.stdout)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.2,), name="REPL", daemon=True
        )

    def start(self) -> None:
        sys.stdout = cast(TextIO, self.output)
        self._thread.start()

    def stop(self) -> None:
        """End the server and all consoles."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(STOP_TIMEOUT)
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if cast(Any, sys.stdout) is self.output:
            sys.stdout = self.output.original
