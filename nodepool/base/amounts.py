"""Amounts of resources: parts of cores add up as decimals do."""

from __future__ import annotations

from typing import Any


def exact(value: object) -> Any:
    """A sum or difference without the noise of binary fractions: 1.9 less nineteen times 0.1 is 0, and 0.1 more does not fit."""
    return round(value, 6) if isinstance(value, float) else value
