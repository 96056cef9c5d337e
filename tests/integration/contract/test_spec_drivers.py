"""Drivers from elsewhere, written to the 11.0.0 interface, served by a whole launcher (DRV)."""

from __future__ import annotations

import importlib.metadata
import logging
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.cmd.config_validator import ConfigValidator
from nodepool.driver import Drivers
from tests import FIXTURES, REPOSITORY
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider

DRIVERS = FIXTURES / "drivers"
OURS = ("bakery", "foundry", "shattered", "mycloud")


def bakery(name: str = "baker", label: str = "bread", **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "driver": "bakery",
        "oven": "stone",
        "pools": [
            {
                "name": "main",
                "node-attributes": {"crust": "thick"},
                "labels": [{"name": label, "flour": 2}],
                **options.pop("pool", {}),
            }
        ],
        **options,
    }


def foundry(name: str = "founder", label: str = "anvil", **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "driver": "foundry",
        "cloud-images": [{"name": "iron", "username": "smith"}],
        "pools": [{"name": "main", "labels": [{"name": label, "cloud-image": "iron"}]}],
        **options,
    }


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    def forget() -> None:
        for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
            del sys.modules[name]

    forget()
    yield
    Drivers.load([])
    forget()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> str:
    """A search-path directory which is on sys.path too, as the drivers of that time need."""
    monkeypatch.syspath_prepend(str(DRIVERS))
    # What a launcher of an earlier test may have loaded in its last moment, without this path.
    Drivers.load([])
    return str(DRIVERS)


@pytest.mark.spec("DRV-1 to DRV-6: a classic driver written for 11.0.0 runs without a changed line")
def test_classic_driver_written_for_11_0_0_runs_unchanged(
    bench: LauncherBench, statsd: StatsdReceiver, directory: str
) -> None:
    pool = bench.start(
        {**config(bakery(), labels={"bread": {"min-ready": 1}}), "drivers-path": directory}
    )
    (idle,) = bench.wait_nodes(1, state="ready", type=["bread"], allocated_to=None)
    assert (idle.username, idle.host_keys, idle.attributes) == (
        "baker",
        ["ssh-rsa FAKEKEY"],
        {"crust": "thick"},
    )
    assert idle.external_id == f"loaf-{idle.id}"
    assert (idle.resources["instances"], idle.resources["cores"]) == (1, 2)
    manager = pool.getProviderManager("baker")
    assert type(manager).__module__ == "bakery.provider"
    # Both a reused and a new node; the third fills the provider, the fourth waits.
    first, nodes = bench.fulfilled("bread", "bread")
    assert idle.id in [node.id for node in nodes]
    statsd.wait("nodepool.launch.provider.baker.ready", "1|c")
    wait_for(lambda: len(manager.loaves) == 3)
    second = bench.submit("bread", "bread")
    bench.wait_request(second, "pending")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")
    bench.use_up(second)
    bench.wait_nodes(1, state="ready")
    wait_for(lambda: "cleanupLeakedResources" in manager.calls, what="the clean-up of the driver")
    bench.stop(pool)
    assert manager.calls[0] == "start"
    assert manager.calls[-2:] == ["stop", "join"]


@pytest.mark.spec(
    "DRV-6.1, DRV-14.8, DRV-14.11: NodeLauncher of a classic driver: retries, FAILED, quota errors "
    "pause"
)
def test_classic_driver_failures(
    bench: LauncherBench, statsd: StatsdReceiver, directory: str
) -> None:
    pool = bench.start({**config(bakery()), "drivers-path": directory})
    manager = pool.getProviderManager("baker")
    manager.failures = 1
    request_id, _nodes = bench.fulfilled("bread")
    bench.use_up(request_id)
    manager.failures = 2
    failed = bench.wait_request(bench.submit("bread"), "failed")
    assert failed["declined_by"]
    statsd.wait("nodepool.launch.provider.baker.error.status", "1|c")
    bench.wait_nodes(0)
    manager.over_quota = 1
    request_id, _nodes = bench.fulfilled("bread")
    statsd.wait("nodepool.launch.provider.baker.error.quota", "1|c")
    bench.use_up(request_id)
    bench.wait_nodes(0)
    assert manager.loaves == {}


@pytest.mark.spec(
    "DRV-5.5: an exception in launch() declines the request; nothing of it stays behind"
)
def test_classic_launch_raises(bench: LauncherBench, directory: str) -> None:
    pool = bench.start({**config(bakery()), "drivers-path": directory})
    manager = pool.getProviderManager("baker")
    manager.explode = True
    failed = bench.wait_request(bench.submit("bread"), "failed")
    assert failed["declined_by"]
    (worker,) = pool.getPoolWorkers("baker")
    wait_for(lambda: not worker.request_handlers, 5, "the handler ends")
    bench.wait_nodes(0)
    manager.explode = False
    bench.fulfilled("bread")


def kiosk(limit: int) -> dict[str, Any]:
    return {
        "name": "corner",
        "driver": "kiosk",
        "pools": [{"name": "main", "labels": ["paper"], "max-servers": limit}],
    }


def most_nodes(bench: LauncherBench, provider_name: str) -> list[int]:
    """The greatest number of records of the provider so far, in a list that keeps changing."""
    from nodepool.zk.zookeeper import ZooKeeper

    watching = ZooKeeper(bench.chroot.connect())
    assert watching.wait_synced(20) and watching.node_tree is not None
    most = [0]

    def changed(_node_id: str, _old: Any, _new: Any) -> None:
        most[0] = max(most[0], len(watching.getProviderNodes(provider_name)))

    watching.node_tree.listeners.append(changed)
    return most


@pytest.mark.spec(
    "DRV-5.5, DRV-12: one node after the other: a driver that counts records never exceeds its "
    "limit"
)
@pytest.mark.parametrize("labels", [1, 2])
def test_classic_driver_that_counts(bench: LauncherBench, labels: int) -> None:
    most = most_nodes(bench, "corner")
    bench.start({**config(kiosk(3)), "drivers-path": str(DRIVERS)})
    waiting = [bench.submit(*["paper"] * labels) for _ in range(8)]
    while waiting:
        states = {r: bench.zuul.request(r)["state"] for r in waiting}
        assert "failed" not in states.values()
        for request_id in [r for r, state in states.items() if state == "fulfilled"]:
            bench.use_up(request_id)
            waiting.remove(request_id)
    assert most[0] == 3


@pytest.mark.spec("DRV-5.5, LAU-21.73: what a driver raises concerns that request only")
@pytest.mark.parametrize(
    "hook", ["imagesAvailable", "hasProviderQuota", "hasRemainingQuota", "setNodeMetadata"]
)
def test_hooks_that_raise(bench: LauncherBench, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = bench.start({**config(kiosk(3)), "drivers-path": str(DRIVERS)})
    handler = next(
        cls
        for cls in type(pool.getProviderManager("corner")).__init__.__globals__.values()
        if getattr(cls, "__name__", "") == "KioskHandler"
    )
    with monkeypatch.context() as patch:
        patch.setattr(handler, hook, lambda *args: 1 / 0)
        assert bench.wait_request(bench.submit("paper"), "failed")["declined_by"]
    (worker,) = pool.getPoolWorkers("corner")
    wait_for(lambda: not worker.request_handlers)
    bench.fulfilled("paper", "paper")
    assert len(bench.zk.getNodes()) == 2


@pytest.mark.spec("DRV-4: exceptions of cleanupLeakedResources are logged per provider")
def test_leak_search_that_raises(
    bench: LauncherBench, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = bench.make(
        {**config(kiosk(3), bakery()), "drivers-path": directory}, cleanup_interval=0.2
    )
    pool.start()
    bench.wait_ready(pool)
    corner, baker = pool.getProviderManager("corner"), pool.getProviderManager("baker")
    corner.cleanupLeakedResources = lambda: 1 / 0
    wait_for(lambda: "ZeroDivisionError" in caplog.text, what="the failure in the log")
    before = len(baker.calls)
    wait_for(
        lambda: baker.calls[before:].count("cleanupLeakedResources") >= 2, what="the other's search"
    )


@pytest.mark.spec("LAU-8.4, DRV-4: tenant limits concern providers with QuotaSupport only")
def test_tenant_limit_and_a_driver_without_quota(bench: LauncherBench) -> None:
    content = config(
        kiosk(1), **{"tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 1}]}
    )
    bench.start({**content, "drivers-path": str(DRIVERS)})
    first, _nodes = bench.fulfilled("paper", tenant_name="acme")
    second = bench.submit("paper", tenant_name="acme")
    bench.wait_request(second, "pending")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec(
    "DRV-7; issue 2: a state machine driver written for 11.0.0 runs without a changed line"
)
def test_state_machine_driver(bench: LauncherBench, statsd: StatsdReceiver) -> None:
    pool = bench.start({**config(foundry()), "drivers-path": [str(DRIVERS)]})
    adapter = bench.adapter("founder")
    assert type(adapter).__name__ == "FoundryAdapter"
    request_id, (node,) = bench.fulfilled("anvil", tenant_name="acme")
    assert (node.username, node.az, node.host_keys) == ("smith", "hall-1", ["ssh-rsa FAKEKEY"])
    assert (node.external_id, node.interface_ip, node.resources["cores"]) == (
        "cast1",
        "fake-cast1",
        2,
    )
    assert node.node_properties == {}
    node_id = bench.zuul.request(request_id)["nodes"][0]
    ((hostname, label, metadata, az),) = adapter.seen
    assert (hostname, label, az) == (f"np{node_id}", "anvil", "hall-1")
    assert metadata.pop("nodepool_cluster_id") and metadata.pop("nodepool_node_created").isdecimal()
    assert metadata == {
        "nodepool_node_id": node_id,
        "nodepool_pool_name": "main",
        "nodepool_provider_name": "founder",
    }
    bench.use_up(request_id)
    assert adapter.casts == {}
    # A failed attempt is deleted, the same node gets another one.
    adapter.crack = 1
    request_id, (node,) = bench.fulfilled("anvil")
    assert list(adapter.casts) == [node.external_id]
    bench.use_up(request_id)
    statsd.wait("nodepool.launch.provider.founder.hall-1.error.status", "1|c")
    # A quota error of the cloud pauses, and is tried again.
    adapter.quota_errors = 1
    request_id, _nodes = bench.fulfilled("anvil")
    statsd.wait("nodepool.launch.provider.founder.error.quota", "1|c")
    # A leak: the record goes, the machine stays.
    node_id = bench.zuul.accept(request_id)[0]
    gone = bench.zuul.client.transaction()
    for path in (
        bench.zuul.locks.pop(node_id),
        f"/nodepool/nodes/{node_id}/lock",
        f"/nodepool/nodes/{node_id}",
    ):
        gone.delete(path)
    gone.commit()
    wait_for(lambda: not adapter.casts, 15, "the leaked machine is deleted")
    statsd.wait("nodepool.provider.founder.leaked.instances", "1|c")
    bench.stop(pool)
    wait_for(lambda: adapter.stopped, what="stop() of the adapter")


@pytest.mark.spec("DRV-14.4, DRV-1.7; issue 2: a broken driver never disables another")
def test_broken_driver_alongside_good_ones(
    bench: LauncherBench, directory: str, caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path
) -> None:
    broken = {
        "name": "shards",
        "driver": "shattered",
        "pools": [{"name": "main", "labels": ["glass"]}],
    }
    content = {
        **config(broken, bakery(), foundry(), provider("fake-provider")),
        "drivers-path": directory,
    }
    pool = bench.start(content)
    assert set(pool.config.provider_managers) == {"baker", "founder", "fake-provider"}
    for label in ("bread", "anvil", "fake-label"):
        bench.fulfilled(label)
    bench.wait_request(bench.submit("glass"), "failed")
    assert "shattered: driver cannot be loaded" in caplog.text
    assert "a_library_that_nobody_installed" in caplog.text
    assert "shattered" not in Drivers.drivers
    assert {"bakery", "foundry", "fake", "static", "test"} <= set(Drivers.drivers)
    with pytest.raises(RuntimeError, match="a_library_that_nobody_installed"):
        Drivers.get("shattered")
    with caplog.at_level(logging.INFO):
        assert ConfigValidator(str(tmp_path / "nodepool.yaml")).validate({}) == 1
    assert "providers[shards]" in caplog.text


@pytest.mark.spec(
    "DRV-2: reset() of every driver in the registry at each load; one instance per process"
)
def test_drivers_are_reset_at_each_load_of_the_configuration(
    bench: LauncherBench, directory: str
) -> None:
    pool = bench.start({**config(bakery()), "drivers-path": directory})
    driver = Drivers.get("bakery")
    assert Drivers.drivers["bakery"] is driver
    before = driver.resets  # type: ignore[attr-defined]
    manager = pool.getProviderManager("baker")
    bench.config({**config(bakery()), "drivers-path": directory, "max-hold-age": 5})
    wait_for(lambda: pool.config.max_hold_age == 5, what="the new configuration")
    assert driver.resets > before  # type: ignore[attr-defined]
    assert Drivers.get("bakery") is driver
    assert pool.getProviderManager("baker") is manager


@pytest.mark.spec(
    "DRV-4, DRV-14.23: idle() of the replaced provider before start() of its successor, stop() "
    "after"
)
def test_replaced_provider_idles_before_its_successor_starts(
    bench: LauncherBench, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []
    pool = bench.start({**config(bakery()), "drivers-path": directory})
    old = pool.getProviderManager("baker")
    for name in ("start", "idle", "stop"):
        original = getattr(type(old), name)

        def record(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            events.append((name, self))
            return original(self, *args)

        monkeypatch.setattr(type(old), name, record)
    bench.config({**config(bakery(oven="electric")), "drivers-path": directory})
    wait_for(lambda: pool.getProviderManager("baker") not in (None, old), what="the new provider")
    wait_for(lambda: len(events) >= 3, what="idle, start, stop")
    new = pool.getProviderManager("baker")
    assert events[:3] == [("idle", old), ("start", new), ("stop", old)]
    bench.fulfilled("bread")
    assert len(new.loaves) == 1 and not old.loaves


@pytest.mark.spec(
    "DRV-1: Drivers.load(paths) by code, Drivers.drivers is a mapping, get() of a default"
)
def test_load_by_code(bench: LauncherBench, directory: str) -> None:
    Drivers.load([directory])
    assert Drivers.drivers_paths == [directory]
    registry = Drivers.drivers
    assert "bakery" in registry and registry["bakery"] is Drivers.get("bakery")
    assert registry.get("nope") is None and dict(registry)["foundry"] is Drivers.get("foundry")
    assert {name: type(d).__name__ for name, d in registry.items() if name in OURS} == {
        "bakery": "BakeryDriver",
        "foundry": "FoundryDriver",
    }
    # A configuration that says nothing about paths keeps what the program has loaded.
    bench.start(config(bakery()))
    assert Drivers.drivers_paths == [directory]
    bench.fulfilled("bread")


@pytest.mark.spec("DRV-1.8; issue 2: drivers of the entry-point group nodepool.drivers")
def test_driver_of_an_entry_point_launches(
    bench: LauncherBench, directory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    package = tmp_path / "site"
    shutil.copytree(DRIVERS / "foundry", package / "foundry_distribution")
    metadata = package / "foundry_distribution-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: foundry-distribution\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[nodepool.drivers]\ncasting = foundry_distribution:FoundryDriver\ngone = "
        "foundry_distribution:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(package))
    assert any(
        point.name == "casting"
        for point in importlib.metadata.entry_points(group="nodepool.drivers")
    )
    Drivers.load([directory])
    Drivers.load([])
    entry = {**foundry(), "driver": "casting"}
    broken = {**foundry("lost", "lost"), "driver": "gone"}
    bench.start(config(entry, broken))
    bench.fulfilled("anvil")
    bench.wait_request(bench.submit("lost"), "failed")
    assert "casting" in Drivers.drivers and "gone" not in Drivers.drivers


@pytest.mark.spec("issue 2: doc/examples/mycloud is loaded through drivers-path and launches")
def test_documented_example_driver_launches(
    bench: LauncherBench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = REPOSITORY / "doc" / "examples"
    shutil.copytree(examples / "mycloud", tmp_path / "mycloud")
    server = bench.chroot
    monkeypatch.setenv("NODEPOOL_ZK_PORT", server.hosts.rsplit(":", 1)[1])
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"NODEPOOL_ZK_{name.upper()}", getattr(server, name))
    text = (examples / "mycloud.yaml").read_text()
    path = tmp_path / "nodepool.yaml"
    path.write_text(
        text.replace("host: 127.0.0.1", f"host: 127.0.0.1\n    chroot: {server.chroot}")
    )
    assert server.chroot in path.read_text()
    assert ConfigValidator(str(path)).validate() == 0

    from nodepool.launcher import NodePool

    pool = NodePool(None, str(path))
    pool.cleanup_interval, pool.delete_interval = 1, 0.2
    bench.pools.append(pool)
    pool.start()
    bench.wait_ready(pool)
    assert Drivers.drivers_paths is not None
    assert [pathlib.Path(path).resolve() for path in Drivers.drivers_paths] == [tmp_path.resolve()]
    bench.wait_nodes(1, state="ready", allocated_to=None)  # min-ready
    request_id, nodes = bench.fulfilled("small", "small")
    assert {node.cloud for node in nodes} == {"mycloud"}
    machines = bench.adapter("first").cloud.machines
    wait_for(lambda: len(machines) == 3)
    bench.use_up(request_id)
    wait_for(lambda: len(machines) == 1)


@pytest.mark.spec("FAK-3: the example driver launches and deletes")
def test_example_driver_launches_and_deletes(bench: LauncherBench) -> None:
    from nodepool.driver.example import adapter as example

    assert example.CreateStateMachine.__name__ and example.DeleteStateMachine.__name__
    entry = {
        "name": "sample",
        "driver": "example",
        "region": "r",
        "project": "p",
        "rate-limit": 1000,
        "cloud-images": [{"name": "image", "image-id": "x", "username": "me"}],
        "pools": [
            {
                "name": "main",
                "labels": [{"name": "l", "cloud-image": "image", "instance-type": "big"}],
            }
        ],
    }
    bench.start(config(entry))
    request_id, (node,) = bench.fulfilled("l")
    assert (node.username, node.interface_ip) == ("me", "fake")
    bench.use_up(request_id)
    wait_for(lambda: not list(bench.adapter("sample").listInstances()))


@pytest.mark.spec("FAK-4.1; DRV-14.3: test and fake drivers side by side")
def test_and_fake_driver_run_side_by_side(bench: LauncherBench) -> None:
    entry = {"name": "plain", "driver": "test", "pools": [{"name": "main", "labels": ["t"]}]}
    pool = bench.start(config(entry, provider()))
    assert not pool.config.providers["plain"].manage_images
    request_id, (node,) = bench.fulfilled("t")
    assert node.external_id == f"test-{request_id}"
    bench.fulfilled("fake-label")
    bench.use_up(request_id)
