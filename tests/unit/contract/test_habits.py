"""Habits that no linter knows: bounds on time are scaled, exceptions from the lint rules only
become fewer.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator

from tests import REPOSITORY

CLOCKS = {"monotonic", "time", "perf_counter"}


def _reads_clock(node: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in CLOCKS
        for call in ast.walk(node)
    )


def _unscaled(tree: ast.AST) -> Iterator[int]:
    """Lines that assert that something took less than a fixed number of seconds."""
    for assertion in ast.walk(tree):
        for compared in ast.walk(assertion) if isinstance(assertion, ast.Assert) else ():
            if isinstance(compared, ast.Compare) and isinstance(compared.ops[-1], ast.Lt | ast.LtE):
                elapsed = compared.comparators[-2] if len(compared.ops) > 1 else compared.left
                is_difference = (
                    isinstance(elapsed, ast.BinOp)
                    and isinstance(elapsed.op, ast.Sub)
                    and _reads_clock(elapsed.left)
                )
                if is_difference and isinstance(compared.comparators[-1], ast.Constant):
                    yield assertion.lineno


def test_upper_bounds_on_wall_time_are_scaled() -> None:
    """A machine that is slow or shared fails no test: ``tests.support.deadline.limit``."""
    assert list(_unscaled(ast.parse("assert time.monotonic() - began < 2"))) == [1]
    assert list(_unscaled(ast.parse("assert 0.1 < time.monotonic() - began < limit(2)"))) == []
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in (REPOSITORY / "tests").rglob("*.py")
        if "benchmark" not in path.parts
        for line in _unscaled(ast.parse(path.read_text()))
    ]
    assert found == []


def test_exceptions_from_lint_rules_only_become_fewer() -> None:
    """Each file that is listed in ``pyproject.toml`` still needs to be;
    ``test_lint_exemptions.py`` counts them.
    """
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]["lint"][
        "per-file-ignores"
    ]
    wanted = {
        (path, code) for path, codes in listed.items() if path != "tests/**" for code in codes
    }
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        ",".join(sorted({code for _path, code in wanted})),
    ]
    answer = subprocess.run(
        [
            *command,
            "--config",
            "lint.per-file-ignores={}",
            "--output-format",
            "json",
            "nodepool",
            "tests",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    needed = {
        (finding["filename"].removeprefix(f"{REPOSITORY}/"), finding["code"])
        for finding in json.loads(answer.stdout)
    }
    assert wanted - needed == set()
