"""Short-lived marks under the elections path: launchers take turns, so that each sees what the other has just written."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError

from nodepool.zk import paths
from nodepool.zk.mirror.tree import Tree

CATCH_UP = 5
"""Looks after which the mirror has read all that was announced, or goes on without."""


class TurnLock:
    """Held for milliseconds, by one launcher; it goes with its session. 11.0.0 ignores it."""

    def __init__(self, kazoo: KazooClient, holder: str, *name: str) -> None:
        self.path = f"{paths.ELECTIONS}/" + "-".join(urllib.parse.quote(part, safe="") for part in name)
        self._kazoo = kazoo
        self._holder = holder.encode()

    def take(self) -> bool:
        """False when another launcher has it.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        try:
            self._kazoo.create(self.path, self._holder, ephemeral=True, makepath=True)
        except NodeExistsError:
            return False
        except KazooException:
            self._kazoo.abandoned.add(self.path)  # it may be there
            raise
        self._kazoo.abandoned.taken(self.path)
        return True

    def catch_up(self, tree: Tree[Any]) -> None:
        """Have the mirror read what others wrote before the mark: that has been announced to us."""
        for _ in range(CATCH_UP if tree is not None else 0):
            self._kazoo.exists(self.path)
            if not tree._deferred:
                break

    def when_gone(self, callback: Callable[[], Any]) -> None:
        """Called once, on any thread: now, when it is free.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        if self._kazoo.exists(self.path, watch=lambda _event: callback()) is None:
            callback()

    def drop(self) -> None:
        """Let others have it."""
        try:
            self._kazoo.delete(self.path)
        except NoNodeError:
            pass
        except KazooException:
            self._kazoo.abandoned.add(self.path)
