#!/usr/bin/env python3
"""Measures pages, API, watchers, history and ``nodepool list`` alongside 10,000 nodes and 2,000
waiting requests.

  python -m tests.benchmark.web [--other PYTHON] [--nodes 10000] [--waiting 2000] [--rate 50]
  [--watchers 200]

A watcher is a connection to ``/api/v1/events?digest`` that asks for a page again when it gets
a change, as a browser does. With ``--other`` only what that release has is measured of it:
``list``.
"""

from __future__ import annotations

import argparse
import http.client
import pathlib
import random
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool.zk import history
from tests.benchmark.harness import Bench, Server, log, percentile
from tests.benchmark.run import load_tool

PATHS = (
    "/ui/",
    "/ui/static/app.js",
    "/api/v1/overview",
    "/api/v1/nodes?limit=100",
    "/api/v1/nodes?limit=100&sort=-since&state=ready",
    "/api/v1/requests?limit=100&state=requested",
    "/api/v1/labels?limit=100",
    "/api/v1/providers",
    "/api/v1/waiting",
    "/api/v1/explain/label/small",
    "/node-list?node_id=0000000001",
    "/ready",
)
PROGRAMS = (
    "nodepool",
    "nodepool-launcher",
    "nodepool-builder",
    "nodepool-nodemanager",
    "nodepool-nm",
)


def get(port: int, path: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:200])
    finally:
        connection.close()
    return time.monotonic() - began


class Readers:
    """Threads that ask for all kinds of pages, in all about 20 a second."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.times: dict[str, list[float]] = {path: [] for path in PATHS}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(number),)) for number in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, chance: random.Random) -> None:
        while not self._stop.wait(0.2):
            path = chance.choice(PATHS)
            self.times[path].append(get(self.port, path))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Watchers:
    """Connections that follow events; one thread asks for pages in their name."""

    def __init__(self, port: int, count: int) -> None:
        self.port = port
        self._sockets = [
            socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)
        ]
        for each in self._sockets:
            each.sendall(b"GET /api/v1/events?digest HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            each.setblocking(False)
        self.changes = self.asked = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        """Idle until something comes: what it costs here would be taken for what it costs the
        launcher.
        """
        tags: dict[str, str] = {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with selectors.DefaultSelector() as selector:
            for number, each in enumerate(self._sockets):
                selector.register(each, selectors.EVENT_READ, number)
            while not self._stop.is_set():
                for key, _events in selector.select(0.2):
                    told = key.fileobj.recv(65536).count(b"event: changed")
                    self.changes += told
                    if told:
                        path = (
                            "/api/v1/overview",
                            "/api/v1/nodes?limit=100",
                            "/api/v1/requests?limit=100",
                        )[key.data % 3]
                        connection.request(
                            "GET", path, headers={"If-None-Match": tags.get(path, "")}
                        )
                        answer = connection.getresponse()
                        answer.read()
                        tags[path] = answer.headers["ETag"]
                        self.asked += 1
        connection.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for each in self._sockets:
            each.close()


def stream(bench: Bench, rate: float, seconds: float) -> tuple[float, float]:
    """Serve requests at this rate; median latency in ms, and the launcher's processor seconds."""
    zuul, cpu, start = bench.zuul, bench.launcher.cpu(), time.monotonic()
    ids: list[str] = []
    open_ids: list[str] = []
    while time.monotonic() - start < seconds:
        ids.append(zuul.submit(["small"]))
        open_ids.append(ids[-1])
        finished = [each for each in open_ids if each in zuul.ended]
        if finished:
            zuul.use(finished)
            open_ids = [each for each in open_ids if each not in finished]
        time.sleep(max(0.0, start + len(ids) / rate - time.monotonic()))
    zuul.wait(ids)
    zuul.use(open_ids)
    return median(zuul.latency(each) for each in ids), bench.launcher.cpu() - cpu


def history_bytes(bench: Bench) -> tuple[int, int]:
    """Writes, and bytes of them."""
    kazoo: Any = bench.zuul.kazoo
    try:
        names = kazoo.get_children(history.ROOT)
    except NoNodeError:
        return 0, 0
    return len(names), sum(len(kazoo.get(f"{history.ROOT}/{name}")[0]) for name in names)


def command(python: str, bench: Bench, *arguments: str) -> float:
    """Seconds of a command of that release, start included."""
    began = time.monotonic()
    program = "import sys; from nodepool.cmd.nodepoolcmd import main; sys.exit(main())"
    done = subprocess.run(
        [python, "-c", program, "-c", str(bench.config_path), *arguments],
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return time.monotonic() - began


def start(program: str) -> float:
    """Seconds of one of our programs that only prints how it is used."""
    began = time.monotonic()
    subprocess.run(
        [pathlib.Path(sys.executable).with_name(program), "--help"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return time.monotonic() - began


def measure(bench: Bench, port: int, args: argparse.Namespace) -> dict[str, float]:
    pools = [
        {"name": "main", "labels": ["small"]},
        {"name": "full", "labels": ["stuck"], "max-servers": 1},
    ]
    bench.environment["NODEPOOL_BENCHMARK_WEB"] = str(port)
    labels = [{"name": name} for name in ("small", "stuck", "idle")]
    bench.start(
        {"labels": labels, "providers": [{"name": "p0", "driver": "instant", "pools": pools}]}
    )
    zuul = bench.zuul
    zuul.wait([zuul.submit(["stuck"])])
    zuul.create_nodes(args.nodes)
    zuul.submit_many([["stuck"]] * args.waiting)
    time.sleep(8)
    found = {f"{program} --help: s": min(start(program) for _ in range(5)) for program in PROGRAMS}
    found["image-list (there are none): s"] = min(
        command(sys.executable, bench, "image-list") for _ in range(5)
    )
    found["list: s"] = min(command(sys.executable, bench, "list") for _ in range(3))
    if args.other:
        # What this release alone has for labels would be refused there.
        found["list, other: s"] = command(args.other, bench, "list")
    found["status: s"] = min(command(sys.executable, bench, "status") for _ in range(3))
    stream(bench, args.rate, 5)  # warm
    before, begun = bench.server.counters()["update"], history_bytes(bench)
    stream(bench, args.rate, args.seconds)
    time.sleep(32)
    writes, size = (now - then for now, then in zip(history_bytes(bench), begun, strict=True))
    found["history: bytes per node"] = size / (args.rate * args.seconds)
    found["history: % of all writes"] = 100 * writes / (bench.server.counters()["update"] - before)
    return {**found, **rounds(bench, port, args)}


def rounds(bench: Bench, port: int, args: argparse.Namespace) -> dict[str, float]:
    """Alone, alongside readers, and alongside watchers in turn, several times: the speed of the
    machine changes meanwhile.
    """
    alone, read, watched, shares, memory = [], [], [], [], []
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(args.rounds):
        latency, cpu = stream(bench, args.rate, args.seconds)
        alone.append(latency)
        readers = Readers(port)
        read.append(stream(bench, args.rate, args.seconds)[0] / latency)
        readers.stop()
        for path in PATHS:
            times[path] += readers.times[path]
        before = bench.launcher.memory()
        watchers = Watchers(port, args.watchers)
        latency_beside, more = stream(bench, args.rate, args.seconds)
        memory.append(bench.launcher.memory() - before)
        watchers.stop()
        watched.append(latency_beside / latency)
        shares.append(100 * (more - cpu) / args.seconds)
        log(
            f"{watchers.changes} changes told, {watchers.asked} pages asked for, {shares[-1]:.1f} "
            "% of a core"
        )
    for path in PATHS:
        log(
            f"{path}: {len(times[path])} times, 95th "
            f"{1000 * percentile(times[path] or [0.0], 0.95):.0f} ms"
        )
    return {
        "pages and API: 95th ms": 1000
        * percentile([each for path in PATHS for each in times[path]], 0.95),
        f"{args.rate:g}/s: median ms": median(alone),
        f"{args.rate:g}/s beside readers: ratio": median(read),
        f"{args.watchers} watchers: MB": max(memory),
        f"{args.watchers} watchers: % of a core": median(shares),
        f"{args.rate:g}/s beside watchers: ratio": median(watched),
    }


def run(
    measure: Callable[[Bench, int, argparse.Namespace], dict[str, float]], args: argparse.Namespace
) -> int:
    """Print what `measure` finds with a launcher whose web server has this port."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-bench-"))
    tool: Any = load_tool()
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        bench = Bench(Server(tool, work / "zk"), sys.executable, work, "ours")
        try:
            for name, value in measure(bench, port, args).items():
                print(f"{name:40} {value:.3f}")
        finally:
            bench.close()
    finally:
        tool.stop(work / "zk")
        shutil.rmtree(work, ignore_errors=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--watchers", type=int, default=200)
    args = parser.parse_args()
    return run(measure, args)


if __name__ == "__main__":
    sys.exit(main())
