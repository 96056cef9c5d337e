"""Suggest names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion for an unknown name, for the end of a message; may be empty.

    :param cutoff: similarity from 0 to 1 that a known name must have.
    """
    close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
