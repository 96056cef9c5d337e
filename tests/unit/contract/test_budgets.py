"""The parts of Nodepool only become smaller, in statements: a change that needs more has to
remove something.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from tests import REPOSITORY

#: Area -> the most statements that it may have. A release lowers the limits to what there is; none
#: may be raised. Docstrings are not counted, so that documentation costs nothing.
BUDGETS = {
    "core": 20_013,
    "driver openstack": 1_639,
    "driver aws": 1_448,
    "driver kubernetes": 1_351,
    "driver nodemanager": 1_928,
    "node manager": 11_123,
    "pages": 3_617,
    "leases": 3_133,
    "adapters": 2_299,
    "tools": 3_019,
    "recovery": 344,
    "package": 58_063,
}
#: Part of a limit that may be unused before it must be lowered without a release.
SLACK = 0.03
#: Files and folders of each area, below ``nodepool``; the longest one decides about a file. The
#: framework of drivers is what is in no driver's folder.
FRAMEWORK = ("backing", "common", "quota", "request", "statemachine", "toolkit")
AREAS = {
    "core": (
        "builder",
        "cmd",
        "config",
        "launcher",
        "zk",
        *(f"driver/{folder}" for folder in FRAMEWORK),
        *(
            f"driver/{path.name}"
            for path in sorted((REPOSITORY / "nodepool" / "driver").glob("*.py"))
        ),
    ),
    "driver openstack": ("driver/openstack",),
    "driver aws": ("driver/aws",),
    "driver kubernetes": ("driver/kubernetes",),
    "driver nodemanager": ("driver/nodemanager",),
    "node manager": ("nodemanager",),
    "pages": ("status", "web", "webapp.py"),
    "leases": (
        "access",
        "client",
        "cmd/audit.py",
        "cmd/commands/agents.py",
        "cmd/commands/lease.py",
        "cmd/commands/login.py",
        "cmd/commands/token.py",
        "config/access.py",
        "lease",
        "adapters/mcp.py",
        "web/actions",
    ),
    "adapters": ("adapters",),
    # Of machines that a restored or emptied ZooKeeper does not know.
    "recovery": ("cmd/commands/recover.py", "zk/cluster.py"),
    "tools": ("cmd/commands/dev.py", "cmd/commands/simulate.py", "lab"),
}


def statements(text: str) -> int:
    """Number of statements; texts that stand alone (docstrings, also those of attributes) are
    none.
    """
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(ast.parse(text))
    )


@cache
def _of_files() -> dict[str, int]:
    root = REPOSITORY / "nodepool"
    return {
        str(path.relative_to(root)): statements(path.read_text()) for path in root.rglob("*.py")
    }


def areas_of(path: str) -> set[str]:
    """Return the areas that a file below ``nodepool`` belongs to."""
    parts = {
        part: area
        for area, parts in AREAS.items()
        for part in parts
        if path == part or path.startswith(f"{part}/")
    }
    return {"package"} | ({parts[max(parts, key=len)]} if parts else set())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ('"""Module."""\nimport a', 1),
        ("def f():\n    'Docstring.'\n    return 1", 2),
        ("class A:\n    x = 1\n    '''What x is.'''", 2),
        ("if a:\n    b\nelse:\n    c", 3),
    ],
)
def test_statements_are_counted(text: str, number: int) -> None:
    assert statements(text) == number


@pytest.mark.parametrize(
    ("path", "areas"),
    [
        ("zk/writer.py", {"core", "package"}),
        ("driver/registry.py", {"core", "package"}),
        ("driver/request/handler.py", {"core", "package"}),
        ("driver/aws/launch/machines.py", {"driver aws", "package"}),
        ("driver/static/provider.py", {"package"}),
        ("nodemanager/manager.py", {"node manager", "package"}),
        ("webapp.py", {"pages", "package"}),
        ("web/v1.py", {"pages", "package"}),
        ("web/actions/routes.py", {"leases", "package"}),
        ("cmd/commands/nodes.py", {"core", "package"}),
        ("cmd/commands/lease.py", {"leases", "package"}),
        ("zk/cluster.py", {"recovery", "package"}),
        ("base/timers.py", {"package"}),
    ],
)
def test_files_belong_to_areas(path: str, areas: set[str]) -> None:
    assert areas_of(path) == areas
    assert path in _of_files()


def test_areas_only_become_smaller() -> None:
    found: Counter[str] = Counter()
    for path, number in _of_files().items():
        found.update(dict.fromkeys(areas_of(path), number))
    assert found.keys() == BUDGETS.keys()
    assert {area: number for area, number in found.items() if number > BUDGETS[area]} == {}, (
        "remove something"
    )
    assert {
        area: number for area, number in found.items() if number < BUDGETS[area] * (1 - SLACK)
    } == {}, "lower the limit"
