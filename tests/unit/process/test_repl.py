from __future__ import annotations

import contextlib
import gc
import io
import socket
import sys
from types import SimpleNamespace

import pytest

from nodepool.process.repl import ReplServer


@contextlib.contextmanager
def running():
    # Not a fixture: pytest exchanges standard output between set-up and call.
    before = sys.stdout
    server = ReplServer(SimpleNamespace(name="the pool"), host="127.0.0.1", port=0)
    server.start()
    try:
        yield server
    finally:
        server.stop()
    assert sys.stdout is before


class Console:
    def __init__(self, server):
        self.socket = socket.create_connection(server.server_address, timeout=10)
        self.stream = self.socket.makefile("rwb", buffering=0)

    def until_prompt(self):
        text = b""
        while not text.endswith(b">>> "):
            chunk = self.stream.read(1)
            assert chunk, text
            text += chunk
        return text.decode()

    def do(self, line):
        self.stream.write(line.encode() + b"\n")
        return self.until_prompt()

    def close(self):
        self.stream.close()
        self.socket.close()


@pytest.mark.spec("CLI-2.4: greets with Console: and >>>; service object is self.server.app")
def test_each_console_has_separate_output(capsys):
    with running() as server:
        first, second = Console(server), Console(server)
        assert first.until_prompt() == "Console:\n>>> "
        second.until_prompt()
        assert first.do("self.server.app.name") == "'the pool'\n>>> "
        assert second.do("print(1 + 1)") == "2\n>>> "
        assert "ZeroDivisionError" in first.do("1 / 0")
        print("for standard output")
        first.stream.write(b"exit()\n")
        assert first.stream.read(1) == b""
        assert "for standard output" in capsys.readouterr().out
        first.close()
        server.stop()
        assert second.stream.read(1) == b""
        second.close()


class Output(io.StringIO):
    flushed = 0

    def flush(self):
        self.flushed += 1


def test_collected_server_does_not_touch_standard_output(monkeypatch):
    original = Output()
    monkeypatch.setattr(sys, "stdout", original)
    with running():
        print("through the server", flush=True)
        assert original.getvalue() == "through the server\n" and original.flushed
        original.flushed = 0
    gc.collect()
    assert not original.flushed, "it may be closed by then"
