"""``rotate``: replace idle nodes, as many at a time as ``max-unready`` permits."""

from __future__ import annotations

import threading
import time

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
from nodepool.cmd.commands.drain import CHECK_AGAIN, NAMES, check_known, counted
from nodepool.status.rotations import left, rotation_list
from nodepool.zk.mirror import notes
from nodepool.zk.rotations import KINDS, Rotation


def register(subparsers: Subparsers) -> None:
    about = "replace the idle nodes of a label, image or provider; running jobs are not affected"
    commands = subparsers.add_parser("rotate", help=about, description=about).add_subparsers(
        dest="kind", metavar="KIND", required=True
    )
    for kind in KINDS:
        parser = add_command(commands, kind, rotate, f"replace the idle nodes of a {kind}")
        parser.add_argument("target", metavar="NAME", help=NAMES[kind])
        parser.add_argument(
            "--wait", action="store_true", help="wait until all are replaced; Ctrl-C only ends this"
        )
        parser.add_argument(
            "--reason", metavar="TEXT", default="", help="shown in the history of the nodes"
        )
    add_table(commands, "list", rotation_list, "list rotations with the number of nodes left")
    parser = add_command(commands, "cancel", cancel, "keep the idle nodes that are left")
    parser.add_argument("of", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("target", metavar="NAME", help="see `nodepool rotate list`")


def rotate(context: Context) -> None:
    args = context.args
    check_known(context)
    new = Rotation(args.kind, args.target, time.time(), args.reason, user())
    for old in context.zk.readNotes(Rotation):
        if old.name == new.name:
            note(
                f"{old.by} was already rotating {old.name}; nodes launched since are replaced, too"
            )
    notes.write(context.kazoo, new)
    stored = [each for each in context.zk.readNotes(Rotation) if each.name == new.name]
    nodes = left(context.zk, stored[0]) if stored else []
    print(f"{new.name}: idle nodes are replaced. Nodes left: {counted(nodes)}")
    if args.wait:
        wait(context, new.name)


def wait(context: Context, name: str) -> None:
    """Wait until the rotation has ended."""
    changed, zk = threading.Event(), context.live
    zk.node_tree.listeners.append(lambda *_: changed.set())
    zk.note_tree.listeners.append(changed.set)
    said = ""
    while not zk.synced or (found := zk.note_tree.get(Rotation, name)) is not None:
        if zk.synced and found is not None and (text := counted(left(zk, found))) != said:
            said = text
            note(f"waiting for nodes of {name}: {text}")
        changed.wait(CHECK_AGAIN)
        changed.clear()
    print(f"the rotation of {name} has ended")


def cancel(context: Context) -> None:
    kind, target = context.args.of, context.args.target
    rotations = [each for each in context.zk.readNotes(Rotation) if each.kind == kind]
    found = next((each for each in rotations if each.target == target), None)
    if found is None or not notes.remove(context.kazoo, found):
        known = {each.target for each in rotations}
        raise CommandError(
            f"there is no rotation of {kind} {target}{did_you_mean(target, known)}; "
            "see `nodepool rotate list`"
        )
    print(f"the rotation of {found.name} is canceled; its idle nodes are kept")
