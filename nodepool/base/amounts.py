"""Exact arithmetic for amounts of resources such as fractions of cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

LARGEST = 1_000_000


def exact(value: object) -> Any:
    """Return a sum or difference without binary rounding errors.

    For example, 1.9 minus nineteen times 0.1 is 0, so that another 0.1 does not fit.
    """
    return round(value, 6) if isinstance(value, float) else value


@dataclass(frozen=True)
class Share:
    """A whole number from 1, or a percentage of something."""

    number: int
    percent: bool = False

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the share that an option contains: ``3``, or ``20%``.

        :raises ValueError: it is neither.
        """
        given = int(value) if isinstance(value, bool) else value  # as in other options
        number, percent, rest = str(given).partition("%")
        most = 100 if percent else LARGEST
        if rest or not number.isdecimal() or not 1 <= int(number[:10]) <= most:
            raise ValueError(f"expected a number from 1 or a share such as 20%, not {value!r}")
        return cls(int(number), bool(percent))

    def of(self, whole: int) -> int:
        """Return the number, at least 1."""
        return max(1, whole * self.number // 100) if self.percent else self.number
