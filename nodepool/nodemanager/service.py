"""The node manager as a program (NM-A.2, NM-C.1)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nodepool.process.program import arguments
from nodepool.process.service import make_daemon_parser, run_daemon

if TYPE_CHECKING:
    from nodepool.process.parts import Group, Part

PROG = "nodepool-nodemanager"
PID_FILE = "/var/run/nodepool/nodepool-nodemanager.pid"


def create_parser() -> argparse.ArgumentParser:
    from nodepool.nodemanager.config import DEFAULT_PATH

    parser = make_daemon_parser(
        PROG, "Carve this machine into isolated, resource-limited slivers.", PID_FILE
    )
    parser.set_defaults(config=None)
    parser.add_argument(
        "--startup",
        action="store_true",
        help="start every enabled sliver once, also stopped ones, when its source was read "
        "completely",
    )
    for action in parser._actions:
        if action.dest == "config":
            action.help = (
                f"configuration (default: {DEFAULT_PATH} if it exists, else defaults for "
                "everything)"
            )
    return parser


def create(args: argparse.Namespace, *more: Part) -> Group:
    """Create the node manager while there is only one thread: this forks.

    :param more: what else starts with it.
    """
    from nodepool.nodemanager import config, log_format
    from nodepool.nodemanager.manager import NodeManager

    path = args.config or (config.DEFAULT_PATH if os.path.exists(config.DEFAULT_PATH) else None)
    loaded = config.load(path)
    if loaded.log_file:
        log_format.install(loaded.log_file)
    return NodeManager(loaded, args.startup, *more).parts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node manager; the return value is the exit status."""
    args = create_parser().parse_args(arguments(argv))
    return run_daemon(PROG, "nodepool-nodemanager", args, lambda: create(args))
