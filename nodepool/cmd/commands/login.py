"""``ssh``: log in to a node with what its record contains."""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.commands.foreground import Foreground
from nodepool.cmd.commands.nodes import find_node
from nodepool.lease import ssh
from nodepool.process.program import absolute_path
from nodepool.ssh import OPTIONS, quoted
from nodepool.zk.records import ABORTED, BUILDING, DELETING, FAILED, INIT, Node


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "ssh",
        log_in,
        "log in to a node, or run a command on it, with the host keys of its record",
    )
    parser.add_argument(
        "-i",
        dest="identity",
        metavar="FILE",
        type=absolute_path,
        help="private key (default: those of ssh)",
    )
    parser.add_argument("node", metavar="NODE", help="node id; leading zeros are optional")
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="after --: run this command")


def why_not(node: Node, without_keys: str) -> str | None:
    """Return why ssh cannot log in to a node and check its host keys; None: it can.

    :param without_keys: what to do if the record has no host keys.
    """
    if node.state in (INIT, BUILDING) and not node.interface_ip:
        return (
            f"node {node.id} has no address yet: it is being launched; see `nodepool explain "
            f"{node.id}`"
        )
    if node.state in (DELETING, FAILED, ABORTED):
        return f"node {node.id} is {node.state}: its machine is being deleted"
    if (why := ssh.unreachable(node)) is not None:
        return why
    return (
        None
        if ssh.known_hosts([node])
        else f"the record of node {node.id} has no host keys; {without_keys}"
    )


def log_in(context: Context) -> int:
    args = context.args
    node = find_node(context.zk, args.node)
    if node is None:
        raise CommandError(f"Node {args.node} not found")
    why = why_not(
        node, "see the option `host-key-checking` of its pool, or `host-key` of a static node"
    )
    if why is not None:
        raise CommandError(why)
    context.close()
    with (
        tempfile.TemporaryDirectory(prefix="nodepool-ssh-") as directory,
        Foreground(using=True) as foreground,
    ):
        path = pathlib.Path(directory, "known_hosts")
        path.write_text(ssh.known_hosts([node]))
        options = {
            **OPTIONS,
            "UserKnownHostsFile": quoted(os.fspath(path)),
            "Port": str(node.connection_port),
        }
        argv = ["ssh", *(f"-o{key}={value}" for key, value in options.items())]
        argv += ["-i", args.identity, "-oIdentitiesOnly=yes"] if args.identity else []
        argv += ["-l", node.username] if node.username else []
        argv += [
            *(["-t"] if not args.command and sys.stdin.isatty() else []),
            "--",
            node.interface_ip,
            *args.command,
        ]
        return foreground.run(argv, {})
