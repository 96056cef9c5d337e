"""Finds cgroups in all hierarchies of this machine."""

from __future__ import annotations

import os
import pathlib

MOUNTED = "/sys/fs/cgroup"


def named(name: str) -> list[pathlib.Path]:
    """Return the groups of this name; other tests may create and delete groups meanwhile.

    ``pathlib`` fails at a directory that is deleted while it is read; ``os.walk`` skips it.
    """
    return [
        pathlib.Path(folder, name)
        for folder, folders, _files in os.walk(MOUNTED)
        if name in folders
    ]
