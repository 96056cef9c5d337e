"""Let the scheduler preempt tasks between any two statements of the daemons.

An import hook puts a conditional call before each statement of each function. It can also replace
the text of modules.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from nodepool.lab.simulation import kernel as kernels

_CALL = "__simulated_step__"
_left = 0


def step() -> None:
    """Preempt the task now and then; called before each statement, so it must be cheap."""
    global _left
    _left -= 1
    if _left < 0:
        kernel = kernels.current()
        _left = int(kernel.random.expovariate(1 / kernel.lines))
        kernel.preempt()


def begin() -> None:
    """Prepare the calls for a run of the current kernel, so that the run can be repeated."""
    global _left
    _left = 0
    # Testing a name costs a tenth of a call, and there are hundreds of millions of them.
    setattr(builtins, _CALL, step if kernels.current().lines else None)


class _Insert(ast.NodeTransformer):
    _depth = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if (
                isinstance(block, list)
                and block
                and self._depth
                and not isinstance(node, (ast.ClassDef, ast.Match))
            ):
                setattr(
                    node,
                    field,
                    [each for statement in block for each in (_call(statement), statement)],
                )
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        depth, self._depth = self._depth, 0
        self.generic_visit(node)
        self._depth = depth
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node


def _call(before: ast.stmt) -> ast.stmt:
    """Return ``if step: step()``, with the line number of the statement that follows."""
    name = ast.Name(_CALL, ast.Load())
    call = ast.If(name, [ast.Expr(ast.Call(name, [], []))], [])
    return ast.fix_missing_locations(ast.copy_location(call, before))


class _Loader(importlib.machinery.SourceFileLoader):
    change: Callable[[str, str], str]
    steps: bool

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        tree = ast.parse(self.change(fullname, self.get_data(path).decode()), path)
        return compile(
            _Insert().visit(tree) if self.steps else tree, path, "exec", dont_inherit=True
        )


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, change: Callable[[str, str], str], only: str | None = None) -> None:
        self._change = change
        self._only = only

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("nodepool.") or name.startswith(
            ("nodepool.lab.simulation", "nodepool.lab.zkserver")
        ):
            return None
        if self._only not in (None, name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
            spec.loader.change = self._change
            spec.loader.steps = self._only is None
        return spec


def instrument(change: Callable[[str, str], str] = lambda _name, text: text) -> None:
    """Let modules that are imported from now on call `step` in runs with ``lines``.

    :param change: gets name and text of each module, and returns the text to use.
    """
    setattr(builtins, _CALL, None)
    sys.meta_path.insert(0, _Finder(change))


def replace_text(module: str, change: Callable[[str, str], str]) -> None:
    """Change the text of one module, which is imported later, and nothing else.

    :param change: gets name and text of the module, and returns the text to use.
    :raises ImportError: the module has been imported already.
    """
    if module in sys.modules:
        raise ImportError(f"{module} was imported before its text could be replaced")
    sys.meta_path.insert(0, _Finder(change, only=module))
