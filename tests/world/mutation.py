"""What a planted defect is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """
    :param module: in which text is replaced; it has to be there once.
    :param found_by: the first seed of the world with a violation, or the id of a test that fails.
    """

    module: str
    old: str
    new: str
    found_by: int | str
