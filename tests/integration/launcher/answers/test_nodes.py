"""Nodes: who holds the lock, who has leased them, and why they were deleted."""

from __future__ import annotations

import os
import pathlib
import socket
import sys

import pytest

from nodepool.driver.fake.api import FakeApi
from tests.integration.launcher.answers.conftest import Desk
from tests.support.launcher import config, provider


def test_lock_of_a_launcher_names_its_process_and_that_of_zuul_none(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.start(config(provider()))
    with monkeypatch.context() as patched:
        patched.setattr(FakeApi, "create_server", lambda *args, **kw: {"id": "slow", "status": "BUILD"})
        desk.bench.submit("fake-label")
        (node,) = desk.bench.wait_nodes(1, state="building")
        me = f"{pathlib.Path(sys.argv[0]).name} on {socket.gethostname()} (process {os.getpid()})"
        assert desk.explain("node", node.id)["facts"]["lock"] == f"held by {me}"
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    assert desk.explain("node", node.id)["facts"]["lock"] == "held by a client without a name, such as Zuul"
