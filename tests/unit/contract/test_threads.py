"""Subclasses of Thread keep away from what the interpreter's own class has."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator

from tests import REPOSITORY

_thread = threading.Thread()
#: The private attributes here, and those that came with Python 3.13 and 3.14: ``Lib/threading.py``.
OWN = {
    *(name for name in {*dir(_thread), *vars(_thread)} if name.startswith("_")),
    *("_handle", "_context", "_os_thread_handle"),
} - {"__init__"}


def hiding(tree: ast.AST) -> Iterator[str]:
    """Yield what subclasses of Thread define or assign although the base class has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base) in ("Thread", "threading.Thread") for base in node.bases
        ):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name in OWN:
                    yield part.name
                elif (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and ast.unparse(part.value) == "self"
                    and part.attr in OWN
                ):
                    yield f"self.{part.attr}"


def test_no_subclass_hides_what_a_thread_has_in_another_version_of_python() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): names
        for path in (REPOSITORY / "nodepool").rglob("*.py")
        if (names := list(hiding(ast.parse(path.read_text()))))
    }
    assert found == {}


def test_methods_and_assignments_are_found() -> None:
    code = (
        "class A(threading.Thread, B):\n"
        "    async def _handle(self): ...\n"
        "    def start_it(self): self._started = 1; self._mine = 2\n"
        "class C(B):\n"
        "    def _handle(self): ...\n"
    )
    assert list(hiding(ast.parse(code))) == ["_handle", "self._started"]
