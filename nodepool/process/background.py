"""Background operation: pid file, detaching, service manager messages (CLI-2.2)."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import sys
import threading
import time

from nodepool.base.files import lock_file

PID_TIMEOUT = 10.0
START_TIMEOUT = 60.0
UMASK = 0o022

log = logging.getLogger("nodepool.daemon")


class PidFileError(Exception):
    """The pid file cannot be acquired; the text names the holder, or the error."""


class PidFile:
    """An exclusive lock: the file names the process, which locks it as long as it lives."""

    def __init__(self, path: str, timeout: float = PID_TIMEOUT) -> None:
        self.path = path
        self._timeout = timeout
        self._fd: int | None = None

    def acquire(self) -> None:
        """Acquire the file; one that nobody has locked is adopted.

        Its number may be that of another process by now.

        :raises PidFileError: it is locked for ``timeout`` seconds, cannot be written, or is not a
            pid file.
        """
        deadline = time.monotonic() + self._timeout
        pause = threading.Event()
        while True:
            try:
                holder = self._try()
            except OSError as error:
                raise PidFileError(
                    f"cannot write pid file {self.path}: {error.strerror}"
                ) from error
            if holder is None:
                return
            if time.monotonic() >= deadline:
                raise PidFileError(f"pid file {self.path} is held by the running process {holder}")
            pause.wait(0.1)

    def _try(self) -> int | None:
        """Acquire the file, or return the process that holds it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            content = "-"
            if stat.S_ISREG(os.fstat(fd).st_mode):
                # A crash may leave it empty or with zeros.
                content = os.pread(fd, 64, 0).decode("ascii", "replace").strip(" \n\0") or "0"
            if not content.isdecimal():
                raise PidFileError(
                    f"{self.path} exists and is not a pid file: name another one, or remove it"
                )
            pid = int(content)
            try:
                lock_file(fd)
            except BlockingIOError:
                return pid
            if not self._is_current(fd):
                return pid  # deleted in the meantime: retry with the new file
            os.fchmod(fd, 0o644)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            self._fd, fd = fd, -1
            return None
        finally:
            if fd >= 0:
                os.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return False
        opened = os.fstat(fd)
        return (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino)

    def release(self) -> None:
        """Delete the file if it is ours."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._is_current(fd):
                os.unlink(self.path)
        os.close(fd)

    def __enter__(self) -> PidFile:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def must_detach() -> bool:
    """Return False if a service manager started us.

    That is process 1, or a super-server with a socket as standard input.
    """
    if os.getppid() == 1:
        return False
    try:
        return not stat.S_ISSOCK(os.fstat(0).st_mode)
    except OSError:
        return True


class StartReport:
    """The daemon's report to the terminal that started it: running, or why not."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def running(self) -> None:
        self._send(b"")

    def failed(self, text: str) -> None:
        self._send(text.encode("utf-8", "replace") or b"failed")

    def _send(self, data: bytes) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(fd, b"." + data[:4000])
        os.close(fd)


def detach(prog: str) -> StartReport:
    """Continue as a daemon; must be called before any thread is started.

    The caller's process ends here, once the daemon reported or after a minute.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.waitpid(child, 0)
        _wait_and_exit(prog, reading)
    os.close(reading)
    os.setsid()
    if os.fork():
        os._exit(0)
    return StartReport(_redirect(writing))


def _wait_and_exit(prog: str, reading: int) -> None:
    """Wait for the daemon's report and end, in the process of the terminal."""
    readable, _, _ = select.select([reading], [], [], START_TIMEOUT)
    data = os.read(reading, 4096) if readable else b"."
    if data == b".":
        os._exit(0)
    text = data[1:].decode("utf-8", "replace") or "the daemon ended while starting"
    print(f"{prog}: error: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _redirect(keep: int) -> int:
    """Detach from the terminal: directory, streams, descriptors, umask."""
    os.chdir("/")
    os.umask(UMASK)
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if keep != 3:
        os.dup2(keep, 3)
    os.set_inheritable(3, False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    return 3


def notify(*lines: str) -> bool:
    """Notify systemd; return False if it does not listen.

    Messages: ``READY=1``, ``STOPPING=1``, ``RELOADING=1``, ``STATUS=...``.
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path or path[0] not in "@/":
        return False
    if path[0] == "@":
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1)
            sock.sendto("\n".join(lines).encode(), path)
    except OSError as error:
        log.debug("Cannot notify the service manager: %s", error)
        return False
    return True
