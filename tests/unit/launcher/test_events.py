"""Which parts of the launcher each change in ZooKeeper wakes, and which it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from kazoo.protocol.states import KazooState

from nodepool.launcher.events import LauncherEvents
from nodepool.metrics import Metrics
from nodepool.reasons import Code
from nodepool.zk import records
from nodepool.zk.drains import Drain
from nodepool.zk.mirror.feed import Feed
from nodepool.zk.mirror.requests import MIN_READY


def tree(**more: Any) -> Any:
    return SimpleNamespace(listeners=[], lock_listeners=[], sync_listeners=[], **more)


def tell(listeners: list[Callable[..., Any]], *args: object) -> None:
    for listener in listeners:
        listener(*args)


class Parts:
    """The parts of a launcher: every call of them is noted as ``part.method``, with its
    arguments if it has some.
    """

    def __init__(self) -> None:
        self.launcher = part = Mock()
        self.nodes: dict[str, records.Node] = {}
        self.contenders: dict[str, set[str]] = {}
        self.node_tree = tree(
            contenders=self.contenders,
            get=self.nodes.get,
            by_request={"200-1": {"0000000007"}},
            synced=threading.Event(),
        )
        self.node_tree.synced.set()
        self.request_tree, self.image_tree, self.component_tree = (
            tree(),
            tree(),
            tree(offers_version=0),
        )
        self.drains: list[Drain] = []
        self.note_tree = tree(of=lambda _kind: self.drains)
        trees = [self.node_tree, self.request_tree, self.image_tree, self.component_tree]
        self.zk = tree(
            report_tree=tree(),
            node_tree=self.node_tree,
            request_tree=self.request_tree,
            image_tree=self.image_tree,
            component_tree=self.component_tree,
            note_tree=self.note_tree,
            trees=trees,
            client=SimpleNamespace(state_listeners=[]),
            synced=True,
        )
        self.handler: Any = None
        config = SimpleNamespace(
            labels={"kept": SimpleNamespace(min_ready=1), "other": SimpleNamespace(min_ready=0)}
        )
        state: Any = SimpleNamespace(
            zk=self.zk,
            config=config,
            workers={"p-main": part.worker},
            getPoolWorkers=lambda _provider: [part.worker],
            handlers=SimpleNamespace(get=lambda _id: self.handler),
            declines=part.declines,
            launch_failures=part.launch_failures,
        )
        part.worker.pool_name = "main"
        LauncherEvents(
            state,
            part.assignment,
            part.nodes,
            part.probes,
            part.min_ready,
            part.cleanup,
            part.statistics,
            part.feed,
            part.verification,
        ).attach(self.zk)
        self.woken()

    def node_changed(self, old: records.Node | None, new: records.Node | None) -> set[str]:
        tell(self.node_tree.listeners, "0000000001", old, new)
        return self.woken()

    def node_lock_changed(self, locked: bool) -> set[str]:
        tell(self.node_tree.lock_listeners, "0000000001", locked)
        return self.woken()

    def request_changed(
        self, request_id: str, old: records.NodeRequest | None, new: records.NodeRequest | None
    ) -> set[str]:
        tell(self.request_tree.listeners, request_id, old, new)
        return self.woken()

    def state_changed(self, state: str) -> set[str]:
        tell(self.zk.client.state_listeners, state)
        return self.woken()

    def woken(self) -> set[str]:
        """What was called since this was asked last, but for those that are notified of every
        change.
        """
        calls = {str(call).removeprefix("call.") for call in self.launcher.mock_calls}
        self.launcher.reset_mock()
        return {
            call
            for call in calls
            if not call.startswith(
                ("statistics.wake", "declines.", "feed.attach", "probes.node_changed")
            )
        }


@pytest.fixture
def parts() -> Parts:
    return Parts()


def node(state: str = records.READY, label: str = "other", **values: Any) -> records.Node:
    made = records.Node("0000000001")
    made.state, made.type, made.provider, made.pool = state, [label], "p", "main"
    for name, value in values.items():
        setattr(made, name, value)
    return made


def request(state: str = records.REQUESTED, **values: Any) -> records.NodeRequest:
    made = records.NodeRequest("200-1")
    made.state = state
    for name, value in values.items():
        setattr(made, name, value)
    return made


EVERYTHING = {
    "feed.begin()",
    "launch_failures.flush()",
    "assignment.rebuild()",
    "nodes.check_all()",
    "probes.check_all()",
    "verification.wake()",
    "cleanup.wake()",
    "min_ready.wake()",
}
CAPACITY = {"worker.capacity_changed()", "assignment.wake()"}
EVERYTHING |= CAPACITY


def test_complete_mirror_has_everything_looked_at(parts: Parts) -> None:
    tell(parts.request_tree.sync_listeners)
    assert parts.woken() == EVERYTHING


def test_mirror_of_which_one_tree_is_not_read_yet_wakes_nobody(parts: Parts) -> None:
    parts.zk.synced = False
    tell(parts.request_tree.sync_listeners)
    assert parts.woken() == set()


def test_lost_session_is_reported_to_all_that_hold_something(parts: Parts) -> None:
    assert parts.state_changed(KazooState.LOST) == {
        "worker.session_lost()",
        "statistics.session_lost()",
    }
    assert parts.state_changed(KazooState.CONNECTED) == {
        "assignment.session_lost()",
        "cleanup.wake()",
    }
    assert parts.state_changed(KazooState.CONNECTED) == {"cleanup.wake()"}, (
        "that session was not lost"
    )


def test_changed_notes_have_requests_looked_at_whose_launches_fail(parts: Parts) -> None:
    tell(parts.note_tree.listeners)
    assert parts.woken() == {
        f"launch_failures.changed({parts.note_tree!r})",
        "assignment.recheck(<Code.LAUNCHES_FAIL: 'launches of {labels} keep failing: {error}'>)",
    }


def test_changed_drains_have_everything_checked(parts: Parts) -> None:
    parts.drains = [Drain("label", "a", 1.0)]
    tell(parts.note_tree.listeners)
    assert {
        "assignment.wake()",
        "min_ready.wake()",
        "cleanup.drains_changed()",
        "nodes.check_all()",
        "feed.note('drain-changed', drains=['label a'])",
    } <= parts.woken()
    tell(parts.note_tree.listeners)
    assert "nodes.check_all()" not in parts.woken(), "the drains are the same"


@pytest.mark.parametrize("gone", [True, False])
def test_change_of_a_pool(parts: Parts, gone: bool) -> None:
    cleanup = {"cleanup.wake()"} if gone else set()
    tell(parts.component_tree.listeners, "/p", gone)
    assert parts.woken() == {"assignment.wake(recheck=True)", *cleanup}
    tell(parts.component_tree.listeners, "/p", gone)
    assert parts.woken() == {"assignment.wake(recheck=False)", *cleanup}, (
        "what it offers is the same"
    )


def test_change_of_an_image(parts: Parts) -> None:
    tell(parts.image_tree.listeners, "debian")
    woken = {"assignment.wake(recheck=True)", "min_ready.wake()", "verification.wake()"}
    assert parts.woken() == woken


LOOK = "nodes.check_soon('0000000001')"
NODE_CHANGES: dict[str, tuple[Any, Any, set[str]]] = {
    "gone": (node(), None, CAPACITY),
    "of a label that is kept ready gone": (
        node(label="kept"),
        None,
        {*CAPACITY, "min_ready.wake()"},
    ),
    "nothing before, nothing now": (None, None, set()),
    "free": (node(records.BUILDING), node(), {LOOK, *CAPACITY}),
    "ready and allocated": (
        node(records.BUILDING, allocated_to="200-1"),
        node(allocated_to="200-1"),
        {LOOK},
    ),
    "used": (node(records.IN_USE), node(records.USED), {LOOK}),
    "in use": (node(), node(records.IN_USE), set()),
    "in use, of a label that is kept ready": (
        node(label="kept"),
        node(records.IN_USE, "kept"),
        {"min_ready.wake()"},
    ),
    "allocated, of a label that is kept ready": (
        node(records.IN_USE, "kept"),
        node(records.IN_USE, "kept", allocated_to="200-1"),
        {"min_ready.wake()"},
    ),
    "of a label that is kept ready, with a comment": (
        node(records.IN_USE, "kept"),
        node(records.IN_USE, "kept"),
        set(),
    ),
    "of other size": (
        node(records.IN_USE, resources={"cores": 1}),
        node(records.IN_USE, resources={"cores": 2}),
        CAPACITY,
    ),
    "of another tenant": (
        node(records.IN_USE, tenant_name="a"),
        node(records.IN_USE, tenant_name="b"),
        {f"assignment.recheck({Code.TENANT_LIMIT!r}, tenant='a')"},
    ),
}


@pytest.mark.parametrize("change", NODE_CHANGES)
def test_change_of_a_node(parts: Parts, change: str) -> None:
    old, new, woken = NODE_CHANGES[change]
    if new is not None and new.state == records.IN_USE:
        parts.contenders["0000000001"] = {"x"}
    assert parts.node_changed(old, new) == woken


@pytest.mark.parametrize("change", NODE_CHANGES)
def test_nodes_that_a_mirror_reads_first_wake_nobody_before_it_is_complete(
    parts: Parts, change: str
) -> None:
    old, new, _woken = NODE_CHANGES[change]
    parts.node_tree.synced.clear()
    if new is not None:
        assert parts.node_changed(old, new) == set()


def test_locked_node_is_not_looked_at_when_it_changes(parts: Parts) -> None:
    parts.contenders["0000000001"] = {"x"}
    assert parts.node_changed(node(records.BUILDING), node()) == set()


def test_end_of_a_node_in_a_slot_has_its_backing_node_probed(parts: Parts) -> None:
    old = node(driver_data={"backing_node": "0000000009", "slot": 0})
    tell(parts.node_tree.listeners, "0000000001", old, None)
    found = parts.launcher.probes.node_changed.mock_calls
    assert found == [call("0000000001", False), call("0000000009", True)]


#: What the user of a backing node stores on it.
BACKING = '{"owner": "NodePool:metastatic:m", "label": "l", "slots": 2}'


@pytest.mark.parametrize(
    ("new", "locked", "free"),
    [
        (node(), False, True),
        (node(), True, False),
        (node(allocated_to="200-1"), False, False),
        (node(records.IN_USE), False, False),
        (None, False, False),
        (node(records.IN_USE, user_data=BACKING), True, True),
        (node(records.IN_USE, user_data='{"owner": "zuul"}'), False, False),
    ],
)
def test_probes_of_a_node_follow_whether_it_is_free(
    parts: Parts, new: records.Node | None, locked: bool, free: bool
) -> None:
    if locked:
        parts.contenders["0000000001"] = {"x"}
    tell(parts.node_tree.listeners, "0000000001", node(records.BUILDING), new)
    assert parts.launcher.probes.node_changed.mock_calls == [call("0000000001", free)]


@pytest.mark.parametrize(
    "state, blocking, woken",
    [
        (records.READY, True, True),
        (records.FAILED, True, True),
        (records.ABORTED, True, True),
        (records.READY, False, False),
        (records.BUILDING, True, False),
    ],
)
def test_handler_of_a_driver_that_blocks_continues_when_its_node_has_reached_an_end(
    parts: Parts, state: str, blocking: bool, woken: bool
) -> None:
    parts.handler = SimpleNamespace(BLOCKING=blocking, pw=parts.launcher.worker)
    parts.node_tree.synced.clear()  # it waits for this node also then
    told = parts.node_changed(node("init", allocated_to="200-1"), node(state, allocated_to="200-1"))
    assert any(call.startswith("worker.progress(") for call in told) == woken


@pytest.mark.parametrize(
    "state, woken",
    [
        (records.READY, {LOOK, *CAPACITY, "probes.check_soon('0000000001')"}),
        (records.IN_USE, {LOOK}),
    ],
)
def test_node_that_is_unlocked(parts: Parts, state: str, woken: set[str]) -> None:
    parts.nodes["0000000001"] = node(state)
    assert parts.node_lock_changed(True) == set()
    assert parts.node_lock_changed(False) == woken


def test_free_node_of_an_unknown_pool_has_requests_looked_at(parts: Parts) -> None:
    assert parts.node_changed(node(records.BUILDING, pool="another"), node(pool="another")) == {
        LOOK,
        "assignment.wake()",
    }


def test_new_request_is_only_reported_to_the_assignment(parts: Parts) -> None:
    new = request()
    assert parts.request_changed("200-1", None, new) == {
        f"assignment.request_changed('200-1', {new!r})"
    }


def test_request_that_somebody_has_accepted_is_watched_once(parts: Parts) -> None:
    new = request(records.PENDING)
    told = f"assignment.request_changed('200-1', {new!r})"
    assert parts.request_changed("200-1", request(), new) == {
        told,
        "cleanup.lost.watch_lock('200-1')",
    }
    assert parts.request_changed("200-1", new, new) == {told}


def test_nodes_of_a_deleted_request_are_checked_and_its_handler_continues(parts: Parts) -> None:
    parts.handler = SimpleNamespace(pw=parts.launcher.worker)
    woken = parts.request_changed("200-1", request(), None)
    assert {"assignment.request_changed('200-1', None)", "nodes.check_soon('0000000007')"} < woken
    assert any(call.startswith("worker.progress(") for call in woken) and len(woken) == 3


@pytest.mark.parametrize("gone", [True, False])
def test_min_ready_is_notified_of_changes_of_its_requests(parts: Parts, gone: bool) -> None:
    made = request(requestor=MIN_READY)
    assert "min_ready.wake()" in parts.request_changed("100-1", made, None if gone else made)


def test_statistics_are_computed_again_after_each_change(parts: Parts) -> None:
    tell(parts.node_tree.listeners, "0000000001", None, node())
    assert parts.launcher.statistics.wake.called
    parts.launcher.reset_mock()
    tell(parts.request_tree.listeners, "200-1", None, request())
    assert parts.launcher.statistics.wake.called


@pytest.mark.spec("issue 49, 7: metrics of usage by label and provider")
def test_usage_of_ended_nodes_is_counted_once_by_label_and_provider(parts: Parts) -> None:
    feed, statsd = Feed(), Metrics()
    feed.begin()
    state: Any = Mock(zk=parts.zk, statsd=statsd, config=None)
    state.getPoolWorkers.return_value = []
    LauncherEvents(state, *[Mock()] * 6, feed, Mock()).attach(parts.zk)
    values = {"cpu_usec": 2_500_000, "memory_peak": 80, "memory_limit": 100, "oom_kills": 3}
    parts.nodes["1"] = node(label="small", provider="metal")
    parts.nodes["4"] = node(label="foreign", provider="cloud")
    feed.note("node-usage", node="1", provider="metal", **values)
    feed.note("node-usage", node="1", provider="metal", **values)  # not confirmed: comes again
    tell(parts.node_tree.listeners, "2", node(label="large", id="2", provider="metal"), None)
    feed.note("node-usage", node="2", provider="metal", memory_peak=110, memory_limit=100)
    feed.note("node-usage", node="3", provider="metal", cpu_usec="x", memory_peak=None)
    feed.note("node-usage", node="4", provider="metal", cpu_usec=1_000_000)  # of another provider
    found = {name: value for name, value in statsd.snapshot().counters.items() if value}
    assert found == {
        "nodepool.label.small.provider.metal.cpu_seconds": 2.5,
        "nodepool.label.small.provider.metal.memory_kills": 3,
        "nodepool.label.small.provider.metal.memory_peak.0.9": 1,
        "nodepool.label.large.provider.metal.memory_peak.1": 1,
        "nodepool.label.unknown.provider.metal.cpu_seconds": 1.0,
    }
