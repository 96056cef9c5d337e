"""The node manager as a program (NM-A.2, NM-C.1)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from nodepool.process.program import arguments
from nodepool.process.service import make_daemon_parser, run_daemon

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


class NodeManagerService:
    """The node manager as a service."""

    def __init__(self, args: argparse.Namespace) -> None:
        from nodepool.nodemanager import config, log_format
        from nodepool.nodemanager.manager import NodeManager

        path = args.config or (config.DEFAULT_PATH if os.path.exists(config.DEFAULT_PATH) else None)
        loaded = config.load(path)
        if loaded.log_file:
            log_format.install(loaded.log_file)
        # Created while there is only one thread: this forks.
        self._manager = NodeManager(loaded, args.startup)

    def start(self) -> None:
        self._manager.start()

    def stop(self) -> None:
        """Stop the daemon; slivers keep running."""
        self._manager.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node manager; the return value is the exit status."""
    args = create_parser().parse_args(arguments(argv))
    return run_daemon(PROG, "nodepool-nodemanager", args, lambda: NodeManagerService(args))
