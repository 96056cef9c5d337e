"""Standard output of nodepool-nm-forward that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", ["by its reader", "before the start"])
def test_output_that_nobody_reads_is_no_traceback(closed: str) -> None:
    command = [sys.executable, "-m", "nodepool.nodemanager.api.forward", "--socket", "/nonexistent"]
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            command if closed == "by its reader" else ["sh", "-c", 'exec "$@" >&-', "sh", *command],
            input=b"a request",
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    finally:
        os.close(write)
    assert (ended.stderr, ended.returncode) == (b"", 1)
