"""Describe which registered pools offer the requested labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from nodepool.base.names import did_you_mean


def joined(words: Iterable[str]) -> str:
    """Return the sorted texts as ``a``, ``a and b`` or ``a, b and c``."""
    words = sorted(words)
    return (
        words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
    )


def unknown_labels(labels: Collection[str], pools: Iterable[Any]) -> set[str]:
    """Return the labels that no pool offers."""
    return set(labels) - {label for pool in pools for label in pool.labels}


def why_not_offered(
    labels: Collection[str], pools: Collection[Any], who: str = "pool"
) -> str | None:
    """Return why no single pool can serve a request for these labels; None: one can.

    :param pools: objects with the attribute ``labels``.
    """
    unknown = unknown_labels(labels, pools)
    if unknown:
        known = {label for pool in pools for label in pool.labels}
        meant = did_you_mean(joined(unknown), known) if len(unknown) == 1 else ""
        return f"no {who} offers {joined(unknown)}{meant}"
    if any(set(labels) <= pool.labels for pool in pools):
        return None
    return f"no pool offers {joined(set(labels))} together; nodes of one request come from one pool"
