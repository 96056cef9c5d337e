"""Programs that the host starts inside, and what root does to them. Runs inside; standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

from tests.attacks.library import Escape, attempt, call


@attempt("26 races for a program of the host between its birth and exec", {"none"})
def race_for_the_helper() -> str:
    # While the test logs in again and again alongside this.
    deadline, own = time.monotonic() + 6, os.stat("/").st_dev
    while time.monotonic() < deadline:
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) in (1, os.getpid()):
                continue
            pid = int(entry)
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    what = os.readlink(f"/proc/{pid}/fd/{number}")
                    if "cgroup" in what or what.endswith(".py") or "/slivers/" in what:
                        raise Escape(f"process {pid} has {what}")
            with contextlib.suppress(OSError):
                text = os.readlink(f"/proc/{pid}/exe")
                if (
                    "python" in text
                    and os.stat(f"/proc/{pid}/exe").st_dev != own
                    and pid != os.getpid()
                    and not _ours(pid)
                ):
                    raise Escape(f"process {pid} shows {text} of the host")
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if b"VIRTUAL_ENV" in file.read() or b"NODEPOOL" in file.read():
                    raise Escape(f"process {pid} has the environment of the daemon")
            with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb") as memory:
                memory.seek(0x400000)
                if b"nodepool" in memory.read(4096):
                    raise Escape(f"the memory of process {pid} is the daemon's")
    return "none"


def _ours(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"zygote" not in file.read()


@attempt("29 ptrace of process 1 gives nothing that this one has not", {"none"})
def trace_process_1() -> str:
    if call(101, 0x4206, 1, 0, 0) < 0:
        return "none"
    with open("/proc/1/status") as first, open("/proc/self/status") as own:
        one, mine = (
            dict(line.split(":\t", 1) for line in file if ":\t" in line) for file in (first, own)
        )
    if (
        any(int(one[name], 16) & ~int(mine[name], 16) for name in ("CapEff", "CapBnd"))
        or one["Seccomp"] != "2\n"
    ):
        raise Escape("process 1 has more rights")
    return "none"


@attempt("killing all that can be named does not reach outside", {"none"})
def kill_all() -> str:
    ctypes.set_errno(0)
    visible = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    for pid in range(1, 33000, 97):
        if pid not in visible and call(62, pid, 0) == 0:
            raise Escape(f"process {pid} can be signalled and not be seen")
    return "none"


@attempt("process 1 is killed from inside", {"none"})
def kill_process_1() -> str:
    call(62, 1, 9)
    time.sleep(0.2)
    return "none"


@attempt("the relay of this session is seen or named", {"none"})
def see_the_relay() -> str:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/comm") as file:
                if file.read().strip() in ("nm-relay", "nodepool-nodema"):
                    raise Escape(f"process {entry} is the relay")
    return "none"
