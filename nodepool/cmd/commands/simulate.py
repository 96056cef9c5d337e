"""``simulate``: replay demand against a configuration in virtual time."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nodepool import status
from nodepool.base import optional
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_json,
    note,
)
from nodepool.config.loading import driver_directories
from nodepool.config.source import Source
from nodepool.process.program import absolute_path, load_config
from nodepool.status.usage import uses
from nodepool.zk.history import HistoryReader

if TYPE_CHECKING:
    from nodepool.lab.whatif.assumptions import Assumptions
    from nodepool.lab.whatif.demand import Trace

#: Names of the runs in tables and charts.
NOW, WHAT_IF = "now", "what-if"


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "simulate",
        simulate,
        "replay demand against a configuration in virtual time: waiting times and utilization",
    )
    add_demand(parser, required=True)
    parser.add_argument(
        "--what-if",
        metavar="FILE",
        type=absolute_path,
        help="another configuration to compare with",
    )
    parser.add_argument(
        "--chart", metavar="SVG", help="write a chart of machines and waiting requests to this file"
    )


def add_demand(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the options of configuration, demand and assumptions (:func:`prepare`).

    :param required: whether the demand has no default; else it is the history.
    """
    parser.add_argument(
        "--config",
        dest="config",
        metavar="FILE",
        type=absolute_path,
        default=argparse.SUPPRESS,
        help="configuration to simulate (default: that of option -c)",
    )
    demand = parser.add_mutually_exclusive_group(required=required)
    demand.add_argument(
        "--trace",
        metavar="CSV",
        help="demand: columns time, labels, duration, tenant, priority, relative_priority",
    )
    demand.add_argument(
        "--history",
        action="store_true",
        help="demand and launch times of the last day, from the history in ZooKeeper"
        + ("" if required else " (default)"),
    )
    parser.add_argument(
        "--assume", metavar="FILE", help="launch times, sizes of nodes, and quotas (YAML)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of random choices such as launch times (default: %(default)s)",
    )
    add_json(parser.add_argument, "print all measures as JSON")
    parser.add_argument(
        "--save-trace",
        metavar="CSV",
        help="write the demand, such as that of --history, to this file",
    )


def require(command: str) -> None:
    """Check that what simulations need is installed.

    :raises CommandError: it is not.
    """
    optional.require(command, "nodepool-lab")
    if importlib.util.find_spec("greenlet") is None:
        raise CommandError(
            "the Python module greenlet is missing; install the extra simulate: pip install "
            "'.[simulate]'"
        )


def simulate(context: Context) -> int:
    require("nodepool simulate")
    from nodepool.lab.whatif.report import chart, tables

    args = context.args
    trace, assumptions = prepare(context)
    files = {NOW: args.config} | ({WHAT_IF: args.what_if} if args.what_if else {})
    for file in files.values():
        load_config(file, None)  # errors are reported before the runs
    runs = _run(files, trace, assumptions, args.seed)
    if args.chart:
        Path(args.chart).write_text(chart(runs), encoding="utf8")
    for name, summary in runs.items():
        for text in summary["notes"]:
            note(f"{name}: {text}")
        for text, count in summary["complaints"].items():
            note(f"{name}: the launcher logged ({count} times): {text}")
    if args.json:
        print(json.dumps(runs))
        return 0
    for title, results in tables(runs):
        print(f"{title}:\n{status.output(results, 'table')}\n")
    return 0


def prepare(context: Context) -> tuple[Trace, Assumptions]:
    """Read the demand and the assumptions, and check the paths of the output.

    :raises CommandError: a file cannot be read or written.
    """
    from nodepool.lab.whatif.assumptions import Assumptions, AssumptionsError
    from nodepool.lab.whatif.demand import TraceError, write_csv

    args = context.args
    try:
        trace = _trace(context)
        assumptions = Assumptions.read(args.assume) if args.assume else Assumptions()
        if args.save_trace:
            write_csv(args.save_trace, trace.requests)
        if args.chart:
            Path(args.chart).touch()
    except (TraceError, AssumptionsError, OSError) as error:
        raise CommandError(str(error)) from None
    assumptions.learn(trace.launch_times)
    return trace, assumptions


def _trace(context: Context) -> Trace:
    from nodepool.lab.whatif.demand import from_history, read_csv

    if context.args.trace:
        return read_csv(context.args.trace)
    events = HistoryReader().read_all(context.zk.kazoo_client)
    trace = from_history(events)
    trace.uses = uses(events)
    if trace.estimated:
        note(
            f"{trace.estimated} of {len(trace.requests)} requests have no known duration; using "
            "the median of their label"
        )
    return trace


# -- runs


def start() -> subprocess.Popen[str]:
    """Start a process that reads a job (:func:`nodepool.lab.whatif.replay.make_job`)."""
    return subprocess.Popen(
        [sys.executable, "-m", "nodepool.lab.whatif"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The order of sets of strings must not differ between runs.
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


def _run(
    files: dict[str, str], trace: Trace, assumptions: Assumptions, seed: int
) -> dict[str, dict[str, Any]]:
    """Run all configurations concurrently; return the summary of each.

    :raises CommandError: a run failed.
    """
    from nodepool.lab.whatif.replay import make_job

    processes = {}
    with contextlib.ExitStack() as stack:
        shown = _Progress(list(files))
        stack.enter_context(shown.status)
        for name, file in files.items():
            processes[name] = process = stack.enter_context(start())
            assert process.stdin is not None and process.stderr is not None
            thread = threading.Thread(
                target=shown.follow, args=(name, process.stderr), name=f"simulate-{name}"
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(process.kill)
            with process.stdin:
                json.dump(make_job(content(file), trace.requests, assumptions, seed), process.stdin)
        outputs = {}
        for name, process in processes.items():
            assert process.stdout is not None
            outputs[name] = process.stdout.read()
            if process.wait() != 0:
                raise CommandError(f"simulation of {name} failed: {shown.last_text(name)}")
        return {name: json.loads(text) for name, text in outputs.items()}


def content(file: str) -> dict[str, Any]:
    """Return the content of a configuration file, with absolute paths of drivers."""
    data: Any = Source(file).data
    return {**data, "drivers-path": driver_directories(data.get("drivers-path"), file)}


class _Progress:
    """Shows the progress of each run on a terminal, and keeps the last line of its errors."""

    def __init__(self, names: list[str]) -> None:
        from rich.console import Console

        self._percents = dict.fromkeys(names, "0")
        self._texts: dict[str, str] = {}
        self.status = Console(stderr=True).status("Simulating ...")

    def follow(self, name: str, output: IO[str]) -> None:
        for line in output:
            text = line.strip()
            if text.isdecimal():
                self._percents[name] = text
                self.status.update(
                    "Simulated: "
                    + ", ".join(f"{run} {percent} %" for run, percent in self._percents.items())
                )
            elif text:
                self._texts[name] = text

    def last_text(self, name: str) -> str:
        return self._texts.get(name, "no message")
