"""Interfaces between pools and the assignment of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nodepool.driver.request.base import RequestHandler
from nodepool.launcher.requests.choice import PoolView, RequestClass
from nodepool.reasons import Code, Reason


class Pool(Protocol):
    """A pool of this launcher, for code that searches one for a request."""

    launcher_id: str
    provider_name: str
    pool_name: str
    label: str
    paused_handlers: set[RequestHandler]

    @property
    def paused(self) -> bool:
        """Return whether a request waits for capacity here."""

    @property
    def load(self) -> int:
        """Return the number of requests that are processed, or about to be."""

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

    def post(self, handler: RequestHandler, function: Callable[..., Any], *args: object) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""

    def active_launches(self) -> int:
        """Return the number of running and expected launches."""

    def capacity_changed(self) -> None:
        """Retry paused handlers in request order, because quota may have become free."""

    def session_lost(self) -> None:
        """Drop every handler, because our locks are lost."""


class Requests(Protocol):
    """Where pools release requests, and report what requests wait for."""

    def wake(self, recheck: bool = False) -> None:
        """Recheck all waiting requests; with ``recheck`` also whether pools decline them."""

    def recheck(self, code: Code, **parameters: object) -> None:
        """Recheck the requests that wait for this reason."""

    def is_wanted(self, label: str) -> bool:
        """Return whether a request that waits here needs such a node."""

    def release(
        self,
        request_id: str,
        wait_for: Reason | None = None,
        retry_after: float = 0.0,
        checked_by: str | None = None,
        refused_by: str | None = None,
        full: bool = False,
        hand_to: str | None = None,
    ) -> None:
        """Release a request of a pool; if it is still open, it is queued again."""
