"""The types have no holes where drivers, launcher and builder meet, and elsewhere they only
become fewer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import REPOSITORY

#: Attributes, parameters, properties and functions of these names have real types.
SEAMS = {"zk", "config", "manager", "provider", "pool", "pw", "statsd"}
#: Lines that annotate a variable or a parameter with Any. May only become smaller.
MOST_ANY = 195
#: Calls of getattr with a literal name. May only become smaller.
MOST_GETATTR = 52

FILES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in sorted((REPOSITORY / "nodepool").rglob("*.py"))
}


def _is_hole(annotation: ast.AST | None) -> bool:
    """Whether the annotation is Any: alone, in a union, or as the result of a callable; YAML
    dicts are ``dict[str, Any]``.
    """
    if isinstance(annotation, ast.Name):
        return annotation.id == "Any"
    if isinstance(annotation, ast.BinOp):
        return _is_hole(annotation.left) or _is_hole(annotation.right)
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        inside = annotation.slice
        if annotation.value.id == "Callable" and isinstance(inside, ast.Tuple):
            return _is_hole(inside.elts[-1])
        return annotation.value.id in (
            "Optional",
            "list",
            "Iterable",
            "Iterator",
            "Sequence",
        ) and _is_hole(inside)
    return False


def holes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines on which a seam is Any, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            name = (
                node.target.attr
                if isinstance(node.target, ast.Attribute)
                else getattr(node.target, "id", "")
            )
            found = [(name, node.annotation)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found = [
                (node.name, node.returns),
                *((argument.arg, argument.annotation) for argument in arguments),
            ]
        else:
            continue
        yield from (
            (node.lineno, name)
            for name, annotation in found
            if name in SEAMS and _is_hole(annotation)
        )


@pytest.mark.parametrize(
    "text",
    [
        "zk: Any",
        "self.config: Any = None",
        "def f(manager: Any) -> None: ...",
        "def f(*, pool: Any | None = None) -> None: ...",
        "def f(zk: Callable[[], Any]) -> None: ...",
        "def provider(self) -> Any: ...",
    ],
)
def test_holes_are_found(text: str) -> None:
    assert len(list(holes(ast.parse(text)))) == 1


def test_typed_seams_and_yaml_dictionaries_are_no_holes() -> None:
    assert (
        list(
            holes(
                ast.parse("zk: ZooKeeper\ndef f(provider: dict[str, Any], other: Any) -> None: ...")
            )
        )
        == []
    )


def test_no_seam_is_any() -> None:
    assert [
        f"{path}:{line} {name}"
        for path, text in FILES.items()
        for line, name in holes(ast.parse(text))
    ] == []


def _count(pattern: str) -> int:
    return sum(
        1 for text in FILES.values() for line in text.splitlines() if re.search(pattern, line)
    )


def test_annotations_with_any_only_become_fewer() -> None:
    assert _count(": Any") <= MOST_ANY


def test_getattr_with_a_literal_name_only_becomes_rarer() -> None:
    assert _count(r"getattr\([^,]+, \"") <= MOST_GETATTR
