"""What the handler of a request needs of its pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nodepool.base.clock import Clock
from nodepool.driver.request.state import Outcome
from nodepool.reasons import Reason
from nodepool.zk.records import NodeRequest


class RequestHost(Protocol):
    """The pool that a request is served by; none of these calls waits for anything."""

    launcher_id: str
    provider_name: str
    pool_name: str
    label: str

    @property
    def clock(self) -> Clock: ...

    @property
    def paused(self) -> bool: ...

    def getZK(self) -> Any: ...

    def getProviderConfig(self) -> Any: ...

    def getPoolConfig(self) -> Any: ...

    def getProviderManager(self) -> Any: ...

    def post(self, handler: Any, function: Callable[..., Any], *args: Any) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""

    # -- nodes

    def claim(self, node_id: str | None) -> bool:
        """Whether no other handler of this process is about to take the free node."""

    def unclaim(self, node_id: str | None) -> None: ...

    def begin_creation(self, handler: Any) -> bool:
        """Whether the handler may make new nodes now; else ``run`` is called when it may."""

    def end_creation(self, handler: Any) -> None: ...

    def recorded(self, handler: Any, missing: list[str]) -> None:
        """Its nodes are in the mirror, but for those of the labels *missing*."""

    # -- room

    def pause_changed(self, handler: Any) -> None: ...

    def paused_reason(self) -> Reason:
        """Which request comes first in the paused pool."""

    def make_room(self, handler: Any) -> None:
        """No quota: an idle node of this pool may have to go."""

    def note_full(self, labels: list[str], reason: Reason) -> None: ...

    def promise_released(self) -> None:
        """Quota that was promised to nodes which did not come into being is free again."""

    def limits_known(self) -> None: ...

    # -- ends

    def driver_works(self, request: NodeRequest) -> None: ...

    def driver_failed(self, request: NodeRequest, error: BaseException) -> None: ...

    def decline(self, request: NodeRequest, reasons: list[Reason]) -> str | None:
        """Note why it is declined; when every pool has declined it the result is why, in words."""

    def request_released(self, handler: Any) -> None:
        """The request is open again while launches of this handler still run."""

    def ended(self, handler: Any, outcome: Outcome) -> None: ...
