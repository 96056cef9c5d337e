"""``status``, ``top``, ``explain`` and ``events``: the current state and its causes."""

from __future__ import annotations

import json
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nodepool import status
from nodepool.base.problems import printable
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.screen import screen
from nodepool.status import cluster
from nodepool.status.explain import KINDS, Unknown, explain
from nodepool.status.once import Once
from nodepool.zk import history
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.feed import TYPES, Event, Feed, describe, matches

LATEST = history.FLUSH_AFTER + 2.0
"""Seconds after which events of a deleted node or request are in the history."""
_NUMBERED = re.compile(r"(\d+-)?\d{10}")
QUIET, SOONEST = 2.0, 1.0
"""Seconds after which a watched listing is refreshed (its ages change), and minimum seconds between refreshes."""
SUBJECTS = ("node", "request", "provider", "label", "image", "state")


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        show_status,
        "show problems, waiting requests with their cause, daemons, and providers with their limits",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--watch", action="store_true", help="refresh after each change")
    parser = add_command(subparsers, "top", show_status, "the same as `status --watch`")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(watch=True)
    parser = add_command(subparsers, "explain", explain_it, "explain the state of a request, label, node, image or provider")
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("name", metavar="NAME", help="id or name")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser = add_command(subparsers, "events", show_events, "show the events of the last day, or new ones")
    parser.add_argument("--follow", action="store_true", help="show new events until interrupted")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--type", dest="types", metavar="TYPE", action="append", choices=sorted(TYPES),
                        help="only events of these types: " + ", ".join(sorted(TYPES)))  # fmt: skip
    for subject in SUBJECTS:
        parser.add_argument(
            f"--{subject}", metavar="NAME", action="append", help=f"only events of this {subject}; may be repeated"
        )


def watch(context: Context, function: Callable[[Context], Any]) -> int:
    """Show the listing repeatedly until interrupted."""
    live, changed = context.live, threading.Event()
    feed = Feed()
    feed.attach(live)
    feed.begin()
    feed.subscribe(lambda event: changed.set(), reports=True)
    with screen() as show:
        while True:
            changed.clear()
            show(lambda: function(context))
            time.sleep(SOONEST)
            changed.wait(QUIET)


def show_status(context: Context) -> None:
    zk = Once(context.zk)
    tables = {
        # What operators look for comes first: `top` shows only what fits.
        "Problems": status.problem_list(zk),
        "Waiting requests": cluster.by_cause(zk),
        "Launchers and builders": cluster.daemons(zk),
        "Providers": cluster.providers(zk),
    }
    if context.args.json:
        print(json.dumps({title.lower().replace(" ", "_"): results.rows for title, results in tables.items()}))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(cluster.summary(zk))
    for title, results in tables.items():
        print(f"\n{title}:" + ("" if results.rows else " none"))
        if results.rows:
            print(status.output(results, "table", width=width))


def explain_it(context: Context) -> None:
    name = context.args.name
    if context.args.kind == "node" and name.isdecimal():
        name = name.zfill(10)
    kind, ended = context.args.kind, threading.Event()
    deadline = time.monotonic() + LATEST * (kind in ("node", "request") and _NUMBERED.fullmatch(name) is not None)
    while True:
        history.wait_for_write(context.zk.kazoo_client, ended.set)
        try:
            found = explain(context.zk, kind, name, HistoryReader())
            break
        except Unknown as error:
            # Events of a just deleted object are written in a moment.
            left = deadline - time.monotonic()
            if left <= 0 or not ended.wait(left):
                raise CommandError(str(error)) from None
            ended.clear()
    found.history_is_late = context.args.kind in ("request", "node")
    print(json.dumps(found.record()) if context.args.json else found.text())


def show_events(context: Context) -> None:
    args = context.args
    wanted: dict[str, Any] = {name: values for name in SUBJECTS if (values := getattr(args, name))}
    if args.types:
        wanted["type"] = args.types
    if "label" in wanted:
        wanted["labels"] = wanted.pop("label")
    if "node" in wanted:
        wanted["node"] = [name.zfill(10) if name.isdecimal() else name for name in wanted["node"]]

    def show(event: Event) -> None:
        if matches(event, wanted):
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
            print(json.dumps(event) if args.json else printable(f"{moment}  {describe(event)}"), flush=True)

    if not args.follow:
        for event in HistoryReader().read_all(context.zk.kazoo_client):
            show(event)
        return
    arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
    feed = Feed()
    feed.attach(context.live)
    feed.begin()
    feed.subscribe(arrived.put)
    while True:
        show(arrived.get())
