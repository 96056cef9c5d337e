"""Output of commands whose locale cannot encode all characters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = """
import sys
from nodepool.process.program import run_console
sys.exit(run_console("nodepool", lambda: print("held by J\\xfcrgen \\u2013 later"), False))
"""

#: A stage that prints the path of a file that does not exist.
STAGE = """
import sys
from nodepool.adapters import gitlab
sys.exit(gitlab.main(["prepare", "--image", "*"]))
"""


def run(code: str, encoding: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": encoding, **environment},
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("encoding", "output"),
    [
        ("ascii", b"held by J\\xfcrgen \\u2013 later\n"),
        ("latin-1", b"held by J\xfcrgen \\u2013 later\n"),
        ("utf-8", "held by J\xfcrgen \u2013 later\n".encode()),
    ],
)
def test_characters_that_the_locale_lacks_are_escaped_in_the_output(
    encoding: str, output: bytes
) -> None:
    ended = run(COMMAND, encoding)
    assert (ended.stdout, ended.stderr, ended.returncode) == (output, b"", 0)


def test_reason_of_a_failed_stage_is_printed_whatever_the_locale_can_encode() -> None:
    ended = run(STAGE, "ascii", JOB_RESPONSE_FILE="/J\xfcrgen", BUILD_FAILURE_EXIT_CODE="7")
    assert ended.returncode == 7
    assert b"/J\\xfcrgen" in ended.stdout and b"Traceback" not in ended.stderr
