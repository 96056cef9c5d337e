"""Options of tools/quickstart, and the checks before anything is done.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import tempfile

#: GiB that building and uploading the image takes in the temporary directory at most, and what
#: everything else takes.
IMAGE_SPACE, SPACE = 4.0, 0.7


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/quickstart",
        description="From a fresh Debian or Ubuntu machine to working nodes, in one command (as "
        "root; without root, fewer limits are shown). Installs what is missing, starts ZooKeeper, "
        "a node manager and a launcher, asks for nodes, logs in to each, shows that limits hold, "
        "builds an image and does the same with nodes made of it; stops everything that it has "
        "started.",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep it running until Ctrl-C, and print commands to try",
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
    """Return why this cannot work, in one sentence; None: it may."""
    if arguments.json is not None and (problem := _unwritable(arguments.json)):
        return f"--json {arguments.json}: {problem}"
    needed = SPACE + (0.0 if arguments.no_image or os.geteuid() != 0 else IMAGE_SPACE)
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free / 2**30
    if free < needed:
        return (
            f"{directory} has {free:.1f} GiB free and {needed:.1f} GiB are needed: free some, set "
            "TMPDIR to another directory"
            + ("" if arguments.no_image else ", or skip the image with --no-image")
        )
    return None


def _unwritable(path: pathlib.Path) -> str | None:
    if path.is_dir():
        return "this is a directory, but must be a file"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written"
    return None
