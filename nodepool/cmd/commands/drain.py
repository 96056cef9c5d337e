"""``drain`` and ``undrain``: take something out of service without harm to running jobs."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime

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
from nodepool.zk.drains import KINDS, Drain, describe
from nodepool.zk.mirror import notes
from nodepool.zk.records import Node

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
    for kind in KINDS:
        parser = add_command(commands, kind, drain, f"drain a {kind}")
        parser.add_argument("target", metavar="NAME", help=NAMES[kind])
        parser.add_argument(
            "--wait", action="store_true", help="wait until no node is left; Ctrl-C only ends this"
        )
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
    parser.add_argument("of", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("target", metavar="NAME", help="see `nodepool drain list`")


def drain(context: Context) -> None:
    args = context.args
    check_known(context)
    new = Drain(
        args.kind, args.target, time.time(), args.until, args.reason, user(), args.keep_idle
    )
    for old in context.zk.readNotes(Drain):
        if old.name == new.name:
            note(f"{old.name} was already drained by {old.by}{describe(old)}; this is replaced")
            new = replace(new, since=old.since)
    notes.write(context.kazoo, new)
    left = remaining(context.zk, new)
    print(f"{new.name} is drained{describe(new)}. Nodes left: {counted(left)}")
    if args.wait:
        wait(context, new)


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


def wait(context: Context, new: Drain) -> None:
    """Wait until no node is left, or the drain has ended.

    :raises CommandError: it has ended before.
    """
    changed, zk = threading.Event(), context.live
    zk.node_tree.listeners.append(lambda *_: changed.set())
    zk.note_tree.listeners.append(changed.set)
    said = ""
    while (left := remaining(zk, new) if zk.synced else None) != []:
        if left is None:
            pass  # the connection is lost
        elif zk.note_tree.get(Drain, new.name) is None:
            raise CommandError(
                f"the drain of {new.name} has ended while nodes were left: {counted(left)}"
            )
        elif (text := counted(left)) != said:
            said = text
            note(f"waiting for nodes of {new.name}: {text}")
        changed.wait(CHECK_AGAIN)
        changed.clear()
    print(f"{new.name} has no nodes left")


def undrain(context: Context) -> None:
    kind, target = context.args.of, context.args.target
    drains = [each for each in context.zk.readNotes(Drain) if each.kind == kind]
    found = next((each for each in drains if each.target == target), None)
    if found is None or not notes.remove(context.kazoo, found):
        known = {each.target for each in drains}
        raise CommandError(
            f"{kind} {target} is not drained{did_you_mean(target, known)}; "
            "see `nodepool drain list`"
        )
    print(f"{found.name} is used again")
