"""Rules between Zuul and us, knobs and names that benches use: ZK-10, FAK-4."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from nodepool.driver.fake.adapter import FakeAdapter
from nodepool.zk import zookeeper as zk
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider

#: ZK-7.
_KEYS = """state state_time cloud provider pool type allocated_to az region public_ipv4 private_ipv4
    public_ipv6
    host_id interface_ip connection_port ssh_port image_id launcher created_time external_id
    hostname comment user_data hold_job host_keys username connection_type shell_type
    hold_expiration resources slot attributes python_path
    tenant_name driver_data requestor node_properties"""
NODE_KEYS = set(_KEYS.split())
#: What Zuul's object for a node uses otherwise.
TAKEN = {
    "name",
    "aliases",
    "label",
    "lock",
    "stat",
    "reuse",
    "kubernetes_connection",
    "uuid",
    "private_ipv6",
}


def static(*nodes: dict[str, Any], name: str = "shelf") -> dict[str, Any]:
    """A static provider; its labels have to be given at top level."""
    return {
        "name": name,
        "driver": "static",
        "pools": [
            {
                "name": "main",
                "labels": [],
                "nodes": [{"username": "zuul", **node} for node in nodes],
            }
        ],
    }


def with_static(
    *nodes: dict[str, Any], others: tuple[dict[str, Any], ...] = (), labels: Any = None
) -> dict[str, Any]:
    content = config(
        static(*nodes), *others, labels={node["labels"]: {} for node in nodes} | (labels or {})
    )
    for entry in content["providers"]:
        for pool in entry["pools"]:
            if not pool["labels"]:
                del pool["labels"]
    return content


def snapshot(kazoo: Any, path: str) -> tuple[Any, int]:
    data, stat = kazoo.get(path)
    return json.loads(data), stat.mzxid


# -- rules


@pytest.mark.spec("ZK-10.6: no children under a request, never recreated, never bumped back")
def test_requests_are_unchanged(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    kazoo = bench.zuul.client
    request_id, _nodes = bench.fulfilled("fake-label")
    path = f"/nodepool/requests/{request_id}"
    before = snapshot(kazoo, path)
    bench.cloud("fake-provider").pause_creates = True
    cancelled = bench.submit("fake-label")
    bench.wait_request(cancelled, "pending")
    assert kazoo.get_children(f"/nodepool/requests/{cancelled}") == []
    bench.zuul.cancel(cancelled)
    bench.cloud("fake-provider").pause_creates = False
    for server in bench.servers("fake-provider"):
        server.event.set()
    failed = bench.wait_request(bench.submit("nobody has it"), "failed")
    bench.stop(pool)
    bench.start(config(provider()))  # clean-up and a check of everything from the start
    bench.fulfilled("fake-label")
    assert bench.zuul.request(cancelled) is None
    assert snapshot(kazoo, path) == before
    for name in kazoo.get_children("/nodepool/requests"):
        assert kazoo.get_children(f"/nodepool/requests/{name}") == []
    assert failed["state"] == "failed"


@pytest.mark.spec("ZK-10.9, ZK-10.11: keys and types of node records of every driver")
def test_node_records_have_the_keys_and_types_of_the_contract(bench: LauncherBench) -> None:
    meta = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "labels": [{"name": "slot", "backing-label": "fake-label", "max-parallel-jobs": 2}],
            }
        ],
    }
    plain = {"name": "plain", "driver": "test", "pools": [{"name": "main", "labels": ["t"]}]}
    bench.start(
        with_static({"name": "fake-host", "labels": "shelf"}, others=(provider(), meta, plain))
    )
    bench.wait_nodes(1, provider="shelf", state="ready")
    request_id, _nodes = bench.fulfilled("slot")
    for label in ("t", "fake-label", "shelf"):
        bench.fulfilled(label)
    seen = set()
    for node_id in bench.zuul.client.get_children("/nodepool/nodes"):
        record = bench.zuul.client.get(f"/nodepool/nodes/{node_id}")[0]
        values = json.loads(record)
        seen.add(values["provider"])
        assert set(values) <= NODE_KEYS, values
        assert not set(values) & TAKEN and not any(key.startswith("_") for key in values)
        assert isinstance(values["connection_port"], int) and isinstance(values["host_keys"], list)
        assert isinstance(values["type"], list)
    assert seen == {"shelf", "fake-provider", "meta", "plain"}
    assert bench.zuul.request(request_id)["state"] == "fulfilled"


@pytest.mark.spec(
    "ZK-10.13: in-use is never written by the launcher but for metastatic backing nodes"
)
def test_in_use_is_not_ours(bench: LauncherBench) -> None:
    meta = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "labels": [
                    {
                        "name": "slot",
                        "backing-label": "fake-label",
                        "max-parallel-jobs": 1,
                        "grace-time": 0,
                    }
                ],
            }
        ],
    }
    watching = zk.ZooKeeper(bench.chroot.connect())
    assert watching.wait_synced(20)
    seen: dict[str, set[Any]] = {}

    def changed(node_id: str, _old: Any, new: Any) -> None:
        if new is not None:
            seen.setdefault(node_id, set()).add((new.state, new.user_data))

    assert watching.node_tree is not None
    watching.node_tree.listeners.append(changed)
    bench.start(with_static({"name": "fake-host", "labels": "shelf"}, others=(provider(), meta)))
    requests = [bench.fulfilled(label)[0] for label in ("fake-label", "shelf", "slot")]
    for request_id in requests:
        bench.zuul.cancel(request_id)
    wait_for(lambda: any(state == "in-use" for states in seen.values() for state, _ in states))
    owned = [
        json.loads(user_data)["owner"]
        for states in seen.values()
        for state, user_data in states
        if state == "in-use"
    ]
    assert set(owned) == {"NodePool:metastatic:meta"}


@pytest.mark.spec(
    "ZK-10.15: pool records list what they can serve; others are declined to failed quickly"
)
def test_pool_records_list_the_labels_that_they_serve(bench: LauncherBench, web: Any) -> None:
    content = config(
        provider("fake-one", labels=["a", "b"]),
        provider("fake-two", labels=["b", "c"]),
        labels={"unserved": {}},
    )
    pool = bench.start(content)
    get = web(pool)
    offered = {frozenset(p.supported_labels) for p in bench.zk.getRegisteredPools()}
    assert offered == {frozenset("ab"), frozenset("bc")}
    began = time.monotonic()
    record = bench.wait_request(bench.submit("unserved"), "failed")
    assert time.monotonic() - began < limit(2)
    assert sorted(record["declined_by"]) == sorted(p.id for p in bench.zk.getRegisteredPools())
    assert sorted(row["label"] for row in get("/label-list")) == ["a", "b", "c"]


@pytest.mark.spec(
    "ZK-14: the cache never goes back to an older version, nor replaces a locked object"
)
def test_cache_never_goes_back(zk: Any, zk_chroot: Any) -> None:
    from nodepool.zk import zookeeper

    node = zookeeper.Node()
    node.state = zookeeper.READY
    node.type = ["l"]
    zk.storeNode(node)
    wait_for(lambda: zk.getCachedNode(node.id))
    zk.lockNode(node)
    versions: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            versions.append(zk.getCachedNode(node.id).stat.version)

    thread = threading.Thread(target=look, name="looker")
    thread.start()
    try:
        for number in range(100):
            node.comment = str(number)
            zk.storeNode(node)
            assert zk.getCachedNode(node.id).comment == str(number)
    finally:
        stop.set()
        thread.join()
    assert versions == sorted(versions)
    # Somebody breaks the rules and writes; our object stays what we made it until we read again.
    other = zk_chroot.connect().client
    record = json.loads(other.get(f"/nodepool/nodes/{node.id}")[0])
    other.set(f"/nodepool/nodes/{node.id}", json.dumps({**record, "comment": "intruder"}).encode())
    wait_for(lambda: zk.getCachedNode(node.id).comment == "intruder")
    assert node.comment == "99" and node.lock is not None
    zk.unlockNode(node)
    zk.lockNode(node)
    assert node.comment == "intruder"
    zk.unlockNode(node)


# -- knobs and names


@pytest.mark.spec("FAK-4.2: a provider named fake-... without driver runs the fake driver")
def test_fake_by_name(bench: LauncherBench) -> None:
    entry = provider("fake-without-driver")
    assert "driver" not in entry
    bench.start(config(entry))
    assert isinstance(bench.adapter("fake-without-driver"), FakeAdapter)
    bench.fulfilled("fake-label")


@pytest.mark.spec(
    "FAK-4.3, FAK-4.4: knobs take effect while the service runs, within fractions of a second"
)
def test_knobs_of_the_fake_cloud(bench: LauncherBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.start(config(provider(pool={"availability-zones": ["az1"]}, **{"launch-retries": 1})))
    adapter, cloud = bench.adapter("fake-provider"), bench.cloud("fake-provider")
    began = time.monotonic()
    request_id, _nodes = bench.fulfilled("fake-label")
    assert 0.1 <= time.monotonic() - began < limit(2)
    adapter.createServer_fails = 1
    bench.wait_request(bench.submit("fake-label"), "failed")
    assert adapter.createServer_fails == 0
    adapter.createServer_fails_with_external_id = 1
    bench.wait_request(bench.submit("fake-label"), "failed")
    assert adapter.createServer_fails_with_external_id == 0
    cloud.pause_creates = True
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    wait_for(lambda: len(bench.servers("fake-provider")) == 2)
    assert bench.zuul.request(waiting)["state"] == "pending"
    cloud.pause_creates = False
    for server in bench.servers("fake-provider"):
        server.event.set()
    bench.wait_request(waiting, "fulfilled")
    cloud._azs[:] = ["az9"]
    bench.wait_request(bench.submit("fake-label"), "failed")  # the configured zone is unknown now
    cloud._azs[:] = ["az1", "az2"]
    bench.use_up(request_id, waiting)
    bench.quota(instances=1)
    bench.pools[0].getProviderManager("fake-provider").invalidateQuotaCache()
    one, _nodes = bench.fulfilled("fake-label")
    two = bench.submit("fake-label")
    bench.wait_request(two, "pending")
    (worker,) = bench.pools[0].getPoolWorkers("fake-provider")
    wait_for(lambda: worker.paused_handlers, what="a paused handler")
    assert [handler.request.id for handler in worker.request_handlers] == [two]
    bench.use_up(one)
    bench.wait_request(two, "fulfilled")
    wait_for(lambda: not worker.request_handlers and not worker.paused_handlers)


@pytest.mark.spec("FAK-4.6: test knobs outside the drivers")
def test_knobs_outside_of_drivers_exist(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nodepool.launcher
    from nodepool import nodeutils
    from nodepool.driver.statemachine import (
        NodescanRequest,
        NodescanWorker,
        StateMachineNodeLauncher,
        StateMachineProvider,
    )

    monkeypatch.setattr(StateMachineProvider, "MINIMUM_SLEEP", 0.1)
    monkeypatch.setattr(StateMachineProvider, "MAXIMUM_SLEEP", 0.1)
    assert NodescanRequest.FAKE is False and NodescanWorker.MAX_REQUESTS == 100
    assert callable(NodescanRequest.advance) and callable(nodeutils.nodescan)
    pool = bench.start(config(provider(**{"launch-retries": 2})))
    assert list(pool._pool_threads) and all(
        isinstance(w, threading.Thread) for w in pool._pool_threads.values()
    )
    assert pool._delete_thread.name == "DeletedNodeWorker"
    calls: list[Any] = []
    original = StateMachineNodeLauncher.launch

    def launch(self: Any) -> None:
        calls.append(self.node.id)
        original(self)

    monkeypatch.setattr(StateMachineNodeLauncher, "launch", launch)
    request_id, (node,) = bench.fulfilled("fake-label")
    assert calls == [node.id]
    bench.zuul.cancel(request_id)
    assert request_id in bench.zk.getNodeRequestLockIDs()
    monkeypatch.setattr(nodepool.launcher, "LOCK_CLEANUP", 0)
    wait_for(
        lambda: request_id not in bench.zk.getNodeRequestLockIDs(),
        what="LOCK_CLEANUP is read at each use",
    )


#: FAK-4.5: threads that a bench lets live while it waits for quiet.
ALLOWED = re.compile(
    r"(Thread-|worker "
    r"|UploadWorker|BuildWorker|CleanupWorker|PoolWorker|ThreadPoolExecutor|openstack-api|aws-api|"
    r"keyscan-|start-)"
    r"|(MainThread|NodePool|NodePool Builder|DeletedNodeWorker|StatsWorker)$"
)


@pytest.mark.spec("FAK-4.5: long-lived threads have names that test benches know")
def test_long_lived_threads_have_the_names_of_the_contract(
    bench: LauncherBench, statsd: StatsdReceiver, web: Any
) -> None:
    before = set(threading.enumerate())
    meta = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "labels": [{"name": "slot", "backing-label": "fake-label", "max-parallel-jobs": 2}],
            }
        ],
    }
    plain = {"name": "plain", "driver": "test", "pools": [{"name": "main", "labels": ["t"]}]}
    content = with_static(
        {"name": "fake-host", "labels": "shelf"}, others=(provider(), meta, plain)
    )
    pool = bench.start(content)
    web(pool)("/node-list")
    for label in ("fake-label", "slot", "t", "shelf"):
        bench.fulfilled(label)
    providers = set(pool.config.providers)
    strange = sorted(
        thread.name
        for thread in set(threading.enumerate()) - before
        if not ALLOWED.match(thread.name) and thread.name not in providers
    )
    assert not strange, ", ".join(strange)


# -- command line and web alongside a running launcher


@pytest.fixture
def web() -> Any:
    """``web(pool)`` gives ``get(path)``: the parsed JSON (or, with ``text=True``, the text) of a
    real web server.
    """
    from nodepool.web.server import WebApp

    apps: list[Any] = []

    def start(pool: Any) -> Any:
        app = WebApp(pool, port=0, listen_address="127.0.0.1", cache_expiry=0)
        apps.append(app)
        app.start()
        port = app.server.socket.getsockname()[1]

        def get(path: str, text: bool = False) -> Any:
            headers = {"Accept": "text/plain" if text else "application/json"}
            with urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers),
                timeout=10,
            ) as reply:
                body = reply.read().decode()
            return body if text else json.loads(body)

        return get

    yield start
    for app in apps:
        app.stop()


@pytest.fixture
def run(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Any:
    from nodepool.cmd import nodepoolcmd

    def run(*args: str) -> str:
        assert nodepoolcmd.main(["-c", str(bench.tmp / "nodepool.yaml"), *args]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.spec(
    "CLI-9: delete and delete --now: the node disappears, a min-ready replacement has a new id"
)
@pytest.mark.parametrize("options", [(), ("--now",)])
def test_deleted_min_ready_node_is_replaced(
    bench: LauncherBench, run: Any, options: tuple[str, ...]
) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    (node,) = bench.wait_nodes(1, state="ready", allocated_to=None)
    run("delete", *options, node.id)
    bench.wait_gone(node.id)
    (other,) = bench.wait_nodes(1, state="ready", allocated_to=None)
    assert other.id != node.id
    wait_for(
        lambda: [server.id for server in bench.servers("fake-provider")] == [other.external_id],
        what="one server",
    )


@pytest.mark.spec("CLI-9: a held node is not assigned: another is built if the quota allows")
def test_hold_builds_another(bench: LauncherBench, run: Any) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    (node,) = bench.wait_nodes(1, state="ready", allocated_to=None)
    assert "hold" in run("hold", node.id)
    _request_id, (other,) = bench.fulfilled("fake-label")
    assert other.id != node.id
    assert bench.node(node.id).state == "hold"


@pytest.mark.spec(
    "CLI-9: a held static node: the request stays open; after delete service is normal"
)
def test_hold_of_a_static_node(bench: LauncherBench, run: Any) -> None:
    bench.start(with_static({"name": "fake-host", "labels": "shelf"}))
    (node,) = bench.wait_nodes(1, state="ready")
    run("hold", node.id)
    request_id = bench.submit("shelf")
    time.sleep(1)
    record = bench.zuul.request(request_id)
    assert (record["state"], record.get("declined_by") or []) == ("requested", [])
    run("delete", node.id)
    record = bench.wait_request(request_id, "fulfilled")
    assert record["nodes"] != [node.id]


@pytest.mark.spec("CLI-9: web: ready, lists; changes made by a builder started later show up")
def test_web_alongside_a_launcher(bench: LauncherBench, web: Any, run: Any) -> None:
    pool = bench.make(
        {**config(provider()), "diskimages": [{"name": "fake-image-disk", "elements": ["vm"]}]}
    )
    get = web(pool)
    with pytest.raises(urllib.error.HTTPError) as error:
        get("/ready", text=True)
    error.value.close()
    pool.start()
    bench.wait_ready(pool)
    assert get("/ready", text=True) == "OK"
    assert get("/label-list") == [{"label": "fake-label"}]
    request_id, (node,) = bench.fulfilled("fake-label", event_id=None)
    # Zuul's side may see the record a moment before the launcher's mirror has the answer.
    (row,) = wait_for(
        lambda: [row for row in get("/node-list") if row["state"] == "ready"],
        what="the ready node on the web",
    )
    assert (row["id"], row["ipv6"], row["label"], row["provider"]) == (
        node.id,
        "",
        ["fake-label"],
        "fake-provider",
    )
    assert (row["public_ipv4"], row["connection_port"], row["state"]) == ("fake", 22, "ready")
    assert "locked" in row
    assert [r["id"] for r in get(f"/node-list?node_id={node.id}")] == [node.id]
    assert get("/node-list?node_id=9999999999") == []
    (line,) = get("/request-list")
    assert line["node_types"] == ["fake-label"] and line["requestor"]
    assert {"id", "event_id"} <= line.keys() and line["id"] == request_id
    # The builder comes later.
    assert get("/image-list") == []
    run("image-build", "fake-image-disk")
    wait_for(
        lambda: (
            [(row["image"], row["build_request"], row["paused"]) for row in get("/image-status")]
            == [("fake-image-disk", "pending", False)]
        ),
        what="the pending build on the web",
    )
    with bench.zk.imageBuildLock("fake-image-disk", blocking=False):
        upload = bench.store_image("fake-image-disk", "fake-provider")
        wait_for(lambda: get("/image-status")[0]["build_request"] == "building", what="building")
    wait_for(lambda: get("/image-list"), what="the upload on the web")
    (image,) = get("/image-list")
    assert (image["id"], image["image"], image["provider"], image["state"]) == (
        upload.build_id,
        "fake-image-disk",
        "fake-provider",
        "ready",
    )
    assert f"| {upload.build_id} | fake-image-disk | ready |" in get(
        "/image-list?fields=id,image,state", text=True
    )
    (build,) = get("/dib-image-list")
    assert (build["id"], build["formats"], build["state"]) == (
        f"fake-image-disk-{upload.build_id}",
        ["qcow2"],
        "ready",
    )


@pytest.mark.spec("CLI-9: request-list shows the event id generated when absent; id is cell 0")
def test_generated_event_id(bench: LauncherBench, web: Any, run: Any) -> None:
    pool = bench.start(config(provider()))
    get = web(pool)
    request = zk.NodeRequest()
    request.state, request.node_types, request.requestor = zk.REQUESTED, ["nobody has it"], "tester"
    bench.zk.storeNodeRequest(request)
    (line,) = wait_for(lambda: get("/request-list"))
    assert line["event_id"] == request.event_id and line["event_id"]
    assert line["requestor"] == "tester"
    row = run("request-list").splitlines()[3]
    assert [cell.strip() for cell in row.split("|")][1] == request.id
