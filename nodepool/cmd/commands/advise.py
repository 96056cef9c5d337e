"""``advise``: changes of the configuration that the recorded demand suggests."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodepool import status
from nodepool.cmd.commands import simulate
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command, note
from nodepool.config.location import readable_path
from nodepool.process.program import duration, load_config
from nodepool.status import usage
from nodepool.status.results import Results, format_bytes
from nodepool.texts import print_text

if TYPE_CHECKING:
    from nodepool.config.model import Config
    from nodepool.lab.whatif.advise import Changes, Figures, Option

COLUMNS = {
    "name": "Configuration",
    "p50": "Wait p50",
    "p95": "Wait p95",
    "waiting_hours": "Waiting h",
    "machine_hours": "Machine h",
    "idle_hours": "Idle h",
    "cost": "Cost",
}
#: Concurrent simulations.
JOBS = 2


def register(subparsers: Subparsers) -> None:
    text = "suggest at most three changes of min-ready, max-servers and ram, with their effect"
    parser = add_command(subparsers, "advise", advise, text)
    simulate.add_demand(parser, required=False)
    parser.add_argument(
        "--hour-of-waiting",
        metavar="HOURS",
        type=float,
        default=5.0,
        help="hours of a machine that an hour of waiting is worth (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=duration,
        default=60.0,
        help="print the best changes found within this time (default: 60s)",
    )
    parser.set_defaults(chart=None)


def advise(context: Context) -> None:
    deadline = time.monotonic() + context.args.timeout
    simulate.require("nodepool advise")
    from nodepool.lab.whatif import advise as rules
    from nodepool.lab.whatif.replay import make_job

    args = context.args
    text = Path(args.config).read_text(encoding="utf8")
    config, data = load_config(args.config, None), simulate.content(args.config)
    trace, assumptions = simulate.prepare(context)
    if reason := rules.too_short(trace):
        raise CommandError(f"no advice from this demand: {reason}")
    prices, weight = _prices(config), args.hour_of_waiting

    def judge(wanted: list[Changes]) -> list[Figures | None]:
        changed = (rules.changed(data, each) for each in wanted)
        jobs = [make_job(each, trace.requests, assumptions, args.seed) for each in changed]
        with ThreadPoolExecutor(JOBS, thread_name_prefix="advise") as pool:
            found = pool.map(lambda job: _run(job, deadline), jobs)
            return [None if each is None else rules.figures(each, prices, weight) for each in found]

    sizes = usage.sufficient(trace.uses, usage.sizes(config))
    less = {label: int(each.size / usage.MIB) for label, each in sizes.items()}
    search = rules.Search(judge, rules.simulations(len(trace.requests), args.timeout))
    chosen = search.run(rules.options(data, trace.requests, assumptions, weight, less))
    if rules.NOTHING not in search.known:
        raise CommandError(
            f"no simulation of {len(trace.requests)} requests ended within {args.timeout:g} s; use "
            "a longer --timeout"
        )
    steps = [frozenset(chosen[:number]) for number in range(len(chosen) + 1)]
    early, compared = not search.left, len(search.known)
    search.left = len(steps)
    search.measure(steps)
    rows = [_row(chosen[:number], search.known.get(each)) for number, each in enumerate(steps)]
    _show(args, data, text, chosen, rows)
    for option, _value in chosen:
        if option.label in sizes:
            each = sizes[option.label]
            note(
                f"label {option.label}: the highest memory peak of {each.runs} measured runs is "
                f"{format_bytes(each.peak)}"
            )
    note(f"{compared} configurations were compared with {len(trace.requests)} requests")
    if early:
        note(f"the search was not complete after --timeout {args.timeout:g} s")


def _prices(config: Config) -> dict[tuple[str, str], float]:
    """Return the price of an hour by provider and label."""
    return {
        (name, label): price
        for name, provider in config.providers.items()
        for pool in provider.pools.values()
        for label in pool.labels
        if (price := usage.price_of(config, usage.Use("", label, name, pool.name))) is not None
    }


def _run(job: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """Return the result of a simulation; None if it did not end in time."""
    with simulate.start() as process:
        try:
            left = max(0.0, deadline - time.monotonic())
            output, errors = process.communicate(json.dumps(job), left)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
    if process.returncode:
        raise CommandError(f"the simulation failed: {errors.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(output)
    return result


def _row(changes: Sequence[tuple[Option, int]], found: Figures | None) -> dict[str, Any]:
    name = "now"
    for option, value in changes:
        name = f"{option.name}: {value} instead of {option.value}"
    return {**dict.fromkeys(COLUMNS), **(vars(found) if found else {}), "name": name}


def _show(
    args: argparse.Namespace,
    data: object,
    text: str,
    chosen: Sequence[tuple[Option, int]],
    rows: list[dict[str, Any]],
) -> None:
    from nodepool.lab.whatif import edit
    from nodepool.lab.whatif.report import time_of

    after, changes = text, []
    for option, value in chosen:
        edited = edit.changed(after, option.path, value, os.environ)
        after = edited or after
        where = readable_path(data, option.path)
        changes.append(
            {"option": where, "now": option.value, "advised": value, "in_diff": edited is not None}
        )
    diff = edit.difference(text, after, args.config)
    if args.json:
        print(json.dumps({"changes": changes, "figures": rows, "diff": diff}))
        return
    for row in rows:
        row |= {key: time_of(row[key]) for key in ("p50", "p95")}
        row |= {key: f"{row[key]:.1f}" for key in list(COLUMNS)[3:] if row[key] is not None}
    columns = {key: title for key, title in COLUMNS.items() if key != "cost" or rows[0]["cost"]}
    print(status.output(Results(rows, columns), "table"))
    print_text("\n" + diff if chosen else "\nNo change saves enough.")
    for each in changes:
        if not each["in_diff"]:
            note(f"no single line sets it; change {each['option']} to {each['advised']} by hand")
