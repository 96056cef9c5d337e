"""``status``, ``top``, ``explain`` and ``events``: the current state and its causes."""

from __future__ import annotations

import argparse
import queue
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nodepool import status
from nodepool.base.problems import one_line
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_json,
    add_table,
    note,
)
from nodepool.cmd.screen import Changes, print_colored, screen
from nodepool.status import cluster, find
from nodepool.status.explain import Explanation, Unknown
from nodepool.status.find import ALL_KINDS
from nodepool.status.health import health
from nodepool.status.known import count_of
from nodepool.status.once import Once
from nodepool.status.results import to_json
from nodepool.texts import printable
from nodepool.zk import history
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.feed import TYPES, Event, Feed, describe, matches

LATEST = history.FLUSH_AFTER + 2.0
"""Seconds after which events of a deleted node or request are in the history."""
QUIET, SOONEST = 2.0, 1.0
"""Seconds without a change after which a watched listing is refreshed (its ages change), and
minimum between refreshes.
"""
WAITING = "Waiting requests"
MOST_IDS = 3
"""Ids of waiting requests with the same cause that are shown."""
SUBJECTS = ("node", "request", "provider", "label", "image", "state")


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        show_status,
        "show problems, waiting requests with their cause, daemons, and providers with their "
        "limits",
    )
    add_json(parser.add_argument, "print JSON")
    parser.add_argument("--watch", action="store_true", help="refresh after each change")
    parser = add_command(subparsers, "top", show_status, "the same as `status --watch`")
    add_json(parser.add_argument, "print JSON")
    parser.set_defaults(watch=True)
    parser = add_command(
        subparsers,
        "explain",
        explain_it,
        "explain the state of a request, label, node, image, provider, fleet, host or tenant",
    )
    parser.add_argument(
        "kind",
        metavar="KIND",
        nargs="?",
        choices=ALL_KINDS,
        help="default: found by the id or name; " + ", ".join(ALL_KINDS),
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="id of a node (leading zeros are optional) or request, or a name",
    )
    add_json(parser.add_argument, "print JSON")
    parse = parser.parse_known_args

    def options_first(args: Sequence[str], namespace: argparse.Namespace | None) -> object:
        # Between KIND and NAME, argparse would take KIND for NAME.
        words = [(word, args[number - 1] if number else "") for number, word in enumerate(args)]
        ordered = sorted(
            words, key=lambda each: not (each[0].startswith("-") or each[1] in ("-c", "--format"))
        )
        return parse([word for word, _before in ordered], namespace)

    subparsers.choices["explain"].parse_known_args = options_first
    for name, read, text, filters in (
        (
            "hosts",
            cluster.hosts,
            "list hosts of node managers and static providers, with their use and problems",
            ("host", "provider", "launcher"),
        ),
        (
            "tenants",
            cluster.tenants,
            "list tenants, with their limits and use",
            ("tenant", "launcher"),
        ),
        (
            "pools",
            cluster.pools,
            "list pools of all launchers, with their labels and use",
            ("provider", "pool", "launcher"),
        ),
    ):
        add_table(subparsers, name, read, text, {key: key for key in filters})
    parser = add_command(
        subparsers, "events", show_events, "show the events of the last day, or new ones"
    )
    parser.add_argument("--follow", action="store_true", help="show new events until interrupted")
    add_json(parser.add_argument, "print one JSON object per line")
    parser.add_argument(
        "--type",
        dest="types",
        metavar="TYPE",
        action="append",
        choices=sorted(TYPES),
        help="only events of these types: " + ", ".join(sorted(TYPES)),
    )
    for subject in SUBJECTS:
        parser.add_argument(
            f"--{subject}",
            metavar="NAME",
            action="append",
            help=f"only events of this {subject}; may be repeated",
        )


def watch(context: Context, function: Callable[[Context], Any]) -> int:
    """Show the listing repeatedly until the user interrupts or quits."""
    changed = Changes()
    _subscribe(context, lambda event: changed.set(), reports=True)
    with screen() as shown:
        while True:
            changed.clear()
            shown.show(lambda: function(context))
            if not shown.wait(changed, SOONEST, SOONEST + QUIET):
                return 0


def _subscribe(context: Context, listener: Callable[[Event], object], reports: bool) -> None:
    feed = Feed()
    feed.attach(context.live)
    feed.begin()
    feed.subscribe(listener, reports)


def show_status(context: Context) -> None:
    zk = Once(context.zk)
    tables = {
        # What operators look for comes first: `top` shows only what fits.
        "Problems": status.problem_list(zk),
        WAITING: cluster.by_cause(zk),
        "Launchers and builders": cluster.daemons(zk),
        "Providers": cluster.providers(zk),
    }
    found = health(zk)
    if context.args.json:
        as_json = {
            title.lower().replace(" ", "_"): results.rows for title, results in tables.items()
        }
        print(to_json({"health": found.record(), **as_json}))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = [*_wrapped(f"Health: {found}", width), cluster.summary(zk)]
    for title, results in tables.items():
        lines.append(f"\n{title}:" + ("" if results.rows else " none"))
        if title == WAITING:
            lines += [line for row in results.rows for line in waiting_lines(row, width)]
        elif results.rows:
            lines.append(status.output(results, "table", width=width))
    print_colored("\n".join(lines))


def waiting_lines(row: dict[str, Any], width: int | None) -> Iterator[str]:
    number, ids = row["count"], row["ids"]
    yield from _wrapped(
        f"{count_of(number, 'request')} waiting up to {row['since']}: {row['cause']}", width, 2
    )
    if row["suggestion"]:
        yield from _wrapped(f"suggestion: {row['suggestion']}", width, 4)
    for title, counts in (("labels", row["label_counts"]), ("tenants", row["tenants"])):
        if counts:
            yield from _wrapped(
                f"{title}: {', '.join(f'{name} {count}' for name, count in counts.most_common())}",
                width,
                4,
            )
    more = f" (+{len(ids) - MOST_IDS} more)" if len(ids) > MOST_IDS else ""
    yield from _wrapped(f"ids: {', '.join(ids[:MOST_IDS])}{more}", width, 4)


def _wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Return a text in lines of this width, later ones indented by two more."""
    line = " " * indent + printable(one_line(text))
    return (
        [line]
        if width is None
        else textwrap.wrap(
            line, width, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
        )
    )


def explain_it(context: Context) -> None:
    args = context.args
    try:
        kinds = [args.kind] if args.kind else find.kinds_of(Once(context.zk), args.name)
    except Unknown as error:
        raise CommandError(str(error)) from None
    if len(kinds) > 1:
        several = (
            f"{args.name} has several meanings ({', '.join(kinds)}); name one: `nodepool "
            f"explain {kinds[0]} {args.name}`"
        )
        if args.json:
            raise CommandError(several)
        note(several)
    found = [_explained(context, kind) for kind in kinds]
    print(to_json(found[0].record()) if args.json else "\n\n".join(each.text() for each in found))


def _explained(context: Context, kind: str) -> Explanation:
    name = context.args.name
    if kind == "node" and name.isdecimal():
        name = name.zfill(10)
    has_history, ended = kind in ("node", "request"), threading.Event()
    deadline = time.monotonic() + LATEST * (
        has_history and find.NUMBERED.fullmatch(name) is not None
    )
    while True:
        history.wait_for_write(context.zk.kazoo_client, ended.set)
        try:
            found = find.explain_any(context.zk, kind, name, HistoryReader())
            break
        except Unknown as error:
            # Events of a just deleted object are written in a moment.
            left = deadline - time.monotonic()
            if left <= 0 or not ended.wait(left):
                raise CommandError(str(error)) from None
            ended.clear()
    found.history_is_late = has_history
    return found


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
            moment = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(event["time"]))
            print(
                to_json(event) if args.json else printable(f"{moment}  {describe(event)}"),
                flush=True,
            )

    if not args.follow:
        for event in HistoryReader().read_all(context.zk.kazoo_client):
            show(event)
        return
    arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
    _subscribe(context, arrived.put, reports=False)
    while True:
        show(arrived.get())
