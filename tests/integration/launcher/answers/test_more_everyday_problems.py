"""Everyday problems of options, clouds and owners of nodes: one cause and one remedy, the same
everywhere.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.cmd.commands.context import CommandError
from nodepool.nodescan.request import NodescanRequest
from nodepool.status import cluster
from nodepool.zk.records import Node
from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk, answer, created
from tests.support.launcher import config, provider

ONE = {"max-servers": 1}
LONG_AGO = 1000


def failed(desk: Desk, *labels: str, **fields: Any) -> str:
    request = desk.bench.submit(*labels, **fields)
    desk.bench.wait_request(request, "failed")
    return request


def refuse_launches(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse(*args: Any, **kw: Any) -> None:
        raise exceptions.LaunchNodepoolException(text)

    monkeypatch.setattr("nodepool.driver.fake.adapter.FakeAdapter._createServer", refuse)


# -- options


def test_disabled_pool_names_its_option(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 0})))
    found = answer(
        desk, "request", failed(desk, "fake-label"), "failed: ", "pool is disabled by max_servers"
    )
    assert found["suggestion"].startswith("raise `max-servers` of the pool")
    disabled = (
        "every pool that offers fake-label is disabled: `max-servers` of pool "
        "fake-provider-main is 0"
    )
    assert (
        answer(desk, "label", "fake-label", disabled)["suggestion"]
        == "raise `max-servers` of pool fake-provider-main"
    )
    desk.reported(disabled)
    assert "Suggestion: raise `max-servers`" in created(desk, "fake-label")


def test_switched_off_provider_is_the_cause_of_its_labels(desk: Desk) -> None:
    desk.start(config(provider(**{"max-concurrency": 0}), labels={"fake-label": {"min-ready": 1}}))
    answer(
        desk, "label", "fake-label", "is disabled: `max-concurrency` of provider fake-provider is 0"
    )
    desk.reported(
        "0 of 1 ready (min-ready)", "max-concurrency", "Suggestion: raise `max-concurrency`"
    )


def test_label_that_one_of_two_pools_disables_is_no_problem(desk: Desk) -> None:
    pools = [
        {"name": "off", "labels": ["fake-label"], "max-servers": 0},
        {"name": "on", "labels": ["fake-label"]},
    ]
    desk.start(config(provider(pools=pools)))
    answer(desk, "label", "fake-label", "offered; no request waits for it")
    assert desk.problems() == []


def test_request_that_is_larger_than_the_pool_names_the_option(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 2})))
    found = answer(
        desk,
        "request",
        failed(desk, *["fake-label"] * 3),
        "failed: ",
        "instances: 3 needed, 2 of 2 left",
    )
    assert found["suggestion"].startswith(
        "raise `max-servers` of pool main, or request fewer or smaller nodes"
    )


def test_request_that_is_larger_than_the_limit_of_its_tenant_can_never_be_served(
    desk: Desk,
) -> None:
    desk.start(
        config(
            provider(), **{"tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 1}]}
        )
    )
    request = desk.bench.submit(*["fake-label"] * 3, tenant_name="acme")
    found = answer(
        desk, "request", request, "tenant acme is limited to 1 instances, 0 in use, 3 needed"
    )
    assert "or request fewer nodes" in found["suggestion"] and "wait" not in found["suggestion"]


def test_labels_of_different_pools_are_to_be_requested_one_by_one(desk: Desk) -> None:
    desk.start(
        config(provider(pools=[{"name": "a", "labels": ["la"]}, {"name": "b", "labels": ["lb"]}]))
    )
    found = answer(
        desk, "request", failed(desk, "la", "lb"), "failed: no pool offers la and lb together"
    )
    assert found["suggestion"].startswith("request these labels one by one")
    (folded,) = found["candidates"]
    assert (folded["name"], folded["verdict"]) == ("2 pools", "do not offer la and lb")


def _declined(desk: Desk, request: str) -> list[str]:
    """The lines of its history that name declines."""
    return [
        event["text"]
        for event in desk.explain("request", request)["history"]
        if event["type"] == "request-declined"
    ]


def test_pools_that_do_not_offer_a_label_are_folded(desk: Desk) -> None:
    others = [{"name": f"p{number}", "labels": ["other"]} for number in range(3)]
    desk.start(
        config(
            provider(pools=[{"name": "off", "labels": ["fake-label"], "max-servers": 0}, *others])
        )
    )
    request = failed(desk, "fake-label")
    found = answer(
        desk, "request", request, "failed: ", "pool is disabled", "(3 other pools do not offer it)"
    )
    assert [each["name"] for each in found["candidates"]][1:] == ["3 other pools"]
    wait_for(
        lambda: _declined(desk, request)[0].endswith(" and 3 other pools"),
        what="one line in the history",
    )
    assert len(_declined(desk, request)) == 1
    for text in (
        desk.run("request", "show", request)[1],
        *desk.run("request", "create", "fake-label", "--wait", "5")[1:],
    ):
        assert "3 other pools do not offer it" in text and "fake-provider-p0" not in text


def test_unknown_label_is_explained_with_what_may_be_meant(desk: Desk) -> None:
    desk.start(config(provider()))
    with pytest.raises(CommandError, match="no launcher offers fake-labl; did you mean fake-label"):
        desk.run("explain", "label", "fake-labl")


# -- clouds


def test_misspelt_flavor_is_to_be_corrected(desk: Desk) -> None:
    entry = provider(label={"flavor-name": "Nosuch"})
    del entry["pools"][0]["labels"][0]["min-ram"]
    desk.start(config(entry))
    found = answer(desk, "request", failed(desk, "fake-label"), "failed: ", "flavor named 'Nosuch'")
    assert found["suggestion"].startswith("correct the flavor of the label")
    assert (
        answer(desk, "label", "fake-label", "flavor named 'Nosuch'")["suggestion"]
        in found["suggestion"]
    )
    desk.reported("flavor named 'Nosuch'", "Suggestion: correct the flavor of the label")


def test_image_that_the_cloud_lacks_is_to_be_uploaded(desk: Desk) -> None:
    entry = provider()
    entry["cloud-images"][0]["image-name"] = "No Such"
    desk.start(config(entry))
    found = answer(desk, "request", failed(desk, "fake-label"), "failed: ", "cloud image No Such")
    assert found["suggestion"].startswith("correct the image of the label")
    answer(desk, "provider", "fake-provider", "cloud image No Such")
    desk.reported("cloud image No Such", "Suggestion: correct the image")


def test_cloud_that_does_not_answer_a_launch_is_named_with_its_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider()))
    going_on = threading.Event()
    monkeypatch.setattr(
        desk.bench.adapter("fake-provider"), "_createServer", lambda *args, **kw: going_on.wait(60)
    )
    try:
        request = desk.bench.submit("fake-label")
        (node,) = desk.bench.wait_nodes(1, state="building")
        answer(desk, "request", request, f"launching node {node.id} for ")
    finally:
        going_on.set()


def test_deletion_that_fails_names_the_error_of_the_cloud(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider(pool=ONE)))
    request, (node,) = desk.bench.fulfilled("fake-label")

    def refuse(*args: Any, **kw: Any) -> None:
        raise RuntimeError("HTTP 409: server is locked")

    with monkeypatch.context() as patched:
        patched.setattr(desk.bench.adapter("fake-provider"), "_deleteServer", refuse)
        desk.bench.zuul.give_back(*desk.bench.zuul.accept(request))
        words = f"deletion of node {node.id} failed: HTTP 409: server is locked"
        answer(desk, "node", node.id, words)
        waiting = desk.bench.submit("fake-label")
        found = answer(desk, "request", waiting, "0 of 1 left", "1 node: 1 deleting", words)
        assert found["suggestion"].endswith("the deletion is retried until it succeeds")
        desk.reported(words)
        assert (
            words not in str(desk.explain("label", "fake-label")["problems"]) or found["problems"]
        )
    desk.bench.wait_request(waiting, "fulfilled")
    wait_for(lambda: desk.problems() == [], what="nothing is reported any more")


def test_machine_of_a_former_driver_keeps_its_record_until_that_driver_deletes_it(
    desk: Desk,
) -> None:
    cloud = config(provider("rack", driver="fake"), labels={"fake-label": {"min-ready": 1}})
    pool = desk.bench.start(cloud)
    (node,) = desk.bench.wait_nodes(1, state="ready")
    # While a launcher changes the driver, its former one may still delete the machine.
    desk.bench.stop(pool)
    host = {"name": "fake-host", "labels": ["fake-label"], "host-key-checking": False}
    rack = {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [host]}]}
    desk.start({"labels": [{"name": "fake-label"}], "providers": [rack]})
    words = f"deletion of node {node.id} failed: another driver has created it"
    desk.reported(words, node.external_id)
    found = answer(desk, "node", node.id, words, f"machine {node.external_id} may still run")
    assert found["suggestion"].startswith("restore the former driver")
    (static,) = desk.bench.wait_nodes(1, state="ready")
    assert static.launcher == "static driver"
    desk.bench.zuul.write_node(static.id, state="used")
    desk.bench.wait_gone(static.id)
    assert desk.bench.node(node.id).external_id == node.external_id
    desk.bench.config(cloud)
    desk.bench.wait_gone(node.id)
    wait_for(lambda: not any(words in text for text in desk.problems()), what="its problem ends")


@pytest.mark.parametrize(
    "after, why",
    [
        (provider(labels=["other"]), "pool fake-provider-main no longer offers fake-label"),
        (
            provider(pools=[{"name": "new", "labels": ["fake-label"]}]),
            "pool fake-provider-main is no longer configured",
        ),
    ],
    ids=["label", "pool"],
)
def test_idle_node_of_a_removed_label_or_pool_is_reported_until_it_is_deleted(
    desk: Desk, after: dict[str, Any], why: str
) -> None:
    desk.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    (node,) = desk.bench.wait_nodes(1, state="ready")
    wait_for(lambda: not desk.bench.node(node.id).allocated_to, what="the node is free")
    assert answer(desk, "node", node.id, "free")["cause"] == "" and desk.problems() == []
    desk.bench.config(config(after))
    found = answer(desk, "node", node.id, "free: no request gets it", why)
    assert found["suggestion"].startswith(f"delete it with `nodepool delete {node.id}`")
    words = f"no request gets idle node {node.id}: {why}"
    desk.reported(words)
    assert desk.bench.node(node.id).state == "ready", "as with 11.0.0"
    assert desk.run("delete", node.id)[0] == 0
    wait_for(lambda: words not in desk.problems(), what="the problem ends")


def test_nodes_of_a_removed_provider_are_reported_until_it_is_configured_again(desk: Desk) -> None:
    both = config(
        provider(), provider("fake-other", labels=["other"]), labels={"other": {"min-ready": 1}}
    )
    desk.start(both)
    (node,) = desk.bench.wait_nodes(1, state="ready")
    wait_for(lambda: not desk.bench.node(node.id).allocated_to, what="the node is free")
    assert desk.problems() == []
    desk.bench.config(config(provider()))
    words = (
        "no launcher has provider fake-other: its 1 node (1 ready) cannot be assigned or deleted"
    )
    desk.reported(words)
    answer(desk, "node", node.id, "no launcher has provider fake-other")
    desk.bench.config(both)
    wait_for(lambda: desk.problems() == [], what="the problem ends")
    assert desk.bench.node(node.id).state == "ready"


def test_idle_node_without_labels_is_reported(desk: Desk) -> None:
    desk.start(config(provider()))
    node = Node()
    node.state, node.provider, node.pool = "ready", "fake-provider", "main"
    desk.bench.zk.storeNode(node)
    why = "pool fake-provider-main no longer offers nodes without a label"
    desk.reported(f"no request gets idle node {node.id}: {why}")


def test_backing_node_that_cannot_be_launched_is_the_cause(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "labels": [
                    {
                        "name": "small",
                        "backing-label": "big",
                        "max-parallel-jobs": 2,
                        "grace-time": 1,
                    }
                ],
            }
        ],
    }
    desk.start(config(provider(labels=["big"], **{"launch-retries": 1}), slots))
    refuse_launches(monkeypatch, "no valid host was found")
    words = (
        "no backing node of big can be launched: provider fake-provider: no valid host was found"
    )
    answer(
        desk,
        "request",
        failed(desk, "small"),
        f"failed: {words}",
        "(1 other pool does not offer it)",
    )
    answer(desk, "label", "small", words)
    answer(desk, "provider", "meta", words)


def test_backing_node_whose_machine_has_died_gets_no_more_nodes_and_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = {
        "name": "meta",
        "driver": "metastatic",
        "boot-timeout": 1,
        "pools": [
            {
                "name": "main",
                "labels": [
                    {
                        "name": "small",
                        "backing-label": "big",
                        "max-parallel-jobs": 3,
                        "host-key-checking": True,
                    }
                ],
            }
        ],
    }
    desk.start(config(provider(labels=["big"]), slots))
    _request, (first,) = desk.bench.fulfilled("small")
    (dead,) = desk.bench.nodes(type=["big"])
    # Its address is looked up in vain until there is another machine.
    monkeypatch.setattr(
        NodescanRequest, "_fake", lambda _scan: len(desk.bench.nodes(type=["big"])) > 1
    )
    _request, (second,) = desk.bench.fulfilled("small")
    backing = {node.driver_data["backing_node"] for node in desk.bench.nodes(type=["small"])}
    assert dead.id in backing and len(backing) == 2, (first, second)
    desk.reported(
        f"host {dead.id} (backing node) does not answer and gets no more nodes; check its machine"
    )


# -- owners of nodes


def test_requestor_that_does_not_accept_its_nodes_is_named(desk: Desk) -> None:
    desk.start(config(provider(pool=ONE)))
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.write_node(node.id, state_time=time.time() - LONG_AGO)
    words = f"has not accepted request {request}"
    answer(desk, "node", node.id, words)
    found = answer(desk, "request", desk.bench.submit("fake-label"), "1 node: 1 assigned", words)
    assert (
        found["suggestion"]
        == "check that the requestor (Zuul's scheduler) runs, or cancel the request"
    )
    desk.reported(words)


def test_used_node_whose_lock_is_not_released_is_named(desk: Desk) -> None:
    desk.start(config(provider(pool=ONE)))
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    desk.bench.zuul.write_node(node.id, state="used", state_time=time.time() - LONG_AGO)
    words = f"node {node.id} has been used for 16 min"
    answer(desk, "node", node.id, words)
    found = answer(desk, "request", desk.bench.submit("fake-label"), "1 node: 1 used", words)
    assert found["suggestion"].startswith("restart the process that holds the lock")
    desk.reported(words)


def test_hold_that_has_expired_long_ago_is_named(desk: Desk) -> None:
    desk.start(config(provider(pool=ONE)))
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    held = {"hold_job": "nightly", "hold_expiration": 60, "state_time": time.time() - LONG_AGO}
    desk.bench.zuul.write_node(node.id, state="hold", **held)
    words = f"the hold of node {node.id} expired 15 min"
    answer(desk, "node", node.id, words)
    found = answer(
        desk, "request", desk.bench.submit("fake-label"), "by nightly, expired 15 min", words
    )
    assert found["suggestion"] == f"delete it with `nodepool delete {node.id}`"
    desk.reported(words)


def test_static_host_that_serves_another_label_is_counted_as_assigned(desk: Desk) -> None:
    host = {
        "name": "127.0.0.1",
        "labels": ["metal", "rock"],
        "host-key-checking": False,
        "connection-type": "ssh",
    }
    rack = {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [host]}]}
    desk.start({"labels": [{"name": "metal"}, {"name": "rock"}], "providers": [rack]})
    desk.bench.fulfilled("rock")
    answer(
        desk, "request", desk.bench.submit("metal"), "no free node of metal (1 node: 1 assigned)"
    )


# -- launchers


def test_without_any_launcher_waiting_requests_are_listed_with_the_cause(desk: Desk) -> None:
    pool = desk.start(config(provider()))
    desk.stop()
    desk.bench.stop(pool)
    request = desk.bench.submit("fake-label")
    for text in (
        desk.explained("request", request),
        desk.run("status")[1],
        "\n".join(desk.problems()),
    ):
        assert "no launcher is running" in text and "start nodepool-launcher" in text
    (row,) = cluster.by_cause(desk.bench.zk).rows
    assert (row["ids"], row["suggestion"]) == ([request], "start nodepool-launcher")


def test_request_behind_one_for_another_label_has_no_queue_position(desk: Desk) -> None:
    desk.start(config(provider(labels=["a", "b"], pool={"max-servers": 2})))
    desk.bench.fulfilled("a")
    first = desk.bench.submit("a", "a")
    desk.bench.wait_request(first, "pending")
    found = answer(
        desk, "request", desk.bench.submit("b", priority="300"), f"request {first} comes first"
    )
    assert "queue position" not in found["facts"]
    assert found["suggestion"].startswith("raise `max-servers` of pool main")


def test_pools_are_named_after_the_launcher_in_its_report(desk: Desk) -> None:
    pool = desk.start(config(provider()))
    (own,) = wait_for(pool.zk.readReports, what="the first report")
    place = f"fake-provider-main on {own['name']}"
    assert [each["name"] for each in desk.explain("label", "fake-label")["candidates"]] == [place]
    assert [each["name"] for each in desk.explain("provider", "fake-provider")["candidates"]] == [
        place
    ]
    assert [row["launcher"] for row in desk.table("pools")] == [own["name"]]


def test_tenant_that_may_have_nothing_is_not_to_request_fewer_nodes(desk: Desk) -> None:
    desk.start(
        config(
            provider(), **{"tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 0}]}
        )
    )
    request = desk.bench.submit("fake-label", tenant_name="acme")
    found = answer(
        desk, "request", request, "tenant acme is limited to 0 instances, 0 in use, 1 needed"
    )
    assert found["suggestion"] == "raise `max-servers` of tenant acme in `tenant-resource-limits`"


def test_launch_that_fails_without_a_message_is_not_to_be_repaired_after_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider(**{"launch-retries": 1})))
    refuse_launches(monkeypatch, "")
    found = answer(
        desk, "request", failed(desk, "fake-label"), "failed: ", "launch failed without a message"
    )
    assert (
        found["suggestion"]
        == "see the launcher's log for the reason, then submit the request again"
    )


def test_full_pool_names_the_request_that_comes_first(desk: Desk) -> None:
    pools = [{"name": name, "labels": ["fake-label"], "max-servers": 1} for name in ("one", "two")]
    desk.start(config(provider(pools=pools)))
    for _ in pools:
        desk.bench.fulfilled("fake-label")
    first, second = desk.bench.submit("fake-label"), desk.bench.submit("fake-label", priority="300")
    answer(desk, "request", second, "0 of 1 left")

    def full() -> bool:
        found = desk.explain("request", second)["candidates"]
        return any(each["verdict"] == f"full; request {first} comes first there" for each in found)

    wait_for(full, what=str(desk.explain("request", second)))
