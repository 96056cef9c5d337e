"""Lifetime of cached limits of a provider; the setting is in :mod:`nodepool.driver.utils`."""

from __future__ import annotations


def max_age() -> float:
    """Return the greatest age of limits in seconds; replaced where outside code may change it."""
    return 300.0
