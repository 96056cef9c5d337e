"""Rotations: idle nodes are replaced in waves; nodes above min-ready are deleted."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodepool.launcher.nodes import rotation
from nodepool.zk.drains import Drain
from nodepool.zk.mirror import notes
from nodepool.zk.rotations import Rotation
from nodepool.zk.writer import Txn, Writer
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, expire_session, provider

FREE: dict[str, Any] = {"state": "ready", "allocated_to": None}


def rotate(bench: LauncherBench, kind: str = "label", target: str = "fake-label") -> Rotation:
    found = Rotation(kind, target, time.time(), reason="new flavor")
    notes.write(bench.zk.kazoo_client, found)
    return found


def setup(kept: int, **options: Any) -> dict[str, Any]:
    return config(provider(), labels={"fake-label": {"min-ready": kept, **options}})


def start(bench: LauncherBench, given: Any, kept: int, **options: Any) -> tuple[Any, set[str]]:
    """Start a launcher; return it with its ready nodes."""
    bench.quota(instances=200, cores=10_000)
    launcher = bench.start(given, **options)
    return launcher, {node.id for node in bench.wait_nodes(kept, timeout=300, **FREE)}


def start_other(bench: LauncherBench, given: Any) -> Any:
    """Start a second launcher as if it were another process."""
    launcher = bench.make(given, name="b.yaml")
    launcher.state.identifier = "elsewhere-1"
    launcher.start()
    bench.wait_ready(launcher)
    return launcher


def count_ready(launcher: Any) -> list[int]:
    """Record the number of ready nodes after each change."""
    found: list[int] = []
    tree = launcher.zk.node_tree
    tree.listeners.append(lambda *_: found.append(tree.counted.free["fake-label"]))
    return found


def wait_ended(bench: LauncherBench, timeout: float = 600) -> None:
    wait_for(lambda: not bench.zk.readNotes(Rotation), timeout, "the rotation has ended")


@pytest.mark.parametrize(("option", "missing"), [(1, 1), ("20%", 10), (60, 50)])
def test_rotation_keeps_all_but_max_unready_nodes(
    bench: LauncherBench, option: Any, missing: int
) -> None:
    launcher, before = start(bench, setup(50, **{"max-unready": option}), 50)
    counts = count_ready(launcher)
    rotate(bench)
    wait_ended(bench)
    after = {node.id for node in bench.wait_nodes(50, **FREE)}
    assert not before & after
    assert 50 - missing <= min(counts) <= 49
    assert (min(counts) == 50 - missing) or missing == 50


def test_label_without_min_ready_is_replaced_immediately(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    idle = [bench.ready_node("fake-provider", "main", "fake-label") for _ in range(3)]
    rotate(bench, "provider", "fake-provider")
    bench.wait_gone(*(node.id for node in idle))
    wait_ended(bench)
    assert not bench.nodes()


def test_nodes_in_use_are_unchanged(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    request, _nodes = bench.fulfilled("fake-label")
    (used,) = bench.zuul.accept(request)
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    rotate(bench)
    bench.wait_gone(idle.id)
    wait_ended(bench)
    assert bench.node(used).state == "in-use"


def test_node_that_becomes_idle_again_is_replaced(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    request, (node,) = bench.fulfilled("fake-label")
    rotate(bench)
    time.sleep(60)
    assert bench.node(node.id).state == "ready", "its request may still use it"
    bench.zuul.cancel(request)
    bench.wait_gone(node.id)
    wait_ended(bench)


def test_node_that_is_being_launched_is_replaced(bench: LauncherBench) -> None:
    bench.start(config(provider(), labels={"fake-label": {}}))
    bench.cloud("fake-provider").pause_creates = True
    bench.config(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    (old,) = bench.wait_nodes(1, state="building")
    rotate(bench)
    time.sleep(5)
    bench.resume_creates("fake-provider")
    wait_ended(bench)
    (new,) = bench.wait_nodes(1, **FREE)
    assert new.id != old.id


def test_static_nodes_are_not_replaced(bench: LauncherBench) -> None:
    host = {"name": "fake-host-1", "labels": ["a"]}
    pools = [{"name": "main", "nodes": [host]}]
    static = {"name": "static", "driver": "static", "pools": pools}
    bench.start({"labels": [{"name": "a"}], "providers": [static]})
    (node,) = bench.wait_nodes(1, **FREE)
    rotate(bench, "label", "a")
    wait_ended(bench)
    assert bench.node(node.id).state == "ready"


def test_two_launchers_together_keep_all_but_max_unready_nodes(bench: LauncherBench) -> None:
    given = setup(12)
    first, before = start(bench, given, 12, name="a.yaml")
    start_other(bench, given)
    counts = count_ready(first)
    rotate(bench)
    rotate(bench)
    wait_ended(bench)
    assert not before & {node.id for node in bench.wait_nodes(12, **FREE)}
    assert min(counts) == 11


def test_lost_session_in_a_wave_loses_no_node(bench: LauncherBench) -> None:
    launcher, before = start(bench, setup(6), 6)
    counts = count_ready(launcher)
    rotate(bench)
    wait_for(lambda: 5 in counts)
    expire_session(launcher)
    wait_ended(bench)
    assert not before & {node.id for node in bench.wait_nodes(6, timeout=60, **FREE)}
    assert min(counts) >= 5


def test_rotation_waits_for_the_launcher_that_keeps_the_stock(bench: LauncherBench) -> None:
    """A file without min-ready says nothing: the label may have it in the one of another."""
    keeper, before = start(bench, setup(4), 4, name="a.yaml")
    other = start_other(bench, config(provider()))
    bench.stop(keeper)
    wait_for(lambda: list(other.zk.report_tree.reports) == ["elsewhere-1"])
    rotate(bench)
    wait_for(other.rotation.problems, rotation.STALLED + 120)
    (problem,) = other.rotation.problems()
    assert "no running launcher reports min-ready of label fake-label" in problem.text
    time.sleep(120)
    assert {node.id for node in bench.nodes(**FREE)} == before
    bench.start(setup(4), name="a.yaml")
    wait_ended(bench)
    assert not before & {node.id for node in bench.wait_nodes(4, **FREE)}


def test_stock_is_kept_while_launches_fail(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, before = start(bench, setup(5, **{"max-unready": 2}), 5)
    counts = count_ready(launcher)
    bench.cloud("fake-provider").fail_creates = True
    failing: Any = ([], "launches of fake-label keep failing: no such flavor")
    monkeypatch.setattr(launcher.state.launch_failures, "blocked", lambda *_: failing)
    rotate(bench)
    wait_for(launcher.rotation.problems, rotation.STALLED + 120)
    (problem,) = launcher.rotation.problems()
    assert "keep failing: no such flavor" in problem.text
    assert {node.id for node in bench.nodes(**FREE)} == before
    monkeypatch.undo()
    wait_ended(bench)
    assert min(counts) >= 3


def test_wave_that_makes_no_progress_is_a_problem(bench: LauncherBench) -> None:
    launcher, _before = start(bench, setup(3), 3)
    bench.cloud("fake-provider").pause_creates = True
    rotate(bench)
    wait_for(launcher.rotation.problems, rotation.STALLED + 120)
    (problem,) = launcher.rotation.problems()
    assert problem.text.endswith("2 of 3 nodes are ready, at least 2 have to be")
    bench.resume_creates("fake-provider")
    wait_ended(bench)
    assert launcher.rotation.problems() == []


# -- images


def image(kept: int, **options: Any) -> dict[str, Any]:
    name = "fake-image"
    return config(
        provider(
            diskimages=[{"name": name}],
            pool={"labels": [{"name": "fake-label", "diskimage": name, "min-ram": 8192}]},
        ),
        labels={"fake-label": {"min-ready": kept}},
        diskimages=[{"name": name, "elements": ["e"], **options}],
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_nodes_of_an_earlier_build_are_replaced(bench: LauncherBench, enabled: bool) -> None:
    bench.store_image("fake-image", "fake-provider")
    launcher, before = start(bench, image(3, **{"replace-idle": enabled}), 3)
    counts = count_ready(launcher)
    newer = bench.store_image("fake-image", "fake-provider")
    time.sleep(60)
    after = bench.wait_nodes(3, **FREE)
    if not enabled:
        assert {node.id for node in after} == before
        return
    assert all(f"/builds/{newer.build_id}/" in node.image_id for node in after)
    assert min(counts) == 2
    time.sleep(60)
    assert {node.id for node in bench.nodes()} == {node.id for node in after}


def test_nodes_that_canaries_keep_on_the_earlier_build_are_launched_once(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.statemachine.upload_trials import UploadTrials, earlier_upload

    bench.store_image("fake-image", "fake-provider")
    _launcher, before = start(bench, image(3, **{"replace-idle": True}), 3)

    def earlier(_self: object, zk: Any, newest: Any, *_args: object) -> Any:
        return earlier_upload(zk.readImages(), newest) or newest

    monkeypatch.setattr(UploadTrials, "choose", earlier)
    bench.store_image("fake-image", "fake-provider")
    wait_for(lambda: not before & {node.id for node in bench.nodes(**FREE)}, 60)
    after = {node.id for node in bench.wait_nodes(3, **FREE)}
    time.sleep(120)
    assert {node.id for node in bench.nodes()} == after


# -- shrinking


def test_lowered_min_ready_deletes_the_oldest_nodes(bench: LauncherBench) -> None:
    _launcher, older = start(bench, setup(3), 3)
    time.sleep(1)
    bench.config(setup(4))
    (newest,) = {node.id for node in bench.wait_nodes(4, **FREE)} - older
    bench.config(setup(1))
    (left,) = bench.wait_nodes(1, **FREE)
    assert left.id == newest
    time.sleep(120)
    assert [node.id for node in bench.nodes()] == [left.id]


@pytest.mark.parametrize("options", [{"min-ready": 1, "shrink-ready": False}, {}])
def test_stock_is_kept_if_shrinking_is_off_or_min_ready_is_missing(
    bench: LauncherBench, options: dict[str, Any]
) -> None:
    launcher, before = start(bench, setup(3), 3)
    bench.config(config(provider(), labels={"fake-label": options}))
    wait_for(lambda: launcher.config.labels["fake-label"].min_ready == options.get("min-ready", 0))
    time.sleep(120)
    assert {node.id for node in bench.nodes(**FREE)} == before


def test_nodes_of_canceled_requests_are_not_deleted(bench: LauncherBench) -> None:
    start(bench, setup(1), 1)
    request, _nodes = bench.fulfilled("fake-label", "fake-label")
    bench.wait_nodes(1, **FREE)
    bench.zuul.cancel(request)
    bench.wait_nodes(3, **FREE)
    time.sleep(120)
    assert len(bench.nodes(**FREE)) == 3


def test_surplus_of_a_moment_is_kept(bench: LauncherBench) -> None:
    """Files are not applied by all launchers concurrently."""
    _launcher, before = start(bench, setup(4), 4, name="a.yaml")
    bench.config(setup(1), name="a.yaml")
    time.sleep(40)
    assert {node.id for node in bench.nodes()} == before
    bench.config(setup(4), name="a.yaml")
    time.sleep(120)
    assert {node.id for node in bench.nodes()} == before


def test_larger_min_ready_of_another_launcher_counts(bench: LauncherBench) -> None:
    _launcher, before = start(bench, setup(4), 4, name="a.yaml")
    start_other(bench, setup(2))
    time.sleep(120)
    assert {node.id for node in bench.nodes()} == before
    bench.config(setup(3), name="a.yaml")
    bench.wait_nodes(3, timeout=60, **FREE)


def test_stock_is_not_shrunk_below_that_of_a_launcher_that_reports_none(
    bench: LauncherBench,
) -> None:
    """One of 11.0.0 would launch the nodes again."""
    from nodepool.zk.components import PoolComponent

    component = PoolComponent(bench.chroot.connect(), "elsewhere")
    component.content.update(
        id="elsewhere-PoolWorker.p-main",
        provider_name="p",
        name="main",
        supported_labels=["fake-label"],
        paused=True,
    )
    component.register()
    _launcher, before = start(bench, setup(3), 3)
    bench.config(setup(1))
    time.sleep(120)
    assert {node.id for node in bench.nodes()} == before
    component.unregister()
    bench.wait_nodes(1, timeout=60, **FREE)


def test_end_of_a_drain_leads_to_no_loop(bench: LauncherBench) -> None:
    _launcher, (kept, *_more) = start(bench, setup(1, **{"max-ready-age": 600}), 1)
    bench.zuul.write_node(kept, host_id="rack-1")
    found = Drain("host", "rack-1", time.time(), keep_idle=True)
    notes.write(bench.zk.kazoo_client, found)
    bench.wait_nodes(2, **FREE)
    notes.remove(bench.zk.kazoo_client, found)
    (left,) = bench.wait_nodes(1, **FREE)
    time.sleep(120)
    assert [node.id for node in bench.nodes()] == [left.id]


# -- other clients


def test_launcher_waits_for_its_turn(bench: LauncherBench) -> None:
    launcher, before = start(bench, setup(2), 2)
    mark = "/nodepool/elections/rotation-fake-label"
    bench.zuul.client.create(mark, b"another launcher", ephemeral=True)
    rotate(bench)
    time.sleep(60)
    assert {node.id for node in bench.nodes(**FREE)} == before
    bench.zuul.client.delete(mark)
    wait_ended(bench)
    assert launcher.zk.kazoo_client.exists(mark) is None
    assert not before & {node.id for node in bench.wait_nodes(2, **FREE)}


@pytest.mark.parametrize("what", ["changed", "locked"])
def test_node_that_somebody_gets_at_the_same_time_is_not_deleted(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    run, tries = Writer.run, []

    def late(writer: Writer, txn: Txn, *args: Any) -> Any:
        if not tries and any("/elections/rotation-" in op.path for op in txn.operations):
            tries.append(txn)
            if what == "changed":
                bench.zuul.write_node(idle.id, state="hold")
            else:
                bench.zuul.lock(idle.id)
        return run(writer, txn, *args)

    monkeypatch.setattr(Writer, "run", late)
    rotate(bench)
    wait_for(lambda: tries)
    time.sleep(60)
    assert bench.node(idle.id).state == ("hold" if what == "changed" else "ready")
    assert not bench.zk.kazoo_client.exists("/nodepool/elections/rotation-fake-label")
