"""A client that behaves like Zuul: it submits requests, uses nodes, and returns them.

It needs no tasks: the server answers within the call, and timers of the kernel call the client.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from kazoo.protocol.serialization import Create, Delete, SetData, Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from nodepool.lab.simulation.kernel import EPOCH, Kernel
from nodepool.lab.whatif.demand import Demand
from nodepool.lab.whatif.link import connect
from nodepool.lab.zkserver.codec import Reader
from nodepool.lab.zkserver.requests import StandaloneServer
from nodepool.zk import paths
from nodepool.zk.records import IN_USE, READY, REQUESTED, USED, ImageBuild, ImageUpload

REQUESTOR = "simulate"
#: Of all images.
FORMAT = "qcow2"
#: Seconds from the end of a request to the first use of its nodes.
ACCEPTS_AFTER = 0.01
_PERSISTENT, _SEQUENCE, _EPHEMERAL_SEQUENCE = 0, 2, 3
_HEADER = 16


class Session:
    """A session whose requests are answered within the call."""

    def __init__(self, server: StandaloneServer) -> None:
        self.server = server
        self._received = bytearray()
        self._connection = connect(server, self._received.extend)
        self._xid = 0

    def _send(self, payload: bytes) -> bytes:
        self.server.receive(self._connection, len(payload).to_bytes(4, "big") + payload)
        answer = bytes(self._received)
        self._received.clear()
        return answer[4:]

    def call(self, request: Any) -> tuple[int, bytes]:
        """Return the error code, 0 if there is none, and the body of the answer."""
        self._xid += 1
        head = self._xid.to_bytes(4, "big") + int(request.type).to_bytes(4, "big", signed=True)
        answer = self._send(head + bytes(request.serialize()))
        return int.from_bytes(answer[12:_HEADER], "big", signed=True), answer[_HEADER:]

    def create(self, path: str, data: bytes = b"", flags: int = _PERSISTENT) -> str:
        """Create a znode with its parents; return its path."""
        tree = self.server.tree.nodes
        missing = []
        parent = path.rpartition("/")[0]
        while parent and parent not in tree:
            missing.append(parent)
            parent = parent.rpartition("/")[0]
        for each in reversed(missing):
            self.call(Create(each, b"", OPEN_ACL_UNSAFE, _PERSISTENT))
        return Reader(self.call(Create(path, data, OPEN_ACL_UNSAFE, flags))[1]).string()


class ReplayClient:
    """A client like Zuul.

    :param submitted: called with the id of a request and what it asks for.
    """

    def __init__(
        self, kernel: Kernel, server: StandaloneServer, submitted: Callable[[str, Demand], None]
    ) -> None:
        self._kernel = kernel
        self._session = Session(server)
        self._tree = server.tree.nodes
        self._submitted = submitted
        self._demand: dict[str, Demand] = {}
        #: Locks of the nodes in use.
        self._locks: dict[str, str] = {}

    @property
    def uses_nodes(self) -> bool:
        return bool(self._locks)

    def upload_images(self, images: Iterable[tuple[str, str]]) -> None:
        """Store ready uploads.

        :param images: names of disk image and provider.
        """
        for image, provider in images:
            build = ImageBuild()
            build.state, build.builder, build.formats = READY, REQUESTOR, [FORMAT]
            upload = ImageUpload()
            upload.state, upload.external_name, upload.external_id, upload.format = (
                READY,
                image,
                image,
                FORMAT,
            )
            name = "0000000001"
            if paths.build(image, name) not in self._tree:
                self._session.create(paths.build(image, name), build.serialize())
            self._session.create(paths.upload(image, name, provider, name), upload.serialize())

    def plan(self, requests: Iterable[Demand], start: float) -> None:
        for each in requests:
            self._kernel.call_at(start + each.time, functools.partial(self._submit, each))

    def _submit(self, demand: Demand) -> None:
        now = EPOCH + self._kernel.now
        record = {
            "requestor_data": None,
            "node_types": list(demand.labels),
            "requestor": REQUESTOR,
            "created_time": now,
            "provider": None,
            "state": REQUESTED,
            "state_time": now,
            "relative_priority": demand.relative_priority,
            "event_id": None,
            "tenant_name": demand.tenant,
        }
        path = self._session.create(
            f"{paths.REQUESTS}/{demand.priority}-", json.dumps(record).encode(), _SEQUENCE
        )
        name = path.rpartition("/")[2]
        self._demand[name] = demand
        self._submitted(name, demand)

    def ended(self, request_id: str, nodes: list[str]) -> None:
        """Use the nodes of an ended request; called within a transaction of the server.

        :param nodes: empty for a failed request.
        """
        demand = self._demand.pop(request_id, None)
        if demand is not None:
            self._kernel.call_at(
                self._kernel.now + ACCEPTS_AFTER,
                lambda: self._accept(request_id, nodes, demand.duration),
            )

    def _accept(self, request_id: str, nodes: list[str], duration: float) -> None:
        for node in nodes:
            lock = self._session.create(
                f"{paths.node_lock(node)}/{REQUESTOR}__lock__",
                REQUESTOR.encode(),
                _EPHEMERAL_SEQUENCE,
            )
            self._locks[node] = lock
            self._session.call(SetData(paths.node(node), self._changed(node, IN_USE), -1))
        self._session.call(Delete(paths.request(request_id), -1))
        if nodes:
            self._kernel.call_at(self._kernel.now + duration, lambda: self._return(nodes))

    def _return(self, nodes: list[str]) -> None:
        for node in nodes:
            change = SetData(paths.node(node), self._changed(node, USED), -1)
            self._session.call(Transaction([change, Delete(self._locks.pop(node), -1)]))

    def _changed(self, node: str, state: str) -> bytes:
        record = json.loads(self._tree[paths.node(node)].data or b"{}")
        return json.dumps(
            {**record, "state": state, "state_time": EPOCH + self._kernel.now}
        ).encode()
