"""Exemptions from lint rules and types only become fewer."""

from __future__ import annotations

import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests import REPOSITORY

#: Where -> exemption -> how many there are. When there are fewer, lower the number; it may not be
#: raised.
EXEMPTIONS = {
    "nodepool": {"C901": 10, "SLF001": 21, "noqa": 9, "type: ignore": 50},
    "tests": {"C901": 1, "F401": 2, "F811": 1, "SLF001": 1, "noqa": 21, "type: ignore": 177},
    "tools": {"noqa": 1, "type: ignore": 8},
    "everywhere": {"extend-ignore-names": 38, "ignore": 9},
}
COMMENT = re.compile(r"#\s*(noqa|type: ignore|pragma: no cover)\b", re.IGNORECASE)


def comments(text: str) -> Counter[str]:
    """Exemptions in comments; what is in strings is not a comment."""
    found: Counter[str] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.update(match[1].lower() for match in COMMENT.finditer(token.string))
    return found


def settings(text: str) -> dict[str, Counter[str]]:
    """Exemptions in ``pyproject.toml``: files for which a rule is off, rules that are off,
    private names that all may use.
    """
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    found: dict[str, Counter[str]] = {}
    for path, codes in lint.get("per-file-ignores", {}).items():
        found.setdefault(path.partition("/")[0], Counter()).update(codes)
    everywhere = {
        "ignore": len(lint.get("ignore", ())),
        "extend-ignore-names": len(lint["flake8-self"]["extend-ignore-names"]),
    }
    return {**found, "everywhere": Counter(everywhere)}


def _programs(folder: str) -> Iterator[str]:
    """Texts of Python files, those without suffix included."""
    for path in (REPOSITORY / folder).rglob("*"):
        if path.is_file() and path.suffix in ("", ".py"):
            data = path.read_bytes()
            if path.suffix or (data.startswith(b"#!") and b"python" in data.partition(b"\n")[0]):
                yield data.decode()


@pytest.mark.parametrize("text", ["x = 1  # noqa: E501", "x = 1  # type: ignore[misc]  # why"])
def test_exemptions_in_comments_are_counted(text: str) -> None:
    assert comments(text).total() == 1


def test_exemptions_in_strings_are_not_counted() -> None:
    assert comments('x = "# noqa"  # no exemption') == Counter()


def test_exemptions_in_settings_are_counted() -> None:
    text = """
[tool.ruff.lint]
ignore = ["E1", "E2"]
[tool.ruff.lint.flake8-self]
extend-ignore-names = ["_a"]
[tool.ruff.lint.per-file-ignores]
"nodepool/a.py" = ["C901", "SLF001"]
"tests/**" = ["C901"]
"""
    assert settings(text) == {
        "nodepool": {"C901": 1, "SLF001": 1},
        "tests": {"C901": 1},
        "everywhere": {"ignore": 2, "extend-ignore-names": 1},
    }


def test_exemptions_only_become_fewer() -> None:
    found = settings((REPOSITORY / "pyproject.toml").read_text())
    for folder in ("nodepool", "tests", "tools"):
        for text in _programs(folder):
            found.setdefault(folder, Counter()).update(comments(text))
    assert {where: dict(sorted(counted.items())) for where, counted in found.items()} == EXEMPTIONS
