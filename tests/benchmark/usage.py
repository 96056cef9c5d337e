"""CPU that the records of usage cost for each node (root): python -m tests.benchmark.usage
--other /path/to/another/nodepool-nodemanager [--slivers 200] [--runs 3]

Alternating runs of both daemons, ours with a reader of its events; then the launcher's part alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import tempfile
import threading
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from nodepool.driver.nodemanager.events import EventReader
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.history import HistoryWriter
from nodepool.zk.mirror.feed import Feed
from tests.support.nodemanager import scene
from tests.support.nodemanager.scene import NmDaemon

TICKS = os.sysconf("SC_CLK_TCK")
METADATA = {"nodepool_provider_name": "metal", "nodepool_node_id": "0000000001"}


def cpu(pid: int) -> float:
    """Seconds of CPU of a process and its children."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / TICKS
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return own + sum(map(cpu, map(int, file.read().split())))


def daemon(program: str, slivers: int, read: bool) -> float:
    """Return the ms of CPU per sliver that is created and deleted."""
    scene.PROGRAM = program
    with tempfile.TemporaryDirectory() as directory:
        nm = NmDaemon(pathlib.Path(directory))
        nm.start()
        stopped = threading.Event()
        try:
            if read:
                threading.Thread(target=follow, args=(nm, stopped), daemon=True).start()
            nm.put("warm")
            nm.delete("warm")
            assert nm.process is not None
            before = cpu(nm.process.pid)
            for number in range(slivers):
                nm.put(f"s{number}", rspec={"nm_mem_limit": 128}, metadata=METADATA)
                nm.delete(f"s{number}")
            return (cpu(nm.process.pid) - before) / slivers * 1000
        finally:
            stopped.set()
            nm.clean()


def follow(nm: NmDaemon, stopped: threading.Event) -> None:
    after = 0
    with contextlib.suppress(RpcError, RpcFault):
        while not stopped.wait(0.3):
            for event in nm.client.call("WaitEvents", "metal", after, after, 5, timeout=20):
                after = event["number"]


def launcher(count: int) -> float:
    """Return the ms of CPU per event: noted, published, packed and compressed."""
    feed = Feed()
    answer = SimpleNamespace(get=lambda timeout: None)
    kazoo: Any = SimpleNamespace(create_async=lambda *_, **__: answer)
    history = HistoryWriter(feed)
    reader = EventReader("h", lambda *_, **__: [], "metal", feed, logging.getLogger())
    begun = time.thread_time()
    for number in range(count):
        reader._note(
            {
                "number": number,
                "kind": "ended",
                "time": 1.7e9 + number,
                "metadata": METADATA,
                "complete": True,
                "seconds": 300.5,
                "cpu_usec": 12_345_678,
                "memory_peak": 1 << 30,
                "memory_limit": 2 << 30,
                "oom_kills": 0,
                "disk_peak": 1 << 28,
                "net_tx_bytes": 1234567,
                "net_rx_bytes": 7654321,
            }
        )
    history.flush(kazoo, False, at_once=True)
    return (time.thread_time() - begun) / count * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", required=True)
    parser.add_argument("--slivers", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    ours, other = scene.PROGRAM, []
    own = []
    for _ in range(args.runs):
        other.append(daemon(args.other, args.slivers, read=False))
        own.append(daemon(ours, args.slivers, read=True))
        print(f"node manager: {other[-1]:.2f} ms per sliver, with usage {own[-1]:.2f}", flush=True)
    events = launcher(2000)
    more = median(own) - median(other)
    print(f"node manager: {more:.2f} ms more (ratio {median(own) / median(other):.3f})")
    print(f"launcher: {events:.3f} ms per node; together {more + events:.2f} (limit 0.3)")


if __name__ == "__main__":
    main()
