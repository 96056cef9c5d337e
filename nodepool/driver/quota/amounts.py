"""Amounts of named resources: needs of nodes, limits, use of pools (DRV-6.3)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from nodepool.base.amounts import exact


def max_age() -> float:
    """Return the greatest age of limits in seconds.

    It is replaced by the setting in :mod:`nodepool.driver.utils`.
    """
    return 300.0


class QuotaInformation:
    """Resources by name; ``ram`` in MiB. Others have ``default`` (``math.inf``: no limit)."""

    def __init__(
        self,
        cores: float | None = None,
        instances: float | None = None,
        ram: float | None = None,
        default: float = 0,
        **kw: float | None,
    ) -> None:
        self.default = default
        given: dict[str, Any] = {"cores": cores, "instances": instances, "ram": ram, **kw}
        #: The amounts by type of resource; "compute" is the only one.
        self.quota = {
            "compute": {name: default if value is None else value for name, value in given.items()}
        }

    @staticmethod
    def from_resources(resources: Mapping[str, Any]) -> QuotaInformation:
        """Return the amounts of a record's ``resources`` object (missing names count as 0)."""
        result = QuotaInformation()
        result.quota["compute"].update(
            (name, 0 if value is None else value) for name, value in resources.items()
        )
        return result

    def get_resources(self) -> dict[str, Any]:
        """Return the dict for ``node.resources``, which Zuul reads."""
        return self.quota["compute"]

    def add(self, other: QuotaInformation) -> None:
        self._change(other, 1)

    def subtract(self, other: QuotaInformation) -> None:
        self._change(other, -1)

    def _change(self, other: QuotaInformation, sign: int) -> None:
        mine, theirs = self.quota["compute"], other.quota["compute"]
        for name in [*theirs, *(mine.keys() - theirs.keys() if other.default else ())]:
            have = mine.get(name, self.default)
            # Infinite minus infinite would be NaN, which cannot be compared and is not valid JSON.
            mine[name] = (
                have if have == math.inf else exact(have + sign * theirs.get(name, other.default))
            )

    def non_negative(self) -> bool:
        """Return True when nothing is overused."""
        return all(value >= 0 for value in self.quota["compute"].values())

    def copy(self) -> QuotaInformation:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def __str__(self) -> str:
        return str(self.quota)

    def __repr__(self) -> str:
        return f"<QuotaInformation {self.quota['compute']}>"
