"""Errors of backends, missing features of a host, and exits of processes."""

from __future__ import annotations

from dataclasses import dataclass

from nodepool.nodemanager.client.texts import clean


class BackendError(Exception):
    """An error of a backend; `retry`: the same call may succeed later without a change."""

    def __init__(self, message: str, retry: bool = False) -> None:
        # It may hold names and output from inside.
        super().__init__(clean(message))
        self.retry = retry


@dataclass(frozen=True)
class Problem:
    """A missing feature: its name, whether the backend requires it, and how to get it."""

    feature: str
    fatal: bool
    remedy: str


@dataclass(frozen=True)
class Exit:
    """How a spawned process ended."""

    status: int | None
    """Exit status, or minus the number of the signal; None: it ended, but the helper that would
    know how ended before it.
    """
