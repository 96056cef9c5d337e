"""What a client knows once it has connected."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kazoo.client import KazooClient


def test_client_that_has_connected_is_connected(
    zk_chroot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo ends the wait for the connection before it calls listeners."""
    name = "_make_state_change"
    change = getattr(KazooClient, name)

    def late(self: KazooClient, state: str) -> None:
        time.sleep(0.2)
        change(self, state)

    monkeypatch.setattr(KazooClient, name, late)
    assert zk_chroot.connect().connected
