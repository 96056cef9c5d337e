"""What a pool says about its room, and who is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.launcher.pools.fullness import Fullness
from nodepool.launcher.pools.room import PoolRoom
from nodepool.reasons import Code, because


class Room(PoolRoom):
    """A pool of a driver that does not count nodes per label."""

    def __init__(self) -> None:
        self.assignment = Mock()
        self.published = 0
        self._full = Fullness(lambda: 0.0)

    def getProviderManager(self) -> Any:
        return SimpleNamespace()

    def capacity_changed(self) -> None:
        self._room()

    def _publish_soon(self) -> None:
        self.published += 1


@pytest.fixture
def room() -> Room:
    return Room()


def test_waiting_requests_are_looked_at_when_there_may_be_room_again(room: Room) -> None:
    room.capacity_changed()
    assert not room.assignment.wake.called and room.published == 0
    room.note_full(["label"], because(Code.BUSY))
    room.note_full(["label"], because(Code.BUSY))
    assert room.published == 1
    room.capacity_changed()
    assert room.assignment.wake.called and room.published == 2
