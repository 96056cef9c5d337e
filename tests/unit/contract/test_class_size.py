"""Classes of the node manager stay small enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import REPOSITORY

#: The most functions in the body of a class: methods, properties and special ones.
MOST = 25


def sizes(text: str) -> Iterator[tuple[str, int]]:
    """Name of each class, and the number of functions in its body, without inherited ones."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            yield node.name, sum(isinstance(each, functions) for each in node.body)


def test_functions_of_classes_are_counted() -> None:
    text = """
class A:
    x = 1
    def __init__(self): pass
    @property
    def p(self):
        def inner(): pass
        return inner
    class B:
        async def f(self): pass
"""
    assert dict(sizes(text)) == {"A": 2, "B": 1}


def test_classes_of_the_node_manager_are_small() -> None:
    root = REPOSITORY / "nodepool" / "nodemanager"
    large = {
        f"{path.relative_to(root)} {name}": number
        for path in root.rglob("*.py")
        for name, number in sizes(path.read_text())
        if number > MOST
    }
    assert large == {}, "split it where a part has its own state and name"
