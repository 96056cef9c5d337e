"""The helper's own side, without slivers."""

from __future__ import annotations

import errno
import socket
from typing import Any, NoReturn

import pytest

from nodepool.nodemanager import helper_program


def refuse(*_args: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("what", ["socket.socketpair", "os.pipe2", "os.fork"])
def test_no_worker_ahead_without_resources(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It continues, and does not try again before the next request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = helper_program._Server(theirs, {})
        assert server.spare_due
        with monkeypatch.context() as patch:
            patch.setattr(what, refuse)
            server._make_spare()
        assert server.spare is None
        assert not server.spare_due
