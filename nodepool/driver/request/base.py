"""RequestHandler, which drivers implement (DRV-5), and the interface of its pool."""

from __future__ import annotations

import abc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from nodepool.base.clock import Clock
from nodepool.base.problems import LabelProblems
from nodepool.config.model import ConfigPool, ProviderConfig
from nodepool.driver.request.state import (
    ADMISSION,
    Admission,
    End,
    Event,
    How,
    LabelRecorder,
    Outcome,
    State,
)
from nodepool.logconfig import Log, get_annotated_logger
from nodepool.metrics.launches import StatsClient
from nodepool.reasons import Code, Declined, Reason, because
from nodepool.zk.locks import LockHandle
from nodepool.zk.zookeeper import Node, NodeRequest, ZooKeeper


class NodeRequestHandlerNotifications:
    """Optional notifications for a request handler, which do nothing here."""

    def nodeReusedNotification(self, node: Node) -> None:
        """Handle the assignment of the ready *node* to the request."""

    def setNodeMetadata(self, node: Node) -> None:
        """Fill driver data before the node is first stored."""

    # -- not in 11.0.0

    def noteReuse(self, node: Node) -> None:
        """Record the choice of a ready node; further choices may depend on it."""

    def prepareNode(self, node: Node) -> None:
        """Fill more before the node is stored as BUILDING."""

    def launchesDropped(self) -> None:
        """End launches without a result after the loss of all node locks."""


#: Path, data and expected version of a write.
Trial = tuple[str, bytes, int]


class LaunchFailures(Protocol):
    """Labels whose launches keep failing."""

    def blocked(
        self, provider: ProviderConfig, labels: Iterable[str], request_id: str | None = None
    ) -> tuple[list[str], Reason] | None:
        """Return the labels of which no nodes may be launched now, and why.

        :param labels: one for each node.
        :param request_id: of the request that they are for; its running launches do not count.
        """

    def trials(self, provider: ProviderConfig, labels: Iterable[str]) -> list[Trial]:
        """Return the writes with which only one launcher at a time starts a trial.

        Ask for them before :meth:`blocked`.
        """

    def failed(self, provider: ProviderConfig, label: str, error: str) -> bool:
        """Count a failed launch; return whether its request must not try again."""

    def succeeded(self, provider: ProviderConfig, label: str) -> None:
        """Forget the failures, because a launch has succeeded."""


class Launcher(Protocol):
    """The launcher of a pool."""

    clock: Clock
    #: Ids of free nodes that a handler is about to assign, with the claim on each; claim them with
    #: `setdefault`.
    claims: dict[str | None, object]

    @property
    def launch_failures(self) -> LaunchFailures:
        """Return which labels must not be launched."""

    @property
    def statsd(self) -> StatsClient | None:
        """Return where launches are counted."""

    def decline(self, pool: RequestHost, request: NodeRequest, reasons: list[Reason]) -> str | None:
        """Record why a pool declines a request; return all reasons if every pool has declined
        it.
        """


class Capacity(Protocol):
    """The capacity of a pool, which its handlers share."""

    #: The pool, as "provider-pool".
    label: str

    def blocks(self, handler: RequestHandler) -> bool:
        """Return whether requests wait for capacity that this one may not overtake."""

    def pause_changed(self, handler: RequestHandler) -> None:
        """Record whether the handler's request waits for capacity."""

    def note_full(self, labels: list[str], reason: Reason) -> None:
        """Record that there is no capacity for these labels, and publish it."""

    def begin_creation(self, handler: RequestHandler) -> bool:
        """Return whether the handler may create nodes now; otherwise ``run`` is called later."""

    def end_creation(self, handler: RequestHandler) -> None:
        """Let the next handler create nodes: those of this one are recorded, or will not be."""

    def promise(self, handler: RequestHandler) -> bool:
        """Promise the nodes of the request to its tenant; return False without limits for it.

        :raises End: the limits of the tenant are not sufficient now.
        """

    def recorded(self, handler: RequestHandler, missing: list[str]) -> None:
        """Record that its nodes are in the mirror, except those of the labels *missing*."""

    def promise_released(self) -> None:
        """Report that quota that was promised to nodes is free, as they were not created."""

    def limits_known(self) -> None:
        """Retry, because the limits of the provider were read again."""


class RequestHost(Protocol):
    """The pool that serves a request; none of these calls waits."""

    launcher_id: str
    provider_name: str
    pool_name: str

    @property
    def capacity(self) -> Capacity:
        """Return what the handlers of the pool share."""

    @property
    def nodepool(self) -> Launcher:
        """Return the launcher of the pool."""

    def getZK(self) -> ZooKeeper:
        """Return the connection of the launcher."""

    def getProviderConfig(self) -> ProviderConfig | None:
        """Return the configuration in force; None if the provider is not configured any more."""

    def getPoolConfig(self) -> ConfigPool | None:
        """Return the configuration in force; None if the pool is not configured any more."""

    def getProviderManager(self) -> Manager | None:
        """Return the running provider."""

    def post(self, handler: RequestHandler, function: Callable[..., object], *args: object) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""

    def progress(self, handler: RequestHandler) -> None:
        """Handle the end of a launch, or another event that concerns the handler's request."""

    def ended(self, handler: RequestHandler, outcome: Outcome) -> None:
        """Release the request, and clean up after the handler if it is done.

        Otherwise its launches still run, and this is called again when they have ended.
        """


class Manager(Protocol):
    """The provider, for the handlers of its requests."""

    PAUSE_AT_QUOTA: bool

    @property
    def label_problems(self) -> LabelProblems:
        """Return the labels that do not work, and why."""

    def errorLabels(self) -> Iterable[str]:
        """Return the labels known to be permanently broken."""


class Events(Protocol):
    """The life of a request, for events."""

    state: State
    #: See :meth:`begin`.
    gives_way: bool
    #: The nodes are promised to the tenant, whose limits are sufficient.
    promised: bool
    #: The request was returned to the queue already while launches of it were still running.
    released: bool

    def begin(self, check_only: bool, gives_way: bool) -> None:
        """Accept the request, or only check whether this pool can ever serve it.

        :param gives_way: another pool is open, which gets the request if this one has no capacity.
        """

    def happen(self, event: Event, end: End | None = None) -> None:
        """Handle an event, and the end that it brings."""


class RequestHandler(NodeRequestHandlerNotifications, abc.ABC):
    """A request that is served; ``life`` does it."""

    #: Whether the driver's checks may block; they then run on helper threads, not on the pool's
    #: own.
    BLOCKING = True

    #: Whether quota is promised until a node is recorded.  A driver that counts records itself sees
    #: a node only then; its pool records one node after the other.
    RESERVES = False

    # None only until the first step (`refresh`), before the driver is asked anything.
    provider: ProviderConfig
    pool: ConfigPool
    manager: Manager
    life: Events

    def __init__(self, pw: RequestHost, request: NodeRequest) -> None:
        #: Our pool.
        self.pw = pw
        self.request = request
        self.nodeset: list[Node] = []
        #: Whether it waits for capacity; the pool then accepts nothing more.
        self.paused = False
        self.launcher_id: str = pw.launcher_id
        self.log: Log = get_annotated_logger(
            logging.getLogger(f"nodepool.driver.NodeRequestHandler[{self.launcher_id}]"),
            event_id=request.event_id,
            node_request_id=request.id,
        )
        self.zk: ZooKeeper = pw.getZK()
        self.provider = self.pool = self.manager = None  # type: ignore[assignment]
        #: Which node serves which label.
        self._satisfied_types = LabelRecorder()
        self._failed_nodes: list[Node] = []
        self._ready_nodes: list[Node] = []
        #: The short quota and the missing amount; while paused.
        self.shortage: Reason | None = None
        #: Whether the shortage is one of the provider, not of the pool; None: the driver does not
        #: report it.
        self.wants_more_of_provider: bool | None = None
        #: The limit that the request alone exceeds.
        self.exceeded: Reason | None = None
        #: When it was paused (monotonic seconds).
        self.paused_since = 0.0
        #: UNIX seconds.
        self.accepted_time: float | None = None

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

    def hasRoomFor(self, labels: list[str]) -> bool:
        """Return whether new nodes of these labels fit, all together."""
        return len(labels) == 1 and self.hasRemainingQuota(labels[0])

    @property
    def counts_records(self) -> bool:
        """Whether the driver counts recorded nodes to decide about the next one."""
        return (
            not self.RESERVES
            and type(self).hasRemainingQuota is not RequestHandler.hasRemainingQuota
        )

    # -- facts

    @property
    def state(self) -> State:
        return self.life.state

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
        return (
            pw.getProviderConfig() is None
            or pw.getPoolConfig() is None
            or pw.getProviderManager() is None
        )

    @property
    def holds_nothing(self) -> bool:
        """Whether the request waits for its first node."""
        return self.accepted and self.paused and not self.nodeset

    # -- checks

    def refresh(self) -> None:
        """Use the configuration in force."""
        provider, pool, manager = (
            self.pw.getProviderConfig(),
            self.pw.getPoolConfig(),
            self.pw.getProviderManager(),
        )
        self.zk = self.pw.getZK()
        if provider is None or pool is None or manager is None:  # returns the request, see Life
            raise RuntimeError(
                f"provider {self.pw.provider_name} or its pool {self.pw.pool_name} no longer exists"
            )
        self.provider, self.pool, self.manager = provider, pool, manager

    def getDeclinedReasons(self) -> list[str]:
        """Return why this pool can never serve the request, as text; 11.0.0's interface."""
        return [str(reason) for reason in self._why_declined()]

    def decline_reasons(self) -> list[Reason]:
        """Return why this pool can never serve the request: the first reason, or nothing."""
        if type(self).getDeclinedReasons is not RequestHandler.getDeclinedReasons:
            return [because(Declined.BY_DRIVER, text=text) for text in self.getDeclinedReasons()]
        return self._why_declined()

    def _why_declined(self) -> list[Reason]:
        if self.provider is None:
            self.refresh()
        if self.pool.max_servers <= 0:
            return [because(Declined.POOL_DISABLED)]
        offered = set(self.pool.labels) - set(self.manager.errorLabels())
        missing = sorted(set(self.request.node_types) - offered)
        if missing:
            return [because(Declined.UNAVAILABLE, labels=",".join(missing))]
        if not self.imagesAvailable():
            return [because(Declined.NO_IMAGE)]
        if not self.hasProviderQuota(self.request.node_types):
            return [
                because(Declined.OVER_LIMIT, limit=self.exceeded)
                if self.exceeded
                else because(Declined.OVER_QUOTA)
            ]
        # The needs of the labels are known now; the driver may have found one that can never work.
        broken = sorted(set(self.request.node_types) & set(self.manager.errorLabels()))
        return [because(Declined.LABEL_BROKEN, labels=",".join(broken))] if broken else []

    def known_problems(self) -> list[Reason]:
        """Return the known problems with the labels of the request here."""
        known = self.manager.label_problems.of(self.request.node_types)
        return [
            because(Declined.LABEL_PROBLEM, problem=f"label {one.label}: {one.text}", help=one.help)
            for one in known
        ]

    def could_serve(self) -> bool:
        """Return whether there is capacity for all nodes of the request now; nothing is reserved.

        A driver that only counts recorded nodes cannot check several nodes.
        """
        self.refresh()
        if self.decline_reasons():
            return False
        wanted = Counter(self.request.node_types)
        if self.request.reuse:
            for label in wanted:
                free = itertools.islice(
                    self.zk.node_tree.iter_free(self.provider.name, self.pool.name, label),
                    wanted[label],
                )
                wanted[label] -= sum(1 for _ in free)
        missing = list(wanted.elements())
        return not missing or self.hasRoomFor(missing)

    # -- events

    def run(self) -> None:
        """Accept the request, or continue with a paused one."""
        self.life.happen(Event.RUN)

    def poll(self) -> bool:
        """Finish the request if its nodes are complete; return True when it is done."""
        self.life.happen(Event.POLL)
        return self.done

    def declineRequest(self) -> None:
        """Decline the request; it becomes FAILED when every registered pool has declined it."""
        self.life.happen(Event.DECLINE, End(Outcome(How.DECLINED)))

    def declined(self, reasons: list[Reason]) -> End:
        """Return the end of a request that this pool can never serve."""
        self.log.info("Declining node request because: %s", ", ".join(map(str, reasons)))
        return End(Outcome(How.DECLINED), [*reasons, *self.known_problems()])

    def hand_back(self) -> None:
        """Put the request back into the queue and release its nodes: the pool is being removed."""
        self.life.happen(Event.HAND_BACK, End(Outcome(How.RETURNED)))

    def move(self, retry_after: float = 0.0, discard: bool = False, to: str | None = None) -> None:
        """Let another pool have the request, or its nodes, as it waits for capacity here.

        :param retry_after: seconds before it is tried again.
        :param discard: delete its nodes: another pool needs what they occupy.
        :param to: launcher id of the pool that has asked for it; None: any with capacity.
        """
        if ADMISSION[self.state][Event.MOVE] is not Admission.ACT:
            return  # it has made progress meanwhile
        missing = self._satisfied_types.missing(self.request.node_types)
        self.pw.capacity.note_full(
            missing, self.shortage or because(Code.NO_ROOM, labels=",".join(missing))
        )
        self.life.happen(
            Event.MOVE, End(Outcome(How.RETURNED, retry_after, hand_to=to), discard=discard)
        )

    def drop(self) -> None:
        """Stop without writing (lost session, lost lock): leave everything to the cleanup."""
        self.life.happen(Event.DROP)

    def unlockNodeSet(self, clear_allocation: bool = False) -> None:
        """Unlock every node we hold; errors are logged."""
        for node in self.nodeset:
            if not isinstance(node.lock, LockHandle):
                continue
            try:
                if clear_allocation:
                    node.allocated_to = None
                    self.zk.storeNode(node)
                self.zk.unlockNode(node)
            except Exception:
                self.log.exception("Error unlocking node %s:", node.id)
        self.nodeset = []
