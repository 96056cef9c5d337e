"""Waiting for the ports of new nodes and collecting SSH host keys (driver-api.md 7.8, launcher.md 16)."""

from __future__ import annotations

from nodepool.nodescan.request import NodescanEvent, NodescanRequest
from nodepool.nodescan.worker import NodescanWorker, scan_blocking

__all__ = ["NodescanEvent", "NodescanRequest", "NodescanWorker", "scan_blocking"]
