"""Root trees for slivers of backends that have no image `host`."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

from tests.integration.nodemanager.backends.test_native import small_tree

_LEFT_OUT = ("__pycache__", "test", "dist-packages", "idlelib", "lib2to3", "ensurepip")


def make_python_tree(target: pathlib.Path) -> pathlib.Path | None:
    """A root tree with a shell and the Python of this host's distribution; None: there is none."""
    interpreter = pathlib.Path("/usr/bin/python3").resolve()
    library = pathlib.Path("/usr/lib", interpreter.name)
    if not interpreter.is_file() or not library.is_dir():
        return None
    tree = small_tree(target)
    shutil.copy(interpreter, tree / "usr/bin/python3")
    shutil.copytree(
        library,
        tree / "usr/lib" / interpreter.name,
        symlinks=True,
        ignore=shutil.ignore_patterns(*_LEFT_OUT),
    )
    programs = [str(interpreter), *map(str, (library / "lib-dynload").glob("*.so"))]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for needed in {
        word for word in listed.split() if word.startswith("/") and not word.endswith(":")
    }:
        copy = tree / needed.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            shutil.copy(os.path.realpath(needed), copy)
    return tree
