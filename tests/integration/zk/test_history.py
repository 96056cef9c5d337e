"""What becomes of the history in ZooKeeper: old parts go, and many writes become one."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
import zlib
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError
from kazoo.security import make_acl

from nodepool.status.usage import MEASURED
from nodepool.zk import history
from nodepool.zk.mirror.feed import Feed, describe
from nodepool.zk.records import Node
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for


@pytest.fixture
def kazoo(zk_chroot: Chroot) -> Any:
    return zk_chroot.connect().client


def write(kazoo: Any, *events: dict[str, Any]) -> str:
    data = zlib.compress("\n".join(map(json.dumps, events)).encode())
    return str(kazoo.create(f"{history.ROOT}/", data, sequence=True, makepath=True)).rpartition(
        "/"
    )[2]


def event(number: int) -> dict[str, Any]:
    return {"type": "node-step", "time": 1000.0 + number, "node": f"{number:010}", "step": "x"}


def test_many_become_one(kazoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or there twice, not for those who read meanwhile or have read before;
    damaged parts harm nothing.
    """
    monkeypatch.setattr(history, "MERGE_AT", 5)
    monkeypatch.setattr(history, "MERGED", 4)
    reader = history.HistoryReader()
    names = [write(kazoo, event(2 * number), event(2 * number + 1)) for number in range(8)]
    damaged = str(kazoo.create(f"{history.ROOT}/", b"x", sequence=True)).rpartition("/")[2]
    expected = [event(number) for number in range(16)]
    assert reader.read_all(kazoo) == expected
    history.tidy(kazoo)
    merged = f"{names[0]}-{names[3]}"
    assert sorted(kazoo.get_children(history.ROOT)) == [merged, *names[4:], damaged]
    assert reader.read_all(kazoo) == expected == history.HistoryReader().read_all(kazoo)
    assert reader.read(kazoo, "node", "0000000003") == [event(3)]
    history.tidy(kazoo)
    assert sorted(kazoo.get_children(history.ROOT)) == [merged, *names[4:], damaged], (
        "five may stay"
    )
    write(kazoo, event(16))
    history.tidy(kazoo)
    history.tidy(kazoo)
    assert reader.read_all(kazoo) == [*expected, event(16)]


def test_one_that_is_too_large_is_kept_as_it_is(
    kazoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MERGE_AT", 1)
    names = [write(kazoo, event(number)) for number in range(3)]
    monkeypatch.setattr(history, "MERGED_BYTES", 10)
    for _ in range(3):
        history.tidy(kazoo)
    assert sorted(kazoo.get_children(history.ROOT)) == [
        f"{names[0]}-{names[0]}",
        f"{names[1]}-{names[1]}",
        names[2],
    ]
    assert history.HistoryReader().read_all(kazoo) == [event(0), event(1), event(2)]


def test_parts_that_are_too_large_together_when_they_are_unpacked_stay_apart(
    kazoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MERGE_AT", 1)
    names = [write(kazoo, event(number)) for number in range(4)]
    monkeypatch.setattr(history, "LARGEST", 2 * len(json.dumps(event(0))) + 10)
    history.tidy(kazoo)
    assert sorted(kazoo.get_children(history.ROOT)) == [f"{names[0]}-{names[1]}", *names[2:]]


def test_old_and_too_much(kazoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [write(kazoo, event(number)) for number in range(4)]
    size = len(kazoo.get(f"{history.ROOT}/{names[0]}")[0])
    monkeypatch.setattr(history, "MOST_BYTES", 3 * size + size // 2)
    history.tidy(kazoo)
    assert sorted(kazoo.get_children(history.ROOT)) == names[1:]
    written = kazoo.exists(f"{history.ROOT}/{names[3]}").ctime
    newest = wait_for(lambda: write(kazoo, event(9)) if time.time() * 1000 > written + 1 else None)
    assert kazoo.exists(f"{history.ROOT}/{newest}").ctime > written
    monkeypatch.setattr(history, "LONGEST", 0.0)
    history.tidy(kazoo)
    assert kazoo.get_children(history.ROOT) == [newest]


def test_wrong_clock_of_one_launcher_deletes_nothing(
    kazoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write(kazoo, event(number)) for number in range(3)]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * history.LONGEST)
    history.tidy(kazoo)
    assert sorted(kazoo.get_children(history.ROOT)) == names


def test_what_cannot_be_deleted_or_read_keeps_nothing_else(
    kazoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write(kazoo, event(number)) for number in range(6)]
    kazoo.create(f"{history.ROOT}/{names[0]}/child")
    kazoo.create(f"{history.ROOT}/strange", b"x")
    unreadable = write(kazoo, event(6))
    kazoo.set_acls(f"{history.ROOT}/{unreadable}", [make_acl("world", "anyone", write=True)])
    monkeypatch.setattr(history, "MOST_BYTES", 0)
    history.tidy(kazoo)
    # Newer servers do not show the age of what we may not read.
    assert {names[0]} <= set(kazoo.get_children(history.ROOT)) <= {names[0], unreadable}
    monkeypatch.undo()
    with contextlib.suppress(NoNodeError):
        kazoo.delete(f"{history.ROOT}/{unreadable}")
    unreadable = write(kazoo, event(7))
    kazoo.set_acls(f"{history.ROOT}/{unreadable}", [make_acl("world", "anyone", write=True)])
    write(kazoo, event(8))
    monkeypatch.setattr(history, "MERGE_AT", 1)
    history.tidy(kazoo)
    assert history.HistoryReader().read_all(kazoo) == [event(0), event(8)]
    kazoo.delete(f"{history.ROOT}/{unreadable}")


def test_damaged_lines_harm_no_other(kazoo: Any) -> None:
    """Consumers get only events whose fields have the types that they expect."""
    lines = [
        "[" * 100_000,
        "[1]",
        '{"type": 1, "time": 2}',
        '{"type": "x"}',
        "1",
        json.dumps(event(1)),
        json.dumps({**event(2), "labels": 5, "nodes": [5], "request": {"a": []}, "reason": ["x"]}),
        *(
            json.dumps({**event(number), "type": kind, **dict.fromkeys(MEASURED, wrong)})
            for kind in ("node-usage", "node-killed")
            for number, wrong in enumerate((10**400, -(10**400), math.inf, math.nan), 3)
        ),
    ]
    kazoo.create(
        f"{history.ROOT}/", zlib.compress("\n".join(lines).encode()), sequence=True, makepath=True
    )
    found = history.HistoryReader().read_all(kazoo)
    assert found[:2] == [event(1), event(2)]
    assert len(found) == 10
    for each in found:
        assert describe(each)
        assert not each.keys() & set(MEASURED)
        json.dumps(each, allow_nan=False)


def test_only_of_late(kazoo: Any) -> None:
    write(kazoo, event(1))
    reader = history.HistoryReader()
    assert reader.read_all(kazoo, time.time() - 60) == [event(1)]
    assert reader.read_all(kazoo, time.time() + 60) == []


def test_large_events_do_not_end_the_connection(kazoo: Any) -> None:
    """The server closes the connection of a client that sends more than 1 MiB."""
    feed = Feed()
    writer = history.HistoryWriter(feed)
    for number in range(6):
        feed.note("node-step", node=str(number), step=secrets.token_hex(200_000))
    feed.note("node-step", node="too large", step=secrets.token_hex(1 << 20))
    feed.note("node-step", node="last", step="x")
    session = kazoo.client_id
    writer.flush(kazoo, elected=True, at_once=True)
    assert kazoo.client_id == session
    assert [found["node"] for found in history.HistoryReader().read_all(kazoo)] == [
        *"012345",
        "last",
    ]


def test_change_that_two_launchers_have_written_is_read_once(kazoo: Any) -> None:
    used = {
        "type": "node-changed",
        "node": "0000000001",
        "state": "in-use",
        "before": "ready",
        "zxid": 70,
    }
    again = {**used, "zxid": 90}  # the same change of state, later
    step = {"type": "node-step", "node": "0000000001", "step": "x", "time": 1001.0}
    write(
        kazoo, {**used, "time": 1000.0}, step, {**step, "time": 1001.5}, {**again, "time": 1002.0}
    )
    write(kazoo, {**used, "time": 1000.2}, {**again, "time": 1002.4})
    reader = history.HistoryReader()
    expected = [
        ("node-changed", 1000.0),
        ("node-step", 1001.0),
        ("node-step", 1001.5),
        ("node-changed", 1002.0),
    ]
    assert [
        (event["type"], event["time"]) for event in reader.read(kazoo, "node", "0000000001")
    ] == expected
    assert [(event["type"], event["time"]) for event in reader.read_all(kazoo)] == expected


def test_launchers_give_the_same_change_the_same_transaction(zk_chroot: Chroot) -> None:
    """Whether they have written the record themselves or have read it."""
    feeds, facades = [], []
    for _number in range(2):
        facade = ZooKeeper(zk_chroot.connect())
        assert facade.wait_synced(20)
        feeds.append(Feed())
        feeds[-1].attach(facade)
        feeds[-1].begin()
        facades.append(facade)
    node = Node()
    node.state, node.type, node.provider = "ready", ["a"], "p"
    facades[0].storeNode(node)
    # A mirror that reads the record only once has seen only its last state.
    wait_for(lambda: facades[1].node_tree.get(node.id), what="the other has read it")
    facades[0].lockNode(node, blocking=False)
    node.state = "in-use"
    facades[0].storeNode(node)

    def seen(feed: Feed) -> list[tuple[str, int]]:
        return [
            (event["type"], event["zxid"])
            for event in feed.since(0)[0]
            if event.get("node") == node.id
        ]

    wait_for(
        lambda: len(seen(feeds[0])) == len(seen(feeds[1])) == 2, what="both have seen both changes"
    )
    assert seen(feeds[0]) == seen(feeds[1])
