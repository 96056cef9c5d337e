"""What a pool says about its capacity, and who is notified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.launcher.pools.admission import PoolAdmission
from nodepool.launcher.pools.backlog import Backlog
from nodepool.launcher.pools.fullness import Fullness
from nodepool.launcher.requests.queue import ClassKey, RequestClass
from nodepool.reasons import Code, Reason, because


class Room(PoolAdmission):
    """A pool of a driver that does not count nodes per label."""

    offer = ask = refresh = Mock()

    def __init__(self) -> None:
        self.assignment = self.nodepool = Mock()
        self.nodepool.drains.blocked.return_value = None
        self.published = 0
        self.asked: list[frozenset[str]] = []
        self.label, self.paused_handlers, self.request_handlers, self.backlog = (
            "p",
            set(),
            [],
            Backlog(),
        )
        self._full = Fullness(lambda: 0.0)

    def getProviderManager(self) -> Any:
        return SimpleNamespace()

    def getProviderConfig(self) -> Any:
        return None

    def getPoolConfig(self) -> Any:
        return SimpleNamespace(labels={"a": None})

    def _closed_to(self, cls: RequestClass) -> Reason | None:
        self.asked.append(cls.labels)
        return because(Code.BUSY)

    def capacity_changed(self) -> None:
        self._room()

    def publish_soon(self) -> None:
        self.published += 1


@pytest.fixture
def room() -> Room:
    return Room()


def test_waiting_requests_are_checked_when_there_may_be_capacity_again(room: Room) -> None:
    room.capacity_changed()
    assert not room.assignment.wake.called and room.published == 0
    room.note_full(["label"], because(Code.BUSY))
    room.note_full(["label"], because(Code.BUSY))
    assert room.published == 1
    room.capacity_changed()
    assert room.assignment.wake.called and room.published == 2


def test_pool_is_not_asked_about_labels_that_it_lacks(room: Room) -> None:
    views = [
        room.view(RequestClass(ClassKey((label,), None, None, frozenset()))) for label in ("a", "b")
    ]
    assert room.asked == [frozenset({"a"})] and [view.closed is None for view in views] == [
        False,
        True,
    ]
