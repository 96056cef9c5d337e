"""The parts of Nodepool only become smaller, in statements: a change that needs more has to remove something."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests import REPOSITORY

#: Area -> the most statements that it may have. When an area shrinks by 100, lower its limit; none may be raised.
#: Goals: core 17,500; pages 2,500; package 45,500; features since then have their own: leases 2,000 (200 more are for agents
#: and programs without SSH), programs in the node manager 450.
BUDGETS = {
    "core": 19_680,
    "driver openstack": 1_840,
    "driver aws": 1_700,
    "driver kubernetes": 1_290,
    "driver nodemanager": 2_000,
    "node manager": 11_200,
    "pages": 2_960,
    "leases": 2_240,
    "adapters": 2_050,
    "package": 55_150,
}
#: Slack that a limit may have before it must be lowered.
SLACK = 100
#: Files and folders of each area, below ``nodepool``. The framework of drivers is what is in no driver's folder.
FRAMEWORK = ("backing", "common", "quota", "request", "statemachine", "toolkit")
AREAS = {
    "core": (
        "builder", "cmd", "config", "launcher", "zk", *(f"driver/{folder}" for folder in FRAMEWORK),
        *(f"driver/{path.name}" for path in sorted((REPOSITORY / "nodepool" / "driver").glob("*.py"))),
    ),
    "driver openstack": ("driver/openstack",),
    "driver aws": ("driver/aws",),
    "driver kubernetes": ("driver/kubernetes",),
    "driver nodemanager": ("driver/nodemanager",),
    "node manager": ("nodemanager",),
    "pages": ("status", "web", "webapp.py"),
    "leases": ("access", "client.py", "lease", "mcp.py", "web/actions"),
    "adapters": ("adapters",),
    "package": ("",),
}  # fmt: skip


def statements(text: str) -> int:
    """Number of statements; texts that stand alone (docstrings, also those of attributes) are none."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for node in ast.walk(ast.parse(text))
    )


@cache
def _of_files() -> dict[str, int]:
    root = REPOSITORY / "nodepool"
    return {str(path.relative_to(root)): statements(path.read_text()) for path in root.rglob("*.py")}


def areas_of(path: str) -> Iterator[str]:
    """Areas that a file below ``nodepool`` belongs to."""
    for area, parts in AREAS.items():
        if area == "pages" and path.startswith("web/actions/"):
            continue
        if any(part in ("", path) or path.startswith(f"{part}/") for part in parts):
            yield area


@pytest.mark.parametrize(("text", "number"), [
    ("", 0),
    ('"""Module."""\nimport a', 1),
    ("def f():\n    'Docstring.'\n    return 1", 2),
    ("class A:\n    x = 1\n    '''What x is.'''", 2),
    ("if a:\n    b\nelse:\n    c", 3),
])  # fmt: skip
def test_statements_are_counted(text: str, number: int) -> None:
    assert statements(text) == number


@pytest.mark.parametrize(("path", "areas"), [
    ("zk/writer.py", {"core", "package"}),
    ("driver/registry.py", {"core", "package"}),
    ("driver/request/handler.py", {"core", "package"}),
    ("driver/aws/launch/machines.py", {"driver aws", "package"}),
    ("driver/static/provider.py", {"package"}),
    ("nodemanager/manager.py", {"node manager", "package"}),
    ("webapp.py", {"pages", "package"}),
    ("web/v1.py", {"pages", "package"}),
    ("web/actions/routes.py", {"leases", "package"}),
])  # fmt: skip
def test_files_belong_to_areas(path: str, areas: set[str]) -> None:
    assert set(areas_of(path)) == areas
    assert path in _of_files()


def test_areas_only_become_smaller() -> None:
    found: Counter[str] = Counter()
    for path, number in _of_files().items():
        found.update(dict.fromkeys(areas_of(path), number))
    assert found.keys() == BUDGETS.keys()
    assert {area: number for area, number in found.items() if number > BUDGETS[area]} == {}, "remove something"
    assert {area: number for area, number in found.items() if number <= BUDGETS[area] - SLACK} == {}, "lower the limit"
