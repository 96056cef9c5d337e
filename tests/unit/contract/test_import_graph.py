"""Imports go one way: no circles, those for type checking and late ones included, and no folder imports one above it."""

from __future__ import annotations

import ast
from functools import cache

from tests import REPOSITORY

#: From below to above; those on a line import nothing of each other unless ``MAY`` says so.
LAYERS = (
    ("exceptions", "version"),
    ("base", "logconfig", "reasons"),
    ("metrics",),
    ("zk", "config", "zkserver"),
    ("cloud", "nodescan", "nodeutils", "process", "simulation"),
    ("status",),
    ("nodemanager",),
    ("driver",),
    ("launcher", "builder", "web"),
    ("stats", "webapp", "provider_manager", "dev", "whatif"),
    ("cmd",),
)
#: Folder -> what it imports of its own layer.
MAY: dict[str, set[str]] = {"nodeutils": {"nodescan"}, "zk": {"config"}}


@cache
def graph() -> dict[str, set[str]]:
    """Module -> modules that it imports, anywhere in its text."""
    root = REPOSITORY / "nodepool"
    files = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        found = edges[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update(whole if (whole := f"{node.module}.{alias.name}") in files else node.module for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
        found.intersection_update(files)
        found.discard(name)
    return edges


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Modules that can be reached from themselves: what is left when all others are taken away from below and above."""
    left = {name: set(found) for name, found in edges.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        gone = {name for name, found in left.items() if not found or name not in used}
        if not gone:
            return sorted(left)
        left = {name: found - gone for name, found in left.items() if name not in gone}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_no_circles() -> None:
    assert circles(graph()) == []


def test_layers() -> None:
    level = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
    wrong = []
    for name, found in graph().items():
        folder = name.split(".")[1] if "." in name else ""
        for other in found:
            target = other.split(".")[1] if "." in other else ""
            if not folder or not target or folder == target:
                continue
            if level[target] >= level[folder] and target not in MAY.get(folder, ()):
                wrong.append(f"{name} imports {other}")
    assert wrong == []
