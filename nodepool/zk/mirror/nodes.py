"""The mirrored nodes and all queries of the launcher, in O(1)."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo.protocol.states import ZnodeStat

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.requests import MIN_READY, VERIFIER
from nodepool.zk.mirror.reservations import Reservations, Sums
from nodepool.zk.mirror.tree import Tree, put
from nodepool.zk.records import BUILDING, DELETING, HOLD, LARGEST, READY, USED, Node, RecordError

#: listener(node id, record before or None, record now or None); on the connection thread.
NodeListener = Callable[[str, "Node | None", "Node | None"], Any]
#: listener(node id, locked); on the connection thread.
LockListener = Callable[[str, bool], Any]

#: Number of free nodes that are read together.
PORTION = 16

PoolKey = tuple[str | None, str | None]


@dataclass(frozen=True)
class NodeCounts:
    """Node counts: by state; by provider, and by label, and state; by provider and pool.

    ``free`` has the ready, unallocated nodes by label, which count for min-ready; ``idle`` has them
    by provider, pool and labels.
    """

    states: Counter[str] = field(default_factory=Counter)
    providers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    labels: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    pools: Counter[PoolKey] = field(default_factory=Counter)
    free: Counter[str] = field(default_factory=Counter)
    idle: Counter[tuple[str | None, str | None, tuple[str, ...]]] = field(default_factory=Counter)

    def add(self, node: Node, free: bool, sign: int = 1) -> None:
        """Add the node to the numbers.

        :param free: a request could get it, if it is not locked.
        :param sign: -1: subtract it.
        """
        state, provider = node._state or "", node.provider
        self.states[state] += sign
        for label in node._type:
            self.labels[label][state] += sign
            self.free[label] += sign * free
        self.idle[provider, node.pool, tuple(node._type)] += sign * free
        if provider is not None:
            self.providers[provider][state] += sign
            self.pools[provider, node.pool] += sign

    def positive(self) -> NodeCounts:
        """Return a copy without zeros."""
        providers, labels = (
            {k: +count for k, count in group.items() if +count}
            for group in (self.providers, self.labels)
        )
        return NodeCounts(+self.states, providers, labels, +self.pools, +self.free, +self.idle)


def _is_idle(node: Node) -> bool:
    """Return whether a request could get the node, if it is fit and not locked."""
    return node._state == READY and node.allocated_to is None and node.requestor != VERIFIER


#: The resources of mirrored nodes by their names, amounts and types; how many there are at most.
_RESOURCES: dict[tuple[object, ...], dict[str, Any]] = {}
MOST_RESOURCES = 1000


def _shared(resources: dict[str, Any]) -> dict[str, Any]:
    """Return equal resources of another mirrored node, if there are any.

    Most nodes have those of their label. Copies of nodes have their own.
    """
    key = (*resources, *resources.values(), *map(type, resources.values()))
    try:
        found = _RESOURCES.get(key)
    except TypeError:  # an amount that is a list or an object: the record is unfit
        return resources
    if found is None:
        if len(_RESOURCES) >= MOST_RESOURCES:
            _RESOURCES.clear()
        found = _RESOURCES[key] = resources
    return found


def _uses(node: Node) -> tuple[Any, ...]:
    """Return what counts towards limits."""
    return node.provider, node.pool, node.tenant, node._type, node.resources


def count_nodes(nodes: Iterable[Node]) -> NodeCounts:
    found = NodeCounts()
    for node in nodes:
        found.add(node, _is_idle(node) and node.unfit() is None)
    return found


class NodeTree(Tree[Node]):
    """Nodes by id, with indexes. Records are never modified: each change is a new object."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.NODES)
        self.nodes: dict[str, Node] = {}
        self.contenders: dict[str, set[str]] = {}
        self.listeners: list[NodeListener] = []
        self.lock_listeners: list[LockListener] = []
        #: ids of znodes without data, left behind by a client that locked a deleted node.
        self.empty: set[str] = set()
        #: node ids by the request they are allocated to.
        self.by_request: dict[str, set[str]] = {}
        #: ids of nodes that somebody has to accept, release or delete: those that are ready for a
        #: request, held, used or being deleted.
        self.unreleased: set[str] = set()
        #: ids of nodes that were created for min-ready and are still allocated.
        self.min_ready: set[str] = set()
        #: (provider, pool) -> label -> {node id: None} of ready, unallocated, unlocked nodes,
        #: oldest first.
        self.free: dict[PoolKey, dict[str, dict[str, None]]] = {}
        #: Ready, unallocated nodes that no request gets, because their records are invalid.
        self.unfit: dict[str, str] = {}
        self.counted = NodeCounts()
        #: Sums of the stored ``resources``.
        self.measured: Sums[str] = Sums()
        #: Numbers of the nodes without ``resources``, by (provider, pool, label).
        self.unmeasured: Sums[tuple[str, str | None, str]] = Sums()
        #: (provider, pool) -> {node id: since when} of the nodes being deleted.
        self.deleting: dict[PoolKey, dict[str, float]] = defaultdict(dict)
        #: Nodes whose lock directory exists.
        self.lock_dirs: set[str] = set()
        #: The nodes in :attr:`free`.
        self.idle: dict[str, Node] = {}
        #: Resources of nodes that this process is about to store.
        self.reservations = Reservations()

    # -- Tree

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        if len(parts) == 1:
            return stat is None or stat.numChildren > 0
        return len(parts) == 2 and parts[1] == "lock"

    def known_paths(self) -> set[str]:
        result = {paths.node(i) for i in self.nodes} | {paths.node(i) for i in self.empty}
        result |= {paths.node_lock(i) for i in self.lock_dirs}
        for node_id, names in self.contenders.items():
            result |= {f"{paths.node_lock(node_id)}/{name}" for name in names}
        return result

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        node_id = parts[0]
        node = Node.read(data, stat, node_id)
        if node is None:
            with self.lock:
                self.empty.add(node_id)
        elif node.state is None:
            raise RecordError("the state is missing")
        else:
            self.empty.discard(node_id)
        self._replace(node_id, node)

    def store_own(self, parts: list[str], path: str, record: Node, stat: ZnodeStat) -> None:
        node_id = parts[0]
        if stat.version == 0 and record.id is None:
            record.id = node_id
        record.stat = stat
        self._replace(node_id, record)

    def appeared(self, parts: list[str], path: str) -> None:
        if len(parts) == 2 and parts[1] == "lock":
            self.lock_dirs.add(parts[0])
        elif len(parts) == 3 and paths.contender_number(parts[2]) is not None:
            self._contender(parts[0], parts[2], True)

    def unchanged(self, parts: list[str]) -> None:
        if parts[0] not in self.contenders:
            self.announce(self.lock_listeners, parts[0], False)

    def vanished(self, parts: list[str], path: str) -> None:
        if len(parts) == 1:
            with self.lock:
                self.empty.discard(parts[0])
                self.lock_dirs.discard(parts[0])
            self._replace(parts[0], None)
        elif len(parts) == 2 and parts[1] == "lock":
            self.lock_dirs.discard(parts[0])
        elif len(parts) == 3:
            self._contender(parts[0], parts[2], False)

    # -- changes

    def _contender(self, node_id: str, name: str, present: bool) -> None:
        with self.lock:
            names = self.contenders.get(node_id)
            before = bool(names)
            if present:
                if names is None:
                    names = self.contenders[node_id] = set()
                    if (node := self.nodes.get(node_id)) is not None:
                        node.lock_contenders = names
                names.add(name)
            elif names is not None:
                names.discard(name)
                if not names:
                    del self.contenders[node_id]
            now = bool(names)
            if before != now:
                self._index_free(node_id, self.nodes.get(node_id))
        if before != now and (now or not self.is_changing(node_id)):
            # (If we are writing or reading its record, the answer announces the node with the new
            # record.)
            self.announce(self.lock_listeners, node_id, now)

    def _replace(self, node_id: str, node: Node | None) -> None:
        if node is not None and isinstance(node.resources, dict):
            node.resources = _shared(node.resources)
        with self.lock:
            old = self.nodes.get(node_id)
            if node is None:
                if old is None:
                    return
                del self.nodes[node_id]
            else:
                if old is not None and old.stat is not None and node.stat is not None:
                    if node.stat.czxid == old.stat.czxid and self.is_older(
                        paths.node(node_id), node.stat, old.stat
                    ):
                        return
                    node.lock_contenders = old.lock_contenders
                else:
                    node.lock_contenders = self.contenders.get(node_id) or node.lock_contenders
                self.nodes[node_id] = node
            moved = old is None or node is None or _uses(old) != _uses(node)
            if old is not None:
                self._count(old, -1, moved)
            self._note_unfit(node_id, node)
            if node is not None:
                self._count(node, 1, moved)
                if node.promise is not None:
                    # In the same step, so that nobody sees the resources counted twice or not at
                    # all.
                    self.reservations.release(node.promise)
                    node.promise = None
            self._index_free(node_id, node)
        self.announce(self.listeners, node_id, old, node)

    def _note_unfit(self, node_id: str, node: Node | None) -> None:
        reason = (
            node.unfit()
            if node is not None and node._state == READY and node.allocated_to is None
            else None
        )
        if reason is None:
            self.unfit.pop(node_id, None)
        elif self.unfit.get(node_id) != reason:
            self.unfit[node_id] = reason
            self.log.error("Node %s is not assigned to requests: %s", node_id, reason)

    def _is_free(self, node: Node) -> bool:
        """Return whether a request could get the node shown, if it is not locked."""
        return _is_idle(node) and node._id not in self.unfit

    def _count(self, node: Node, sign: int, moved: bool) -> None:
        """Add the node to the indexes, or remove it.

        :param moved: what counts towards limits has changed, too.
        """
        self.counted.add(node, self._is_free(node), sign)
        state, provider, labels = node._state, node.provider, node._type
        node_id = node._id or ""
        if state in (HOLD, USED, DELETING) or (state == READY and node.allocated_to):
            (self.unreleased.add if sign > 0 else self.unreleased.discard)(node_id)
        if node.allocated_to:
            put(self.by_request, node.allocated_to, node_id, sign > 0)
            if node.requestor == MIN_READY and state in (READY, BUILDING):
                (self.min_ready.add if sign > 0 else self.min_ready.discard)(node_id)
        if provider is None:
            return
        pool = (provider, node.pool)
        if state == DELETING:
            if sign > 0:
                self.deleting[pool][node_id] = node.state_time or 0
            else:
                self.deleting[pool].pop(node_id, None)
        if not moved:
            return
        tenant, resources = node.tenant or None, node.resources
        if resources and isinstance(resources, dict):
            valid = {
                n: amount
                for n, amount in resources.items()
                if isinstance(amount, (int, float)) and abs(amount) < LARGEST
            }
            self.measured.add(*pool, tenant, valid, sign)
        elif labels:
            self.unmeasured.add(*pool, tenant, {(*pool, labels[0]): 1}, sign)

    def _index_free(self, node_id: str, node: Node | None) -> None:
        before = self.idle.pop(node_id, None)
        if before is not None:
            for label in before._type:
                self.free[before.provider, before.pool][label].pop(node_id, None)
        if node is not None and node_id not in self.contenders and self._is_free(node):
            labels = self.free.setdefault((node.provider, node.pool), {})
            for label in node._type:
                labels.setdefault(label, {})[node_id] = None
            self.idle[node_id] = node

    # -- queries

    def get(self, node_id: str | None) -> Node | None:
        return None if node_id is None else self.nodes.get(node_id)

    def snapshot(self) -> list[Node]:
        """Return all nodes, sorted by id."""
        with self.lock:
            nodes = self.nodes
            return [nodes[node_id] for node_id in sorted(nodes)]

    def to_release(self) -> list[Node]:
        """Return the nodes of :attr:`unreleased`, sorted by id."""
        with self.lock:
            # A driver that changes a record of the mirror leaves an id there.
            return [self.nodes[each] for each in sorted(self.unreleased) if each in self.nodes]

    def counts(self) -> NodeCounts:
        """Return the node counts without iterating over the nodes."""
        with self.lock:
            return self.counted.positive()

    def is_changing(self, node_id: str) -> bool:
        """Return whether we are writing or reading the record, so that it is about to change."""
        path = paths.node(node_id)
        return path in self._own or path in self.reading

    def is_locked(self, node_id: str | None) -> bool:
        return node_id in self.contenders

    def iter_free(self, provider: str, pool: str, label: str) -> Iterator[str]:
        """Yield free nodes of the label in this pool, oldest first.

        Free nodes are ready, unallocated and unlocked; nodes assigned in the meantime are omitted.
        """
        seen: set[str] = set()
        while True:
            with self.lock:
                ids = self.free.get((provider, pool), {}).get(label, {})
                portion = list(
                    itertools.islice((node_id for node_id in ids if node_id not in seen), PORTION)
                )
            if not portion:
                return
            seen.update(portion)
            yield from portion

    def oldest_free(self, provider: str, pool: str) -> Node | None:
        """Return the free node of this pool that has been ready longest, whatever its label."""
        with self.lock:
            # Not in the order of the dict: a node that was allocated for a while, or existed when
            # we started, follows younger ones there.
            ids = {
                i for per_label in self.free.get((provider, pool), {}).values() for i in per_label
            }
            candidates = [self.nodes[i] for i in ids if i in self.nodes]
            return min(candidates, key=lambda n: (n.state_time or 0, n._id or ""), default=None)

    def usage(self, provider: str, pool: str | None = None) -> Mapping[str, float]:
        """Return the sum of the stored resources of the provider's (pool's) nodes."""
        with self.lock:
            return self.measured.of(provider, pool)

    def usage_and_promises(
        self, provider: str, pool: str | None = None
    ) -> tuple[Mapping[str, float], Mapping[str, float], list[tuple[str | None, str, float]]]:
        """Return :meth:`usage`, promises and :meth:`unmeasured_nodes`, all at one time."""
        with self.lock:
            return (
                self.usage(provider, pool),
                self.reservations.provider(provider, pool),
                self.unmeasured_nodes(provider, pool),
            )

    def unmeasured_nodes(
        self, provider: str, pool: str | None = None
    ) -> list[tuple[str | None, str, float]]:
        """Return (pool, label, count) of the provider's nodes without stored resources."""
        with self.lock:
            return [
                (each, label, count)
                for (_provider, each, label), count in self.unmeasured.of(provider, pool).items()
            ]
