"""Releasing locks and other marks of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss, NoNodeError, SessionExpiredError

from nodepool.zk import locks


@pytest.mark.parametrize(
    ("state", "error", "deleted", "abandoned"),
    [
        ("CONNECTED", None, True, False),
        ("CONNECTED", NoNodeError(), True, False),
        ("CONNECTED", ConnectionLoss(), True, True),
        ("CONNECTED", SessionExpiredError(), True, True),
        ("SUSPENDED", None, False, True),
        ("LOST", None, False, True),
    ],
)
@pytest.mark.parametrize("ephemeral", [True, False])
def test_mark_is_deleted_now_or_after_the_reconnect_without_waiting(
    state: str, error: Exception | None, deleted: bool, abandoned: bool, ephemeral: bool
) -> None:
    calls: list[str] = []
    left: list[tuple[str, bool]] = []

    def delete(path: str) -> None:
        calls.append(path)
        if error is not None:
            raise error

    client: Any = SimpleNamespace(
        state=state, delete=delete, abandoned=SimpleNamespace(add=lambda *what: left.append(what))
    )
    locks.release(client, locks.LockHandle("/a", "/a/x", 1, ephemeral))
    assert calls == ["/a/x"] * deleted
    assert left == [("/a/x", ephemeral)] * abandoned
