"""All communication with ZooKeeper."""

from __future__ import annotations

from nodepool.zk.connection.client import ZooKeeperClient

__all__ = ["ZooKeeperClient"]
