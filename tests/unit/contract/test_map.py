"""The map of the architecture leads to code and tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests import REPOSITORY

MAP = (REPOSITORY / "doc/architecture/map.rst").read_text()
#: ``path.py`` ``name``
PLACES = re.findall(r"``([\w/]+\.py)`` ``(\w+)``", MAP)
TESTS = re.findall(r"^     - ``([\w/]+\.py)``$", MAP, re.MULTILINE)


def test_the_map_is_read() -> None:
    assert len(PLACES) >= 40
    assert len(TESTS) >= 40


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_named_places_exist(path: str, name: str) -> None:
    tree = ast.parse((REPOSITORY / "nodepool" / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert name in names


@pytest.mark.parametrize("path", TESTS)
def test_named_test_files_exist(path: str) -> None:
    assert "def test_" in (REPOSITORY / "tests" / path).read_text()
