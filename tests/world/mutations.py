"""Defects that are planted on purpose: each removes one guard, and the world has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Mutation:
    """
    :param module: in which text is replaced; it has to be there once.
    """

    module: str
    old: str
    new: str


MUTATIONS: dict[str, Mutation] = {}


def change(name: str) -> Callable[[str, str], str]:
    """For :func:`nodepool.simulation.lines.instrument`."""
    mutation = MUTATIONS[name]

    def apply(module: str, text: str) -> str:
        if module != mutation.module:
            return text
        if text.count(mutation.old) != 1:
            raise ValueError(f"mutation {name}: {mutation.old!r} occurs {text.count(mutation.old)} times in {module}, not once")
        return text.replace(mutation.old, mutation.new)

    return apply
