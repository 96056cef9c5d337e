"""Show one line per step of a script, with its time and signs of life.

Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

#: Seconds between two signs of life, on a terminal and elsewhere.
TURN, DOT = 0.2, 10.0


class StepFailed(Exception):
    """A command of a step has failed; ``output`` is what it printed."""

    def __init__(self, title: str, output: str) -> None:
        super().__init__(title)
        self.title = title
        self.output = output


class _Line:
    """The line of a step: redrawn with the seconds on a terminal; elsewhere it grows by dots."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._terminal = stream.isatty()
        self._begun = time.monotonic()
        self._turns = itertools.cycle("|/-\\")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="Thread-step", daemon=True)
        if not self._terminal:
            self._write(f"{title} ...")
        self._thread.start()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
            self._stream.write(text)
            self._stream.flush()

    def _run(self) -> None:
        while not self._ended.wait(TURN if self._terminal else DOT):
            elapsed = time.monotonic() - self._begun
            self._write(
                f"\r\x1b[K{next(self._turns)} {self._title}  {elapsed:.0f} s"
                if self._terminal
                else "."
            )

    def end(self, how: str) -> None:
        self._ended.set()
        self._thread.join()
        elapsed = time.monotonic() - self._begun
        start = f"\r\x1b[K{self._title}: " if self._terminal else " "
        self._write(f"{start}{how} ({elapsed:.0f} s)\n")


@contextlib.contextmanager
def step(title: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show what the body does as one line."""
    line = _Line(title, stream or sys.stderr)
    try:
        yield
    except KeyboardInterrupt:
        line.end("interrupted")
        raise
    except BaseException:
        line.end("FAILED")
        raise
    line.end("done")


def run_step(
    title: str,
    commands: Sequence[Sequence[str]],
    log: pathlib.Path,
    timeout: float = 1800.0,
    environment: dict[str, str] | None = None,
    allowed: frozenset[int] = frozenset({0}),
) -> str:
    """Run the commands sequentially; log and return what they print.

    :param timeout: seconds for each.
    :raises StepFailed: one of them has failed, or takes too long.
    """
    with step(title), open(log, "ab") as output:
        begin = output.tell()
        try:
            for command in commands:
                output.write(f"$ {' '.join(command)}\n".encode())
                output.flush()
                done = subprocess.run(
                    command,
                    check=False,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                )
                if done.returncode not in allowed:
                    raise StepFailed(title, _printed(log, begin))
        except subprocess.TimeoutExpired as error:
            raise StepFailed(
                title, f"{_printed(log, begin)}\nno end within {error.timeout:.0f} s"
            ) from None
        except OSError as error:
            raise StepFailed(title, str(error)) from None
        return _printed(log, begin)


def _printed(log: pathlib.Path, begin: int) -> str:
    with open(log, "rb") as stream:
        stream.seek(begin)
        return stream.read().decode("utf-8", "replace")
