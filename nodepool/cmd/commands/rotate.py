"""``rotate``: replace idle nodes, as many at a time as ``max-unready`` permits."""

from __future__ import annotations

import time

from nodepool.cmd.commands.context import Context, Subparsers, add_command, add_table, note, user
from nodepool.cmd.commands.drain import add_name, add_target, check_known, counted, end, wait
from nodepool.status.rotations import left, rotation_list
from nodepool.zk.mirror import notes
from nodepool.zk.records import Node
from nodepool.zk.rotations import Rotation
from nodepool.zk.zookeeper import ZooKeeper


def register(subparsers: Subparsers) -> None:
    about = "replace the idle nodes of a label, image or provider; running jobs are not affected"
    commands = subparsers.add_parser("rotate", help=about, description=about).add_subparsers(
        dest="kind", metavar="KIND", required=True
    )
    for kind in Rotation.KINDS:
        parser = add_command(commands, kind, rotate, f"replace the idle nodes of one {kind}")
        add_target(parser, kind, "all are replaced")
        parser.add_argument(
            "--reason", metavar="TEXT", default="", help="shown in the history of the nodes"
        )
    add_table(commands, "list", rotation_list, "list rotations with the number of nodes left")
    parser = add_command(commands, "cancel", cancel, "keep the idle nodes that are left")
    add_name(parser, Rotation.KINDS, "rotate")


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
        wait(context, new.name, lambda zk: _left(zk, new.name))
        print(f"the rotation of {new.name} has ended")


def _left(zk: ZooKeeper, name: str) -> list[Node] | None:
    """Return the nodes that a rotation waits for; None: it has ended."""
    found = zk.note_tree.get(Rotation, name)
    return None if found is None else left(zk, found)


def cancel(context: Context) -> None:
    name = end(context, Rotation, "there is no rotation of {}", "rotate")
    print(f"the rotation of {name} is canceled; its idle nodes are kept")
