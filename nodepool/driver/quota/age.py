"""Lifetime of cached limits of a provider; the setting is in :mod:`nodepool.driver.utils`."""

from __future__ import annotations

from collections.abc import Callable

DEFAULT = 300.0
"""Seconds."""

_setting: Callable[[], float] | None = None


def read_from(setting: Callable[[], float]) -> None:
    """Use the current value of a setting that outside code may change."""
    global _setting
    _setting = setting


def max_age() -> float:
    """Return the greatest age of limits in seconds."""
    return _setting() if _setting is not None else DEFAULT
