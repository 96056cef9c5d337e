"""Events, how they are announced, and how they are written."""

from __future__ import annotations

import contextlib
import itertools
import json
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.texts import killed
from nodepool.zk import history
from nodepool.zk.history import MOST_WAITING, HistoryReader, HistoryWriter, kills_of
from nodepool.zk.mirror.feed import (
    KEPT,
    KILLED,
    TYPES,
    Event,
    Feed,
    describe,
    matches,
    seconds_between,
)
from nodepool.zk.records import Node, NodeRequest


def node(state: str, request: str | None = None) -> Node:
    made = Node("0000000001")
    made.state, made.provider, made.pool, made.type, made.allocated_to = (
        state,
        "p",
        "main",
        ["a", "b"],
        request,
    )
    return made


def request(state: str, *declined_by: str) -> NodeRequest:
    made = NodeRequest("100-0000000001")
    made.state, made.node_types, made.requestor, made.declined_by = (
        state,
        ["a"],
        "zuul",
        list(declined_by),
    )
    return made


class Zk:
    def __init__(self) -> None:
        (
            self.node_tree,
            self.request_tree,
            self.image_tree,
            self.component_tree,
            self.report_tree,
        ) = (SimpleNamespace(listeners=[]) for _ in range(5))


@pytest.fixture
def zk() -> Zk:
    return Zk()


@pytest.fixture
def feed(zk: Zk) -> Feed:
    made = Feed(clock=lambda: 1000.0)
    made.attach(zk)
    return made


def test_what_is_there_at_first_is_no_news(zk: Zk, feed: Feed) -> None:
    zk.node_tree.listeners[0]("0000000001", None, node("ready"))
    assert feed.since(feed.number) == ([], True)


def test_reports_are_sent_to_subscribers(zk: Zk, feed: Feed) -> None:
    heard: list[Event] = []
    others: list[Event] = []
    feed.subscribe(heard.append, reports=True)
    feed.subscribe(others.append)
    zk.report_tree.listeners[0]()
    feed.begin()
    zk.report_tree.listeners[0]()
    zk.image_tree.listeners[0]("debian")
    assert [event["type"] for event in heard] == ["report-changed", "image-changed"]
    assert [event["type"] for event in others] == ["image-changed"]
    assert [event["type"] for event in feed.since(0)[0]] == ["image-changed"], "nobody keeps it"
    feed.unsubscribe(heard.append)
    zk.report_tree.listeners[0]()
    assert len(heard) == 2


def test_events_of_a_node_and_a_request(zk: Zk, feed: Feed) -> None:
    feed.begin()
    heard: list[Event] = []
    feed.subscribe(heard.append)
    changed, asked = zk.node_tree.listeners[0], zk.request_tree.listeners[0]
    asked("100-0000000001", None, request("requested"))
    changed("0000000001", None, node("building", "100-0000000001"))
    changed("0000000001", node("building", "r"), node("ready", "r"))
    changed("0000000001", node("ready", "r"), node("ready"))
    asked("100-0000000001", request("requested"), request("requested", "l1"))
    asked("100-0000000001", request("requested", "l1"), request("failed", "l1"))
    asked("100-0000000001", request("failed"), None)
    changed("0000000001", node("deleting"), None)
    zk.image_tree.listeners[0]("debian")
    zk.component_tree.listeners[0]("/nodepool/components/pool/host0001", True)
    feed.note("launch-failed", node="0000000001", attempt=1, reason="no\nroom")
    assert [event["type"] for event in heard] == [
        "request-submitted",
        "node-created",
        "node-changed",
        "node-allocated",
        "request-declined",
        "request-changed",
        "request-removed",
        "node-removed",
        "image-changed",
        "component-changed",
        "launch-failed",
    ]
    for drains, text in ((["label a", "host b"], "label a, host b"), ([], "none")):
        feed.note("drain-changed", drains=drains)
        assert describe(heard.pop()) == f"drains: now {text}"
    assert {event["type"] for event in heard} <= TYPES.keys()
    first = heard[0]["number"]
    assert [event["number"] for event in heard] == list(range(first, first + 11))
    for event in heard:
        text = describe(event)
        assert "\n" not in text and "None" not in text, text
    assert describe(heard[3]) == "node 0000000001: deallocated from request r"
    assert describe(heard[10]) == "node 0000000001: launch attempt 1 failed: no room"


def test_end_of_a_launch_and_a_wait_has_its_seconds(zk: Zk, feed: Feed) -> None:
    feed.begin()
    old, ready, asked, done = (
        node("building"),
        node("ready"),
        request("pending"),
        request("fulfilled"),
    )
    ready.created_time, ready.state_time, done.created_time, done.state_time = (
        10.0,
        14.0,
        10.0,
        12.5,
    )
    zk.node_tree.listeners[0]("0000000001", old, ready)
    zk.node_tree.listeners[0]("0000000001", ready, node("in-use"))
    zk.request_tree.listeners[0]("100-0000000001", asked, done)
    assert [event.get("seconds") for event in feed.since(0)[0]] == [4.0, None, 2.5]


@pytest.mark.parametrize("begin", [20.0, None, "x", -1e12, float("nan"), 10**400, -(10**400)])
def test_wrong_clocks_give_no_seconds(begin: object) -> None:
    assert seconds_between(begin, 14.0) is None


def test_an_unchanged_record_is_no_event(zk: Zk, feed: Feed) -> None:
    feed.begin()
    before = feed.number
    zk.node_tree.listeners[0]("0000000001", node("ready"), node("ready"))
    assert feed.number == before


def test_what_is_not_kept_any_more(feed: Feed) -> None:
    before = feed.number
    for _ in range(KEPT + 10):
        feed.note("node-step", node="1")
    found, complete = feed.since(before + 5)
    assert len(found) == KEPT and not complete
    assert feed.since(before + KEPT) == (found[-10:], True)
    assert feed.since(before + KEPT + 10) == ([], True)
    assert feed.since(before + KEPT + 11) == (found, False), "the number is that of another process"


def test_number_of_an_earlier_process_returns_all_events_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = 1796072369 * 10**9
    monkeypatch.setattr("nodepool.zk.mirror.feed.time.time_ns", lambda: started)
    earlier = Feed()
    for _ in range(3):
        earlier.note("node-step", node="1")
    monkeypatch.setattr("nodepool.zk.mirror.feed.time.time_ns", lambda: started + 10**9)
    later = Feed()
    for _ in range(5):
        later.note("node-step", node="2")
    found, complete = later.since(earlier.number)
    assert len(found) == 5 and not complete


def test_a_listener_that_raises_harms_no_other(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def bad(event: Event) -> None:
        raise ValueError

    feed.subscribe(bad)
    feed.subscribe(heard.append)
    feed.note("node-step")
    assert len(heard) == 1 and "A listener failed" in caplog.text
    feed.unsubscribe(heard.append)
    feed.note("node-step")
    assert len(heard) == 1


def test_event_matches_by_field_values() -> None:
    event = {"type": "node-changed", "labels": ["a", "b"], "node": "1"}
    assert matches(event, {}) and matches(event, {"labels": ["b", "c"], "node": ["1"]})
    assert not matches(event, {"labels": ["c"]}) and not matches(event, {"request": ["1"]})


class Kazoo:
    """Writes and reads in memory."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def _now(self, value: Any) -> Any:
        return SimpleNamespace(get=lambda timeout: value)

    def create_async(self, path: str, data: bytes, **options: Any) -> Any:
        name = f"{len(self.written):010}"
        self.written[name] = data
        return self._now(path + name)

    def get_children_async(self, path: str) -> Any:
        return self._now(list(self.written))

    def get_async(self, path: str) -> Any:
        return self._now((self.written[path.rpartition("/")[2]], SimpleNamespace(ctime=2e15)))

    def exists_async(self, path: str) -> Any:
        return self._now(SimpleNamespace(ctime=2e15, dataLength=0))


def test_history_is_written_together(zk: Zk, feed: Feed) -> None:
    now = [0.0]
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed, lambda: now[0])
    feed.begin()
    zk.node_tree.listeners[0]("0000000001", None, node("building"))
    feed.note("node-step", node="0000000001", step="x")
    zk.image_tree.listeners[0]("debian")
    writer.flush(kazoo, True)
    assert kazoo.written == {}  # not yet
    now[0] = 31.0
    writer.flush(kazoo, True)
    writer.flush(kazoo, True)
    assert len(kazoo.written) == 1
    found = HistoryReader().read(kazoo, "node", "0000000001")
    assert [event["type"] for event in found] == ["node-created", "node-step"]
    assert all("number" not in event and "noted" not in event for event in found)


def test_each_writes_its_own_and_one_writes_what_all_see(zk: Zk, feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    feed.begin()
    zk.node_tree.listeners[0]("0000000001", None, node("building"))
    feed.note("node-step", node="0000000001", step="x")
    writer.flush(kazoo, False, at_once=True)
    assert [event["type"] for event in HistoryReader().read_all(kazoo)] == ["node-step"]
    zk.node_tree.listeners[0]("0000000001", node("building"), None)
    writer.flush(kazoo, False, at_once=True)
    assert len(kazoo.written) == 1  # nothing new: no write


def test_without_zookeeper_memory_is_bounded(feed: Feed) -> None:
    writer = HistoryWriter(feed)
    for _ in range(MOST_WAITING + 10):
        feed.note("node-step")
    kazoo: Any = Kazoo()
    writer.flush(kazoo, True)
    assert 0 < len(HistoryReader().read_all(kazoo)) <= MOST_WAITING


@pytest.mark.parametrize(
    "data",
    [b"", b"x", zlib.compress(b"[]\n5\n{}\n{\n"), zlib.compress(b'{"type": 5, "time": "x"}')],
)
def test_damaged_history_is_skipped(data: bytes) -> None:
    kazoo: Any = Kazoo()
    kazoo.written["0000000000"] = data
    assert HistoryReader().read_all(kazoo) == []


def test_history_holds_little_per_node(zk: Zk, feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    feed.begin()
    changed, asked = zk.node_tree.listeners[0], zk.request_tree.listeners[0]
    for number in range(100):
        request_id, node_id = f"200-{number:010}", f"{number:010}"
        asked(request_id, None, request("requested"))
        for before, after in (("requested", "pending"), ("pending", "fulfilled")):
            asked(request_id, request(before), request(after))
        states = ["building", "ready", "in-use", "used", "deleting"]
        changed(node_id, None, node("building", request_id))
        for step in range(3):
            feed.note(
                "node-step",
                node=node_id,
                request=request_id,
                provider="p",
                pool="main",
                step=f"step {step}",
            )
        for before, after in itertools.pairwise(states):
            changed(node_id, node(before, request_id), node(after, request_id))
        changed(node_id, node("deleting"), None)
        asked(request_id, request("fulfilled"), None)
    writer.flush(kazoo, True, at_once=True)
    assert sum(map(len, kazoo.written.values())) / 100 < 1000


@pytest.mark.spec("issue 49: events survive a write that failed; sources confirm what is stored")
def test_events_wait_for_a_write_that_succeeds(feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    create = kazoo.create_async

    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionLoss

    feed.note("node-usage", node="1")
    kazoo.create_async = fail
    with pytest.raises(ConnectionLoss):
        writer.flush(kazoo, False, at_once=True)
    assert feed.stored == feed.number - 1
    feed.note("node-usage", node="2")
    kazoo.create_async = create
    writer.flush(kazoo, False, at_once=True)
    assert [event["node"] for event in HistoryReader().read_all(kazoo)] == ["1", "2"]
    assert feed.stored == feed.number


def test_kill_is_written_immediately(feed: Feed) -> None:
    now = [100.0]
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed, lambda: now[0])
    feed.note("node-step", node="1")
    writer.flush(kazoo, False)
    assert kazoo.written == {}
    feed.note(KILLED, node="1", pid=7, program="cc1plus", memory_limit=2 << 30)
    writer.flush(kazoo, False)
    [_step, kill] = HistoryReader().read_all(kazoo)
    assert describe(kill) == (
        "node 1: process 7 (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
    )


def test_reader_of_kills_reads_and_keeps_nothing_else(feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer, reader = HistoryWriter(feed), HistoryReader(KILLED)
    feed.note(KILLED, node="1", pid=6)
    writer.flush(kazoo, False, at_once=True)
    reader.skip(kazoo)
    feed.note("node-step", node="1", step="x" * 1000)
    writer.flush(kazoo, False, at_once=True)
    feed.note("console-log", node="1", tail=f'the job said "{KILLED}"')
    feed.note("action", node="1", target=KILLED)
    feed.note(KILLED, node="1", pid=7)
    feed.note(KILLED, node="2", pid=8)
    for wrong in (float("nan"), -1.0, 1e300):
        feed.note(KILLED, node="1", pid=9, time=wrong)
    writer.flush(kazoo, False, at_once=True)
    feed.note(KILLED, node="1", pid=10)
    recent = feed.since(0)[0][2:]
    assert [kill["pid"] for kill in kills_of(reader, kazoo, {("1", None)})] == [7]
    assert [kill["pid"] for kill in kills_of(reader, kazoo, {("1", None)}, recent)] == [7, 10]
    assert sum(len(data) for _written, data in reader._segments.values()) < 500
    kills = kills_of(HistoryReader(KILLED), kazoo, {("1", None), ("2", None)})
    assert [kill["pid"] for kill in kills] == [6, 7, 8]


@pytest.mark.parametrize(
    ("limit", "text"),
    [(2 << 30, "2 GiB"), (1536 << 20, "1536 MiB"), (128 << 20, "128 MiB"), (None, "? MiB")],
)
def test_limit_of_a_kill_has_a_unit(limit: int | None, text: str) -> None:
    assert killed({"pid": 7, "program": "a\nb\x1b[2J", "memory_limit": limit}) == (
        f"process 7 (a b\\x1b[2J) was killed: the node's memory limit of {text} was reached"
    )


def test_usage_in_words() -> None:
    usage = {"type": "node-usage", "node": "7", "cpu_usec": 1_500_000, "seconds": 10.5}
    text = "node 7: used 1.5 s of CPU in 10.5 s, at most ? of ? MiB memory and ? MiB disk"
    assert describe(usage | {"time": 1.0}) == f"{text} (incomplete)"
    networked = usage | {"time": 1.0, "net_tx_bytes": 5 << 20, "net_rx_bytes": 7 << 20}
    assert describe(networked) == f"{text}, sent 5 and received 7 MiB (incomplete)"


def test_what_was_written_is_not_written_again(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LARGEST_WRITE", 200)
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    create, calls = kazoo.create_async, itertools.count(1)

    def fail_now_and_then(*arguments: Any, **options: Any) -> Any:
        if next(calls) % 3 == 0:
            raise ConnectionLoss
        return create(*arguments, **options)

    for number in range(20):
        feed.note("node-step", node=str(number))
    kazoo.create_async = fail_now_and_then
    for _ in range(20):
        with contextlib.suppress(ConnectionLoss):
            writer.flush(kazoo, False, at_once=True)
    lines = [line for data in kazoo.written.values() for line in zlib.decompress(data).split(b"\n")]
    assert [json.loads(line)["node"] for line in lines] == [str(number) for number in range(20)]


def test_events_that_are_not_written_count_as_stored(feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    feed.note("node-step", node="1")
    feed.note("drain-changed", drains=[])
    writer.flush(kazoo, False, at_once=True)
    assert feed.stored == feed.number
    feed.note("drain-changed", drains=[])
    writer.flush(kazoo, False)
    assert feed.stored == feed.number


def test_event_of_another_thread_that_comes_late_does_not_count_as_stored(feed: Feed) -> None:
    kazoo: Any = Kazoo()
    writer = HistoryWriter(feed)
    feed.unsubscribe(writer._note_event)
    for _ in range(2):
        feed.note("node-usage", node="1")
    first, second = feed.since(0)[0]
    writer._note_event(second)
    writer.flush(kazoo, False, at_once=True)
    writer._note_event(first)  # its thread had only got the number
    assert feed.stored == feed.number - 2
    writer.flush(kazoo, False, at_once=True)
    assert feed.stored == feed.number
