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
    def paused(self) -> bool: ...

    @property
    def load(self) -> int: ...

    def has(self, request_id: str) -> bool: ...

    def view(self, cls: RequestClass) -> PoolView: ...

    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None: ...

    def ask(self, waiting: RequestHandler, others: list[Pool]) -> None: ...

    def make_way(self) -> None: ...

    def post(self, handler: RequestHandler, function: Callable[..., Any], *args: object) -> None: ...

    def active_launches(self) -> int: ...

    def capacity_changed(self) -> None: ...

    def session_lost(self) -> None: ...


class Requests(Protocol):
    """Where pools release requests, and report what requests wait for."""

    def wake(self, recheck: bool = False) -> None: ...

    def recheck(self, code: Code, **parameters: object) -> None: ...

    def is_wanted(self, label: str) -> bool: ...

    def release(
        self,
        request_id: str,
        wait_for: Reason | None = None,
        retry_after: float = 0.0,
        checked_by: str | None = None,
        refused_by: str | None = None,
        full: bool = False,
        hand_to: str | None = None,
    ) -> None: ...
