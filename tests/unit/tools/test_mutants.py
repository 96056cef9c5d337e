"""tools/mutants: which guards it removes, and that what remains is a program."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import load_tool

SOURCE = """
def write(txn, tree, node, waiting, age):
    if tree.is_locked(node.id):
        return
    if age >= LIMIT:
        raise ValueError
    txn.check(node.lock.path)
    txn.set(node.path, "ä", node.version)
    waiting.wake()
"""


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_tool("mutants")


def mutated(tool: Any, kind: str) -> list[str]:
    found = [mutant for mutant in tool.Finder("write.py", SOURCE).found if mutant.kind == kind]
    return [SOURCE[: m.start] + m.new + SOURCE[m.end :] for m in found]


@pytest.mark.parametrize(
    "kind, old, new",
    [
        ("version", "node.version", "-1"),
        ("check", "txn.check(node.lock.path)", "pass"),
        ("lock", "tree.is_locked(node.id)", "False"),
        ("boundary", "age >= LIMIT", "age > LIMIT"),
        ("limit", "age >= LIMIT", "False"),
        ("wake", "waiting.wake()", "pass"),
    ],
)
def test_each_kind_of_guard_is_removed(tool: Any, kind: str, old: str, new: str) -> None:
    assert mutated(tool, kind) == [SOURCE.replace(old, new)]


def test_guards_of_the_launcher_are_found_and_their_mutants_are_programs(tool: Any) -> None:
    mutants = [m for m in tool.find(None) if m.kind in ("version", "check", "lock", "limit", "wake")]
    found = {(m.path, m.kind) for m in mutants}
    for path in ("nodepool/driver/request/handler.py", "nodepool/launcher/nodes/reconciler.py", "nodepool/launcher/cleanup.py"):
        assert {(path, "version"), (path, "check")} <= found
    for mutant in mutants:
        text = (REPOSITORY / mutant.path).read_text()
        ast.parse(text[: mutant.start] + mutant.new + text[mutant.end :])


def test_every_module_has_closest_tests_that_exist(tool: Any) -> None:
    for path in {mutant.path for mutant in tool.find(None)}:
        assert all((REPOSITORY / test).exists() for test in tool.tests_of(path)), path
