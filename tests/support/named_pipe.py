"""A named pipe in the place of a file."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

#: A reader that waits for a writer continues when this one ends.
WRITER = """
import sys, time
time.sleep(30)
print("a reader waits", flush=True)
open(sys.argv[1], "w")
"""


@contextlib.contextmanager
def named_pipe(path: pathlib.Path) -> Iterator[None]:
    """Replace the file; the block fails if it waits for a writer of the pipe."""
    path.unlink()
    os.mkfifo(path)
    command = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            yield
        finally:
            writer.kill()
            said, _ = writer.communicate()
    assert not said, "the block has waited for a writer"
    path.unlink()
