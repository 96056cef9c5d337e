"""CPU that the records of usage cost for each node (root): python -m tests.benchmark.usage
[--slivers 200] [--runs 3]

The node manager counts its own time of a thread in all that reads and stores the use of a sliver;
then the calls of a launcher that receives the events, and what the launcher does with them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import sys
import tempfile
import threading
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from nodepool.driver.nodemanager.events import PAUSE, EventReader
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.history import HistoryWriter
from nodepool.zk.mirror.feed import Feed
from tests.support.nodemanager import scene
from tests.support.nodemanager.scene import NmDaemon

TICKS = os.sysconf("SC_CLK_TCK")
METADATA = {"nodepool_provider_name": "metal", "nodepool_node_id": "0000000001"}
#: Calls whose CPU is measured together: the kernel counts in steps of 10 ms.
CALLS = 400
#: The node manager with a clock around everything that usage needs.
PROGRAM = """\
#!{python}
import atexit, sys, threading, time
from nodepool.cmd.nodemanager import main
from nodepool.nodemanager.slivers.events import Events
from nodepool.nodemanager.slivers.reconciler import SliverReconciler

spent = []
depth = threading.local()

def clocked(owner, name):
    inner = getattr(owner, name)
    def call(*args):
        if getattr(depth, "inside", False):
            return inner(*args)
        depth.inside, begun = True, time.thread_time()
        try:
            return inner(*args)
        finally:
            depth.inside = False
            spent.append(time.thread_time() - begun)
    setattr(owner, name, call)

clocked(Events, "used")
clocked(Events, "measure")
clocked(SliverReconciler, "_count")
atexit.register(lambda: open({result!r}, "w").write(str(sum(spent))))
sys.exit(main())
"""


def cpu(pid: int) -> float:
    """Seconds of CPU of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS


def daemon(slivers: int) -> list[float]:
    """Return ms of CPU per sliver: of the daemon, of its records, and of calls for them."""
    with tempfile.TemporaryDirectory() as directory:
        result, program = pathlib.Path(directory, "spent"), pathlib.Path(directory, "program")
        program.write_text(PROGRAM.format(python=sys.executable, result=str(result)))
        program.chmod(0o755)
        scene.PROGRAM = str(program)
        nm = NmDaemon(pathlib.Path(directory))
        nm.start()
        stopped = threading.Event()
        calls: list[int] = []
        reader = threading.Thread(
            target=follow, args=(nm, stopped, calls), name="follow", daemon=True
        )
        try:
            assert nm.process is not None
            reader.start()
            before = cpu(nm.process.pid)
            for number in range(slivers):
                nm.put(f"s{number}", rspec={"nm_mem_limit": 128}, metadata=METADATA)
                nm.delete(f"s{number}")
            all_of_it = cpu(nm.process.pid) - before
            stopped.set()
            reader.join(30)
            last = max(calls)
            before = cpu(nm.process.pid)
            for _ in range(CALLS):
                nm.client.call("WaitEvents", "metal", 0, last - 1, 0, timeout=20)
            call = (cpu(nm.process.pid) - before) / CALLS
        finally:
            stopped.set()
            nm.clean()
        records = float(result.read_text())
        found = (all_of_it, records, call * len(calls))
        return [round(each / slivers * 1000, 3) for each in found]


def follow(nm: NmDaemon, stopped: threading.Event, calls: list[int]) -> None:
    """Receive events as a launcher does; note the last number after each call."""
    after = 0
    with contextlib.suppress(RpcError, RpcFault):
        while not stopped.wait(PAUSE):
            for event in nm.client.call("WaitEvents", "metal", after, after, 5, timeout=20):
                after = event["number"]
            calls.append(after)


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
    parser.add_argument("--slivers", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    found = []
    for _ in range(args.runs):
        found.append(daemon(args.slivers))
        print("node manager: {} ms per sliver; records {}, calls {}".format(*found[-1]), flush=True)
    events = launcher(2000)
    records, calls = (median(column) for column in list(zip(*found, strict=True))[1:])
    print(f"launcher: {events:.3f} ms; together {records + calls + events:.2f} (limit 0.3)")


if __name__ == "__main__":
    main()
