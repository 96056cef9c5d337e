"""Identify the current boot of this machine: process ids of another boot are meaningless."""

from __future__ import annotations

import functools

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Return an id that changes with each boot; empty if this system has none.

    It is read once: a lack of descriptors must not look like another boot, after which nothing of
    what is running would be known.

    :raises OSError: it could not be read yet.
    """
    try:
        return _read(BOOT_ID)
    except (FileNotFoundError, PermissionError):
        return ""


@functools.cache
def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
