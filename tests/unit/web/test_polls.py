"""Calls that wait for a lease."""

from __future__ import annotations

import asyncio
import http
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nodepool.access.identity import Identity, Role
from nodepool.web.actions.leases import LeaseCalls
from nodepool.web.actions.places import Places
from nodepool.web.actions.routes import Call, Later, Refused
from nodepool.web.shares import Share


class Waiting:
    """Leases whose hand-over ends when a poll has just read that it has not."""

    number = 0

    def __init__(self) -> None:
        self.places = Places(1, 1)
        self._answers = [True, False, False]

    def expects(self, _lease_id: str) -> bool:
        return self._answers.pop(0)

    async def changed(self, *_arguments: object) -> None:
        pytest.fail("it would wait until its deadline: no event follows")


def test_poll_does_not_wait_when_the_hand_over_has_just_ended() -> None:
    waiting: Any = Waiting()

    def zk() -> Any:
        raise Refused(http.HTTPStatus.SERVICE_UNAVAILABLE, "read", "The lease is read again")

    calls = LeaseCalls(zk, lambda: None, waiting)
    later = calls.show(
        Call(Identity("alice", "test", Role.BORROW), {"id": "200-1"}, {"wait": "60"})
    )
    assert isinstance(later, Later)
    with ThreadPoolExecutor(1) as threads, pytest.raises(Refused, match="read again"):
        asyncio.run(later.outcome(Share(threads)))
    assert len(waiting.places) == 0, "its place is free again"
