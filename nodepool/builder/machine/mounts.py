"""Mounts, loop devices and trees of an interrupted build; all calls have time limits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Sequence

from nodepool.builder.machine.processes import COMMAND_TIMEOUT, below, run_privileged

_OCTAL = re.compile(rb"\\([0-7]{3})")
_SYS_BLOCK = "/sys/block"
_REMOVE_TIMEOUT = 300.0


def _unescape(text: bytes) -> str:
    """Decode the octal escapes of blank, tab, newline and backslash in mountinfo."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), text))


def mount_points(directories: Sequence[str]) -> list[str]:
    """Return mount points at or below the directories (real paths), in unmount order."""
    found: list[tuple[int, int, str]] = []
    with open("/proc/self/mountinfo", "rb") as file:
        for number, line in enumerate(file):
            path = _unescape(line.split(b" ")[4])
            if below(path, list(directories)):
                found.append((path.count("/"), number, path))
    # The deepest first; of several mounts at one path the latest first, which is the uppermost.
    return [path for _, _, path in sorted(found, reverse=True)]


def _limit(deadline: float) -> float:
    return min(COMMAND_TIMEOUT, max(0.1, deadline - time.monotonic()))


def unmount_below(directories: Sequence[str], deadline: float) -> list[str]:
    """Unmount everything at or below the directories; return sentences about failures.

    Lazy unmounting is the last resort.
    """
    problems: dict[str, str] = {}
    for command in (["umount"], ["umount", "-l"]):
        # Repeat for mounts that were hidden under another one.
        for _ in range(2):
            for path in mount_points(directories):
                if time.monotonic() >= deadline:
                    break
                if error := run_privileged([*command, "--", path], _limit(deadline)):
                    problems[path] = error
    return [
        f"{path} is still mounted: {problems.get(path, 'no time left')}"
        for path in mount_points(directories)
    ]


def loop_devices(wanted: Callable[[str], bool]) -> list[str]:
    """Return the names (``loop0``) of attached loop devices with one of these backing files.

    Deleted files count, too.
    """
    names = sorted(name for name in os.listdir(_SYS_BLOCK) if name.startswith("loop"))
    return [name for name in names if (backing := _backing_file(name)) and wanted(backing)]


def _backing_file(name: str) -> str | None:
    try:
        with open(
            f"{_SYS_BLOCK}/{name}/loop/backing_file", encoding="utf-8", errors="surrogateescape"
        ) as file:
            return file.read().removesuffix("\n").removesuffix(" (deleted)")
    except OSError:
        return None


def _maps(name: str) -> list[str]:
    """Return the device-mapper maps on a loop device and its partitions, uppermost first."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        device = waiting.pop()
        with contextlib.suppress(OSError):
            for holder in os.listdir(f"/sys/class/block/{device}/holders"):
                with open(f"/sys/class/block/{holder}/dm/name") as file:
                    found.append(file.read().strip())
                waiting.append(holder)
        with contextlib.suppress(OSError):
            waiting += [
                part
                for part in os.listdir(f"/sys/class/block/{device}")
                if part.startswith(f"{name}p")
            ]
    return found[::-1]


def detach(wanted: Callable[[str], bool], deadline: float) -> list[str]:
    """Detach the loop devices with one of these backing files, and the maps on them.

    Return sentences about failures.
    """
    problems: dict[str, str] = {}
    for name in loop_devices(wanted):
        if time.monotonic() >= deadline:
            break
        for map_name in _maps(name):
            if error := run_privileged(
                ["dmsetup", "remove", "--retry", map_name], _limit(deadline)
            ):
                problems[name] = f"map {map_name}: {error}"
        if error := run_privileged(["losetup", "-d", f"/dev/{name}"], _limit(deadline)):
            problems.setdefault(name, error)
    # A busy device is only marked for removal when its last user closes it.
    return [
        f"/dev/{name} is still attached to {_backing_file(name)}: "
        f"{problems.get(name, 'it is in use')}"
        for name in loop_devices(wanted)
    ]


def remove_tree(path: str, deadline: float) -> str | None:
    """Delete a directory tree, never across a mount; return None, or a sentence on failure.

    Reads the mount table, since a bind mount of the same file system has the same device number.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    if not stat.S_ISDIR(mode):
        return f"{path} is not deleted: it is not a directory"
    if mounted := mount_points([os.path.realpath(path)]):
        return f"{path} is not deleted: {mounted[0]} is mounted there"
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
        return None
    # Files of root, created through the tool's sudo, or an extremely deep tree.
    timeout = max(0.1, min(_REMOVE_TIMEOUT, deadline - time.monotonic()))
    failure = run_privileged(["rm", "-rf", "--one-file-system", "--", path], timeout)
    if not os.path.lexists(path):
        return None
    return f"{path} cannot be removed: {failure or 'files were added concurrently'}"
