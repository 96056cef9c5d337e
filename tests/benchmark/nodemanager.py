"""Figures of the node manager on this machine (root): python -m tests.benchmark.nodemanager
[--slivers 100] [--rounds 30]

Daemon as a separate process, slivers of image host, calls over the Unix socket.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from nodepool.nodemanager.client import programs
from tests.support.nodemanager.scene import NmDaemon


class Figures:
    """Name -> value, limit and whether it is met."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self, what: str, value: float, target: float, smaller: bool = True, spread: str = ""
    ) -> None:
        met = value <= target if smaller else value >= target
        self.rows.append(
            {"what": what, "value": round(value, 3), "target": target, "met": met, "spread": spread}
        )
        sign, verdict = "<=" if smaller else ">=", "met" if met else "NOT MET"
        print(
            f"{what:58} {value:10.2f}   target {sign} {target:<8g} {verdict}  {spread}", flush=True
        )


def spread(values: list[float]) -> str:
    return f"min {min(values):.1f} max {max(values):.1f}"


def timed(function: Any, *arguments: Any, **keywords: Any) -> float:
    """Milliseconds."""
    started = time.monotonic()
    function(*arguments, **keywords)
    return (time.monotonic() - started) * 1000


def create_and_destroy(nm: NmDaemon, rounds: int, figures: Figures) -> None:
    for network, target in (("none", 25.0), ("nat", 60.0)):
        made, gone = [], []
        for number in range(rounds):
            name = f"b{number % 3}"
            made.append(timed(nm.put, name, network=network, rspec={"nm_mem_limit": 256}))
            gone.append(timed(nm.delete, name))
        figures.add(
            f"create, network {network}: median ms", median(made), target, spread=spread(made)
        )
        if network == "none":
            figures.add("destroy: median ms", median(gone), 15, spread=spread(gone))


def many(nm: NmDaemon, count: int, figures: Figures) -> None:
    started = time.monotonic()
    for number in range(count):
        nm.put(f"many{number}", wait=False)
    for number in range(count):
        nm.wait(f"many{number}")
    figures.add(f"{count} slivers: s", time.monotonic() - started, 3.0 * count / 100)
    time.sleep(1)
    memory = [nm.client.call("GetUsage", f"many{n}")["memory_bytes"] / 2**20 for n in range(count)]
    figures.add("memory of an idle sliver: median MiB", median(memory), 2, spread=spread(memory))


def adoption(nm: NmDaemon, figures: Figures) -> None:
    """SIGKILL with slivers and an open session; from the start of the program until all answer."""
    nm.put("held")
    session = nm.session("held")
    count = len(nm.client.call("ListSlivers"))
    nm.stop(signal.SIGKILL)
    started = time.monotonic()
    nm.start()
    while any(s["state"] != "ready" for s in nm.client.call("ListSlivers")):
        time.sleep(0.01)
    took = time.monotonic() - started
    out, _ = session.communicate("hello\n", timeout=20)
    assert out == "got hello\n", "the session did not survive"
    figures.add(
        f"start and adoption of {count} slivers after SIGKILL: s",
        took,
        1.0 if count <= 30 else 1.0 * count / 20,
    )


def burn(nm: NmDaemon, names: list[str], loops: int, seconds: float) -> dict[str, float]:
    """Cores used by each of these slivers at the same time."""
    script = (
        f"for i in $(seq {loops}); do timeout {seconds + 3:g} sh -c 'while :; do :; done' & "
        "done; wait"
    )
    found = {name: nm.client.call("GetRecord", name) for name in names}
    programs = [
        subprocess.Popen(
            [
                "ssh",
                "-i",
                str(nm.key),
                "-p",
                str(found[name]["ssh_port"]),
                "-o",
                "BatchMode=yes",
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                f"UserKnownHostsFile={os.devnull}",
                "-o",
                "LogLevel=ERROR",
                "root@127.0.0.1",
                script,
            ],
            stdin=subprocess.DEVNULL,
        )
        for name in names
    ]
    deadline = time.monotonic() + 30
    while (
        any(nm.client.call("GetUsage", name)["pids"] < loops + 2 for name in names)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    before, started = (
        {n: nm.client.call("GetUsage", n)["cpu_usec"] for n in names},
        time.monotonic(),
    )
    time.sleep(seconds)
    after, took = (
        {n: nm.client.call("GetUsage", n)["cpu_usec"] for n in names},
        time.monotonic() - started,
    )
    for program in programs:
        program.wait(60)
    return {name: (after[name] - before[name]) / 1e6 / took for name in names}


def limits(nm: NmDaemon, figures: Figures, seconds: float) -> None:
    cores = os.cpu_count() or 1
    nm.put("light", rspec={"nm_cpu_share": 10})
    nm.put("heavy", rspec={"nm_cpu_share": 30})
    used = burn(nm, ["light", "heavy"], cores * 2, seconds)
    share = 100 * used["heavy"] / (used["light"] + used["heavy"])
    figures.add("CPU 1:3: distance from 75 %, points", abs(share - 75), 3)
    nm.delete("light")
    nm.delete("heavy")
    nm.put("capped", rspec={"nm_cpu_limit": 500})
    used = burn(nm, ["capped"], cores * 2, seconds)
    figures.add("CPU cap of 50 %: distance, points", abs(100 * used["capped"] / cores - 50), 1)
    nm.delete("capped")
    nm.put("sure", rspec={"nm_cpu_guaranteed_share": 200})
    burners = [f"burner{n}" for n in range(10)]
    for name in burners:
        nm.put(name)
    used = burn(nm, ["sure", *burners], cores, seconds)
    figures.add(
        "guarantee of 20 % against ten burners: %", 100 * used["sure"] / cores, 19, smaller=False
    )
    for name in ("sure", *burners):
        nm.delete(name)


def _exec(nm: NmDaemon, name: str) -> None:
    with programs.start(nm.client, name, ["echo", "x"]) as running:
        assert running.read(20) == (programs.STDOUT, b"x\n")


def _first_byte(argv: list[str]) -> None:
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"


def _banner(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        assert connection.recv(4).startswith(b"SSH")


def first_output(nm: NmDaemon, rounds: int, figures: Figures) -> None:
    """From the call, or the start of ssh, to the first output of a command."""
    port = nm.put("ready")["ssh_port"]
    options = (
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        f"UserKnownHostsFile={os.devnull}",
        "LogLevel=ERROR",
    )
    ssh = [
        "ssh",
        "-i",
        str(nm.key),
        "-p",
        str(port),
        *(word for option in options for word in ("-o", option)),
    ]
    target = ["root@127.0.0.1", "echo x"]
    measured: dict[str, tuple[float, Callable[[], None]]] = {
        "ready sliver to output by Exec": (60, lambda: _exec(nm, "ready")),
        "ready sliver to output by SSH": (250, lambda: _first_byte([*ssh, *target])),
        "  the same without sntrup761 (post-quantum)": (
            150,
            lambda: _first_byte([*ssh, "-o", "KexAlgorithms=curve25519-sha256", *target]),
        ),
        "  of which start of the server inside (its banner)": (40, lambda: _banner(port)),
    }
    for what, (limit, function) in measured.items():
        took = []
        for _ in range(rounds):
            time.sleep(0.12)  # the gate accepts 10 connections per second
            took.append(timed(function))
        figures.add(f"{what}: median ms", median(took), limit, spread=spread(took))
    nm.delete("ready")
    took = []
    for number in range(rounds):

        def new(name: str = f"n{number % 3}") -> None:
            nm.put(name)
            _exec(nm, name)

        took.append(timed(new))
        nm.delete(f"n{number % 3}")
    figures.add("new sliver to output by Exec: median ms", median(took), 120, spread=spread(took))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slivers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of CPU")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="nodepool-nm-bench-") as work:
        nm = NmDaemon(pathlib.Path(work))
        nm.start()
        try:
            nm.put("first")
            nm.delete("first")
            first_output(nm, args.rounds, figures)
            create_and_destroy(nm, args.rounds, figures)
            limits(nm, figures, args.seconds)
            for number in range(19):
                nm.put(f"kept{number}")
            adoption(nm, figures)
            for sliver in nm.client.call("ListSlivers"):
                nm.delete(sliver["name"])
            many(nm, args.slivers, figures)
        finally:
            nm.clean()
        print("left behind:", nm.left() or "nothing")
        left = bool(nm.left())
    if args.json:
        args.json.write_text(json.dumps(figures.rows, indent=1))
    return 0 if all(row["met"] for row in figures.rows) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
