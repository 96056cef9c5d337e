"""What can go wrong with slivers: errors of backends, features that a host lacks, how processes end."""

from __future__ import annotations

from dataclasses import dataclass

from nodepool.nodemanager.texts import clean


class BackendError(Exception):
    """Text for people; `retry` says whether the same call may succeed later without a change by the operator."""

    def __init__(self, message: str, retry: bool = False) -> None:
        # It may hold names and output from inside.
        super().__init__(clean(message))
        self.retry = retry


@dataclass(frozen=True)
class Problem:
    """A feature that this host lacks: what it is, whether the backend is useless without it, what to do."""

    feature: str
    fatal: bool
    remedy: str


@dataclass(frozen=True)
class Exit:
    """How a spawned process ended."""

    status: int | None
    """Exit status, or minus the number of the signal; None: it ended, but the helper that would know how ended before it."""
