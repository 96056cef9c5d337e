"""State and driver-facing part of the request handler (driver-api.md 5.1 - 5.4)."""

from __future__ import annotations

import abc
import logging
from typing import Any

from nodepool.driver.provider import NodeRequestHandlerNotifications
from nodepool.driver.steps import LabelRecorder
from nodepool.logconfig import get_annotated_logger
from nodepool.reasons import Reason
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle


class HandlerBase(NodeRequestHandlerNotifications, abc.ABC):
    """Base of the request handlers of all drivers."""

    #: Whether the driver's checks may block; they then run on helper threads, not on the pool's own.
    BLOCKING = True

    #: Whether quota is promised until a node is recorded.  A driver that counts records itself sees a node only then;
    #: its pool records one node after the other.
    RESERVES = False

    def __init__(self, pw: Any, request: zk.NodeRequest) -> None:
        self.pw = pw
        self.request = request
        self.nodeset: list[zk.Node] = []
        self.done = False
        self.paused = False
        self.launcher_id: str = pw.launcher_id
        self._satisfied_types = LabelRecorder()
        self._failed_nodes: list[zk.Node] = []
        self._ready_nodes: list[zk.Node] = []
        self.log: Any = get_annotated_logger(
            logging.getLogger(f"nodepool.driver.NodeRequestHandler[{self.launcher_id}]"),
            event_id=request.event_id, node_request_id=request.id)
        self.provider: Any = None
        self.pool: Any = None
        self.zk: Any = None
        self.manager: Any = None
        #: Which quota is short by how much; while paused.
        self.shortage: Reason | None = None
        #: Whether it is the provider's, not the pool's own; None: the driver does not tell.
        self.wants_more_of_provider: bool | None = None
        #: What of the limits the request exceeds by itself.
        self.exceeded: Reason | None = None
        #: Why it is declined, in words, for whoever waits.
        self.declined_because: str | None = None
        #: When it was paused (monotonic seconds).
        self.paused_since = 0.0
        #: Another pool is open, which is to have the request when this one has no room.
        self.gives_way = False
        #: The tenant's limits have room for it; the nodes are booked.
        self.promised = False
        #: When the other pools were last asked whether they could serve it, by launcher id (monotonic seconds).
        self.asked: dict[str, float] = {}
        # Our own books.
        self._busy = False  # a transaction is under way
        self._finishing = False
        self._more_to_fill = False
        self._declined = False  # to be handed back
        self._request_free = False  # handed back; only waits for launches that are under way
        self._conflicts = 0
        self._lock_directory_exists = False
        self._lock_directories: dict[str, bool] = {}  # of ready nodes: whether they exist, as ZooKeeper has told us
        self._held: set[str | None] = set()  # ready nodes that somebody holds, as ZooKeeper has told us
        self._poll_later = False
        self._hand_back_later = False
        self._retry_after: float | None = None  # seconds before the request that is given back is looked at again
        self._discard = False  # the nodes that are given back are to be deleted: they keep what others wait for

    # -- for drivers

    @property
    @abc.abstractmethod
    def alive_thread_count(self) -> int:
        """How many launches are under way."""

    @abc.abstractmethod
    def imagesAvailable(self) -> bool:
        """Whether the images of the request's labels are there."""

    @abc.abstractmethod
    def launch(self, node: zk.Node) -> None:
        """Start producing the (stored, locked, BUILDING) node; must not block."""

    @abc.abstractmethod
    def launchesComplete(self) -> bool:
        """Whether every node of ``nodeset`` has reached an end."""

    def hasProviderQuota(self, node_types: list[str]) -> bool:
        """Whether the empty provider could ever hold these nodes."""
        return True

    def hasRemainingQuota(self, ntype: str) -> bool:
        """Whether there is room for one more node of this label now."""
        return True

    def checkReusableNode(self, node: zk.Node) -> bool:
        """Whether the ready node may be used for this request; it is not locked yet."""
        return True

    def setNodeMetadata(self, node: zk.Node) -> None:
        """Fill driver data before the node is first stored."""
        return

    def prepareNode(self, node: zk.Node) -> None:
        """Fill more before the node is stored as BUILDING (a hook of ours, not of 11.0.0)."""
        return

    def launchesDropped(self) -> None:
        """The locks of all nodes are gone: launches under way must end without a result (a hook of ours)."""
        return

    # -- facts

    @property
    def failed_nodes(self) -> list[zk.Node]:
        return self._failed_nodes

    @property
    def ready_nodes(self) -> list[zk.Node]:
        return self._ready_nodes

    @property
    def accepted(self) -> bool:
        """Whether we hold the lock of the request."""
        return isinstance(self.request.lock, LockHandle)

    @property
    def homeless(self) -> bool:
        """Whether the pool or its provider is not configured any more, or does not run."""
        pw = self.pw
        return pw.getProviderConfig() is None or pw.getPoolConfig() is None or pw.getProviderManager() is None

    def _refresh(self) -> None:
        self.provider = self.pw.getProviderConfig()
        self.pool = self.pw.getPoolConfig()
        self.zk = self.pw.getZK()
        self.manager = self.pw.getProviderManager()
        if self.provider is None or self.pool is None or self.manager is None:  # gives the request back, see trouble()
            raise RuntimeError(f"provider {self.pw.provider_name} or its pool {self.pw.pool_name} is gone")

    def _missing_labels(self) -> list[str]:
        missing = list(self.request.node_types)
        for label in self._satisfied_types.labels():
            if label in missing:
                missing.remove(label)
        return missing

    def getDeclinedReasons(self) -> list[str]:
        """Why this pool can never serve the request; the first reason found, or nothing."""
        if self.provider is None:
            self._refresh()
        if self.pool.max_servers <= 0:
            return ["pool is disabled by max_servers"]
        offered = set(self.pool.labels) - set(self.manager.errorLabels())
        missing = sorted(set(self.request.node_types) - offered)
        if missing:
            return [f"node type(s) [{','.join(missing)}] not available"]
        if not self.imagesAvailable():
            return ["images are not available"]
        if not self.hasProviderQuota(self.request.node_types):
            return [f"it would exceed quota ({self.exceeded})" if self.exceeded else "it would exceed quota"]
        # What the labels need has been asked now; the driver may have found one that can never work.
        broken = sorted(set(self.request.node_types) & set(self.manager.errorLabels()))
        return [f"node type(s) [{','.join(broken)}] cannot work"] if broken else []
