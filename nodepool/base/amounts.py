"""Exact arithmetic for amounts of resources such as fractions of cores."""

from __future__ import annotations

from typing import Any


def exact(value: object) -> Any:
    """Return a sum or difference without binary rounding errors.

    For example, 1.9 minus nineteen times 0.1 is 0, so that another 0.1 does not fit.
    """
    return round(value, 6) if isinstance(value, float) else value
