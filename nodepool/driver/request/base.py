"""State and driver-facing part of the request handler (DRV-5.1 to DRV-5.4)."""

from __future__ import annotations

import abc
import logging
import math

from nodepool.config.model import ConfigPool, ProviderConfig
from nodepool.driver.provider import NodeRequestHandlerNotifications, Provider, RequestHandler, RequestHost
from nodepool.driver.request.state import ADMISSION, BUSY, CATCH_UP, NEXT, Admission, Event, How, Outcome, State
from nodepool.driver.request.step import LabelRecorder
from nodepool.logconfig import Log, get_annotated_logger
from nodepool.reasons import Declined, Reason, because
from nodepool.zk.locks import LockHandle
from nodepool.zk.zookeeper import Node, NodeRequest, ZooKeeper


class HandlerBase(RequestHandler, NodeRequestHandlerNotifications, abc.ABC):
    """Base of the request handlers of all drivers."""

    #: Whether the driver's checks may block; they then run on helper threads, not on the pool's own.
    BLOCKING = True

    #: Whether quota is promised until a node is recorded.  A driver that counts records itself sees a node only then;
    #: its pool records one node after the other.
    RESERVES = False

    # None only until the first step (`_refresh`), before the driver is asked anything.
    provider: ProviderConfig
    pool: ConfigPool
    zk: ZooKeeper
    manager: Provider

    def __init__(self, pw: RequestHost, request: NodeRequest) -> None:
        #: Our pool.
        self.pw = pw
        self.request = request
        self.nodeset: list[Node] = []
        self.state = State.OFFERED
        #: Whether it waits for capacity; the pool then accepts nothing more.
        self.paused = False
        self.launcher_id: str = pw.launcher_id
        self._satisfied_types = LabelRecorder()
        self._failed_nodes: list[Node] = []
        self._ready_nodes: list[Node] = []
        self.log: Log = get_annotated_logger(
            logging.getLogger(f"nodepool.driver.NodeRequestHandler[{self.launcher_id}]"),
            event_id=request.event_id,
            node_request_id=request.id,
        )
        self.provider = self.pool = self.zk = self.manager = None  # type: ignore[assignment]
        #: The short quota and the missing amount; while paused.
        self.shortage: Reason | None = None
        #: Whether the shortage is one of the provider, not of the pool; None: the driver does not report it.
        self.wants_more_of_provider: bool | None = None
        #: The limit that the request alone exceeds.
        self.exceeded: Reason | None = None
        #: Why it is declined, for users who wait for it.
        self.declined_because: list[Reason] = []
        #: When it was paused (monotonic seconds).
        self.paused_since = 0.0
        #: Another pool is open, which is to get the request when this one has no capacity.
        self.gives_way = False
        #: The request was returned to the queue already while launches of it were still running.
        self.released = False
        #: Launcher id of the pool that has asked for it.
        self.destination: str | None = None
        #: The tenant's limits are sufficient for it; the nodes are booked.
        self.promised = False
        #: When other pools may be asked again whether they could serve it (monotonic seconds).
        self.ask_after = -math.inf
        #: Launcher ids of those that have not answered yet.
        self.unanswered: set[str] = set()
        # Internal state.
        #: Events that have to wait for an answer of ZooKeeper.
        self._later: set[Event] = set()
        #: The outcome for the pool when the request has been given up.
        self._outcome = Outcome(How.DECLINED)
        #: UNIX seconds.
        self.accepted_time: float | None = None
        self._conflicts = 0
        self._lock_directory_exists = False
        self._lock_directories: dict[str, bool] = {}  # of ready nodes: whether they exist, according to ZooKeeper
        self._held: set[str | None] = set()  # ready nodes that are locked, according to ZooKeeper
        self._discard = False  # delete the released nodes: they occupy what others wait for

    # -- for drivers

    @property
    @abc.abstractmethod
    def alive_thread_count(self) -> int:
        """Return the number of running launches."""

    @abc.abstractmethod
    def imagesAvailable(self) -> bool:
        """Return whether the images of the request's labels exist."""

    @abc.abstractmethod
    def launch(self, node: Node) -> None:
        """Start producing the (stored, locked, BUILDING) node; must not block."""

    @abc.abstractmethod
    def launchesComplete(self) -> bool:
        """Return whether every node of ``nodeset`` has reached an end."""

    def hasProviderQuota(self, node_types: list[str]) -> bool:
        """Return whether the empty provider could ever hold these nodes."""
        return True

    def hasRemainingQuota(self, ntype: str) -> bool:
        """Return whether there is quota for one more node of this label now."""
        return True

    def checkReusableNode(self, node: Node) -> bool:
        """Return whether the ready node may be used for this request; it is not locked yet."""
        return True

    def setNodeMetadata(self, node: Node) -> None:
        """Fill driver data before the node is first stored."""
        return

    def prepareNode(self, node: Node) -> None:
        """Fill more before the node is stored as BUILDING (a hook of ours, not of 11.0.0)."""
        return

    def launchesDropped(self) -> None:
        """End launches without a result after the loss of all node locks (a hook of ours)."""
        return

    # -- state

    def _to(self, state: State) -> None:
        if state not in NEXT[self.state]:
            # A bug; the state of the request in the pool and in ZooKeeper stays correct all the same.
            self.log.error("Unexpected transition of node request from %s to %s", self.state.value, state.value)
        elif state is not self.state:
            self.log.debug("Node request: %s -> %s", self.state.value, state.value)
        self.state = state

    def _admits(self, event: Event) -> bool:
        """Return whether to act now; events during a ZooKeeper write are kept for the answer."""
        admission = ADMISSION[self.state][event]
        if admission is Admission.LATER:
            self._later.add(event)
        return admission is Admission.ACT

    def _catch_up(self) -> None:
        """Handle the events that waited for an answer of ZooKeeper."""
        for event, act in zip(CATCH_UP, (self.declineRequest, self.hand_back, self.poll), strict=True):
            if event in self._later and self.state not in BUSY:
                self._later.discard(event)
                act()

    def _set_paused(self, paused: bool) -> None:
        if self.state in (State.LAUNCHING, State.WAITING):
            self._to(State.WAITING if paused else State.LAUNCHING)
        if self.paused != paused:
            self.paused = paused
            self.paused_since = self.pw.clock.monotonic()
            self.pw.pause_changed(self)

    def end(self, outcome: Outcome) -> None:
        """End the handler and report the outcome to the pool once."""
        if self.done:
            return
        self._set_paused(False)
        self._to(State.ENDED)
        self.pw.ended(self, outcome)

    @abc.abstractmethod
    def declineRequest(self) -> None: ...

    # -- facts

    @property
    def done(self) -> bool:
        return self.state is State.ENDED

    @property
    def failed_nodes(self) -> list[Node]:
        return self._failed_nodes

    @property
    def ready_nodes(self) -> list[Node]:
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
        provider, pool, manager = self.pw.getProviderConfig(), self.pw.getPoolConfig(), self.pw.getProviderManager()
        self.zk = self.pw.getZK()
        if provider is None or pool is None or manager is None:  # returns the request, see trouble()
            raise RuntimeError(f"provider {self.pw.provider_name} or its pool {self.pw.pool_name} no longer exists")
        self.provider, self.pool, self.manager = provider, pool, manager

    def _missing_labels(self) -> list[str]:
        missing = list(self.request.node_types)
        for label in self._satisfied_types.labels():
            if label in missing:
                missing.remove(label)
        return missing

    def getDeclinedReasons(self) -> list[str]:
        """Return why this pool can never serve the request, as text; 11.0.0's interface."""
        reason = self._why_declined()
        return [] if reason is None else [str(reason)]

    def decline_reasons(self) -> list[Reason]:
        """Return why this pool can never serve the request: the first reason, or nothing."""
        if type(self).getDeclinedReasons is not HandlerBase.getDeclinedReasons:
            return [because(Declined.BY_DRIVER, text=text) for text in self.getDeclinedReasons()]
        reason = self._why_declined()
        return [] if reason is None else [reason]

    def _why_declined(self) -> Reason | None:
        if self.provider is None:
            self._refresh()
        if self.pool.max_servers <= 0:
            return because(Declined.POOL_DISABLED)
        offered = set(self.pool.labels) - set(self.manager.errorLabels())
        missing = sorted(set(self.request.node_types) - offered)
        if missing:
            return because(Declined.UNAVAILABLE, labels=",".join(missing))
        if not self.imagesAvailable():
            return because(Declined.NO_IMAGE)
        if not self.hasProviderQuota(self.request.node_types):
            return because(Declined.OVER_LIMIT, limit=self.exceeded) if self.exceeded else because(Declined.OVER_QUOTA)
        # The needs of the labels are known now; the driver may have found one that can never work.
        broken = sorted(set(self.request.node_types) & set(self.manager.errorLabels()))
        return because(Declined.LABEL_BROKEN, labels=",".join(broken)) if broken else None
