"""The mirrored node requests (ZK-5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kazoo.protocol.states import ZnodeStat

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import FULFILLED, PENDING, REQUESTED, NodeRequest, RecordError

#: listener(request id, record before or None, record now or None); on the connection thread.
RequestListener = Callable[[str, "NodeRequest | None", "NodeRequest | None"], Any]

MIN_READY = "NodePool:min-ready"
#: Of the machines that try uploads of images (BLD-25): nobody else gets them.
VERIFIER = "NodePool:verify"


class RequestTree(Tree[NodeRequest]):
    """Requests by id. Records are never modified."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.REQUESTS)
        self.requests: dict[str, NodeRequest] = {}
        self.listeners: list[RequestListener] = []
        self.pending: set[str] = set()
        #: Those for min-ready, and for machines that try uploads, of any launcher.
        self.min_ready: set[str] = set()
        self.verifying: set[str] = set()
        #: label -> number of unfinished min-ready requests of any launcher.
        self.min_ready_open: Counter[str] = Counter()
        #: label -> number of fulfilled min-ready requests whose nodes are not free yet.
        self.min_ready_done: Counter[str] = Counter()
        #: number of requests by the set of their labels.
        self.label_sets: Counter[frozenset[str]] = Counter()

    def known_paths(self) -> set[str]:
        return {paths.request(i) for i in self.requests}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        request = NodeRequest.read(data, stat, parts[0])
        if request is None:
            raise RecordError("the znode is empty")
        if request.state is None:
            raise RecordError("the state is missing")
        _ = request.priority  # a malformed name affects this request only
        self._replace(parts[0], request)

    def store_own(self, parts: list[str], path: str, record: NodeRequest, stat: ZnodeStat) -> None:
        if (
            record.id is None
        ):  # just created, and like all requests of ours it ends with the session
            record.id = parts[0]
            stat = stat._replace(ephemeralOwner=self.client.session_id)
        record.stat = stat
        self._replace(parts[0], record)

    def vanished(self, parts: list[str], path: str) -> None:
        if len(parts) == 1:
            self._replace(parts[0], None)

    def _replace(self, request_id: str, request: NodeRequest | None) -> None:
        with self.lock:
            old = self.requests.get(request_id)
            if request is None:
                if old is None:
                    return
                del self.requests[request_id]
            else:
                if old is not None and self.is_older(
                    paths.request(request_id), request.stat, old.stat
                ):
                    return
                self.requests[request_id] = request
            if old is not None:
                self._count(old, -1)
            if request is not None:
                self._count(request, 1)
            for ids, fits in (
                (self.pending, request is not None and request._state == PENDING),
                (self.min_ready, request is not None and request.requestor == MIN_READY),
                (self.verifying, request is not None and request.requestor == VERIFIER),
            ):
                (ids.add if fits else ids.discard)(request_id)
        self.announce(self.listeners, request_id, old, request)

    def _count(self, request: NodeRequest, sign: int) -> None:
        labels = frozenset(request.node_types)
        self.label_sets[labels] += sign
        if not self.label_sets[labels]:
            del self.label_sets[labels]
        if request.requestor == MIN_READY and request._state in (REQUESTED, PENDING, FULFILLED):
            counted = self.min_ready_done if request._state == FULFILLED else self.min_ready_open
            for label in request.node_types:
                counted[label] += sign

    def get(self, request_id: str | None) -> NodeRequest | None:
        return None if request_id is None else self.requests.get(request_id)

    def is_own(self, request: NodeRequest) -> bool:
        """Return whether our session has created this request."""
        owner = request.stat.ephemeralOwner if request.stat is not None else None
        return owner == self.client.session_id

    def snapshot(self) -> list[NodeRequest]:
        """Return all requests, sorted by id."""
        with self.lock:
            requests = self.requests
            return [requests[request_id] for request_id in sorted(requests)]
