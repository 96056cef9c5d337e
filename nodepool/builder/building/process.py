"""Run the image-building command and the upload hook (BLD-7.4 to BLD-7.7, BLD-9)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets as random_source
import select
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, BinaryIO

from nodepool.builder.machine import processes

log = logging.getLogger("nodepool.builder.process")

#: Milliseconds; kept for external code that sets it.
BUILD_PROCESS_POLL_TIMEOUT = 30000
#: Longest time in seconds in which a termination, or the end of a command whose output stays open,
#: is noticed.
TICK = 0.2
#: Seconds between SIGTERM and SIGKILL.
GRACE = 8.0
#: Seconds for filters of the command to flush their output after its end.
DRAIN = 2.0
#: Seconds in which killed processes must end.
LAST_KILL = 10.0
MAX_LINE = 500
HOOK_LINES = 200
_CHUNK = 65536
_MIN_SECRET = 4
_NO_SECRETS = frozenset({"true", "false", "none", "null"})


@dataclass(frozen=True)
class ProcessResult:
    #: Negative: ended by that signal. None: it could not be killed.
    returncode: int | None
    timed_out: bool
    #: The reason why it was terminated.
    terminated: str | None
    #: Seconds.
    duration: float


class Redactor:
    """Replaces secret values in a stream of bytes, even across chunk boundaries.

    Of a value with several lines, each line is a secret.
    """

    def __init__(self, values: Iterable[str]) -> None:
        words: set[bytes] = set()
        for text in (line for value in values for line in value.splitlines()):
            if len(text) >= _MIN_SECRET and text.lower() not in _NO_SECRETS:
                # Unchanged, and as bash prints it in a trace (single quotes) or in "declare -p"
                # (double quotes).
                quoted = shlex.quote(text)
                forms = (
                    text,
                    quoted[1:-1] if quoted != text else text,
                    text.replace("'", "'\\''"),
                    re.sub(r'([$`"\\])', r"\\\1", text),
                )
                words.update(form.encode() for form in forms)
        self._longest = max(map(len, words), default=0)
        self._pattern = (
            re.compile(b"|".join(map(re.escape, sorted(words, key=len, reverse=True))))
            if words
            else None
        )
        self._held = b""

    def feed(self, data: bytes, last: bool = False) -> bytes:
        """Return the bytes that can be shown; hold back what may be the start of a secret."""
        if self._pattern is None:
            return data
        data = self._held + data
        cut = len(data) if last else max(data.rfind(b"\n") + 1, len(data) - self._longest + 1)
        for match in self._pattern.finditer(data):
            if match.start() < cut < match.end():
                cut = match.start()
        self._held = data[cut:]
        return self._pattern.sub(b"***", data[:cut])


class LineSplitter:
    """Splits output into decoded lines of at most MAX_LINE characters; memory is bounded."""

    def __init__(self, on_line: Callable[[str], object]) -> None:
        self._on_line = on_line
        self._partial = b""
        self._failed = False

    def feed(self, data: bytes, last: bool = False) -> None:
        lines = re.split(rb"[\r\n]", self._partial + data)
        # 4 bytes per character at most
        self._partial = b"" if last else lines.pop()[: 4 * MAX_LINE]
        for line in filter(None, lines):
            try:
                self._on_line(line[: 4 * MAX_LINE].decode(errors="replace")[:MAX_LINE])
            except Exception:  # reading continues: a full pipe would block the build
                if not self._failed:
                    log.exception("Cannot evaluate the build's output; the build continues")
                self._failed = True


class BuildProcess:
    """One run of the command: logs its output, and ends it in time with all its processes."""

    grace = GRACE
    drain = DRAIN

    def __init__(
        self,
        args: Sequence[str],
        environment: Mapping[str, str],
        log_file: BinaryIO,
        on_line: Callable[[str], object],
        secrets: Iterable[str] = (),
    ) -> None:
        self.args = list(args)
        self.environment = dict(environment)
        self.environment.setdefault(processes.MARKER_VARIABLE, random_source.token_hex(16))
        self.pid: int | None = None
        #: Why the log file is incomplete; the build itself continues.
        self.log_error: str | None = None
        self._log_file = log_file
        self._redactor = Redactor(secrets)
        self._lines = LineSplitter(on_line)
        self._process: subprocess.Popen[bytes]
        self._stdout: IO[bytes]
        self._poll = select.poll()
        self._reason: str | None = None
        self._started_at = 0.0
        self._line_open = False
        self._origin = processes.Origin(self.environment[processes.MARKER_VARIABLE])

    def start(self) -> None:
        """Start the command.

        :raises OSError: it cannot be started.
        """
        # Resolved at run time, because test benches replace it.
        self._process = subprocess.Popen(
            self.args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
            close_fds=True,
            umask=0o022,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._poll.register(self._stdout, select.POLLIN)
        self._started_at = time.monotonic()
        self.pid = self._process.pid
        leader = processes.read_process(self.pid)
        self._origin = processes.Origin(
            self._origin.marker, self.pid, leader.start_time if leader else None
        )

    def terminate(self, reason: str) -> None:
        """End the command and all its processes; :meth:`wait` returns soon after.

        Callable at any time from any thread.
        """
        self._reason = self._reason or reason

    def wait(self, deadline_monotonic: float) -> ProcessResult:
        """Copy the output until the command ends, is terminated or reaches its time limit."""
        timed_out, reason = False, None
        with self._stdout:
            while not self._ended:
                timed_out = time.monotonic() >= deadline_monotonic
                reason = None if timed_out else self._reason
                if timed_out or reason is not None:
                    self._signal_group(signal.SIGTERM)
                    self._read_until_end(time.monotonic() + self.grace)
                    break
                self._read(deadline_monotonic)
            self._finish()
            returncode = self._process.poll()
            self._output(b"", last=True)
            self._write(self._last_line(timed_out, reason, returncode, deadline_monotonic))
        return ProcessResult(returncode, timed_out, reason, time.monotonic() - self._started_at)

    def _finish(self) -> None:
        """Read the last output and end the remaining processes of the command."""
        ended = self._ended
        if ended:
            # Normally the output ends with the command; a background child may keep the pipe open
            # forever.
            self._read_until_closed(time.monotonic() + self.drain)
        left = processes.end(
            self._origin, time.monotonic() + LAST_KILL, grace=processes.GRACE if ended else 0.0
        )
        self._read_until_end(time.monotonic() + 1.0)
        self._read_until_closed(time.monotonic())
        if left:
            log.error(
                "Processes %s of build %s do not end; inspect them with ps",
                left,
                self._origin.marker,
            )

    @property
    def _ended(self) -> bool:
        return self._process.poll() is not None

    def _read(self, until: float) -> bool:
        """Wait for output, at most until this time or for a tick; return False if there is none."""
        seconds = max(0.0, min(TICK, until - time.monotonic()))
        if self._stdout.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return False
        if not self._poll.poll(seconds * 1000):
            return False
        data = os.read(self._stdout.fileno(), _CHUNK)
        if not data:
            self._stdout.close()
        self._output(data)
        return bool(data)

    def _read_until_end(self, until: float) -> None:
        while not self._ended and time.monotonic() < until:
            self._read(until)

    def _read_until_closed(self, until: float) -> None:
        """Read until the pipe is closed or the time is reached, including data in the pipe."""
        while not self._stdout.closed and time.monotonic() < until:
            self._read(until)
        for _ in range(16):  # a pipe holds 64 KiB to 1 MiB
            if not self._read(0.0):
                break

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.pid is not None
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            # Processes of the tool's sudo. Never use "kill -15 -<group>": procps 4.0.2 reads
            # "-1234" as "-1", every process.
            processes.signal_all(processes.find(self._origin), number, time.monotonic())

    def _output(self, data: bytes, last: bool = False) -> None:
        shown = self._redactor.feed(data, last)
        self._lines.feed(shown, last)
        self._write(shown)
        if shown:
            self._line_open = not shown.endswith(b"\n")

    def _write(self, data: bytes) -> None:
        while data and self.log_error is None:
            try:
                data = data[self._log_file.write(data) :]
            except (OSError, ValueError) as error:
                # Continue reading the output, else the command would block.
                self.log_error = str(error)
                log.error(
                    "Cannot write build log %s: %s; the build continues",
                    getattr(self._log_file, "name", ""),
                    error,
                )

    def _last_line(
        self, timed_out: bool, reason: str | None, returncode: int | None, deadline: float
    ) -> bytes:
        if timed_out:
            seconds = deadline - self._started_at
            text = (
                f"Build timeout of {seconds:.0f} seconds exceeded"
                if seconds >= 1
                else "Build timeout exceeded"
            )
        elif reason is not None:
            text = f"Build terminated: {reason}"
        else:
            text = f"Exit code: {returncode}"
        newline = "\n" if self._line_open else ""
        return f"{newline}{text}\n".encode()


def run_hook(args: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run a program; return its status and the last lines of its output and errors.

    At the time limit (seconds) it is killed with all its processes: the status is -9, and the last
    line says so.

    :raises OSError: it cannot be started.
    """
    lines: deque[str] = deque(maxlen=HOOK_LINES)
    environment = {**os.environ, processes.MARKER_VARIABLE: random_source.token_hex(16)}
    with open(os.devnull, "wb", buffering=0) as nowhere:
        process = BuildProcess(args, environment, nowhere, lines.append)
        process.grace = 0.0
        process.start()
        ending = process.wait(time.monotonic() + timeout)
    if not ending.timed_out:
        return ending.returncode, "\n".join(lines)
    return -signal.SIGKILL, "\n".join([*lines, f"Killed: it took more than {timeout:g} seconds"])
