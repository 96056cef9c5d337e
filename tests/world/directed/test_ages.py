"""max-ready-age, max-hold-age and hold_expiration (LAU-12.4, LAU-12.5)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

SPEC = "LAU-21: "


def held(bench: LauncherBench, **values: Any) -> str:
    node = bench.ready_node("fake-provider", "main", "fake-label", state="hold", **values)
    return str(node.id)


def stays(bench: LauncherBench, node_id: str, state: str = "hold") -> None:
    """Still there after everything else that was older has been deleted."""
    assert bench.node(node_id).state == state


@pytest.mark.spec(SPEC + "max_ready_age")
def test_max_ready_age(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(labels=["fake-label", "young"]), labels={"fake-label": {"max-ready-age": 1}}
        )
    )
    old = bench.ready_node("fake-provider", "main", "fake-label")
    allocated = bench.ready_node(
        "fake-provider", "main", "fake-label", allocated_to=bench.submit("nowhere", state="failed")
    )
    unlimited = bench.ready_node("fake-provider", "main", "young", state_time=1.0)
    foreign = bench.ready_node("elsewhere", "main", "fake-label", state_time=1.0)
    begin = time.monotonic()
    bench.wait_gone(old.id)
    assert time.monotonic() - begin > 0.5
    for node in (allocated, unlimited, foreign):
        stays(bench, node.id, "ready")


def test_ready_node_is_replaced_after_an_hour(bench: LauncherBench) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1, "max-ready-age": 3600}}))
    (old,) = bench.wait_nodes(1, state="ready")
    time.sleep(3590)
    assert bench.node(old.id).state == "ready"
    bench.wait_gone(old.id)
    bench.wait_nodes(1, state="ready")


@pytest.mark.spec("LAU-12.4: several labels, the first limit that hits")
def test_max_ready_age_of_several_labels(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(labels=["a", "b"]),
            labels={"a": {"max-ready-age": 5000}, "b": {"max-ready-age": 100}},
        )
    )
    node = bench.ready_node(
        "fake-provider", "main", "a", type=["a", "b"], state_time=time.time() - 200
    )
    young = bench.ready_node("fake-provider", "main", "a", state_time=time.time() - 200)
    bench.wait_gone(node.id)
    stays(bench, young.id, "ready")


@pytest.mark.spec(SPEC + "max_hold_age")
def test_max_hold_age(bench: LauncherBench) -> None:
    bench.start(config(provider(), **{"max-hold-age": 1}))
    node_id = held(bench)
    bench.wait_gone(node_id)


@pytest.mark.spec(SPEC + "hold_expiration_no_default")
def test_own_limit_without_a_global_one(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    control, custom = held(bench, state_time=1.0), held(bench, hold_expiration=1)
    bench.wait_gone(custom)
    stays(bench, control)


@pytest.mark.spec(SPEC + "hold_expiration_str_type, hold_expiration_bad_type_coercion")
def test_hold_expiration_of_any_type_is_read(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    bad = held(bench, hold_expiration="notanumber", state_time=1.0)
    text = held(bench, hold_expiration="1")
    bench.wait_gone(text)
    stays(bench, bad)
    assert bench.node(bad).hold_expiration == 0


@pytest.mark.spec(SPEC + "hold_expiration_lower_than_default, hold_expiration_higher_than_default")
def test_the_smaller_limit_wins(bench: LauncherBench) -> None:
    bench.start(config(provider(), **{"max-hold-age": 100}))
    now = time.time()
    lower = held(bench, hold_expiration=20, state_time=now - 50)
    control = held(bench, state_time=now - 50)
    higher = held(bench, hold_expiration=500, state_time=now - 150)
    bench.wait_gone(lower, higher)
    stays(bench, control)
    # Zuul's autohold writes strings and numbers alike; the state's age counts, not the node's.
    bench.zuul.write_node(control, hold_expiration="10", state_time=now - 50)
    bench.wait_gone(control)


@pytest.mark.spec("ZK-10.12: a locked held node, and one within its time, are left alone")
def test_held_nodes_are_kept(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    request_id = bench.submit("fake-label")
    node_id = bench.wait_request(request_id, "fulfilled")["nodes"][0]
    bench.zuul.accept(request_id)
    bench.zuul.write_node(
        node_id, state="hold", hold_job="t p j .*", comment="reason", hold_expiration=0
    )
    bench.zuul.unlock(node_id)
    bench.use_up(bench.fulfilled("fake-label")[0])
    node = bench.node(node_id)
    assert (node.state, node.hold_job, node.comment) == ("hold", "t p j .*", "reason")
    # The operator lets it go.
    bench.zuul.write_node(node_id, state="used")
    bench.wait_gone(node_id)
    wait_for(lambda: not bench.servers("fake-provider"))


def test_ready_nodes_without_a_running_instance_go(bench: LauncherBench) -> None:
    """Gone or stopped in the cloud: not handed out; used ones and those of other launchers are
    kept.
    """
    bench.start(
        config(provider(labels=["a"]), labels={"a": {"min-ready": 3}}), cleanup_interval=0.3
    )
    stopped, deleted, kept = bench.wait_nodes(3, state="ready", allocated_to=None)
    request_id, (used,) = bench.fulfilled("a")
    assert used.id in (stopped.id, deleted.id, kept.id)
    idle = [node for node in (stopped, deleted, kept) if node.id != used.id]
    bench.zuul.accept(request_id)
    foreign = bench.ready_node("fake-provider", "main", "a", external_id="made-by-another-launcher")
    bench.wait_nodes(4, state="ready")
    cloud = bench.cloud("fake-provider")
    cloud.get_server_by_id(idle[0].external_id).status = "SHUTOFF"
    with cloud._lock:
        cloud._server_list[:] = [
            s for s in cloud._server_list if s.id not in (idle[1].external_id, used.external_id)
        ]
    bench.wait_gone(*(node.id for node in idle))
    stays(bench, used.id, "in-use")
    stays(bench, foreign.id, "ready")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("no route to the cloud"), "OSError: no route"),
        (Unspeakable(), "Unspeakable: <exception str() failed>"),
    ],
    ids=["error", "unspeakable"],
)
def test_a_cloud_that_cannot_be_asked_loses_no_ready_node(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    bench.start(
        config(provider(labels=["a"]), labels={"a": {"min-ready": 1}}), cleanup_interval=0.3
    )
    (node,) = bench.wait_nodes(1, state="ready")
    calls: list[object] = []

    def fail(external_ids: list[object]) -> list[object]:
        calls.append(external_ids)
        raise error

    bench.adapter("fake-provider").findMissingInstances = fail
    wait_for(lambda: len(calls) >= 2, what="two questions")
    stays(bench, node.id, "ready")
    (line,) = {
        r.message
        for r in caplog.records
        if "Cannot compare ready nodes of provider fake-provider with the cloud" in r.message
    }
    assert text in line


@pytest.mark.spec(
    "issue 11: an external_id of an odd kind keeps no other ready node from being compared with "
    "the cloud"
)
def test_an_odd_external_id_alongside_others(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(
        config(provider(labels=["a"]), labels={"a": {"min-ready": 1}}), cleanup_interval=0.3
    )
    (node,) = bench.wait_nodes(1, state="ready")
    odd = bench.ready_node("fake-provider", "main", "a", external_id={"host": "h", "sliver": ["s"]})
    with bench.cloud("fake-provider")._lock:
        bench.cloud("fake-provider")._server_list.clear()
    bench.wait_gone(node.id)
    stays(bench, odd.id, "ready")
    assert (
        f"Cannot compare ready nodes of provider fake-provider with an odd external_id ({odd.id})"
        in caplog.text
    )
