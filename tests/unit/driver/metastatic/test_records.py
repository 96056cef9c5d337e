"""Bookkeeping of slots: no ZooKeeper needed."""

from __future__ import annotations

import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.driver.backing.records import (
    BackingNodeRecord,
    SlotBook,
    decode_driver_data,
    encode_user_data,
    parse_user_data,
)
from nodepool.driver.backing.slots import BackingSlots
from nodepool.driver.backing.transactions import backing_request
from nodepool.driver.metastatic.machines import MetastaticInstance
from nodepool.zk.zookeeper import REQUESTED, Node, NodeRequest

OWNER = "NodePool:metastatic:meta"


def record(
    slots: int = 2, node_id: str | None = "0000000001", label: str = "small"
) -> BackingNodeRecord:
    result = BackingNodeRecord(label, slots)
    result.node_id = node_id
    return result


@pytest.mark.spec("MST-4: BackingNodeRecord")
def test_record_assigns_each_slot_to_one_node() -> None:
    backing = record(2)
    assert backing.isEmpty()
    assert backing.hasAvailableSlot()
    assert backing.allocateSlot("a") == 0
    assert backing.allocateSlot("b") == 1
    assert not backing.hasAvailableSlot()
    with pytest.raises(Exception, match="No free slot"):
        backing.allocateSlot("c")
    used = backing.last_used = backing.last_used - 100
    assert backing.deallocateSlot("a") == 0
    assert backing.last_used > used
    assert backing.backsNode("b")
    assert not backing.backsNode("a")
    with pytest.raises(Exception, match="taken by b"):
        backing.allocateSlot("c", 1)
    with pytest.raises(Exception, match="Slot 7 does not exist"):
        backing.allocateSlot("c", 7)
    assert backing.allocateSlot("c") == 0, "lowest free slot first"
    backing.deallocateSlot("b")
    backing.failed = True
    assert not backing.hasAvailableSlot()
    assert not backing.isEmpty()


def test_backing_node_that_is_being_released_gets_no_node() -> None:
    book, backing = SlotBook(), record(2)
    book.add(backing)
    assert book.find_free("small") is backing
    backing.releasing = True
    assert book.find_free("small") is None


@pytest.mark.spec("MST-3: user_data is JSON text that release 11.0.0 can read")
def test_user_data_can_be_read_by_11_0_0() -> None:
    backing = record(3)
    backing.allocateSlot("0000000007", 2)
    text = encode_user_data(backing, OWNER)
    data = json.loads(text)
    assert set(data) >= {"owner", "label", "slots", "failed", "launched"}
    assert (data["owner"], data["label"], data["slots"], data["failed"]) == (
        OWNER,
        "small",
        3,
        False,
    )
    assert isinstance(data["launched"], float)
    parsed = parse_user_data(text, OWNER)
    assert parsed is not None
    assert parsed.allocations == {2: "0000000007"}
    assert parsed.launched == backing.launched


@pytest.mark.spec("MST-3: older records lack failed (= false) and launched (= 0)")
def test_user_data_of_older_releases() -> None:
    parsed = parse_user_data(json.dumps({"owner": OWNER, "label": "small", "slots": 4}), OWNER)
    assert parsed is not None
    assert parsed == ("small", 4, False, 0, {}, "")


@pytest.mark.parametrize(
    "text",
    [
        None,
        {"owner": OWNER},
        "not json " + OWNER,
        json.dumps([OWNER]),
        json.dumps({"owner": OWNER + "2", "label": "x", "slots": 1}),
        json.dumps({"owner": OWNER, "label": "x"}),
        json.dumps({"owner": OWNER, "label": "x", "slots": "many"}),
        json.dumps({"owner": OWNER, "label": "x", "slots": 1, "allocations": ["a"]}),
        json.dumps({"owner": OWNER, "label": "x", "slots": 1, "allocations": {"a": "b"}}),
    ],
)
def test_foreign_or_broken_user_data(text: Any) -> None:
    assert parse_user_data(text, OWNER) is None


def test_broken_driver_data_is_ignored() -> None:
    assert decode_driver_data({"backing_node": "1", "slot": 0, "node": "2", "metadata": {}}) == (
        "1",
        0,
    )
    for broken in (
        None,
        "x",
        {},
        {"backing_node": None, "slot": 0},
        {"backing_node": "1", "slot": None},
    ):
        assert decode_driver_data(broken) is None


def test_book_prefers_the_oldest_record_with_a_free_slot() -> None:
    book = SlotBook()
    first, second = record(1, "n1"), record(2, "n2")
    book.add(first)
    book.add(second)
    assert book.find_free("small") is first
    book.allocate(first, "a")
    assert book.find_free("small") is second
    book.deallocate("a")
    assert book.find_free("small") is first
    first.launched = 0
    assert book.find_free("small", oldest=1000) is second
    assert book.find_free("other") is None
    book.drop(first)
    assert first not in book
    assert second in book
    assert set(book.by_backing_node) == {"n2"}


def test_merge_adopts_what_others_stored() -> None:
    book = SlotBook()
    backing = record(4)
    book.add(backing)
    book.allocate(backing, "mine")  # slot 0, not stored yet
    book.allocate(backing, "mine2")  # slot 1
    displaced = book.merge(
        backing, {0: "theirs", 3: "gone", 9: "beyond"}, lambda node_id: node_id != "gone"
    )
    assert displaced == ["mine"]
    assert backing.allocated_nodes == ["theirs", "mine2", None, None]
    assert book.by_node == {"mine2": backing, "theirs": backing}
    # the same again: "gone" is known and stays free; what was freed since stays free
    book.deallocate("theirs")
    assert book.merge(backing, {0: "theirs", 3: "gone"}) == []
    assert backing.allocated_nodes == [None, "mine2", None, None]


def test_merge_moves_a_node_that_another_launcher_moved() -> None:
    book = SlotBook()
    one, two = record(1, "n1"), record(1, "n2")
    book.add(one)
    book.add(two)
    book.allocate(one, "x")
    assert book.merge(two, {0: "x"}) == []
    assert one.isEmpty()
    assert book.by_node["x"] is two


@given(st.data())
def test_two_books_never_agree_on_one_slot_for_two_nodes(data: st.DataObject) -> None:
    """Two launchers that write only on top of what they have read: nobody is lost, nothing is
    booked twice.
    """
    slots = data.draw(st.integers(1, 5))
    version, stored = 0, dict[int, str]()
    books = []
    for _ in range(2):
        book = SlotBook()
        backing = record(slots)
        book.add(backing)
        books.append((book, backing))
    seen = [0, 0]
    granted: dict[str, int] = {}
    waiting: list[list[str]] = [[], []]
    serial = 0
    for _ in range(data.draw(st.integers(1, 25))):
        which = data.draw(st.integers(0, 1))
        book, backing = books[which]
        action = data.draw(st.sampled_from(["allocate", "write", "read", "end"]))
        if action == "allocate" and backing.hasAvailableSlot():
            serial += 1
            book.allocate(backing, f"n{serial}")
            waiting[which].append(f"n{serial}")
        elif action == "read" or (action == "write" and seen[which] != version):
            for node_id in book.merge(backing, stored, lambda node_id: node_id in granted):
                assert node_id in waiting[which], "nobody loses a slot that was granted"
                waiting[which].remove(node_id)
            seen[which] = version
        elif action == "write":
            version += 1
            stored = backing.allocations()
            backing.stored = dict(stored)
            seen[which] = version
            for node_id in waiting[which]:
                granted[node_id] = backing.allocated_nodes.index(node_id)
            waiting[which].clear()
        elif action == "end" and granted:
            gone = data.draw(st.sampled_from(sorted(granted)))
            del granted[gone]
            for other, _record in books:
                other.deallocate(gone)
        assert len(set(granted.values())) == len(granted)


@pytest.mark.spec("MST-3: driver_data, external_id and the copied fields of a requested node")
def test_requested_node_has_fields_of_its_backing_node() -> None:
    backing, node = Node("0000000001"), Node("0000000002")
    backing.interface_ip, backing.cloud, backing.host_keys = "192.0.2.1", "cloud", ["ssh-rsa AAA"]
    backing.connection_port, backing.username, backing.attributes = 2222, "zuul2", {"k": "v"}
    instance = MetastaticInstance(backing, 3, node, {"nodepool_node_id": "0000000002"})
    assert instance.external_id == "0000000002"
    assert instance.slot == 3
    assert (instance.interface_ip, instance.cloud, instance.host_keys) == (
        "192.0.2.1",
        "cloud",
        ["ssh-rsa AAA"],
    )
    assert (instance.connection_port, instance.username) == (2222, "zuul2")  # type: ignore[attr-defined]
    assert instance.node_attributes == {"k": "v"}
    assert instance.driver_data == {
        "metadata": {"nodepool_node_id": "0000000002"},
        "backing_node": "0000000001",
        "slot": 3,
        "node": "0000000002",
    }
    assert instance.getQuotaInformation().get_resources()["instances"] == 1
    empty = MetastaticInstance(None, None, None)
    assert empty.driver_data["backing_node"] is None


def test_backing_request_speaks_for_the_user() -> None:
    label = SimpleNamespace(backing_label="big")
    user = SimpleNamespace(
        id="200-0000000005", tenant_name="tenant", event_id="event", relative_priority=7
    )
    zk: Any = SimpleNamespace(kazoo_client=SimpleNamespace(full_path=str), request_tree=None)
    request, txn = backing_request(zk, label, OWNER, user)
    assert txn.operations[0].path == "/nodepool/requests/200-"
    assert (request.node_types, request.state, request.requestor) == (["big"], REQUESTED, OWNER)
    assert (request.tenant_name, request.event_id, request.relative_priority) == (
        "tenant",
        "event",
        7,
    )
    for odd in (None, "x", "1-2"):
        request, txn = backing_request(zk, label, OWNER, NodeRequest(odd))
        assert txn.operations[0].path == "/nodepool/requests/100-"
        assert request.relative_priority == 0
        assert request.event_id


@pytest.mark.parametrize("busy", [False, True])
def test_slot_that_two_nodes_claim_is_a_warning_unless_our_write_is_under_way(
    busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    book, backing = SlotBook(), record(1)
    book.add(backing)
    book.allocate(backing, "0000000002")
    backing.busy = busy
    slots: Any = SimpleNamespace(
        lock=threading.RLock(), book=book, log=logging.getLogger("nodepool"), _waiting={}
    )
    node = Node("0000000003")
    node.driver_data = {"backing_node": backing.node_id, "slot": 0}
    BackingSlots.note_slot(slots, node)
    assert backing.allocations() == {0: "0000000002"}
    assert ("claims slot 0" in caplog.text) is not busy
