"""One mechanism for one job: a second copy of what ``nodepool.base`` has fails here (issue,
shared primitives).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import nodepool

ROOT = Path(nodepool.__file__).parent
GROWING = re.compile(r"\bmin\((?:2(?:\.0)? \* [\w.]+|[\w.]+ \* 2(?:\.0)?)\b")


@cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Name of what is called, without arguments: ``os.replace``, ``.replace`` of what has no
    simple name.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def renames(text: str) -> bool:
    """``os.replace`` and ``Path.replace``; those of texts have two arguments, those of other
    things keywords.
    """
    return any(
        name in ("os.replace", "os.rename")
        or (re.search(r"\.(replace|rename)$", name) and len(call.args) == 1 and not call.keywords)
        for name, call in calls(text)
    )


def locks(text: str) -> bool:
    return any(name in ("fcntl.flock", "fcntl.lockf") for name, _ in calls(text))


def temporary(text: str) -> bool:
    return any(name == "tempfile.mkstemp" for name, _ in calls(text))


def grows(text: str) -> bool:
    """A power with a variable exponent, or something doubled up to a limit."""
    powers = any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Pow)
        and not isinstance(node.right, ast.Constant)
        for node in ast.walk(ast.parse(text))
    )
    return powers or GROWING.search(text) is not None


def connects(text: str) -> bool:
    return any(name == "ZooKeeperClient" for name, _ in calls(text))


@pytest.mark.parametrize(
    ("found", "home", "exceptions"),
    [
        pytest.param(
            grows,
            "base/backoff.py",
            {
                "adapters/runners/fleet.py": "adapters import only the client",
                "nodemanager/limits/cgroups/files.py": "a period of the kernel, no pause",
                "nodemanager/pushed/program.py": "one loop, no failures to count",
                "nodemanager/slivers/reconciler.py": "a pace by sliver",
            },
            id="back-off",
        ),
        pytest.param(
            renames,
            "base/files.py",
            {
                "builder/machine/build_journal.py": "sets aside a journal that cannot be "
                "understood",
                "nodemanager/records/database.py": "sets aside a broken database",
                "nodemanager/api/delegates.py": "below a directory of somebody else, by its "
                "descriptor",
                "nodemanager/limits/disk_templates.py": "images of disks, made by mke2fs",
                "nodemanager/limits/disks.py": "images and directories of disks",
                "nodemanager/helper/inside.py": "in the tree of a sliver, by descriptors",
                "nodemanager/kernel/removal.py": "directories of a tree that is removed",
                "nodemanager/rootfs/templates.py": "root trees",
                "nodemanager/api/server.py": "a symbolic link",
                "nodemanager/sources/sources.py": "one writer; a fixed name, which no crash "
                "multiplies",
                "ssh.py": "needs nothing but the standard library",
            },
            id="files replaced",
        ),
        pytest.param(temporary, "base/files.py", {}, id="temporary files"),
        pytest.param(
            locks,
            "base/files.py",
            {
                "nodemanager/rootfs/templates.py": "waits for a template that is being built: an "
                "event, no time"
            },
            id="locks on files",
        ),
        pytest.param(
            connects,
            "zk/connection/client.py",
            {"nodemanager/sources/zookeeper.py": "its options are no Config"},
            id="clients of ZooKeeper",
        ),
    ],
)
def test_no_second_copy(
    found: Callable[[str], bool], home: str, exceptions: dict[str, str]
) -> None:
    users = {name for name, text in sources().items() if found(text)}
    assert sorted(users - {home} - exceptions.keys()) == [], (
        f"use what {home} has, or say here why not"
    )
    assert sorted(exceptions.keys() - users) == [], "no exceptions any more"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (grows, "pause = min(60, first * 2.0 ** self._failures)"),
        (grows, "pause = min(2 * pause, 60)"),
        (renames, "new.replace(path)"),
        (renames, "os.rename(a, b)"),
        (locks, "fcntl.flock(fd, 2)"),
        (connects, "ZooKeeperClient(hosts)"),
    ],
)
def test_copies_are_found(found: Callable[[str], bool], text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text", ["'a'.replace('b', 'c')", "dataclasses.replace(a, b=1)", "when.replace(tzinfo=None)"]
)
def test_other_replacements_are_not(text: str) -> None:
    assert not renames(text)


def test_base_uses_nothing_of_ours() -> None:
    for name, text in sources().items():
        if name.startswith("base/"):
            used = set(re.findall(r"^\s*(?:from|import) (nodepool[\w.]*)", text, re.MULTILINE))
            assert {module for module in used if not module.startswith("nodepool.base")} <= {
                "nodepool.exceptions",
                "nodepool.texts",
            }, name
