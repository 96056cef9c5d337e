"""Which history of the tree a cloud resource belongs to; a restore deletes nothing.

``/nodepool/cluster`` (ignored by 11.0.0 and Zuul) contains the id of the cluster, *points* and
*skipped ids*. A point ``[counter, time]`` states that no node id from ``counter`` on had been
assigned at ``time``; one is recorded after each
(re)connection of a launcher. A machine with such an id whose record was created before that time
belongs to a history that a restore has undone.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState

from nodepool.zk import paths
from nodepool.zk.reading import TIMEOUT
from nodepool.zk.records import RecordError, parse_object

if TYPE_CHECKING:
    from nodepool.zk.connection.client import ZooKeeperClient
    from nodepool.zk.connection.protocol import SessionClient
    from nodepool.zk.records import Node

#: Keys of the metadata of machines; uploads have the cluster id only.
NODE_ID, CLUSTER_ID, NODE_CREATED = (
    "nodepool_node_id",
    "nodepool_cluster_id",
    "nodepool_node_created",
)
#: Metadata of the node that a machine was created for.
_OWNER = (NODE_ID, NODE_CREATED, "nodepool_provider_name")
MOST_POINTS = 50
"""Points that are kept, the newest ones."""
MOST_SKIPPED = 50
"""Ranges of skipped ids that are kept, the newest ones."""
MOST_IDS = 5_000_000
"""Maximum number of ids that one call skips."""
SKIPPED_TOGETHER = 500
"""Ids that are skipped in one transaction."""
ATTEMPTS = 10
"""How often a write is repeated when another process has changed the record in between."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Cluster:
    """The content of ``/nodepool/cluster``."""

    id: str
    #: (next node id, server time in ms) in the order of recording.
    points: tuple[Pair, ...] = ()
    #: (first, last) node ids that this tree has never assigned to a launch.
    skipped: tuple[Pair, ...] = ()

    @classmethod
    def parse(cls, data: bytes | None) -> Cluster | None:
        """Return the record, or None if the znode is empty.

        :raises RecordError: the content is damaged.
        """
        values = parse_object(data)
        if values is None:
            return None
        identity = values.get("id")
        if not isinstance(identity, str) or not identity:
            raise RecordError(
                f"{paths.CLUSTER}: id is missing; restore it from a backup or delete the znode"
            )
        return cls(identity, _pairs(values, "points"), _pairs(values, "skipped"))

    def serialize(self) -> bytes:
        return json.dumps({"id": self.id, "points": self.points, "skipped": self.skipped}).encode()

    def with_point(self, counter: int, time: int) -> Cluster:
        """Return a copy with a further point; it replaces those that it implies."""
        kept = [point for point in self.points if not (point[0] >= counter and point[1] <= time)]
        return replace(self, points=(*kept, (counter, time))[-MOST_POINTS:])

    def with_skipped(self, first: int, last: int) -> Cluster:
        """Return a copy in which the ids of this range are known never to be given."""
        kept = [pair for pair in self.skipped if not (first <= pair[0] and pair[1] <= last)]
        return replace(self, skipped=(*kept, (first, last))[-MOST_SKIPPED:])


def _pairs(values: Mapping[str, Any], key: str) -> tuple[Pair, ...]:
    found = values.get(key, [])
    if not isinstance(found, list):
        raise RecordError(f"{paths.CLUSTER}: {key} must be a list")
    for pair in found:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(number) is int for number in pair)
        ):
            raise RecordError(
                f"{paths.CLUSTER}: {key} must contain pairs of integers, not {pair!r}"
            )
    return tuple((first, second) for first, second in found)


@dataclass(frozen=True)
class View:
    """The cluster record and the node id counter, read after the resources to be judged."""

    cluster: Cluster
    #: The next node id that the tree will assign.
    counter: int
    #: The connection that this was read on.
    connection: int = 0

    def foreign(self, metadata: Mapping[str, Any], node: Node | None) -> str | None:
        """Return why a resource is not of this tree's history, or None if it is.

        :param node: the record with the id in the metadata, if there is one.
        """
        number, created = number_of(metadata.get(NODE_ID)), number_of(metadata.get(NODE_CREATED))
        if node is not None and created is not None and created in created_times(node):
            return None
        theirs = metadata.get(CLUSTER_ID)
        if theirs and theirs != self.cluster.id:
            return (
                f"it was created for cluster {theirs}, this is "
                f"{self.cluster.id or 'one without an id yet'}"
            )
        if number is None:
            return None
        if node is not None and created is None:
            return None
        if number >= self.counter:
            return f"its node id has not been given yet; the next one is {self.counter:010}"
        if node is not None and created_times(node):
            return "another node has its id now"
        if created is None:
            if any(first <= number <= last for first, last in self.cluster.skipped):
                return "its node id was skipped by `nodepool recover`"
        elif any(number >= counter and created < time for counter, time in self.cluster.points):
            return "its node id was given to it before a restore of ZooKeeper undid that"
        return None


def same_owner(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a machine was created for the node with the expected metadata.

    The id alone does not identify a node: a restored ZooKeeper assigns ids again.
    """
    return all(found.get(key) == wanted.get(key) for key in _OWNER)


def number_of(text: object) -> int | None:
    """Return the number of an id or a time stamp in metadata, or None if it is not a number."""
    value = str(text)
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 15 else None


def created_times(node: Node) -> set[int]:
    """Return the times in ms with which the machine of this node may be stamped.

    A record that was re-created for a machine has the time of the first one in ``created_time``.
    """
    found = set()
    if node.stat is not None:
        found.add(int(node.stat.ctime))
    if isinstance(node.created_time, (int, float)):
        found.add(round(node.created_time * 1000))
    return found


class ClusterHistory:
    """Reads and writes ``/nodepool/cluster`` for one process; callable from any thread."""

    def __init__(self, client: ZooKeeperClient, kazoo: Callable[[], SessionClient]) -> None:
        self._kazoo = kazoo
        self._lock = threading.Lock()
        #: Counts connections: what was read on an earlier one may have been undone by a restore.
        self._connection = 0
        self._noted = -1
        #: Time of the server in ms when the last point was recorded.
        self.time = 0
        #: The id of the cluster, as last read; None before that.
        self.id: str | None = None
        client.state_listeners.append(self._state_changed)

    def _state_changed(self, state: str) -> None:
        if state != KazooState.CONNECTED:
            self._connection += 1

    @property
    def due(self) -> bool:
        """Return whether no point was recorded on the present connection yet."""
        return self._noted != self._connection

    def note(self, force: bool = False) -> Cluster:
        """Record a point, unless this was done on the present connection; return the record.

        :param force: record another point in any case.

        :raises KazooException: no connection, or no answer in time.
        :raises RecordError: the record is damaged.
        """
        with self._lock:
            connection = self._connection
            cluster = self.read()
            if force or cluster is None or self._noted != connection:
                # The time is taken before the counter is read. Ids from the counter on are thus
                # given later than that time, whatever other launchers do in between.
                cluster = self.change(lambda known: known)
                self.time = time = (
                    self._kazoo().get_async(paths.CLUSTER).get(timeout=TIMEOUT)[1].mtime
                )
                counter = self.counter()
                cluster = self.change(lambda known: known.with_point(counter, time))
                self._noted = connection
            self.id = cluster.id
            return cluster

    def view(self) -> View:
        """Return the view for resources listed before this call.

        Raises what :meth:`note` raises.
        """
        connection = self._connection
        cluster = self.note()
        return View(cluster, self.counter(), connection)

    def is_current(self, view: View) -> bool:
        """Whether the connection has lasted since the view was read."""
        return view.connection == self._connection

    def peek(self) -> View:
        """Return the view without writing; the id is empty if the tree has none yet."""
        cluster = self.read() or Cluster("")
        return View(cluster, self.counter(), self._connection)

    def skip_to(self, highest: int, most: int = MOST_IDS) -> None:
        """Skip ids up to the highest one; a repetition after a failure completes it.

        :raises ValueError: this would skip more than *most* ids.
        """
        counter = self.counter()
        if highest < counter:
            return
        if highest - counter >= most:
            raise ValueError(
                f"node id {highest:010} is implausible: the next one is {counter:010}; delete its "
                "resource first"
            )
        # Before the effect: otherwise machines whose ids are not assigned yet would look leaked
        # after it. The point covers those with a time stamp, the range those without.
        self.note(force=True)
        self.change(lambda known: known.with_skipped(counter, highest))
        self._kazoo().ensure_path(paths.NODES)
        path = f"{paths.NODES}/skip-{uuid.uuid4().hex}"
        while (missing := highest + 1 - self.counter()) > 0:
            transaction = self._kazoo().transaction()
            for _ in range(min(missing, SKIPPED_TOGETHER)):
                transaction.create(path, b"")
                transaction.delete(path)
            for result in transaction.commit_async().get(timeout=TIMEOUT):
                if isinstance(result, Exception):
                    raise result

    def identity(self) -> str:
        """Return the id of the cluster, created if there is none; raises what :meth:`note`
        raises.
        """
        cluster = self.read() or self.change(lambda known: known)
        self.id = cluster.id
        return cluster.id

    def read(self) -> Cluster | None:
        """Return the record as the server has it; None if there is none."""
        try:
            return Cluster.parse(self._kazoo().get_async(paths.CLUSTER).get(timeout=TIMEOUT)[0])
        except NoNodeError:
            return None

    def change(self, how: Callable[[Cluster], Cluster]) -> Cluster:
        """Write a changed record, also when nothing is different; create it if there is none."""
        kazoo = self._kazoo()
        for _attempt in range(ATTEMPTS):
            try:
                data, stat = kazoo.get_async(paths.CLUSTER).get(timeout=TIMEOUT)
            except NoNodeError:
                data, stat = b"", None
            cluster = how(Cluster.parse(data) or Cluster(str(uuid.uuid4())))
            try:
                if stat is None:
                    kazoo.create_async(paths.CLUSTER, cluster.serialize(), makepath=True).get(
                        timeout=TIMEOUT
                    )
                else:
                    kazoo.set_async(paths.CLUSTER, cluster.serialize(), stat.version).get(
                        timeout=TIMEOUT
                    )
            except (BadVersionError, NodeExistsError, NoNodeError):
                continue
            return cluster
        raise RecordError(f"{paths.CLUSTER}: other processes keep changing it")

    def counter(self) -> int:
        """Return the next node id that the tree will assign."""
        kazoo = self._kazoo()
        # A server that lags behind would make ids look unassigned.
        kazoo.sync_async(paths.NODES).get(timeout=TIMEOUT)
        stat = kazoo.exists_async(paths.NODES).get(timeout=TIMEOUT)
        if stat is None:
            return 0
        # The server reports twice the number of creations, less the number of children.
        return int((stat.cversion + stat.numChildren) % (1 << 32) // 2)
