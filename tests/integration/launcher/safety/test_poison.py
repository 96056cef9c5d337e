"""Poison is contained: a record, callback, listener or error that nobody foresaw concerns
nothing but itself.
"""

from __future__ import annotations

import datetime
import json
import threading
from typing import Any

import pytest
from kazoo.protocol.serialization import GetData

from nodepool.cmd import nodepoolcmd
from nodepool.reasons import render
from nodepool.zk import paths
from nodepool.zk.connection.reply import Reply
from nodepool.zk.writer import Txn
from tests.conftest import Chroot, wait_for
from tests.integration.launcher.safety.test_problems import listed
from tests.integration.zk.test_mirror import make_node
from tests.support.launcher import LauncherBench, config, provider

A2 = "issue 11, A2: a record with an odd value must not end the ZooKeeper thread"

#: What JSON readers let pass and nobody can use.
REQUESTS = [
    '"relative_priority": 1e999',
    '"relative_priority": NaN',
    '"relative_priority": -1e999',
    '"provider": ["p"]',
    '"tenant_name": {"a": 1}',
    '"requestor": []',
]
NODES = [
    '"provider": ["p"]',
    '"pool": {"a": 1}',
    '"allocated_to": ["x"]',
    '"provider": "p", "pool": "main", "resources": {"ram": 5}, "tenant_name": ["t"]',
]


def poison(kazoo: Any) -> set[str]:
    """One record of each kind; their paths."""
    made = set()
    for number, text in enumerate(REQUESTS):
        record = f'{{"state": "requested", "node_types": ["fake-label"], {text}}}'
        made.add(kazoo.create(f"{paths.REQUESTS}/100-{number:010}", record.encode(), makepath=True))
    for text in NODES:
        record = f'{{"state": "ready", "type": ["fake-label"], {text}}}'
        made.add(kazoo.create(f"{paths.NODES}/", record.encode(), sequence=True, makepath=True))
    for text in ('"supported_labels": [["a"]]', '"supported_labels": [], "provider_name": ["p"]'):
        made.add(
            kazoo.create(
                f"{paths.COMPONENTS}/pool/bad", f"{{{text}}}".encode(), sequence=True, makepath=True
            )
        )
    return made


@pytest.mark.spec(A2)
def test_odd_records_are_set_aside(
    zk: Any, zk_chroot: Chroot, caplog: pytest.LogCaptureFixture
) -> None:
    other = zk_chroot.connect().client
    session = zk.client.session_id
    good = make_node()
    zk.storeNode(good)
    made = poison(other)

    def bad() -> set[str]:
        return {path for tree in zk.trees for path in tree.bad}

    wait_for(lambda: bad() == made, what="all are set aside")
    assert {path for path in made if f"Ignoring {path}: " in caplog.text} == made
    later = make_node()
    zk.storeNode(later)
    assert [node.id for node in zk.nodeIterator()] == [good.id, later.id]
    # Without the mirror, too.
    assert [node.id for node in zk.nodeIterator(cached=False)] == [good.id, later.id]
    assert list(zk.nodeRequestIterator(cached=False)) == []
    for path in made:
        other.delete(path)
    wait_for(lambda: not bad(), what="none is left")
    assert zk.node_tree.counted.states["ready"] == 2
    assert zk.client.session_id == session


@pytest.mark.spec(A2)
def test_a_good_node_that_turns_bad_leaves_no_trace(zk: Any, zk_chroot: Chroot) -> None:
    other = zk_chroot.connect().client
    node = make_node(resources={"cores": 2}, tenant_name="t", state="in-use")
    zk.storeNode(node)
    for text in (
        '{"state": "ready", "provider": ["p"]}',
        node.serialize().decode(),
        '{"state": "ready", "provider": "p", "pool": "main", "resources": {"cores": NaN, "ram": '
        "1e999}}",
    ):
        other.set(paths.node(node.id), text.encode())
        good = "[" not in text.replace('["label"]', "").replace('"host_keys": []', "")
        wait_for(lambda good=good: (zk.getCachedNode(node.id) is not None) == good)
    wait_for(lambda: "t" not in zk.node_tree.measured.tenants)
    assert zk.node_tree.usage("p") == {}


@pytest.mark.spec(A2 + "; request-list shows the others; problem-list and /ready name it")
def test_a_launcher_among_odd_records(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)
    made = poison(bench.zk.kazoo_client)
    pool = bench.start(config(provider()))
    request, _nodes = bench.fulfilled("fake-label")
    rows = wait_for(lambda: listed(bench, capsys), what="problems are published")
    assert {
        path
        for path in made
        if any(f"ZooKeeper record {path} is ignored" in row["problem"] for row in rows)
    } == made
    assert pool.getReadiness()[0]
    capsys.readouterr()
    file = str(bench.tmp / "nodepool.yaml")
    assert nodepoolcmd.main(["-c", file, "request-list", "--format", "json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [request]
    for path in made:
        bench.zk.kazoo_client.delete(path)
    wait_for(lambda: not listed(bench, capsys), what="nothing is wrong any more")
    bench.stop(pool)
    assert not pool.is_alive()


@pytest.mark.spec("issue 11, A2: what follows an answer may fail")
def test_callbacks_that_raise(zk: Any) -> None:
    kazoo, called = zk.kazoo_client, []

    def broken(*_args: Any) -> None:
        called.append(1)
        raise OverflowError("induced")

    for path in ("/", "/gone"):
        kazoo.submit(GetData(kazoo.full_path(path), None), Reply(broken))
    for _ in range(4):  # more than are sent at a time
        zk.writer.submit(Txn(kazoo), broken)
    wait_for(lambda: len(called) == 6)
    zk.storeNode(make_node())
    assert zk.connected


@pytest.mark.spec("issue 11, A2: the connection thread does not end without being told")
def test_an_error_on_the_connection_thread(zk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, session = zk.kazoo_client._connection, zk.client.session_id
    node = make_node()
    zk.storeNode(node)
    broken: list[Any] = []
    states: list[str] = []
    zk.client.state_listeners.insert(0, states.append)
    read = connection._read_header

    def fail(timeout: float) -> Any:
        if not broken:
            broken.append(timeout)
            raise OverflowError("induced")
        return read(timeout)

    monkeypatch.setattr(connection, "_read_header", fail)
    zk.kazoo_client.get_async("/")
    wait_for(lambda: states == ["SUSPENDED", "CONNECTED"] and zk.synced, what="connected again")
    assert zk.client.session_id == session
    assert zk.getCachedNode(node.id) is not None
    zk.storeNode(make_node())


@pytest.mark.spec(
    "issue 11, C9: a listener that goes, or raises, keeps nothing from the next, nor the record "
    "from the mirror"
)
def test_failing_listener_does_not_affect_others(zk: Any, zk_chroot: Chroot) -> None:
    tree, seen = zk.node_tree, []

    def once(*_args: Any) -> None:
        tree.listeners.remove(once)

    def broken(*_args: Any) -> None:
        raise TypeError("induced")

    tree.listeners += [
        once,
        lambda node_id, _old, _new: seen.append(node_id),
        broken,
        lambda node_id, _old, _new: seen.append(node_id),
    ]
    other = zk_chroot.connect().client
    path = other.create(f"{paths.NODES}/", make_node().serialize(), sequence=True)
    node_id = path.rsplit("/", 1)[1]
    wait_for(lambda: seen[:2] == [node_id, node_id])
    assert zk.getCachedNode(node_id) is not None and not tree.bad


def reasons(pool: Any) -> dict[str, str]:
    return {request_id: render(reasons) for request_id, _labels, _state, reasons in pool.explain()}


@pytest.mark.spec(
    "issue 11, A1: an option of one provider stops no other; the reason is shown; it heals"
)
def test_a_wrong_option_concerns_one_provider(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    pool = bench.start(
        config(provider("fake-p1", labels=["one"]), provider("fake-p2", labels=["two"]))
    )
    entry = pool.config.providers["fake-p1"]
    for wrong in ("5", None):
        entry.max_concurrency = wrong
        waiting = bench.submit("one", priority="100")
        bench.fulfilled("two")
        assert "fake-p1-main: error: TypeError" in wait_for(lambda i=waiting: reasons(pool).get(i))
        assert pool.getReadiness()[0]
        entry.max_concurrency = 5
        pool.assignment.wake()
        bench.wait_request(waiting, "fulfilled")
    assert sum("whether the pool accepts a request" in r.message for r in caplog.records) == 2


@pytest.mark.spec("issue 11, A1: a handler that raises stops no other")
def test_a_handler_that_cannot_count(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    from nodepool.driver.statemachine.handler import StateMachineHandler

    def count(handler: Any) -> int:
        if handler.pw.provider_name == "fake-p1":
            raise RuntimeError("induced")
        return 0

    monkeypatch.setattr(StateMachineHandler, "alive_thread_count", property(count))
    pool = bench.start(
        config(
            provider("fake-p1", labels=["one"], **{"max-concurrency": 1}),
            provider("fake-p2", labels=["two"]),
        )
    )
    adapter, go_on = bench.adapter("fake-p1"), threading.Event()
    create = adapter._createServer

    def slow(*args: Any, **options: Any) -> Any:
        assert go_on.wait(30)
        return create(*args, **options)

    monkeypatch.setattr(adapter, "_createServer", slow)
    first = bench.submit("one", priority="100")
    bench.wait_request(first, "pending")
    second = bench.submit("one", priority="100")
    bench.fulfilled("two")
    assert "max-concurrency reached: 1 launches" in wait_for(lambda: reasons(pool).get(second))
    go_on.set()
    bench.wait_request(first, "fulfilled")
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec(
    "issue 11, B8: min-ready: a provider that raises stops no other label, nor another pool of its "
    "label"
)
def test_min_ready_alongside_a_provider_that_raises(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nodepool.driver.statemachine import StateMachineProvider

    ready = StateMachineProvider.labelReady

    def broken(manager: Any, label: Any) -> Any:
        if manager.provider.name == "fake-p1":
            raise RuntimeError("induced")
        return ready(manager, label)

    monkeypatch.setattr(StateMachineProvider, "labelReady", broken)
    pool = bench.start(
        config(
            provider("fake-p1", labels=["one", "both"]),
            provider("fake-p2", labels=["both", "two"]),
            labels={name: {"min-ready": 1} for name in ("one", "both", "two")},
        )
    )
    wait_for(lambda: {node.type[0] for node in bench.nodes(state="ready")} >= {"both", "two"})
    assert not any(node.type == ["one"] for node in bench.nodes())
    for _ in range(2):
        pool.min_ready.wake()
    assert sum("fake-p1 can serve label one" in r.message for r in caplog.records) == 1
    # Asking whether it can be served is only a preview.
    monkeypatch.setattr(StateMachineProvider, "labelReady", ready)
    pool.min_ready.wake()
    wait_for(lambda: any(node.type == ["one"] for node in bench.nodes(state="ready")))


@pytest.mark.spec("issue 11, B8: min-ready: whatever raises for one label stops no other")
def test_min_ready_of_a_label_that_raises(bench: LauncherBench) -> None:
    pool = bench.make(
        config(
            provider(labels=["one", "two"]), labels={n: {"min-ready": 1} for n in ("one", "two")}
        )
    )
    need = pool.min_ready._need

    def broken(label: Any) -> int:
        if label.name == "one":
            raise RuntimeError("induced")
        return int(need(label))

    pool.min_ready._need = broken
    pool.start()
    bench.wait_ready(pool)
    wait_for(lambda: {node.type[0] for node in bench.nodes(state="ready")} == {"two"})


@pytest.mark.spec("issue 11, B3: a record that cannot be written takes no quota with it")
def test_a_record_that_cannot_be_written(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    entry = pool.config.providers["fake-provider"].pools["main"]
    entry.node_attributes = {
        "installed": datetime.date(2024, 1, 1)
    }  # as YAML reads an unquoted one
    for _ in range(3):
        bench.wait_request(bench.submit("fake-label"), "failed")
    assert "date is not JSON serializable" in caplog.text
    assert not any(pool.zk.reservations.provider("fake-provider").values())
    entry.node_attributes = None
    bench.fulfilled("fake-label", "fake-label")


@pytest.mark.spec("issue 11, B3: a reuse that fails does not keep the node claimed")
def test_a_reuse_that_fails(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    from nodepool.driver.statemachine.handler import StateMachineHandler

    bench.start(config(provider(pool={"max-servers": 1})))
    first, (node,) = bench.fulfilled("fake-label")
    bench.zuul.cancel(first)
    bench.wait_nodes(1, state="ready", allocated_to=None)

    def fail(*_args: Any) -> None:
        raise RuntimeError("induced")

    with monkeypatch.context() as patch:
        patch.setattr(StateMachineHandler, "noteReuse", fail)
        bench.wait_request(bench.submit("fake-label"), "failed")
    assert bench.fulfilled("fake-label")[1][0].id == node.id


@pytest.mark.spec("issue 11, A2: text that cannot be encoded does not stop a listing")
@pytest.mark.parametrize("form", ["table", "csv", "json", "yaml"])
def test_half_a_surrogate_pair(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    other = bench.submit("fake-label")
    bench.submit("fake-label", event_id="half \ud800 here")
    bench.config(config(provider()))
    assert (
        nodepoolcmd.main(["-c", str(bench.tmp / "nodepool.yaml"), "request-list", "--format", form])
        == 0
    )
    text = capsys.readouterr().out
    assert text.encode() and other in text


@pytest.mark.spec("issue 11, A1: a driver that cannot tell its troubles hides nobody else's")
def test_problems_of_a_driver_that_raises(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(
        config(provider("fake-p1", labels=["one"]), provider("fake-p2", labels=["two"]))
    )
    calls = pool.getProviderManager("fake-p1").adapter.calls

    def fail() -> None:
        raise RuntimeError("induced")

    monkeypatch.setattr(calls, "troubles", fail, raising=False)
    pool.getProviderManager("fake-p2").label_problems.note("two", "launch", "no luck")
    ready, lines = pool.getReadiness()
    assert ready
    assert (
        "provider fake-p1: its driver cannot report its problems: RuntimeError('induced')" in lines
    )
    remedy = "repair what the message names; each request for the label retries"
    assert f"provider fake-p2, label two: no luck. Suggestion: {remedy}" in lines


@pytest.mark.spec(
    "issue 11, A1: a provider that raises fails no request of another provider's tenant"
)
def test_tenant_limits_alongside_a_provider_that_raises(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(
        config(
            provider("fake-p1", labels=["one"]),
            provider("fake-p2", labels=["two"]),
            **{"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 2}]},
        )
    )
    # Without resources, as another driver stores it: it is estimated.
    bench.ready_node("fake-p1", "main", "one", tenant_name="t", state="hold")
    wait_for(lambda: pool.zk.node_tree.unmeasured.tenants.get("t"))

    def fail(*_args: Any) -> None:
        raise RuntimeError("induced")

    monkeypatch.setattr(pool.getProviderManager("fake-p1"), "quotaNeededByLabel", fail)
    bench.fulfilled("two", tenant_name="t")
    last = bench.submit("two", tenant_name="t")
    wait_for(
        lambda: "tenant t is limited to 2 instances" in reasons(pool).get(last, ""),
        what="the tenant's limit as the reason",
    )


UNFIT = [
    {"resources": [4]},
    {"resources": {"cores": "4"}},
    {"resources": {"ram": float("nan")}},
    {"resources": {"ram": float("inf")}},
    {"resources": {"instances": None}},
    {"attributes": ["executor-zone"]},
    {"attributes": {"executor-zone": 5}},
    {"node_properties": "spot"},
    {"connection_port": "22"},
    {"host_keys": [None]},
    {"interface_ip": 5},
    {"connection_type": {}},
    {"username": ["zuul"]},
    {"slot": "1"},
]


def test_ready_node_that_zuul_cannot_read_is_not_handed_out(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    fit = bench.wait_nodes(1, state="ready", allocated_to=None)[0].id
    wait_for(
        lambda: pool.zk.node_tree.counted.free["fake-label"] == 1,
        what="the node counts for min-ready",
    )
    unfit = [
        bench.ready_node("fake-provider", "main", "fake-label", **values).id for values in UNFIT
    ]
    wait_for(lambda: pool.zk.node_tree.unfit.keys() == set(unfit))
    assert pool.zk.node_tree.counted.free["fake-label"] == 1, "they do not count for min-ready"
    _request, nodes = bench.fulfilled("fake-label")
    assert [node.id for node in nodes] == [fit]
    problems = str(pool.getReadiness()[1])
    assert all(f"Node {node_id} is not assigned to requests" in problems for node_id in unfit)
    # A mended one is used, one that was deleted is forgotten.
    bench.zuul.write_node(unfit[0], resources={"cores": 4})
    wait_for(lambda: unfit[0] not in pool.zk.node_tree.unfit)
    assert unfit[0] in pool.zk.node_tree.free["fake-provider", "main"]["fake-label"]
    bench.zk.deleteRawNode(unfit[1])
    wait_for(lambda: unfit[1] not in pool.zk.node_tree.unfit)
