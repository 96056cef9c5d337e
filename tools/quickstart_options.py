"""Options of tools/quickstart, and what can be refused before anything is done. Standard library
only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import tempfile

#: GiB that building and uploading the image takes in the temporary directory at most, and what
#: everything else takes.
IMAGE_ROOM, ROOM = 4.0, 0.7


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/quickstart",
        description="From a fresh Debian or Ubuntu machine to working nodes, in one command (as "
        "root; without root with less "
        "to see). Installs what is missing, starts ZooKeeper, a node manager and a launcher, asks "
        "for nodes, logs in to each, "
        "shows that limits hold, builds an image and does the same with nodes made of it; stops "
        "all it started.",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave it running until Ctrl-C, with commands to try"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write what happened to FILE"
    )
    parser.add_argument(
        "--no-image", action="store_true", help="build no image: seconds instead of minutes"
    )
    parser.add_argument(
        "--zookeeper",
        action="store_true",
        help="with the real ZooKeeper instead of a small one; needs Java",
    )
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser


def obstacle(arguments: argparse.Namespace) -> str | None:
    """Why this cannot work, in one sentence; None when it may."""
    if arguments.json is not None and (problem := _unwritable(arguments.json)):
        return f"--json {arguments.json}: {problem}"
    room = ROOM + (0.0 if arguments.no_image or os.geteuid() != 0 else IMAGE_ROOM)
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free / 2**30
    if free < room:
        return (
            f"{directory} has {free:.1f} GiB free and {room:.1f} GiB are needed; make room, set "
            "TMPDIR to another directory"
            + ("" if arguments.no_image else ", or leave the image out with --no-image")
        )
    return None


def _unwritable(path: pathlib.Path) -> str | None:
    if path.is_dir():
        return "this is a directory; a file is wanted"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written"
    return None
