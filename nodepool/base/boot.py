"""Identify the current boot of this machine: process ids of another boot are meaningless."""

from __future__ import annotations

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Return an id that changes with each boot; empty if it is unknown."""
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
