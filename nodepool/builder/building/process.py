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
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from nodepool.builder.machine import processes

log = logging.getLogger("nodepool.builder.process")

BUILD_PROCESS_POLL_TIMEOUT = 30000
"""Milliseconds; kept for external code that sets it. There is no polling: one wait covers output, end and time limit."""
GRACE = 8.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN = 2.0
"""Seconds for filters of the command to flush their output after its end."""
LAST_KILL = 10.0
"""Seconds in which killed processes must end."""
MAX_LINE = 500
HOOK_OUTPUT = 64 * 1024
_CHUNK = 65536
_MIN_SECRET = 4
_NO_SECRETS = frozenset({"true", "false", "none", "null"})


@dataclass(frozen=True)
class ProcessResult:
    """How the command ended."""

    returncode: int | None
    """Negative: ended by that signal. None: it could not be killed."""
    timed_out: bool
    terminated: str | None
    """The reason why it was terminated."""
    duration: float
    """Seconds."""


class Redactor:
    """Replaces secret values in a stream of bytes, even across chunk boundaries."""

    def __init__(self, values: Iterable[str]) -> None:
        words: set[bytes] = set()
        for value in values:
            for text in (value, *value.splitlines()):
                if len(text) >= _MIN_SECRET and text.lower() not in _NO_SECRETS:
                    # Unchanged, and as bash prints it in a trace (single quotes) or in "declare -p" (double quotes).
                    quoted = shlex.quote(text)
                    forms = (
                        text,
                        quoted[1:-1] if quoted != text else text,
                        text.replace("'", "'\\''"),
                        re.sub(r'([$`"\\])', r"\\\1", text),
                    )
                    words.update(form.encode() for form in forms)
        self._words = sorted(words, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._words))) if words else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that can be shown; hold back the start of a possible secret."""
        if self._pattern is None:
            return data
        data = self._held + data
        cut = len(data) - self._beginning(data)
        for match in self._pattern.finditer(data):
            if match.start() < cut < match.end():
                cut = match.start()
        self._held = data[cut:]
        return self._pattern.sub(b"***", data[:cut])

    def flush(self) -> bytes:
        """Return the bytes held back."""
        held, self._held = self._held, b""
        return self._pattern.sub(b"***", held) if self._pattern else held

    def _beginning(self, data: bytes) -> int:
        """Return the length of the longest suffix with which a secret may start."""
        longest = 0
        for word in self._words:
            end = data[-(len(word) - 1) :]
            # Searching for two bytes leaves few positions to check, even for a key of several thousand bytes.
            at = end.find(word[:2])
            while at >= 0 and not word.startswith(end[at:]):
                at = end.find(word[:2], at + 1)
            if at >= 0:
                longest = max(longest, len(end) - at)
            elif end[-1:] == word[:1]:
                longest = max(longest, 1)
        return longest


class LineSplitter:
    """Splits output into decoded lines of at most MAX_LINE characters; memory is bounded."""

    def __init__(self, on_line: Callable[[str], object]) -> None:
        self._on_line = on_line
        self._partial = b""
        self._failed = False

    def feed(self, data: bytes) -> None:
        lines = re.split(rb"[\r\n]", self._partial + data)
        # 4 bytes per character at most
        self._partial = lines.pop()[: 4 * MAX_LINE]
        for line in lines:
            if line:
                self._give(line)

    def flush(self) -> None:
        if self._partial:
            self._give(self._partial)
            self._partial = b""

    def _give(self, line: bytes) -> None:
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
        self.log_error: str | None = None
        """Why the log file is incomplete; the build itself continues."""
        self._log_file = log_file
        self._redactor = Redactor(secrets)
        self._lines = LineSplitter(on_line)
        self._process: subprocess.Popen[bytes] | None = None
        self._wake_fd = -1
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._started_at = 0.0
        self._line_open = False
        self._origin = processes.Origin(self.environment[processes.MARKER_VARIABLE])

    def start(self) -> None:
        """Start the command.

        :raises OSError: it cannot be started.
        """
        with self._lock:
            self._wake_fd = os.eventfd(1 if self._reason else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            # Resolved at run time, because test benches replace it.
            self._process = subprocess.Popen(
                self.args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment,
                start_new_session=True, close_fds=True, umask=0o022, bufsize=0,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        self._started_at = time.monotonic()
        self.pid = self._process.pid
        leader = processes.read_process(self.pid)
        self._origin = processes.Origin(self._origin.marker, self.pid, leader.start_time if leader else None)

    def wake(self) -> None:
        """Make :meth:`wait` check its conditions now; callable at any time from any thread."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def terminate(self, reason: str) -> None:
        """End the command and all its processes; :meth:`wait` returns soon after.

        Callable at any time from any thread.
        """
        with self._lock:
            self._reason = self._reason or reason
        self.wake()

    def wait(self, deadline_monotonic: float, stop: int | None = None) -> ProcessResult:
        """Copy the output until the command ends, is terminated or reaches its time limit.

        *stop*: a descriptor that becomes readable when the build is to be terminated.
        """
        process = self._process
        assert process is not None and process.stdout is not None, "start() comes first"
        pidfd = os.pidfd_open(process.pid)
        pump = _Pump({process.stdout.fileno(): self._output})
        try:
            timed_out = False
            while not (ended := _ended(process)):
                timed_out = time.monotonic() >= deadline_monotonic
                if timed_out or self._reason is not None:
                    break
                ready = pump.step(deadline_monotonic, (pidfd, self._wake_fd, *(() if stop is None else (stop,))))
                if stop is not None and stop in ready:
                    self.terminate("asked to stop")
                if self._wake_fd in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            reason = None if timed_out or ended else self._reason
            if not ended:
                self._signal_group(signal.SIGTERM)
                self._pump_until_end(process, pump, pidfd, time.monotonic() + self.grace)
            self._finish(process, pump, pidfd)
            returncode = process.poll()
            self._output(b"", last=True)
            self._write(self._last_line(timed_out, reason, returncode, deadline_monotonic))
            return ProcessResult(returncode, timed_out, reason, time.monotonic() - self._started_at)
        finally:
            os.close(pidfd)
            self._close()

    def _finish(self, process: subprocess.Popen[bytes], pump: _Pump, pidfd: int) -> None:
        """Read the last output and end the remaining processes of the command."""
        if _ended(process):
            # Normally the output ends with the command; a background child may keep the pipe open forever.
            pump.until_closed(time.monotonic() + self.drain)
        left = processes.end(self._origin, time.monotonic() + LAST_KILL, grace=0.0 if not _ended(process) else processes.GRACE)
        self._pump_until_end(process, pump, pidfd, time.monotonic() + 1.0)
        pump.until_closed(time.monotonic())
        if left:
            log.error("Processes %s of build %s do not end; inspect them with ps", left, self._origin.marker)

    def _pump_until_end(self, process: subprocess.Popen[bytes], pump: _Pump, pidfd: int, until: float) -> None:
        while not _ended(process) and time.monotonic() < until:
            pump.step(until, (pidfd,))

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.pid is not None
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            # Processes of the tool's sudo. Never use "kill -15 -<group>": procps 4.0.2 reads "-1234" as "-1", every process.
            processes.signal_all(processes.find(self._origin), number, time.monotonic())

    def _output(self, data: bytes, last: bool = False) -> None:
        shown = self._redactor.feed(data)
        if last:
            shown += self._redactor.flush()
        self._lines.feed(shown)
        self._write(shown)
        if shown:
            self._line_open = not shown.endswith(b"\n")
        if last:
            self._lines.flush()

    def _write(self, data: bytes) -> None:
        while data and self.log_error is None:
            try:
                data = data[self._log_file.write(data) :]
            except (OSError, ValueError) as error:
                # Continue reading the output, else the command would block.
                self.log_error = str(error)
                log.error("Cannot write build log %s: %s; the build continues", getattr(self._log_file, "name", ""), error)

    def _last_line(self, timed_out: bool, reason: str | None, returncode: int | None, deadline: float) -> bytes:
        if timed_out:
            seconds = deadline - self._started_at
            text = f"Build timeout of {seconds:.0f} seconds exceeded" if seconds >= 1 else "Build timeout exceeded"
        elif reason is not None:
            text = f"Build terminated: {reason}"
        else:
            text = f"Exit code: {returncode}"
        newline = "\n" if self._line_open else ""
        return f"{newline}{text}\n".encode()

    def _close(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


def _ended(process: subprocess.Popen[Any]) -> bool:
    return process.poll() is not None


class _Pump:
    """Reads pipes as they fill, without blocking longer than requested."""

    def __init__(self, sinks: dict[int, Callable[[bytes], None]]) -> None:
        self._sinks = sinks
        for fd in sinks:
            os.set_blocking(fd, False)

    def step(self, until: float, others: Sequence[int] = ()) -> set[int]:
        """Wait for output, one of the other descriptors or the time; return readable others."""
        poll = select.poll()
        for fd in (*self._sinks, *others):
            poll.register(fd, select.POLLIN)
        # Rounded up, to avoid waking too early.
        milliseconds = min(max(0, int((until - time.monotonic()) * 1000) + 1), 2**31 - 1)
        ready = {fd for fd, _ in poll.poll(milliseconds)}
        for fd in [fd for fd in self._sinks if fd in ready]:
            self._read(fd)
        return ready & set(others)

    def until_closed(self, until: float) -> None:
        """Read until all pipes are closed or the time is reached, including data in the pipes."""
        while self._sinks and time.monotonic() < until:
            self.step(until)
        for fd in list(self._sinks):
            for _ in range(16):  # a pipe holds 64 KiB to 1 MiB
                if not self._read(fd):
                    break

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            del self._sinks[fd]
            return False
        self._sinks[fd](data)
        return True


class _Tail:
    """The last bytes of an output."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = b""
        self._cut = False

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > self._limit:
            self._data = self._data[-self._limit :]
            self._cut = True

    def text(self) -> str:
        return ("[...]" if self._cut else "") + self._data.decode(errors="replace")


def run_hook(
    args: Sequence[str], environment: Mapping[str, str] | None, timeout: float, log: logging.Logger | logging.LoggerAdapter[Any]
) -> tuple[int, str, str]:
    """Run a program; return its status and both outputs (the last 64 KiB of each).

    At the time limit (seconds) it is killed with all its processes: the status is -9, and the error output says so.

    :raises OSError: it cannot be started.
    """
    marker = random_source.token_hex(16)
    process = subprocess.Popen(
        list(args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**(os.environ if environment is None else environment), processes.MARKER_VARIABLE: marker},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + timeout
    leader = processes.read_process(process.pid)
    origin = processes.Origin(marker, process.pid, leader.start_time if leader else None)
    out, err = _Tail(HOOK_OUTPUT), _Tail(HOOK_OUTPUT)
    pidfd = os.pidfd_open(process.pid)
    try:
        pump = _Pump({process.stdout.fileno(): out.add, process.stderr.fileno(): err.add})
        while not _ended(process) and time.monotonic() < deadline:
            pump.step(deadline, (pidfd,))
        timed_out = not _ended(process)
        if not timed_out:
            pump.until_closed(min(deadline, time.monotonic() + DRAIN))
        left = processes.end(origin, time.monotonic() + LAST_KILL, grace=0.0)
        pump.until_closed(time.monotonic())
        try:
            returncode = process.wait(1.0)
        except subprocess.TimeoutExpired:
            returncode = -signal.SIGKILL
        if left:
            log.error("Processes %s of %s do not end; inspect them with ps", left, args[0])
        if timed_out:
            err.add(f"\nKilled: it took more than {timeout:g} seconds\n".encode())
        return returncode, out.text(), err.text()
    finally:
        os.close(pidfd)
        process.stdout.close()
        process.stderr.close()
