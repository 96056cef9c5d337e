"""Flame graphs of the launcher and the node manager, by py-spy (as root): python -m
tests.benchmark.profile [--only ready,steady] [--folder doc/benchmark]

The width of a function is the time in which it, or what it called, had the interpreter (Python's
GIL): neither threads that wait are shown, nor what the kernel does without it.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import psutil

from tests import REPOSITORY
from tests.benchmark import first_command
from tests.benchmark.harness import Bench, Server, log
from tests.benchmark.run import load_tool
from tests.benchmark.scenarios import SCENARIOS

LAUNCHER = (
    *("ready", "launched", "classic", "cloud-burst", "steady", "idle10000", "metastatic"),
    "idle50000",
)
#: File -> shape of the first command.
FIRST = {
    "first-command": "one after the other, none ready",
    "first-command-at-once": "at once, none ready",
    "first-command-ready": "at once, all ready",
}
#: Samples per second. Parts of the whole below `LEAST` are not drawn.
RATE, LEAST = 200, 0.01
#: Of a picture: pixels.
WIDTH, ROW, LETTER = 1200, 16, 6.5
#: Color of functions whose file matches; the first one counts.
COLORS = (
    (r"nodepool/zk/|/kazoo/", "#f4c37d"),
    (r"nodepool/web/|aiohttp|asyncio", "#9fc5e8"),
    (r"nodepool/driver/", "#b6d7a8"),
    (r"nodepool/nodemanager/", "#d5a6bd"),
    (r"nodepool/", "#ea9999"),
    (r"", "#dddddd"),
)


@dataclass
class Frame:
    """A function in one stack of calls, with the samples in it and in what it called."""

    name: str
    samples: int = 0
    called: dict[str, Frame] = field(default_factory=dict)

    def add(self, stack: Iterable[str], samples: int) -> None:
        frame = self
        frame.samples += samples
        for name in stack:
            frame = frame.called.setdefault(name, Frame(name))
            frame.samples += samples

    def drawn(self, left: float, width: float, row: int) -> Iterator[tuple[int, str]]:
        """Yield row and SVG of each rectangle, from this frame downwards."""
        name, color = escape(self.name), next(c for p, c in COLORS if re.search(p, self.name))
        shown = escape(self.name[: int(width / LETTER)] if width > 4 * LETTER else "")
        yield (
            row,
            f'<g><title>{name}: {self.samples} samples</title><rect x="{left:.1f}" '
            f'y="{row * ROW}" width="{width:.1f}" height="{ROW - 1}" fill="{color}"/>'
            f'<text x="{left + 2:.1f}" y="{row * ROW + 11}">{shown}</text></g>',
        )
        for each in sorted(self.called.values(), key=lambda each: each.name):
            part = width * each.samples / self.samples
            if part > LEAST * WIDTH:
                yield from each.drawn(left, part, row + 1)
            left += part


def picture(stacks: str, title: str) -> str:
    """Return a flame graph as SVG; `stacks` is the raw output of py-spy."""
    root = Frame(title)
    for line in stacks.splitlines():
        stack, _, samples = line.rpartition(" ")
        if "_find_and_load" not in stack:  # imports, at the start
            root.add(stack.split(";"), int(samples))
    found = list(root.drawn(0, WIDTH, 0)) if root.samples else []
    height = ROW * (1 + max((row for row, _ in found), default=0))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="11">\n'
        + "\n".join(text for _, text in found)
        + "\n</svg>\n"
    )


class Profiled(Bench):
    """A run of which each of our processes is sampled."""

    graph: pathlib.Path
    samplers: Mapping[str, subprocess.Popen[bytes]] = {}

    def run_launcher(self) -> None:
        for sampler in self.samplers.values():
            sampler.wait(60)  # the scenario has ended its first launcher
        super().run_launcher()
        programs = {"launcher": self.launcher.process.pid}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("nodepool-nodemanager" in word for word in child.cmdline()):
                    programs["node-manager"] = child.pid
        self.samplers = {
            name: subprocess.Popen(
                [
                    *("py-spy", "record", "--gil", "--function", "--format", "raw"),
                    *("--rate", str(RATE), "--duration", "3600", "--pid", str(pid)),
                    *("--output", str(self.work / name)),
                ],
                stdout=subprocess.DEVNULL,
            )
            for name, pid in programs.items()
        }

    def close(self) -> None:
        for name, sampler in self.samplers.items():
            sampler.send_signal(signal.SIGINT)
            sampler.wait(60)
            file = self.graph.with_name(f"{self.graph.name}-{name}.svg")
            file.write_text(picture((self.work / name).read_text(), f"{self.graph.name}: {name}"))
        super().close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*LAUNCHER, *FIRST)
    parser.add_argument("--only", default=",".join(names), help="default: %(default)s")
    parser.add_argument("--folder", type=pathlib.Path, default=REPOSITORY / "doc" / "benchmark")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nodepool-bench-") as folder:
        work, tool = pathlib.Path(folder), load_tool()
        server = Server(tool, work / "zk")
        try:
            for name in args.only.split(","):
                log(name)
                Profiled.graph = args.folder / name
                if name in FIRST:
                    first_command.measure(server, sys.executable, work, FIRST[name], Profiled)
                else:
                    bench = Profiled(server, sys.executable, work, name)
                    try:
                        SCENARIOS[name](bench)
                    finally:
                        bench.close()
        finally:
            tool.stop(work / "zk")


if __name__ == "__main__":
    main()
