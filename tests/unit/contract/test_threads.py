"""Subclasses of Thread keep away from what the interpreter's own has."""

from __future__ import annotations

import ast

from tests import REPOSITORY

#: Attributes of ``threading.Thread`` in Python 3.11 to 3.14; ``_handle`` came with 3.13.
OWN = {
    *("_target", "_name", "_args", "_kwargs", "_daemonic", "_ident", "_native_id", "_tstate_lock"),
    *("_handle", "_started", "_is_stopped", "_initialized", "_stderr", "_invoke_excepthook"),
    *("_bootstrap", "_bootstrap_inner", "_stop", "_delete", "_context", "_os_thread_handle"),
}


def test_no_thread_overrides_private_attributes_of_another_python() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{item.lineno}: {item.name}"
        for path in sorted((REPOSITORY / "nodepool").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("Thread") for base in node.bases)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in OWN
    ]
    assert found == []
