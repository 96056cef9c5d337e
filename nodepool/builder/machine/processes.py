"""Find and end every process of a build, however it has detached itself.

A build runs in a separate session, with a marker in its environment. A process belongs to it if it
has the marker, is in that session, descends from a process that belongs to it, or has its root or
working directory in the build's directories (processes in the image run by ``sudo`` have lost the
marker). Process ids are reused and prove nothing alone: see :func:`find`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass

MARKER_VARIABLE = "NODEPOOL_BUILD"
GRACE = 2.0
COMMAND_TIMEOUT = 10.0
#: Seconds to wait for killed processes before looking for new ones.
_ROUND = 1.0
#: Longest time in seconds that a process spends in execve().
_EXEC = 0.5
_PF_KTHREAD = 0x00200000


@dataclass(frozen=True)
class Origin:
    """How the processes of one build are recognized."""

    marker: str
    #: Leader of the build's session.
    pid: int | None = None
    #: Of the leader, in clock ticks since boot (field 22 of /proc/<pid>/stat).
    start_time: int | None = None
    #: Real paths.
    directories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    start_time: int
    state: str = "S"


def read_process(pid: int) -> Process | None:
    try:
        fields = _stat(pid)
        return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode())
    except (OSError, IndexError, ValueError):
        return None


def processes() -> list[Process]:
    """Return all running processes (no zombies)."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in found if process and process.state not in "ZX"]


def environment(pid: int) -> list[bytes]:
    """Return ``NAME=value`` items; empty if they cannot be read.

    During execve() a process shows an empty environment; this function waits until that has ended.
    """
    until = time.monotonic() + _EXEC
    try:
        while True:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if found := file.read():
                    return found.split(b"\0")
            fields = _stat(pid)
            kernel, code = int(fields[6]) & _PF_KTHREAD, int(fields[23])
            begin, end = int(fields[47]), int(fields[48])
            # execve() first sets the end of the environment to its start, then copies, and sets the
            # start of the code last.
            empty = begin == end != 0 and code != 0
            if kernel or fields[0] in b"ZX" or empty or time.monotonic() >= until:
                return []
            # The end of execve() causes no event.
            time.sleep(0.001)
    except (OSError, IndexError, ValueError):
        return []


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/<pid>/stat from the third (state) on, see proc(5)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def below(path: str, directories: tuple[str, ...] | list[str]) -> bool:
    """Return whether the path is one of the directories or inside one."""
    return any(path == directory or path.startswith(directory + "/") for directory in directories)


def _inside(pid: int, directories: tuple[str, ...]) -> bool:
    for link in ("root", "cwd"):
        with contextlib.suppress(OSError):
            if below(os.readlink(f"/proc/{pid}/{link}").removesuffix(" (deleted)"), directories):
                return True
    return False


def find(origin: Origin) -> list[Process]:
    """Return the running processes of the build, without this process and its ancestors."""
    everything = processes()
    by_pid = {process.pid: process for process in everything}
    item = f"{MARKER_VARIABLE}={origin.marker}".encode()
    own = _ancestors(by_pid)
    # Every process has "/" as its root: directories so near the top never decide.
    directories = tuple(
        directory for directory in origin.directories if directory.strip("/").count("/") >= 1
    )
    found = {
        process.pid
        for process in everything
        if item in environment(process.pid) or (directories and _inside(process.pid, directories))
    }
    # The session id counts only if its leader is still the process that was started, or one of its
    # members has the marker: an id stays reserved as long as the session has members.
    if origin.pid is not None:
        leader = by_pid.get(origin.pid)
        members = [process for process in everything if process.session == origin.pid]
        same = leader is not None and leader.start_time == origin.start_time
        if same or any(item in environment(process.pid) for process in members):
            found.update(process.pid for process in members)
    found -= own
    while True:
        children = {p.pid for p in everything if p.parent in found and p.pid not in found} - own
        if not children:
            return [process for process in everything if process.pid in found]
        found |= children


def _ancestors(by_pid: dict[int, Process]) -> set[int]:
    pids = {0, 1, 2}
    pid = os.getpid()
    while pid not in pids:
        pids.add(pid)
        process = by_pid.get(pid)
        pid = process.parent if process else 0
    return pids


def end(origin: Origin, deadline: float, grace: float = GRACE) -> list[int]:
    """Send TERM, and KILL after ``grace`` seconds, until no process is left.

    All are stopped before the first one is killed: a script whose ``umount`` has been killed would
    continue, and remove what is mounted.

    Return the pids that still run at ``deadline`` (monotonic).
    """
    kill_at = min(time.monotonic() + grace, deadline - _ROUND)
    while True:
        found = find(origin)
        if not found:
            return []
        now = time.monotonic()
        if now >= deadline:
            return [process.pid for process in found]
        if now < kill_at:
            signal_all(found, signal.SIGTERM, kill_at)
        else:
            signal_all(found, signal.SIGSTOP, now)
            signal_all(found, signal.SIGKILL, min(now + _ROUND, deadline))


def signal_all(found: list[Process], number: signal.Signals, until: float) -> None:
    """Signal exactly these processes; wait until all have ended, or ``until`` (monotonic)."""
    poll = select.poll()
    handles: set[int] = set()
    try:
        for process in found:
            try:
                handle = os.pidfd_open(process.pid)
            except OSError:
                continue
            handles.add(handle)
            now = read_process(process.pid)
            if now is None or now.start_time != process.start_time:
                continue
            _send(handle, process.pid, number)
            poll.register(handle, select.POLLIN)
        waiting = len(handles)
        while waiting and (rest := until - time.monotonic()) > 0:
            for handle, _ in poll.poll(rest * 1000):
                poll.unregister(handle)
                waiting -= 1
    finally:
        for handle in handles:
            os.close(handle)


def _send(handle: int, pid: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        # Started by the tool's sudo; where the tool may use sudo, so may this program.
        run_privileged(["kill", f"-{int(number)}", "--", str(pid)])


def run_privileged(command: list[str], timeout: float = COMMAND_TIMEOUT) -> str | None:
    """Run a command as root, with ``sudo -n`` if needed; return None or what failed."""
    arguments = command if os.geteuid() == 0 else ["sudo", "-n", *command]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": path, "LC_ALL": "C"},
        )
    except OSError as error:
        return f"{arguments[0]}: {error.strerror}"
    # Not subprocess.run(): after the time limit it waits without one, and a blocked umount cannot
    # even be killed.
    try:
        errors = process.communicate(timeout=max(timeout, 0.1))[1]
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stderr:
            process.stderr.close()
        return f"{command[0]} took more than {timeout:.0f} seconds"
    if process.returncode == 0:
        return None
    return (
        errors.decode(errors="replace").strip()[-500:]
        or f"{command[0]} ended with status {process.returncode}"
    )
