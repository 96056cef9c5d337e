"""Time from the call that leases a sliver to the end of its first command (``true``), through
``nodepool.client`` and the launcher's socket, in the shapes of public benchmarks of sandboxes: 100
in turn, 100 staggered by 200 ms, and 100 concurrently, with and without ready nodes.

As root: ``python -m tests.benchmark.first_command [--other PYTHON] [--runs 3]``. Launcher, node
manager, ZooKeeper and clients share the machine; releases alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil
from kazoo.exceptions import NoNodeError

from tests.benchmark.harness import HERE, Bench, Server, log, percentile
from tests.benchmark.run import load_tool
from tests.support.nodemanager import scene

COUNT = 100
#: Shape -> nodes that are ready before, and seconds between two calls (see `borrow.py`).
SHAPES = {
    "one after the other, none ready": (0, -1.0),
    "one after the other, all ready": (COUNT, -1.0),
    "staggered by 200 ms, none ready": (0, 0.2),
    "at once, none ready": (0, 0.0),
    "at once, all ready": (COUNT, 0.0),
}


def config(nm: scene.NmDaemon, ready: int) -> dict[str, Any]:
    label = {"name": "host", "cloud-image": "host", "ram": 96, "disk": 1}
    return {
        "labels": [{"name": "host", "min-ready": ready}],
        "providers": [
            {
                "name": "here",
                "driver": "nodemanager",
                "ssh-keys": nm.key.with_suffix(".pub").read_text(),
                "hosts": [{"name": "this", "url": f"unix:{nm.tmp}/run/nodemanager.api"}],
                "cloud-images": [{"name": "host"}],
                "pools": [{"name": "main", "max-servers": COUNT, "labels": [label]}],
            }
        ],
    }


def wait_ready(bench: Bench, count: int) -> None:
    kazoo, deadline = bench.zuul.kazoo, time.monotonic() + 120
    assert kazoo is not None
    while True:
        nodes = []
        for name in kazoo.get_children("/nodepool/nodes"):
            with contextlib.suppress(NoNodeError):
                nodes.append(json.loads(kazoo.get(f"/nodepool/nodes/{name}")[0])["state"])
        if nodes.count("ready") == count == len(nodes):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {count} ready nodes, but {nodes}")
        time.sleep(0.2)


@contextlib.contextmanager
def node_manager(python: str, work: pathlib.Path) -> Iterator[scene.NmDaemon]:
    scene.PROGRAM = str(pathlib.Path(python).with_name("nodepool-nodemanager"))
    nm = scene.NmDaemon(work, overcommit={"disk": 4.0})
    nm.start()
    try:
        yield nm
    finally:
        nm.clean()


def cpu(pid: int) -> float:
    """Return the seconds of processor time of a process, its children, and what has ended in it."""
    process = psutil.Process(pid)
    return float(sum(sum(each.cpu_times()[:4]) for each in (process, *process.children())))


def measure(
    server: Server, python: str, work: pathlib.Path, shape: str, run: type[Bench] = Bench
) -> dict[str, float]:
    ready, pause = SHAPES[shape]
    with (
        tempfile.TemporaryDirectory(dir=work) as folder,
        node_manager(python, pathlib.Path(folder)) as nm,
    ):
        bench = run(server, python, work, "first")
        path = str(bench.work / "api.sock")
        bench.environment["NODEPOOL_BENCHMARK_SOCKET"] = path
        bench.start(config(nm, ready))
        try:
            if not ready:
                borrow(python, path, 1, -1.0)  # the node manager has prepared all it needs
            wait_ready(bench, ready)
            assert nm.process is not None
            programs = {
                "launcher": bench.launcher.process.pid,
                "node manager and its programs": nm.process.pid,
                "ZooKeeper": server.settings["pid"],
            }
            before = {name: cpu(pid) for name, pid in programs.items()}
            found = borrow(python, path, COUNT, pause)
            return {
                "median ms": median(found),
                "99th ms": percentile(found, 0.99),
                **{
                    f"CPU of {name}, ms each": (cpu(pid) - before[name]) / COUNT * 1000
                    for name, pid in programs.items()
                },
            }
        finally:
            bench.close()


def borrow(python: str, path: str, count: int, pause: float) -> list[float]:
    done = subprocess.run(
        [python, str(HERE / "borrow.py"), path, str(count), str(pause)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    if found["errors"]:
        raise RuntimeError(f"{len(found['errors'])} of {count} failed: {found['errors'][0]}")
    return list(found["times"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="shapes whose names contain this")
    args = parser.parse_args()
    pythons = {"ours": sys.executable, **({"other": args.other} if args.other else {})}
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="nodepool-bench-") as folder:
        work, tool = pathlib.Path(folder), load_tool()
        server = Server(tool, work / "zk")
        try:
            for shape in SHAPES:
                if args.only and args.only not in shape:
                    continue
                for _run in range(args.runs):
                    for release, python in pythons.items():
                        for what, value in measure(server, python, work, shape).items():
                            found = figures.setdefault(f"{shape}: {what}", {})
                            found.setdefault(release, []).append(value)
                            log(f"{release:6} {shape}: {what} {value:.1f}")
        finally:
            tool.stop(work / "zk")
    for what, found in figures.items():
        texts = [
            f"{release} {median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for release, values in found.items()
        ]
        ratio = median(found["ours"]) / median(found["other"]) if "other" in found else 1.0
        print(f"{what:64} {', '.join(texts)}, ratio {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
