"""Value classes of the request handler."""

from __future__ import annotations

from typing import Any

from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle


class LabelRecorder:
    """Records which node serves which label (DRV-5.7)."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def add(self, label: str, node_id: str | None) -> None:
        self.data.append({"label": label, "node_id": node_id})

    def labels(self) -> list[str]:
        """Return labels in the order added."""
        return [entry["label"] for entry in self.data]

    def pop(self, label: str) -> Any:
        """Remove the first entry of the label and return its node id; None if there is none."""
        for index, entry in enumerate(self.data):
            if entry["label"] == label:
                del self.data[index]
                return entry["node_id"]
        return None

    def removeNode(self, id: str | None) -> None:
        self.data = [entry for entry in self.data if entry["node_id"] != id]


class Step:
    """The writes of one pass of a handler, and the positions of their results."""

    __slots__ = (
        "created",
        "fused",
        "lock_index",
        "more",
        "request_index",
        "request_lock_index",
        "request_record",
        "reused",
        "set_index",
        "short",
    )

    def __init__(self) -> None:
        self.reused: list[tuple[str, zk.Node]] = []
        self.created: list[tuple[str, zk.Node]] = []
        #: The label without quota.
        self.short: str | None = None
        #: Further nodes are to be chosen when this has been written.
        self.more = False
        #: Accepted and fulfilled in one transaction.
        self.fused = False
        self.request_index: int | None = None
        self.request_lock_index: int | None = None
        self.request_record: zk.NodeRequest | None = None
        self.lock_index: dict[int, int] = {}
        self.set_index: dict[int, int] = {}

    @property
    def empty(self) -> bool:
        return not self.reused and not self.created

    def handle(self, node: zk.Node, results: list[Any], directory: str) -> LockHandle | None:
        index = self.lock_index.get(id(node))
        return None if index is None else LockHandle(directory, str(results[index]), None)


def read_results(step: Step, results: list[Any], request: zk.NodeRequest) -> None:
    """Apply ids, versions and locks from the answer to the first transaction of a step."""
    record = step.request_record
    if record is not None and step.request_index is not None:
        state_time = record.state_time
        request.nodes = record.nodes
        if record.state is not None:
            request.state = record.state
        request.state_time = state_time
        request.stat = results[step.request_index]
    if step.request_lock_index is not None:
        path = str(results[step.request_lock_index])
        request.lock = LockHandle(path.rsplit("/", 1)[0], path, None)
    for _label, node in step.created:
        node.id = str(results[step.set_index[id(node)]]).rsplit("/", 1)[1]
    for _label, node in step.reused:
        node.stat = results[step.set_index[id(node)]]
