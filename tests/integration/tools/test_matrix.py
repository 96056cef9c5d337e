"""tools/matrix: what a row runs ends with the tool."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

from tests import REPOSITORY

#: Runs a row that reads the file until somebody writes into it.
PROGRAM = """
import pathlib, sys
from tests.conftest import load_tool
matrix = load_tool("matrix")
prepared = matrix.Prepared("1", pathlib.Path(sys.executable))
command = ("sh", "-c", "cat $0; true", sys.argv[1])
row = matrix.Row("reads", lambda _folder: prepared, command=command)
print(matrix.execute(row, pathlib.Path("/nonexistent")).result)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of a row need root")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_programs_of_a_row_end_with_the_tool(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], cwd=REPOSITORY) as process:
        written = os.open(path, os.O_WRONLY)  # waits for the reader
        try:
            process.send_signal(number)
            process.wait(30)
            poll = select.poll()
            poll.register(written, 0)
            assert poll.poll(20_000) == [(written, select.POLLERR)], "the reader still exists"
        finally:
            process.kill()
            os.close(written)
