"""The metastatic driver in a whole launcher (MST-8, LAU-21.186)."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from kazoo.exceptions import NotEmptyError

from nodepool.nodescan import NodescanRequest
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

OWNER = "NodePool:metastatic:meta-provider"


def meta(*labels: dict[str, Any], name: str = "meta-provider", **pool: Any) -> dict[str, Any]:
    return {
        "name": name,
        "driver": "metastatic",
        "pools": [{"name": "main", "labels": list(labels), **pool}],
    }


def slot(name: str = "user-label", **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "backing-label": "backing-label",
        "max-parallel-jobs": 2,
        "grace-time": 0,
        **options,
    }


def setup(
    *labels: dict[str, Any], backing: dict[str, Any] | None = None, **pool: Any
) -> dict[str, Any]:
    return config(
        provider(labels=["backing-label"], pool=backing),
        meta(*(labels or (slot(),)), **pool),
        labels={"backing-label": {}, "user-label": {}},
    )


def get(bench: LauncherBench, *labels: str, **fields: Any) -> Any:
    """One node, in use."""
    request_id, _nodes = bench.fulfilled(*(labels or ("user-label",)), **fields)
    (node_id,) = bench.zuul.accept(request_id)
    return bench.node(node_id)


def end(bench: LauncherBench, *nodes: Any) -> None:
    for node in nodes:
        bench.zuul.give_back(node.id)
    bench.wait_gone(*[node.id for node in nodes])


def backing_nodes(bench: LauncherBench) -> list[Any]:
    return sorted(bench.nodes(provider="fake-provider"), key=lambda node: node.id)


def records(bench: LauncherBench, label: str = "user-label") -> list[Any]:
    return list(bench.adapter("meta-provider").backing_node_records.get(label, []))


@pytest.mark.spec("LAU-21.186; MST-8.1 to MST-8.4")
def test_slots_share_a_backing_node_and_inherit_its_fields(bench: LauncherBench) -> None:
    bench.start(
        setup(
            backing={"node-attributes": {"backing": "1", "both": "backing"}},
            **{"node-attributes": {"meta": "2", "both": "meta"}},
        )
    )
    first = get(bench, tenant_name="tenant-1")
    (backing,) = backing_nodes(bench)
    assert first.driver_data["backing_node"] == backing.id
    assert (first.provider, first.pool, first.type) == ("meta-provider", "main", ["user-label"])
    for name in (
        "interface_ip",
        "python_path",
        "shell_type",
        "cloud",
        "host_keys",
        "username",
        "connection_type",
        "connection_port",
        "az",
        "region",
        "public_ipv4",
    ):
        assert getattr(first, name) == getattr(backing, name), name
    assert first.attributes == {"backing": "1", "both": "meta", "meta": "2"}
    assert first.external_id == first.id
    assert first.slot == 0
    assert first.resources == {"cores": 0, "instances": 1, "ram": 0}
    assert (backing.state, backing.tenant_name, backing.requestor) == ("in-use", "tenant-1", OWNER)
    assert json.loads(backing.user_data)["owner"] == OWNER
    assert bench.zk.getNodeLockContenders(backing) == [OWNER]

    second, third = get(bench), get(bench)
    assert (second.driver_data["backing_node"], second.slot) == (backing.id, 1)
    other = backing_nodes(bench)[1]
    assert third.driver_data["backing_node"] == other.id
    end(bench, first)
    again = get(bench)
    assert (again.driver_data["backing_node"], again.slot) == (backing.id, 0)

    end(bench, again, second)
    bench.wait_gone(backing.id)
    assert [node.id for node in backing_nodes(bench)] == [other.id]
    assert len(bench.servers("fake-provider")) == 1
    end(bench, third)
    bench.wait_gone(other.id)


@pytest.mark.spec("LAU-21.187: after restart slots and backing nodes are recovered")
def test_slots_and_backing_nodes_are_recovered_after_a_restart(bench: LauncherBench) -> None:
    pool = bench.start(setup())
    first = get(bench)
    (backing,) = backing_nodes(bench)
    bench.stop(pool)
    bench.start(setup())
    second = get(bench)
    assert (second.driver_data["backing_node"], second.slot) == (backing.id, 1)
    third = get(bench)
    assert third.driver_data["backing_node"] != backing.id
    end(bench, first, second)
    bench.wait_gone(backing.id)


@pytest.mark.spec("LAU-21.188: backing node of a removed label is released when empty")
def test_backing_node_of_a_removed_label_is_released_when_empty(bench: LauncherBench) -> None:
    bench.start(setup(slot(**{"grace-time": 1000})))  # type: ignore[arg-type]
    node = get(bench)
    (backing,) = backing_nodes(bench)
    bench.config(setup(slot("other-label", **{"grace-time": 1000})))
    wait_for(
        lambda: any(
            "other-label" in pool.supported_labels for pool in bench.zk.getRegisteredPools()
        )
    )
    new = get(bench, "other-label")
    assert new.driver_data["backing_node"] != backing.id
    assert bench.node(backing.id).state == "in-use"
    end(bench, node)
    bench.wait_gone(backing.id)
    assert bench.node(new.driver_data["backing_node"]).state == "in-use"


@pytest.mark.spec("LAU-21.189; MST-8.7")
def test_backing_node_of_a_failed_scan_gets_no_new_nodes(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(setup(slot(**{"host-key-checking": True, "max-parallel-jobs": 4})))  # type: ignore[arg-type]
    first = get(bench)
    (bad,) = backing_nodes(bench)
    real = NodescanRequest.advance
    failed: list[str] = []

    def advance(self: NodescanRequest, socket_ready: bool) -> None:
        if not failed and self.node.provider == "meta-provider":
            failed.append(self.node.id)
            raise Exception("scan failed")
        real(self, socket_ready)

    monkeypatch.setattr(NodescanRequest, "advance", advance)
    second = get(bench)
    assert failed == [second.id]
    good = backing_nodes(bench)[1]
    assert second.driver_data["backing_node"] == good.id
    assert json.loads(bench.node(bad.id).user_data)["failed"]
    third = get(bench)
    assert third.driver_data["backing_node"] == good.id
    end(bench, second, third)
    bench.wait_gone(good.id)
    assert bench.node(bad.id).state == "in-use", "its job goes on"
    end(bench, first)
    bench.wait_gone(bad.id)


@pytest.mark.spec("LAU-21.190: empty backing node is kept until retention passed")
def test_empty_backing_node_is_kept_for_min_retention_time(bench: LauncherBench) -> None:
    bench.start(setup(slot(**{"min-retention-time": 300})), cleanup_interval=0.2)  # type: ignore[arg-type]
    node = get(bench)
    (backing,) = backing_nodes(bench)
    end(bench, node)
    time.sleep(1)
    assert bench.node(backing.id).state == "in-use"
    records(bench)[0].launched = 0
    bench.wait_gone(backing.id)


@pytest.mark.spec("LAU-21.191: too old backing node gets no further nodes")
def test_backing_node_beyond_its_max_age_gets_no_new_nodes(bench: LauncherBench) -> None:
    bench.start(setup(slot(**{"max-age": 300})))  # type: ignore[arg-type]
    first = get(bench)
    records(bench)[0].launched = 0
    second = get(bench)
    assert first.driver_data["backing_node"] != second.driver_data["backing_node"]
    end(bench, first)
    bench.wait_gone(first.driver_data["backing_node"])


@pytest.mark.spec("LAU-21.192: backing node deleted behind our back")
def test_backing_node_deleted(bench: LauncherBench) -> None:
    bench.start(setup())
    node = get(bench)
    (backing,) = backing_nodes(bench)
    # without its lock it is up for deletion by the launcher too
    with contextlib.suppress(NotEmptyError):
        bench.zk.deleteRawNode(backing.id)
    wait_for(lambda: records(bench)[0].lost)
    second = get(bench)
    assert second.driver_data["backing_node"] != backing.id
    end(bench, node)
    wait_for(lambda: [r.node_id for r in records(bench)] == [second.driver_data["backing_node"]])


@pytest.mark.spec("issue 2, 5: tenant, priority and event id passed on to the backing request")
def test_request_passes_on_whose_it_is(bench: LauncherBench) -> None:
    # nobody serves the backing label, so the request may be deleted soon
    pool = bench.start(config(meta(slot()), labels={"backing-label": {}, "user-label": {}}))
    seen: list[Any] = []

    def changed(_id: str, _old: Any, new: Any) -> None:
        if new is not None and new.requestor == OWNER:
            seen.append(new)

    pool.zk.request_tree.listeners.append(changed)
    bench.submit("user-label", priority="300", tenant_name="t1", event_id="e1", relative_priority=4)
    wait_for(lambda: seen)
    request = seen[0]
    assert request.id.startswith("300-")
    assert request.node_types == ["backing-label"]
    assert (request.tenant_name, request.event_id, request.relative_priority) == ("t1", "e1", 4)


def test_backing_request_that_fails(bench: LauncherBench) -> None:
    """Declined by everybody: the user's request fails too, and nothing stays behind."""
    bench.start(setup(backing={"max-servers": 0}))
    request_id = bench.submit("user-label")
    bench.wait_request(request_id, "failed")
    bench.zuul.cancel(request_id)
    wait_for(lambda: not bench.zk.getNodeRequests() and not bench.zk.getNodes())
    assert records(bench) == []


@pytest.mark.spec("issue 2, 5: two launchers with the same provider never book one slot twice")
def test_two_launchers_book_no_slot_twice(bench: LauncherBench) -> None:
    content = setup(slot(**{"max-parallel-jobs": 5}))  # type: ignore[arg-type]
    bench.start(content)
    bench.start(content, name="second.yaml")
    requests = [bench.submit("user-label") for _ in range(40)]
    places = set()
    for request_id in requests:
        for node_id in bench.wait_request(request_id, "fulfilled")["nodes"]:
            node = bench.node(node_id)
            places.add((node.driver_data["backing_node"], node.slot))
    assert len(places) == 40
    for request_id in requests:
        bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(lambda: not bench.zk.getNodes(), 30, "everything released")


def test_reload_with_launches_under_way(bench: LauncherBench) -> None:
    bench.start(setup())
    requests = [bench.submit("user-label") for _ in range(6)]
    bench.config(setup(**{"node-attributes": {"new": "1"}}))
    places = set()
    for request_id in requests:
        (node_id,) = bench.wait_request(request_id, "fulfilled")["nodes"]
        node = bench.node(node_id)
        places.add((node.driver_data["backing_node"], node.slot))
    assert len(places) == 6
    for request_id in requests:
        bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(lambda: not bench.zk.getNodes(), 30, "everything released")
