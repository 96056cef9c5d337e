"""Driver and Provider: plug-in interfaces (DRV-2, DRV-4), and those of handlers and pools."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from nodepool.base.clock import Clock
from nodepool.base.problems import LabelProblems
from nodepool.cloud.calls import CloudCalls
from nodepool.config.model import ConfigPool, ProviderConfig
from nodepool.driver.request.state import Outcome
from nodepool.logconfig import Log
from nodepool.metrics.launches import StatsClient
from nodepool.reasons import Reason

if TYPE_CHECKING:
    from nodepool.zk.zookeeper import Node, NodeRequest, ZooKeeper


class Driver(metaclass=abc.ABCMeta):
    """One instance per process and driver; shared by all threads."""

    name: str

    def reset(self) -> None:
        """Drop cached global state; called at every configuration load."""
        return

    def configFiles(self) -> dict[str, int | None]:
        """Return the driver's configuration files; when one changes, everything is reloaded.

        With the modification times (ns) from just before the reading, None for a file that is missing.
        Called after the providers were loaded. New here, 11.0.0 does not call it.
        """
        return {}

    @abc.abstractmethod
    def getProviderConfig(self, provider: dict[str, Any]) -> ProviderConfig:
        """Return the not yet loaded configuration for the YAML dict *provider*."""

    @abc.abstractmethod
    def getProvider(self, provider_config: Any) -> Provider:
        """Return a new, not started provider."""


class ProviderNotifications:
    """Optional notifications for a provider."""

    def nodeDeletedNotification(self, node: Node) -> None:
        """Handle the removal of the znode of *node*."""
        return


class NodeRequestHandlerNotifications:
    """Optional notifications for a request handler."""

    def nodeReusedNotification(self, node: Node) -> None:
        """Handle the assignment of the ready *node* to the request."""
        return


class Provider(ProviderNotifications):
    """A running provider. Methods that a driver does not implement keep these defaults."""

    # When a request cannot get its next node: pause (True) or return the request (False).
    PAUSE_AT_QUOTA = True

    provider: ProviderConfig
    #: For drivers that call their cloud with :class:`~nodepool.cloud.calls.CloudCalls`.
    cloud_calls: CloudCalls | None = None
    #: For drivers that record which labels do not work.
    label_problems: LabelProblems | None = None
    #: The thread on which the provider finishes its launches after ``stop``.
    stop_thread: threading.Thread | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)

    def start(self, zk_conn: ZooKeeper | None) -> None:
        """Start background work; an exception means that the provider is not used."""
        return

    def idle(self) -> None:
        """Stop anything that might fight with a successor of the same name."""
        return

    def stop(self) -> None:
        """Accept no new work; must not block."""
        return

    def join(self) -> None:
        """Return when all work is done."""
        return

    def labelReady(self, name: str) -> bool:
        """Return True when the label could be served, apart from quota."""
        return True

    def startNodeCleanup(self, node: Node) -> Any:
        """Start deleting the locked *node*; return an object with ``join()``."""
        raise NotImplementedError(f"{type(self).__name__}.startNodeCleanup")

    def cleanupNode(self, node_id: object) -> None:
        """Delete the resource; raise ``exceptions.NotFound`` when it does not exist."""
        raise NotImplementedError(f"{type(self).__name__}.cleanupNode")

    def waitForNodeCleanup(self, node_id: object) -> None:
        """Return when the resource is deleted."""
        return

    def cleanupLeakedResources(self) -> None:
        """Find and remove leaks; called every minute."""
        return

    def getRequestHandler(self, poolworker: RequestHost, request: NodeRequest) -> RequestHandler:
        """Return a NodeRequestHandler; must be cheap."""
        raise NotImplementedError(f"{type(self).__name__}.getRequestHandler")

    @property
    def leak_search_stopped(self) -> str | None:
        """Return why leaked resources are not deleted at present; None if nothing prevents it."""
        return None

    def listNodes(self) -> Iterable[Any]:
        """Return objects with ``id`` and ``metadata``; for tools only."""
        return []

    def errorLabels(self) -> Iterable[str]:
        """Return the labels known to be permanently broken."""
        return []

    def uploadImage(
        self,
        provider_image: object,
        image_name: str,
        filename: str,
        image_type: str | None = None,
        meta: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> Any:
        """Upload and return the external id; only if images are managed."""
        raise NotImplementedError(f"{type(self).__name__}.uploadImage")

    def deleteImage(self, name: str, id: str) -> None:
        """Delete the image with external name *name* and external id *id*."""
        raise NotImplementedError(f"{type(self).__name__}.deleteImage")

    def discardImage(self, name: str, id: str) -> None:
        """Delete the image of an unfinished upload, even if the upload has protected it."""
        self.deleteImage(name, id)

    def describeHosts(self) -> list[dict[str, Any]]:
        """Describe the provider's own hosts for operators, without waiting.

        Keys: ``name``, ``usable``, ``problem``, ``used`` and ``limits``.
        The last two are amounts by resource. Not in 11.0.0.
        """
        return []

    def removeUnfinishedUpload(self, name: str, since: float) -> None:
        """Remove the remains, except images, of an upload that started at *since* (Unix seconds)."""
        return


class Launcher(Protocol):
    """Interface of a pool's launcher for drivers."""

    @property
    def statsd(self) -> StatsClient | None: ...


class RequestHost(Protocol):
    """The pool that serves a request; none of these calls waits."""

    launcher_id: str
    provider_name: str
    pool_name: str
    label: str

    @property
    def nodepool(self) -> Launcher: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def paused(self) -> bool: ...

    def getZK(self) -> ZooKeeper: ...

    def getProviderConfig(self) -> ProviderConfig | None: ...

    def getPoolConfig(self) -> ConfigPool | None: ...

    def getProviderManager(self) -> Provider | None: ...

    def post(self, handler: RequestHandler, function: Callable[..., object], *args: object) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""

    def progress(self, handler: RequestHandler) -> None:
        """Handle the end of a launch, or another event that concerns the handler's request."""

    # -- nodes

    def claim(self, node_id: str | None) -> bool:
        """Claim a free node; return False if another handler of this process has chosen it."""

    def unclaim(self, node_id: str | None) -> None: ...

    def begin_creation(self, handler: RequestHandler) -> bool:
        """Return whether the handler may create nodes now; otherwise ``run`` is called later."""

    def end_creation(self, handler: RequestHandler) -> None: ...

    def recorded(self, handler: RequestHandler, missing: list[str]) -> None:
        """Record that its nodes are in the mirror, except those of the labels *missing*."""

    # -- capacity

    def pause_changed(self, handler: RequestHandler) -> None: ...

    def paused_reason(self) -> Reason:
        """Return which request is the first one in the paused pool."""

    def make_room(self, handler: RequestHandler) -> None:
        """Free quota by deleting an idle node of this pool, if necessary."""

    def note_full(self, labels: list[str], reason: Reason) -> None: ...

    def promise_released(self) -> None:
        """Report that quota that was promised to nodes is free, as they were not created."""

    def limits_known(self) -> None: ...

    # -- ends

    def driver_works(self, request: NodeRequest) -> None: ...

    def driver_failed(self, request: NodeRequest, error: BaseException) -> None: ...

    def decline(self, request: NodeRequest, reasons: list[Reason]) -> str | None:
        """Record why it is declined, for the message when every pool has declined it."""

    def request_released(self, handler: RequestHandler) -> None:
        """Record that the request is open again while launches of this handler still run."""

    def ended(self, handler: RequestHandler, outcome: Outcome) -> None: ...


class RequestHandler(Protocol):
    """Interface of a request that is being served, for its pool."""

    BLOCKING: bool
    launcher_id: str
    log: Log
    pw: RequestHost
    pool: ConfigPool
    manager: Provider
    request: NodeRequest
    nodeset: list[Node]
    paused: bool
    paused_since: float
    gives_way: bool
    released: bool
    promised: bool
    destination: str | None
    accepted_time: float | None
    ask_after: float
    unanswered: set[str]
    shortage: Reason | None
    wants_more_of_provider: bool | None

    @property
    def done(self) -> bool: ...

    @property
    def accepted(self) -> bool: ...

    @property
    def holds_nothing(self) -> bool: ...

    @property
    def alive_thread_count(self) -> int: ...

    # -- steps

    def run(self) -> None: ...

    def poll(self) -> bool: ...

    def could_serve(self) -> bool: ...

    def decline_reasons(self) -> list[Reason]: ...

    # -- ends

    def decline_for(self, reasons: list[Reason]) -> None: ...

    def trouble(self, error: BaseException) -> None: ...

    def move(self, retry_after: float = 0.0, discard: bool = False, to: str | None = None) -> None: ...

    def make_way(self) -> None: ...

    def hand_back(self) -> None: ...

    def drop(self) -> None: ...

    def end(self, outcome: Outcome) -> None: ...
