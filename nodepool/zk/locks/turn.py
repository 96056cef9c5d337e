"""Short-lived marks: launchers take turns, so that each sees the latest writes of others."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError

from nodepool.zk import locks, paths
from nodepool.zk.mirror.tree import Tree

#: Maximum number of checks whether the mirror has read everything that was announced.
CATCH_UP = 5


class TurnLock:
    """A mark held for milliseconds by one launcher, under the elections path.

    It ends with its session. 11.0.0 ignores it.
    """

    def __init__(self, kazoo: KazooClient, holder: str, *name: str) -> None:
        self.path = f"{paths.ELECTIONS}/" + "-".join(
            urllib.parse.quote(part, safe="") for part in name
        )
        self._kazoo = kazoo
        self._holder = holder.encode()

    def take(self) -> bool:
        """Acquire the mark; return False if another launcher has it.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        try:
            self._kazoo.create(self.path, self._holder, ephemeral=True, makepath=True)
        except NodeExistsError:
            return False
        except KazooException:
            self._kazoo.abandoned.add(self.path)  # it may exist
            raise
        self._kazoo.abandoned.forget(self.path)
        return True

    def catch_up(self, tree: Tree[Any]) -> None:
        """Let the mirror read what others wrote before the mark.

        These changes have been announced to us.
        """
        for _ in range(CATCH_UP if tree is not None else 0):
            self._kazoo.exists(self.path)
            if not tree._deferred:
                break

    def when_free(self, callback: Callable[[], Any]) -> None:
        """Call the function once the mark is free, on any thread.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        if self._kazoo.exists(self.path, watch=lambda _event: callback()) is None:
            callback()

    def drop(self) -> None:
        locks.withdraw(self._kazoo, self.path)
