"""min-ready nodes (LAU-14)."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from kazoo.protocol.serialization import Create

from nodepool.zk.writer import Txn, Writer
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider


@pytest.mark.spec("LAU-21.26")
def test_min_ready_nodes(bench: LauncherBench) -> None:
    pool = bench.start(
        config(
            provider(pool={"node-attributes": {"key1": "value1"}}),
            labels={"fake-label": {"min-ready": 2}},
        )
    )
    nodes = bench.wait_nodes(2, state="ready", allocated_to=None)
    for node in nodes:
        assert (node.provider, node.pool, node.type) == ("fake-provider", "main", ["fake-label"])
        assert (node.username, node.host_keys) == ("zuul", ["ssh-rsa FAKEKEY"])
        assert node.attributes == {"key1": "value1"}
        assert node.requestor == "NodePool:min-ready"
        assert node.tenant_name is None
    wait_for(lambda: not bench.zk.getNodeRequests())
    assert set(bench.zk.getReadyNodesOfTypes(["fake-label"])) == {"fake-label"}
    # One is taken: replaced immediately.
    request_id, _nodes = bench.fulfilled("fake-label")
    assert bench.zuul.request(request_id)["nodes"][0] in {n.id for n in nodes}
    bench.wait_nodes(2, state="ready", allocated_to=None)
    wait_for(lambda: not pool.zk.request_tree.min_ready)


def test_many_missing_nodes_are_requested_a_few_at_a_time(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a session is one message with all that the session owns."""
    monkeypatch.setattr("nodepool.launcher.requests.minready.MOST", 2)
    created: list[int] = []
    run = Writer.run

    def counted(writer: Writer, txn: Txn, *args: Any) -> Any:
        created.append(
            sum(isinstance(op, Create) and "/requests/900-" in op.path for op in txn.operations)
        )
        return run(writer, txn, *args)

    monkeypatch.setattr(Writer, "run", counted)
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 5}}))
    bench.wait_nodes(5, state="ready", allocated_to=None)
    assert max(created) == 2 and sum(created) == 5


@pytest.mark.spec("ZK-5: our own requests carry what Zuul indexes; LAU-14")
def test_the_request_of_a_min_ready_node(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(), labels={"fake-label": {}}))
    bench.cloud("fake-provider").pause_creates = True
    bench.config(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    request_id = wait_for(bench.zk.getNodeRequests)[0]
    assert request_id.startswith("900-")
    record = wait_for(lambda: bench.zuul.request(request_id))
    assert {
        "state",
        "state_time",
        "event_id",
        "requestor_data",
        "requestor",
        "node_types",
        "provider",
    } <= set(record)
    assert (record["requestor"], record["reuse"], record["node_types"]) == (
        "NodePool:min-ready",
        False,
        ["fake-label"],
    )
    assert len(record["event_id"]) == 32
    stat = bench.zuul.client.exists(f"/nodepool/requests/{request_id}")
    assert stat.ephemeralOwner == pool.zk.client.session_id


@pytest.mark.spec("LAU-21.35")
@pytest.mark.parametrize("amount", [0, -1])
def test_a_disabled_label(bench: LauncherBench, amount: int) -> None:
    bench.start(
        config(
            provider(labels=["fake-label", "wanted"]),
            labels={"fake-label": {"min-ready": amount}, "wanted": {"min-ready": 1}},
        )
    )
    bench.wait_nodes(1, state="ready", type=["wanted"], allocated_to=None)
    wait_for(lambda: not bench.zk.getNodeRequests())
    assert len(bench.zk.getNodes()) == 1


@pytest.mark.spec("LAU-21.30; LAU-14, issue: two launchers keep exactly N")
def test_two_launchers_keep_exactly_n(bench: LauncherBench) -> None:
    labels = {"fake-label": {"min-ready": 3}, "other": {"min-ready": 1}}
    content = config(provider(labels=["fake-label", "other"]), labels=labels)
    first, second = bench.make(content, name="a.yaml"), bench.make(content, name="b.yaml")
    first.start()
    second.start()
    bench.wait_ready(first)
    bench.wait_ready(second)
    bench.wait_nodes(3, state="ready", allocated_to=None, type=["fake-label"])
    bench.wait_nodes(1, state="ready", allocated_to=None, type=["other"])
    wait_for(lambda: not bench.zk.getNodeRequests())
    assert len(bench.zk.getNodes()) == 4
    request_id, _nodes = bench.fulfilled("fake-label", "fake-label")
    bench.wait_nodes(3, state="ready", allocated_to=None, type=["fake-label"])
    bench.use_up(request_id)
    wait_for(lambda: not bench.zk.getNodeRequests())
    assert len(bench.zk.getNodes()) == 4


@pytest.mark.spec(
    "LAU-14: only when an image is there; follows raised numbers; failed ones are tried again"
)
def test_min_ready_waits_for_an_image(bench: LauncherBench) -> None:
    dib = {
        "diskimages": [{"name": "img", "elements": ["x"]}],
        "elements-dir": ".",
        "images-dir": str(bench.tmp),
    }
    fake = provider(
        diskimages=[{"name": "img"}],
        pools=[
            {"name": "main", "labels": [{"name": "fake-label", "diskimage": "img", "min-ram": 1}]}
        ],
    )
    bench.start(config(fake, labels={"fake-label": {"min-ready": 1}}, **dib))
    assert not bench.zk.getNodeRequests()
    bench.store_image("img", "fake-provider")
    bench.wait_nodes(1, state="ready", allocated_to=None)
    bench.adapter("fake-provider").createServer_fails = 3
    bench.config(config(fake, labels={"fake-label": {"min-ready": 2}}, **dib))
    wait_for(lambda: bench.adapter("fake-provider").createServer_fails == 0)
    bench.wait_nodes(2, state="ready", allocated_to=None)


@pytest.mark.spec("LAU-14: min-ready in no pool or in a missing provider is tolerated")
def test_min_ready_without_a_pool(bench: LauncherBench) -> None:
    bench.start(
        config(provider(), labels={"orphan": {"min-ready": 1}, "fake-label": {"min-ready": 1}})
    )
    bench.wait_nodes(1, state="ready", allocated_to=None)
    bench.zk.deleteRawNode(bench.zk.getNodes()[0])
    bench.wait_nodes(1, state="ready", allocated_to=None)
    assert not [r for r in bench.zk.nodeRequestIterator(cached=False) if r.node_types == ["orphan"]]


@pytest.mark.spec("issue 11: a cloud that does not answer holds up no other's min-ready nodes")
def test_a_slow_cloud_alongside_others(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.statemachine import StateMachineProvider

    ready, go_on = StateMachineProvider.labelReady, threading.Event()

    def slow(manager: Any, label: Any) -> Any:
        if manager.provider.name == "fake-p1":
            assert go_on.wait(60)
        return ready(manager, label)

    monkeypatch.setattr(StateMachineProvider, "labelReady", slow)
    try:
        bench.start(
            config(
                provider("fake-p1", labels=["a"]),
                provider("fake-p2", labels=["b"]),
                labels={name: {"min-ready": 1} for name in ("a", "b")},
            )
        )
        wait_for(lambda: [node.type for node in bench.nodes(state="ready")] == [["b"]])
    finally:
        go_on.set()
    wait_for(lambda: sorted(node.type for node in bench.nodes(state="ready")) == [["a"], ["b"]])


def test_driver_that_exits_while_it_checks_a_label_holds_up_no_other(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nodepool.driver.statemachine import StateMachineProvider

    ready = StateMachineProvider.labelReady
    monkeypatch.setattr(
        StateMachineProvider,
        "labelReady",
        lambda manager, label: (
            sys.exit("no license") if manager.provider.name == "fake-p1" else ready(manager, label)
        ),
    )
    content = config(
        provider("fake-p1", labels=["a"]),
        provider("fake-p2", labels=["b"]),
        labels={name: {"min-ready": 1} for name in ("a", "b")},
    )
    bench.start(content)
    wait_for(lambda: [node.type for node in bench.nodes(state="ready")] == [["b"]])
    wait_for(lambda: "Cannot check whether provider fake-p1 can serve label a" in caplog.text)


def test_node_that_nobody_frees_does_not_count_as_arriving(bench: LauncherBench) -> None:
    left = bench.ready_node(
        "unconfigured",
        "main",
        "fake-label",
        allocated_to="100-0000009999",
        requestor="NodePool:min-ready",
    )
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    bench.wait_nodes(1, provider="fake-provider", state="ready", allocated_to=None)
    assert bench.node(left.id).allocated_to == "100-0000009999"
