"""Console programs: what they do with the streams that they inherit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import REPOSITORY

#: Uses all streams, and prints the descriptor of the next file to those that are open.
PROGRAM = """
import os, sys
from nodepool.process.program import run_console

def main():
    print("output")
    print("error", file=sys.stderr)
    assert sys.stdin.read() == "", "there is no input"
    with open("/dev/null") as file:
        return file.fileno()

sys.exit(run_console("test", main, True))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_replaced(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode > 2, "files do not get the descriptors of the streams"
    streams = ("" if ">&-" in closed.split() else "output\n", "" if "2>&-" in closed else "error\n")
    assert (done.stdout, done.stderr) == streams
