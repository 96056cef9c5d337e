"""What the host sees of the programs in the slivers of a daemon."""

from __future__ import annotations

import os
import pathlib

from nodepool.nodemanager.client import programs
from nodepool.nodemanager.client.programs import Running
from tests.support.nodemanager.scene import NmDaemon
from tests.support.ports import ID_SPAN


def processes(nm: NmDaemon, word: str) -> list[int]:
    """Processes in slivers of this daemon with this word in their command line."""
    base = int(nm.options["id-base"])
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    base <= entry.stat().st_uid < base + ID_SPAN
                    and word.encode() in (entry / "cmdline").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def descriptors(nm: NmDaemon) -> int:
    assert nm.process is not None
    return len(os.listdir(f"/proc/{nm.process.pid}/fd"))


def threads(nm: NmDaemon) -> int:
    assert nm.process is not None
    return len(os.listdir(f"/proc/{nm.process.pid}/task"))


def memory(nm: NmDaemon) -> int:
    """Resident bytes of the daemon."""
    assert nm.process is not None
    return int(pathlib.Path(f"/proc/{nm.process.pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def processor_time(nm: NmDaemon) -> float:
    """Seconds that the daemon has used."""
    assert nm.process is not None
    fields = pathlib.Path(f"/proc/{nm.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(nm: NmDaemon, name: str, script: str, word: str = "") -> Running:
    """A shell that runs this script and has written its first output; ``word`` is in its command
    line.
    """
    running = programs.start(nm.client, name, ["sh", "-c", f"echo begun; {script}", word or "sh"])
    found = running.read(20)
    assert found is not None and found[1].startswith(b"begun\n"), found
    return running


def output(running: Running, timeout: float = 20) -> bytes:
    """All further output, of both streams."""
    data = bytearray()
    while (found := running.read(timeout)) is not None:
        data += found[1]
    return bytes(data)
