"""Slots of backing nodes and the nodes in them, without any I/O (MST-3 and MST-4)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nodepool.texts import one_line
from nodepool.zk.records import IN_USE, Node

#: How the names of owners begin; the name of the provider follows.
METASTATIC = "NodePool:metastatic:"


class BackingNodeRecord:
    """A backing node, or the request for one."""

    def __init__(self, label_name: str, slot_count: int) -> None:
        self.label_name = label_name
        self.slot_count = slot_count
        #: None until the request is fulfilled.
        self.node_id: str | None = None
        self.request_id: str | None = None
        #: ``created_time`` of the request.
        self.requested: float | None = None
        self.allocated_nodes: list[str | None] = [None] * slot_count
        #: No new nodes are put here; why, if a launcher has probed it.
        self.failed = False
        self.reason = ""
        #: Unix time; in ZooKeeper, too.
        self.launched = time.time()
        #: Monotonic seconds.
        self.last_used = time.monotonic()
        # Below: its state in ZooKeeper.
        #: The backing node no longer exists or is not ours any more.
        self.lost = False
        #: A write for it is in progress; ``dirty``: another one is due afterwards.
        self.busy = False
        self.dirty = False
        self.releasing = False
        #: Its request is fulfilled, and the node is about to be locked.
        self.taking = False
        #: Slots as stored on the backing node; may name deleted nodes.
        self.stored: dict[int, str] = {}

    def hasAvailableSlot(self) -> bool:
        return not self.failed and not self.releasing and None in self.allocated_nodes

    def isEmpty(self) -> bool:
        return all(node_id is None for node_id in self.allocated_nodes)

    def allocateSlot(self, node_id: str, slot_id: int | None = None) -> int:
        """Allocate the first free slot, or the one asked for; raises when that is impossible."""
        if slot_id is None:
            if None not in self.allocated_nodes:
                raise Exception(f"No free slot in {self}")
            slot_id = self.allocated_nodes.index(None)
        elif not 0 <= slot_id < len(self.allocated_nodes):
            raise Exception(f"Slot {slot_id} does not exist in {self}")
        if self.allocated_nodes[slot_id] is not None:
            raise Exception(
                f"Slot {slot_id} of {self} is taken by {self.allocated_nodes[slot_id]}, not "
                f"{node_id}"
            )
        self.allocated_nodes[slot_id] = node_id
        return slot_id

    def deallocateSlot(self, node_id: str) -> int:
        """Free the slot of this node; raises ValueError when it has none here."""
        slot_id = self.allocated_nodes.index(node_id)
        self.allocated_nodes[slot_id] = None
        self.last_used = time.monotonic()
        return slot_id

    def backsNode(self, node_id: str) -> bool:
        return node_id in self.allocated_nodes

    def allocations(self) -> dict[int, str]:
        return {
            slot: node_id
            for slot, node_id in enumerate(self.allocated_nodes)
            if node_id is not None
        }

    def __repr__(self) -> str:
        where = (
            f"backing node {self.node_id}" if self.node_id else f"backing request {self.request_id}"
        )
        return f"<BackingNodeRecord {where} for {self.label_name}>"


class UserData(NamedTuple):
    """Content of the ``user_data`` of a backing node."""

    label: str
    slots: int
    failed: bool
    launched: float
    allocations: dict[int, str]
    reason: str = ""


def encode_user_data(record: BackingNodeRecord, owner: str) -> str:
    """Return the text for ``user_data``. 11.0.0 reads the first five keys, not the last ones."""
    reason = {"reason": record.reason} if record.reason else {}
    return json.dumps(
        {
            "owner": owner,
            "label": record.label_name,
            "slots": record.slot_count,
            "failed": record.failed,
            "launched": record.launched,
            "allocations": {str(slot): node_id for slot, node_id in record.allocations().items()},
            **reason,
        }
    )


def parse_user_data(text: object, owner: str) -> UserData | None:
    """Return the ``user_data`` of a backing node of this owner, None for other nodes."""
    if not isinstance(text, str) or owner not in text:
        return None
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("owner") != owner:
            return None
        allocations = data.get("allocations") or {}
        return UserData(
            str(data["label"]),
            max(0, int(data["slots"])),
            bool(data.get("failed", False)),
            float(data.get("launched", 0)),
            {int(slot): str(node_id) for slot, node_id in allocations.items()},
            one_line(data.get("reason") or ""),
        )
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def backing_data(node: Node) -> tuple[str, UserData] | None:
    """Return the owner and the ``user_data`` of a backing node; None for other nodes."""
    text = node.user_data
    if node.state != IN_USE or not isinstance(text, str) or METASTATIC not in text:
        return None
    try:
        owner = str(json.loads(text)["owner"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    data = parse_user_data(text, owner)
    return (owner, data) if data is not None and owner.startswith(METASTATIC) else None


def with_failure(text: str, reason: str) -> str:
    """Return the ``user_data`` of a backing node that gets no more nodes."""
    return json.dumps({**json.loads(text), "failed": True, "reason": reason})


def decode_driver_data(data: object) -> tuple[str, int] | None:
    """Return (backing node, slot) of a requested node; None when it has none."""
    if not isinstance(data, dict) or not isinstance(data.get("backing_node"), str):
        return None
    slot = data.get("slot")
    return (data["backing_node"], slot) if isinstance(slot, int) else None


class SlotBook:
    """All records by label, backing node and requested node. Not locked."""

    def __init__(self) -> None:
        #: In order of creation.
        self.records: dict[str, list[BackingNodeRecord]] = {}
        self.by_backing_node: dict[str, BackingNodeRecord] = {}
        self.by_node: dict[str, BackingNodeRecord] = {}

    def __iter__(self) -> Iterator[BackingNodeRecord]:
        return iter([record for records in self.records.values() for record in records])

    def add(self, record: BackingNodeRecord) -> None:
        self.records.setdefault(record.label_name, []).append(record)
        if record.node_id is not None:
            self.by_backing_node[record.node_id] = record

    def set_backing_node(self, record: BackingNodeRecord, node_id: str) -> None:
        record.node_id = node_id
        self.by_backing_node[node_id] = record

    def drop(self, record: BackingNodeRecord) -> None:
        records = self.records.get(record.label_name, [])
        if record in records:
            records.remove(record)
        if not records:
            self.records.pop(record.label_name, None)
        if record.node_id is not None and self.by_backing_node.get(record.node_id) is record:
            del self.by_backing_node[record.node_id]
        for node_id in record.allocations().values():
            if self.by_node.get(node_id) is record:
                del self.by_node[node_id]

    def find_free(
        self,
        label_name: str,
        oldest: float | None = None,
        usable: Callable[[BackingNodeRecord], bool] = lambda _record: True,
    ) -> BackingNodeRecord | None:
        """Return the first usable record with a free slot that was launched after ``oldest``."""
        free = (
            record
            for record in self.records.get(label_name, ())
            if record.hasAvailableSlot() and usable(record)
        )
        return next((record for record in free if oldest is None or record.launched > oldest), None)

    def allocate(self, record: BackingNodeRecord, node_id: str, slot_id: int | None = None) -> int:
        slot = record.allocateSlot(node_id, slot_id)
        self.by_node[node_id] = record
        return slot

    def deallocate(self, node_id: str) -> BackingNodeRecord | None:
        """Free the slot of a requested node; the result is where it was."""
        record = self.by_node.pop(node_id, None)
        if record is not None and record.backsNode(node_id):
            record.deallocateSlot(node_id)
        return record

    def merge(
        self,
        record: BackingNodeRecord,
        stored: dict[int, str],
        exists: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """Adopt the slots that are stored on the backing node.

        Entries that we knew before and have freed since are leftovers. Returns our nodes that were
        not stored yet and lost their slot to one that is.
        """
        displaced = []
        for slot, node_id in stored.items():
            if slot >= record.slot_count or slot < 0 or record.stored.get(slot) == node_id:
                continue
            present = record.allocated_nodes[slot]
            if present == node_id or (exists is not None and not exists(node_id)):
                continue
            other = self.by_node.get(node_id)
            if other is record:
                continue
            if present is not None:
                displaced.append(present)
                self.by_node.pop(present, None)
                record.allocated_nodes[slot] = None
            if other is not None:
                self.deallocate(node_id)
            self.allocate(record, node_id, slot)
        record.stored = dict(stored)
        return displaced
