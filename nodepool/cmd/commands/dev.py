"""``dev``: a private installation on this machine while the command runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nodepool.base import optional
from nodepool.cmd.commands.context import Context, Subparsers, add_command
from nodepool.process.program import absolute_path


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "dev",
        dev,
        "run ZooKeeper, launcher and nodes on this machine, to try things out",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=absolute_path,
        default=None,
        help="directory for all data (default: nodepool-dev in $XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory for the next run")
    parser.add_argument(
        "--fake",
        action="store_true",
        help="create no machines: nodes are only records of the fake driver",
    )


def _directory() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "state"
    )
    return os.path.join(state, "nodepool-dev")


def dev(context: Context) -> int:
    for wheel in ("nodepool-lab", "nodepool-nodemanager"):
        optional.require("nodepool dev", wheel)
    from nodepool.lab.dev.files import Directory
    from nodepool.lab.dev.installation import Installation

    args = context.args
    if not args.debug:
        logging.getLogger("nodepool").setLevel(logging.ERROR)
    directory = Directory(Path(args.directory or _directory()), args.keep)
    try:
        end = "kept at the end" if directory.kept else "removed at the end (--keep keeps it)"
        _print(f"Everything is in {directory.path}, {end}")
        if directory.existed:
            _print("  using the existing data")
        Installation(directory, args.fake, _print).run()
    finally:
        directory.close()
        _print(f"Everything has ended{f'; {directory.path} is kept' if directory.kept else ''}")
    return 0


def _print(text: str) -> None:
    print(text, flush=True)
