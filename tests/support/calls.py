"""Watches the calls of a function that the product makes."""

from __future__ import annotations

from typing import Any

import pytest


def count_calls(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list that gets the positional arguments of each call of ``target.name``, which
    works as before.
    """
    calls: list[tuple[Any, ...]] = []
    original = getattr(target, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(target, name, counted)
    return calls
