"""Changes of the configuration while everything runs (LAU-15)."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from typing import Any

import pytest
import yaml

from nodepool.driver import lifecycle
from nodepool.driver.statemachine.handler import StateMachineHandler
from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.launcher.nodes.probes import NodeProbes
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.pools.worker import PoolWorker
from nodepool.reasons import Code
from tests.conftest import wait_for
from tests.support.launcher import CLOUDS, LauncherBench, config, provider, reason_for

SPEC = "LAU-21: "


@pytest.mark.spec(SPEC + "provider_removal")
def test_removed_provider_is_stopped(bench: LauncherBench) -> None:
    one, two = provider("fake-one"), provider("fake-two", labels=["two"])
    pool = bench.start(config(one, two))
    worker = pool.getPoolWorkers("fake-two")[0]
    manager = pool.getProviderManager("fake-two")
    assert len(bench.zk.getRegisteredPools()) == 2
    bench.config(config(one))
    wait_for(lambda: not pool.getPoolWorkers("fake-two"))
    wait_for(lambda: [p.provider_name for p in bench.zk.getRegisteredPools()] == ["fake-one"])
    wait_for(lambda: not worker.is_alive())
    wait_for(lambda: not manager.running, what="manager stopped")
    bench.fulfilled("fake-label")


@pytest.mark.spec("LAU-15: removed provider: in-flight requests are finished or handed back")
def test_provider_removal_with_requests_under_way(bench: LauncherBench) -> None:
    one, two = (
        provider("fake-one", priority=2),
        provider("fake-two", priority=1, pool={"max-servers": 1}),
    )
    pool = bench.start(config(one, two))
    cloud = bench.cloud("fake-two")
    cloud.pause_creates = True
    launching = bench.submit("fake-label")
    wait_for(lambda: cloud._server_list)
    bench.config(config(one))
    wait_for(lambda: not pool.getPoolWorkers("fake-two"))
    wait_for(lambda: bench.zuul.request(launching)["state"] != "pending" or True)
    for server in list(cloud._server_list):
        server.event.set()
    record = bench.wait_request(launching, "fulfilled")
    assert record["declined_by"] == []
    bench.use_up(*([launching] if bench.node(record["nodes"][0]).provider == "fake-one" else []))


@pytest.mark.spec("LAU-15: removed provider: paused handlers free their nodes")
def test_provider_removal_with_paused_requests(bench: LauncherBench) -> None:
    one = provider("fake-one", priority=2)
    two = provider("fake-two", priority=1, pool={"max-servers": 1})
    pool = bench.start(config(one, two))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    wait_for(lambda: pool.getPoolWorkers("fake-two")[0].paused)
    bench.config(config(one))
    assert bench.node(bench.wait_request(waiting, "fulfilled")["nodes"][0]).provider == "fake-one"


@pytest.mark.spec("DRV-14.23: a provider is replaced only when its configuration changed; OST-3.2")
def test_only_changed_providers_are_replaced(bench: LauncherBench) -> None:
    pool = bench.start(config(provider("fake-one"), provider("fake-two")))
    one, two = pool.getProviderManager("fake-one"), pool.getProviderManager("fake-two")
    bench.config(
        config(
            provider("fake-one"),
            provider("fake-two", **{"boot-timeout": 33}),
            provider("fake-three"),
        )
    )
    wait_for(lambda: "fake-three" in pool.config.provider_managers)
    assert pool.getProviderManager("fake-one") is one
    assert pool.getProviderManager("fake-two") is not two
    assert pool.getProviderManager("fake-two").provider.boot_timeout == 33
    wait_for(lambda: not two.running)
    # Another cloud behind the same name, noticed at the next change of ours.
    changed = {"clouds": {**CLOUDS["clouds"], "fake": {"auth": {"username": "another"}}}}
    bench.write_clouds(changed)
    bench.config(config(provider("fake-one"), labels={"new": {}}))
    wait_for(lambda: "new" in pool.config.labels)
    assert pool.getProviderManager("fake-one") is not one
    assert (
        pool.getProviderManager("fake-one").provider.cloud_config.config["auth"]["username"]
        == "another"
    )


@pytest.mark.spec("DRV-14.23; LAU-15: launches under way survive a changed provider")
def test_a_launch_survives_a_changed_provider(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    old, cloud = pool.getProviderManager("fake-provider"), bench.cloud("fake-provider")
    cloud.pause_creates = True
    request_id = bench.submit("fake-label")
    wait_for(lambda: cloud._server_list)
    bench.config(config(provider(**{"boot-timeout": 33})))
    wait_for(lambda: pool.getProviderManager("fake-provider") is not old)
    cloud._server_list[0].event.set()
    assert bench.wait_request(request_id, "fulfilled")["declined_by"] == []
    wait_for(lambda: not old.running)


@pytest.mark.spec(
    "LAU-15: pools added and removed inside a provider; labels, limits, priorities at once"
)
def test_pools_and_labels_follow(bench: LauncherBench) -> None:
    def pools(*names: str, **options: Any) -> dict[str, Any]:
        return provider(pools=[{"name": n, "labels": [f"label-{n}"], **options} for n in names])

    pool = bench.start(config(pools("a", "b")))
    bench.fulfilled("label-b")
    bench.config(config(pools("a", "c", priority=7, **{"max-servers": 3})))
    wait_for(lambda: {p.name for p in bench.zk.getRegisteredPools()} == {"a", "c"})
    bench.fulfilled("label-c")
    wait_for(lambda: {p.priority for p in bench.zk.getRegisteredPools()} == {7})
    assert {w.getPoolConfig().max_servers for w in pool.getPoolWorkers("fake-provider")} == {3}
    bench.wait_request(bench.submit("label-b"), "failed")


@pytest.mark.spec(SPEC + "launcher_registers_config_change; pool_component")
def test_registered_labels_follow(bench: LauncherBench) -> None:
    bench.start(config(provider(labels=["fake-label", "second"]), labels={"unused": {}}))
    assert [set(p.supported_labels) for p in bench.zk.getRegisteredPools()] == [
        {"fake-label", "second"}
    ]
    bench.config(config(provider(labels=["fake-label", "third"]), labels={"unused": {}}))
    wait_for(
        lambda: (
            [set(p.supported_labels) for p in bench.zk.getRegisteredPools()]
            == [{"fake-label", "third"}]
        )
    )


@pytest.mark.spec("LAU-15: a broken file keeps the running configuration")
def test_a_broken_file_changes_nothing(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    path = pathlib.Path(pool.configfile)
    good = path.read_text()
    before = pool.config
    for content in (
        "providers: [",
        "labels: 5\n",
        good.replace("name: fake-label", "name: other", 1),
        "",
    ):
        path.write_text(content)
        wait_for(lambda: pool.config_state.error is not None, what=content[:30])
        assert pool.config is before
        bench.fulfilled("fake-label")
        ready, details = pool.getReadiness()
        assert ready and any("stale" in d for d in details)
        path.write_text(good)
        wait_for(lambda: pool.config_state.error is None and pool.config is not before)  # noqa: B023
        before = pool.config
    path.unlink()
    bench.fulfilled("fake-label")
    path.write_text(good)
    bench.fulfilled("fake-label")


@pytest.mark.spec(
    "issue 11, point 3: a wrong type keeps the running configuration, an unknown option is warned "
    "of"
)
def test_a_changed_file_is_validated(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    pool = bench.start(config(provider(), provider("fake-other", labels=["other"])))
    before = pool.config
    bench.config(
        config(provider(), provider("fake-other", labels=["other"], **{"max-concurrency": "5"}))
    )
    wait_for(lambda: pool.config_state.error is not None)
    assert pool.config is before
    details = pool.getReadiness()[1]
    reason = "providers[fake-other].max-concurrency: Schema validation failed: expected int"
    assert any("stale" in d and reason in d for d in details), details
    wait_for(
        lambda: any(
            reason in r.getMessage()
            for r in caplog.records
            if (r.name, r.levelname) == ("nodepool.NodePool", "ERROR")
        )
    )
    bench.fulfilled("fake-label")
    bench.fulfilled("other")
    bench.config(
        config(provider(), provider("fake-other", labels=["other"], pool={"max-server": 2}))
    )
    wait_for(
        lambda: any(
            "did you mean max-servers?" in r.getMessage()
            for r in caplog.records
            if r.levelname == "WARNING"
        )
    )
    wait_for(lambda: pool.config is not before and pool.config_state.error is None)


@pytest.mark.spec(SPEC + "secure_file; LAU-15: an empty secure file")
def test_changed_secure_file_is_applied(bench: LauncherBench) -> None:
    values = yaml.safe_load(pathlib.Path(bench.config(config(provider()))).read_text())
    secret = {key: values.pop(key) for key in ("zookeeper-servers", "zookeeper-tls")}
    path = bench.tmp / "main.yaml"
    path.write_text(yaml.safe_dump({**values, "zookeeper-servers": [{"host": "nowhere.invalid"}]}))
    secure = bench.tmp / "secure.yaml"
    secure.write_text(yaml.safe_dump(secret))
    from nodepool.launcher import NodePool

    pool = NodePool(str(secure), str(path))
    bench.pools.append(pool)
    pool.start()
    bench.wait_ready(pool)
    bench.fulfilled("fake-label")
    before = pool.config
    shutil.copy(secure, bench.tmp / "copy")
    os.replace(bench.tmp / "copy", secure)
    wait_for(lambda: pool.config is not before)
    bench.fulfilled("fake-label")


@pytest.mark.spec("PY-1, PY-4: names and life of NodePool")
def test_launcher_has_the_names_that_tools_use(bench: LauncherBench) -> None:
    pool = bench.make(config(provider()))
    assert pool.config is None
    loaded = pool.loadConfig()
    assert set(loaded.providers) == {"fake-provider"} and loaded == pool.loadConfig()
    never = bench.make(config(provider()))
    bench.stop(never)
    pool.start()
    bench.wait_ready(pool)
    assert pool.zk is pool.getZK()
    assert (
        pool.getProviderManager("fake-provider") is pool.config.provider_managers["fake-provider"]
    )
    worker = pool.getPoolWorkers("fake-provider")[0]
    assert pool._pool_threads == {("fake-provider", "main"): worker}
    assert worker.getPoolConfig().name == "main"
    before = pool.config
    pool.updateConfig()
    assert pool.config is before
    os.utime(pool.configfile, (1, 1))
    pool.updateConfig()
    wait_for(lambda: pool.config is not before)


@pytest.mark.spec("issue: a graceful stop hands work to the next start; LAU-15 signals")
def test_stop_and_start_with_work_under_way(bench: LauncherBench) -> None:
    content = config(provider())
    first = bench.start(content)
    cloud = bench.cloud("fake-provider")
    bench.use_cloud(lambda: cloud)  # the next launcher talks to the same cloud
    bench.use_up(bench.fulfilled("fake-label")[0])
    cloud.pause_creates = True
    ids = [bench.submit("fake-label") for _ in range(4)]
    wait_for(lambda: len(cloud._server_list) == 4)
    bench.stop(first)
    assert not bench.zk.getRegisteredPools()
    cloud.pause_creates = False
    bench.start(content)
    for request_id in ids:
        bench.wait_request(request_id, "fulfilled")
    bench.wait_nodes(4)
    wait_for(lambda: len(cloud._server_list) == 4, what="servers of the first start removed")


def test_stop_abandons_the_launches_of_a_removed_provider(bench: LauncherBench) -> None:
    """Otherwise they fail again and again, as they can no longer be written to ZooKeeper."""
    one, two = provider("fake-one"), provider("fake-two", labels=["two"])
    pool = bench.start(config(one, two))
    cloud = bench.cloud("fake-two")
    cloud.pause_creates = True
    bench.submit("two")
    wait_for(lambda: cloud._server_list)
    manager = pool.getProviderManager("fake-two")
    bench.config(config(one))
    wait_for(lambda: not pool.getPoolWorkers("fake-two"))
    (thread,) = manager.create_loop.threads
    assert thread.is_alive(), "the launch is still under way"
    bench.stop(pool)
    assert not thread.is_alive()


def test_a_changed_clouds_yaml_is_noticed(bench: LauncherBench) -> None:
    """11.0.0 checks it only when Nodepool's own files have changed."""
    pool = bench.start(config(provider()))
    clouds = bench.tmp / "clouds.yaml"
    good = clouds.read_text()
    first = pool.getProviderManager("fake-provider")
    clouds.write_text("clouds: [")
    wait_for(
        lambda: "fake-provider" in pool.config.provider_errors, what="the broken file is noticed"
    )
    assert pool.getProviderManager("fake-provider") is first
    clouds.write_text(good.replace("username: user", "username: new"))
    wait_for(
        lambda: pool.getProviderManager("fake-provider") is not first,
        what="a provider with the new user",
    )
    assert (
        pool.getProviderManager("fake-provider").provider.cloud_config.config["auth"]["username"]
        == "new"
    )
    bench.fulfilled("fake-label")


@pytest.mark.spec(
    "LAU: a changed provider is replaced; requests under way go on with its successor"
)
def test_replaced_between_plan_and_launch(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    old = pool.getProviderManager("fake-provider")
    (loop,) = old.create_loop.threads
    launch = StateMachineHandler.launch

    def late(self: Any, node: Any) -> None:
        if self.manager is old:
            bench.config(config(provider(pool={"max-cores": 50})))
            wait_for(
                lambda: pool.getProviderManager("fake-provider") is not old,
                what="the provider to be replaced",
            )
            wait_for(lambda: not loop.is_alive(), what="the old one to end")
        launch(self, node)

    monkeypatch.setattr(StateMachineHandler, "launch", late)
    _request, (node,) = bench.fulfilled("fake-label")
    assert old.launchers == []
    assert [server.id for server in bench.servers("fake-provider")] == [node.external_id]


def limit(pool: Any) -> Any:
    return pool.getPoolWorkers("fake-one")[0].getPoolConfig().max_servers


def test_everything_is_looked_at_when_a_configuration_comes_into_force(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    woken: list[str] = []

    def watch(part: Any, name: str, **expected: bool) -> None:
        def call(*_: Any, **options: bool) -> None:
            if options == expected:
                woken.append(f"{type(part).__name__}.{name}")

        monkeypatch.setattr(part, name, call)

    watch(pool.assignment, "wake", recheck=True)
    watch(pool.min_ready, "wake")
    watch(pool.cleanup, "wake")
    watch(pool.node_reconciler, "check_all")
    watch(pool.probes, "check_all")
    pool._apply(pool.loadConfig())
    assert sorted(woken) == [
        "Assignment.wake",
        "CleanupWorker.wake",
        "MinReady.wake",
        "NodeProbes.check_all",
        "NodeReconciler.check_all",
    ]


@pytest.mark.spec("LAU-15: [extra] a start checks all nodes once")
def test_start_checks_all_nodes_once(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def count(part: Any) -> None:
        if part.state.config is not None:  # none is checked without
            checks.append(type(part).__name__)

    monkeypatch.setattr(NodeReconciler, "check_all", count)
    monkeypatch.setattr(NodeProbes, "check_all", count)
    pool = bench.start(
        config(provider()), cleanup_interval=None, all_read=lambda: checks.append("all read")
    )
    wait_for(lambda: pool.ready)
    assert checks == ["all read", "NodeReconciler", "NodeProbes"]


class SlowStart:
    """Providers of these names start only when `begun` is set and `may_start` is, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.begun, self.may_start = threading.Event(), threading.Event()
        self.managers: list[Any] = []
        original = StateMachineProvider.start

        def start(manager: Any, zk: Any) -> None:
            if manager.provider.name in names:
                self.managers.append(manager)
                self.begun.set()
                assert self.may_start.wait(30)
            original(manager, zk)

        monkeypatch.setattr(StateMachineProvider, "start", start)
        monkeypatch.setattr(lifecycle, "START_GRACE", 0.01)


def test_new_provider_that_is_slow_to_start_holds_up_no_other(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-one")))
    slow = SlowStart(monkeypatch, "fake-slow")
    bench.config(
        config(
            provider("fake-one", pool={"max-servers": 7}), provider("fake-slow", labels=["other"])
        )
    )
    assert slow.begun.wait(10)
    wait_for(
        lambda: pool.getPoolWorkers("fake-one")[0].getPoolConfig().max_servers == 7,
        what="the other provider has its new limit",
    )
    assert [str(problem) for problem in pool.problems()] == [
        f"provider fake-slow: not running: {lifecycle.STARTING}"
    ]
    early = bench.submit("other")
    unknown = bench.submit("unknown")
    wait_for(
        lambda: reason_for(pool.assignment, early).startswith(
            "pools of this launcher are still being registered"
        )
    )
    bench.wait_request(unknown, "failed")
    slow.may_start.set()
    wait_for(lambda: pool.getPoolWorkers("fake-slow"), what="the slow provider is taken into force")
    assert pool.problems() == [] and len(slow.managers) == 1
    bench.wait_request(early, "fulfilled")


def test_request_for_a_pool_that_is_just_being_added(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-one")))
    start, submitted = PoolWorker.start, []

    def late(worker: PoolWorker) -> None:
        submitted.append(bench.submit("other"))
        wait_for(
            lambda: any(
                why.code is Code.REGISTERING
                for _, _, _, reasons in pool.explain()
                for why in reasons
            )
        )
        start(worker)

    monkeypatch.setattr(PoolWorker, "start", late)
    bench.config(config(provider("fake-one"), provider("fake-two", labels=["other"])))
    wait_for(lambda: submitted, what="the pool is added")
    bench.wait_request(submitted[0], "fulfilled")


def test_changed_provider_that_is_slow_to_start_continues_unchanged(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-slow"), provider("fake-one", labels=["other"])))
    before = pool.getProviderManager("fake-slow")
    slow = SlowStart(monkeypatch, "fake-slow")
    bench.config(
        config(
            provider("fake-slow", **{"boot-timeout": 33}),
            provider("fake-one", labels=["other"], pool={"max-servers": 7}),
        )
    )
    wait_for(lambda: limit(pool) == 7)
    assert pool.getProviderManager("fake-slow") is before and not slow.may_start.is_set()
    assert [str(problem) for problem in pool.problems()] == [
        f"provider fake-slow: uses its last valid configuration: {lifecycle.STARTING}"
    ]
    bench.fulfilled("fake-label")
    slow.may_start.set()
    wait_for(
        lambda: pool.getProviderManager("fake-slow") is not before,
        what="the changed provider is taken into force",
    )
    assert pool.getProviderManager("fake-slow").provider.boot_timeout == 33
    wait_for(lambda: not before.running)
    bench.fulfilled("fake-label")


def test_change_that_is_taken_back_while_its_provider_starts(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-slow")))
    before = pool.getProviderManager("fake-slow")
    slow = SlowStart(monkeypatch, "fake-slow")
    bench.config(config(provider("fake-slow", **{"boot-timeout": 33})))
    wait_for(lambda: "fake-slow" in pool.config.provider_errors)
    bench.config(config(provider("fake-slow")))
    wait_for(lambda: len(slow.managers) == 2, what="the one that runs is idle: another is started")
    slow.may_start.set()
    wait_for(lambda: pool.getProviderManager("fake-slow") is slow.managers[1])
    assert (
        pool.getProviderManager("fake-slow").provider == before.provider and pool.problems() == []
    )
    wait_for(lambda: not before.running and not slow.managers[0].running)


def test_provider_that_still_starts_when_the_launcher_stops_is_stopped(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-one")))
    slow = SlowStart(monkeypatch, "fake-slow")
    bench.config(config(provider("fake-one"), provider("fake-slow", labels=["other"])))
    assert slow.begun.wait(10)
    wait_for(pool.problems, what="the reload has not waited for the slow provider")
    stopped = threading.Event()
    stop = slow.managers[0].stop
    monkeypatch.setattr(slow.managers[0], "stop", lambda: (stop(), stopped.set()))
    pool.stop()
    slow.may_start.set()
    assert stopped.wait(10)


def test_provider_that_is_removed_while_it_starts_is_stopped(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-one")))
    slow = SlowStart(monkeypatch, "fake-slow")
    bench.config(config(provider("fake-one"), provider("fake-slow")))
    wait_for(lambda: "fake-slow" in pool.config.provider_failures)
    bench.config(config(provider("fake-one", pool={"max-servers": 7})))
    wait_for(lambda: limit(pool) == 7)
    (manager,) = slow.managers
    stopped = threading.Event()
    stop = manager.stop
    monkeypatch.setattr(manager, "stop", lambda: (stop(), stopped.set()))
    slow.may_start.set()
    assert stopped.wait(10)
    assert pool.config is not None and "fake-slow" not in pool.config.provider_managers
