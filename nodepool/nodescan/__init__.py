"""Wait for the ports of new nodes and collect SSH host keys (DRV-7.8, LAU-16)."""

from __future__ import annotations

from nodepool.nodescan.request import NodescanEvent, NodescanRequest
from nodepool.nodescan.worker import NodescanWorker, scan_blocking

__all__ = ["NodescanEvent", "NodescanRequest", "NodescanWorker", "scan_blocking"]
