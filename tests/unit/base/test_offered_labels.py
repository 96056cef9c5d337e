"""Words about who offers what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.base.offered_labels import joined, why_not_offered


def pools(*labels: str) -> list[Any]:
    return [SimpleNamespace(labels=frozenset(text.split())) for text in labels]


@pytest.mark.parametrize(
    ("asked", "offered", "words"),
    [
        (["a"], ["a"], None),
        ([], ["a"], None),
        (["hsot"], ["host big"], "no pool offers hsot; did you mean host?"),
        (["x", "y"], ["host"], "no pool offers x and y"),
        (["x"], [], "no pool offers x"),
        (
            ["b", "a", "a"],
            ["a", "b"],
            "no pool offers a and b together; nodes of one request come from one pool",
        ),
    ],
)
def test_why_not_offered(asked: list[str], offered: list[str], words: str | None) -> None:
    assert why_not_offered(asked, pools(*offered)) == words


def test_names_are_joined_in_words() -> None:
    assert [joined(w) for w in ([], ["a"], ["b", "a"], ["c", "b", "a"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
