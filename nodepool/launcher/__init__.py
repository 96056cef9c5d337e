"""The launcher: turns node requests into working nodes."""

from __future__ import annotations

#: Seconds after which the lock directory of a deleted request is removed; read at each use.
LOCK_CLEANUP = 28800

from nodepool.launcher.launcher import NodePool  # noqa: E402
from nodepool.launcher.pools.worker import PoolWorker  # noqa: E402

NodePool.lock_cleanup = staticmethod(lambda: LOCK_CLEANUP)

__all__ = ["LOCK_CLEANUP", "NodePool", "PoolWorker"]
