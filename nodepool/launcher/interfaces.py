"""Interface of pools for the assignment of requests."""

from __future__ import annotations

from typing import Protocol

from nodepool.driver.request.base import RequestHandler, RequestHost
from nodepool.launcher.requests.choice import PoolView, RequestClass


class Pool(RequestHost, Protocol):
    """A pool of this launcher, for code that searches one for a request."""

    label: str
    paused_handlers: set[RequestHandler]

    @property
    def paused(self) -> bool:
        """Return whether a request waits for capacity here."""

    def has(self, request_id: str) -> bool:
        """Return whether this pool processes the request."""

    def view(self, cls: RequestClass) -> PoolView:
        """Return the current state of the pool for requests of this class."""

    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        """Queue a request for this pool."""

    def ask(self, waiting: RequestHandler, unanswered: set[str], others: list[Pool]) -> None:
        """Request a move of what waits elsewhere if this pool has capacity; else ask the others."""

    def make_way(self) -> None:
        """Return the requests that the pool is paused for to the queue."""

    def active_launches(self) -> int:
        """Return the number of running and expected launches."""

    def capacity_changed(self) -> None:
        """Retry paused handlers in request order, because quota may have become free."""

    def session_lost(self) -> None:
        """Drop every handler, because our locks are lost."""
