"""``drain`` and ``undrain``: take something out of service without harm to running jobs."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from nodepool.base.names import did_you_mean
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_table,
    note,
    user,
)
from nodepool.process.program import duration
from nodepool.status.drains import drain_list, known_names, remaining
from nodepool.zk.drains import Drain, describe
from nodepool.zk.mirror import notes
from nodepool.zk.records import Node
from nodepool.zk.rotations import Rotation
from nodepool.zk.zookeeper import ZooKeeper

NAMES = {
    "provider": "its name in the configuration",
    "pool": "PROVIDER-POOL, as in `nodepool pools`",
    "host": "a host of a node manager, as in `nodepool hosts`, or the name of a static node",
    "image": "a disk image: nodes of labels that use it",
    "label": "its name in the configuration",
    "launcher": "its host, as in `nodepool status`",
}
#: Seconds between two checks of ``--wait`` without a change.
CHECK_AGAIN = 10.0

N = TypeVar("N", Drain, Rotation)


def moment(text: str) -> float:
    """Return UNIX seconds of a duration from now, or of a date and time (argument type)."""
    try:
        return time.time() + duration(text)
    except argparse.ArgumentTypeError:
        pass
    try:
        found = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        found = 0.0
    if found <= time.time():
        raise argparse.ArgumentTypeError(
            f"must be a time such as 90m, 8h or 2d, or a future date and time such as "
            f"2030-01-31T08:00, not {text!r}"
        )
    return found


def register(subparsers: Subparsers) -> None:
    about = "stop using a provider, pool, host, image, label or launcher; running jobs finish"
    commands = subparsers.add_parser("drain", help=about, description=about).add_subparsers(
        dest="kind", metavar="KIND", required=True
    )
    for kind in Drain.KINDS:
        parser = add_command(commands, kind, drain, f"drain one {kind}")
        add_target(parser, kind, "no node is left")
        parser.add_argument(
            "--until",
            metavar="TIME",
            type=moment,
            help="end the drain after a time such as 90m, 8h or 2d, or at a date and time such as "
            "2030-01-31T08:00 (default: until `nodepool undrain`)",
        )
        parser.add_argument("--reason", metavar="TEXT", default="", help="shown to those who wait")
        parser.add_argument(
            "--keep-idle",
            action="store_true",
            help="keep idle nodes for the time afterwards; they are not assigned meanwhile",
        )
    add_table(commands, "list", drain_list, "list drains with the number of nodes left")
    parser = add_command(subparsers, "undrain", undrain, "use something again")
    add_name(parser, Drain.KINDS, "drain")


def add_target(parser: argparse.ArgumentParser, kind: str, until: str) -> None:
    """Add the name, and ``--wait`` until that."""
    parser.add_argument("target", metavar="NAME", help=NAMES[kind])
    parser.add_argument(
        "--wait", action="store_true", help=f"wait until {until}; Ctrl-C only ends this"
    )


def add_name(parser: argparse.ArgumentParser, kinds: Collection[str], command: str) -> None:
    """Add kind and name of what the command has ordered."""
    parser.add_argument("of", metavar="KIND", choices=kinds, help=", ".join(kinds))
    parser.add_argument("target", metavar="NAME", help=f"see `nodepool {command} list`")


def drain(context: Context) -> None:
    args = context.args
    check_known(context)
    new = Drain(
        args.kind, args.target, time.time(), args.reason, user(), args.until, args.keep_idle
    )
    for old in context.zk.readNotes(Drain):
        if old.name == new.name:
            note(f"{old.name} was already drained by {old.by}{describe(old)}; this is replaced")
            new = replace(new, since=old.since)
    notes.write(context.kazoo, new)
    left = remaining(context.zk, new)
    print(f"{new.name} is drained{describe(new)}. Nodes left: {counted(left)}")
    if args.wait:
        wait(context, new.name, lambda zk: _left(zk, new))
        print(f"{new.name} has no nodes left")


def check_known(context: Context) -> None:
    """:raises CommandError: no running launcher has what the arguments name."""
    args = context.args
    known = known_names(context.zk, args.kind)
    if args.target not in known:
        raise CommandError(
            f"no running launcher has {args.kind} {args.target}"
            f"{did_you_mean(args.target, known)}; known: {', '.join(sorted(known)) or 'none'}"
        )


def counted(nodes: list[Node]) -> str:
    """Return the number of nodes by state."""
    states = Counter(str(node.state) for node in nodes)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"


def _left(zk: ZooKeeper, new: Drain) -> list[Node] | None:
    """Return the nodes that the drain waits for; None: there are none.

    :raises CommandError: it has ended before.
    """
    left = remaining(zk, new)
    if left and zk.note_tree.get(Drain, new.name) is None:
        raise CommandError(
            f"the drain of {new.name} has ended while nodes were left: {counted(left)}"
        )
    return left or None


def wait(context: Context, name: str, left: Callable[[ZooKeeper], list[Node] | None]) -> None:
    """Print the number of nodes left after each change until the function returns None."""
    changed, zk = threading.Event(), context.live
    zk.node_tree.listeners.append(lambda *_: changed.set())
    zk.note_tree.listeners.append(changed.set)
    said = ""
    while True:
        if zk.synced:  # else the connection is lost
            nodes = left(zk)
            if nodes is None:
                return
            if (text := counted(nodes)) != said:
                said = text
                note(f"waiting for nodes of {name}: {text}")
        changed.wait(CHECK_AGAIN)
        changed.clear()


def undrain(context: Context) -> None:
    print(f"{end(context, Drain, '{} is not drained', 'drain')} is used again")


def end(context: Context, record: type[N], missing: str, command: str) -> str:
    """End what the arguments name; return its name.

    :raises CommandError: it does not exist.
    """
    args = context.args
    found = {each.target: each for each in context.zk.readNotes(record) if each.kind == args.of}
    name = f"{args.of} {args.target}"
    if args.target not in found or not notes.remove(context.kazoo, found[args.target]):
        raise CommandError(
            f"{missing.format(name)}{did_you_mean(args.target, found)}; "
            f"see `nodepool {command} list`"
        )
    return name
