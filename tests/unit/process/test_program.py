"""Console programs: what they do with the streams and signals that they inherit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from nodepool.process.program import ending_signals
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

#: Ends with the status of a program that needs all streams.
STARTER = """
import subprocess, sys
from nodepool.process.program import run_console

STARTED = "import os; [os.fstat(number) for number in range(3)]"

def main():
    return subprocess.run([sys.executable, "-c", STARTED]).returncode

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


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_started_programs_get_the_replaced_streams(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", STARTER],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_lost_terminal_ends_programs_but_not_below_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        found = ending_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
