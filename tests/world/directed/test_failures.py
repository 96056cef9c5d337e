"""Launches that fail, time out, cannot be cleaned up or lose their session (LAU-9)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nodepool.nodescan import NodescanRequest
from nodepool.status.explain import explain
from nodepool.zk.history import HistoryReader
from tests.conftest import wait_for
from tests.support.calls import count_calls
from tests.support.launcher import LauncherBench, StatsdReceiver, config, expire_session, provider

pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")


@pytest.mark.spec("LAU-21.21, LAU-21.46; DRV-14.8; OST-3.16")
def test_request_fails_after_launch_retries(
    bench: LauncherBench, statsd: StatsdReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider(**{"launch-retries": 2})))
    adapter = bench.adapter("fake-provider")
    calls = count_calls(adapter, "_createServer", monkeypatch)
    adapter.createServer_fails = 2
    request_id = bench.submit("fake-label")
    assert bench.wait_request(request_id, "failed")["declined_by"] == list(pool.state.workers)
    assert len(calls) == 2 and adapter.createServer_fails == 0
    bench.wait_nodes(0)
    statsd.wait("nodepool.launch.error.unknown", "1|c")
    adapter.createServer_fails = 1
    bench.fulfilled("fake-label")


@pytest.mark.spec("LAU-21.22; DRV-14.9; OST-3.17")
def test_launch_fails_after_launch_timeout(bench: LauncherBench) -> None:
    bench.start(config(provider(**{"launch-timeout": 1, "launch-retries": 2})))
    cloud = bench.cloud("fake-provider")
    cloud._create_server_timeout = 2
    request_id = bench.submit("fake-label")
    assert bench.wait_request(request_id, "failed")["declined_by"]
    bench.wait_nodes(0)
    wait_for(lambda: not cloud._server_list)
    # One slow server only costs an attempt.
    cloud._create_server_timeout = 1
    bench.fulfilled("fake-label")
    wait_for(lambda: len(cloud._server_list) == 1)


@pytest.mark.spec("LAU-21.51; OST-3.16")
def test_failures_with_external_id(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(config(provider(**{"launch-retries": 2})), delete_interval=1000)
    adapter = bench.adapter("fake-provider")
    calls = count_calls(adapter, "_createServer", monkeypatch)
    adapter.createServer_fails_with_external_id = 2
    request_id = bench.submit("fake-label")
    bench.wait_request(request_id, "failed")
    assert len(calls) == 2 and adapter.createServer_fails_with_external_id == 0
    bench.fulfilled("fake-label")


@pytest.mark.spec("LAU-21.80; DRV-14.10")
def test_delete_errors_between_attempts_are_retried(bench: LauncherBench) -> None:
    from nodepool.driver.fake.adapter import FakeLaunchAndDeleteFailCloud

    bench.use_cloud(lambda: FakeLaunchAndDeleteFailCloud(times_to_fail=1))
    bench.start(config(provider(**{"launch-retries": 2})))
    cloud = bench.cloud("fake-provider")
    request_id, _nodes = bench.fulfilled("fake-label")
    assert cloud.times_failed_launch == cloud.times_failed_delete == 1
    assert cloud.launch_success and cloud.delete_success
    assert len(bench.zuul.request(request_id)["nodes"]) == 1
    assert len(cloud._server_list) == 1


@pytest.mark.spec("LAU-21.47; DRV-14.21")
def test_one_keyscan_failure(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_scans(monkeypatch, 1)
    bench.start(config(provider(**{"launch-retries": 2})))
    bench.fulfilled("fake-label")
    wait_for(lambda: len(bench.servers("fake-provider")) == 1)


@pytest.mark.spec("LAU-21.48, LAU-21.49; DRV-14.21; OST-3.26")
def test_keyscan_failures_with_console(
    bench: LauncherBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    statsd: StatsdReceiver,
) -> None:
    fail_scans(monkeypatch, 100)
    monkeypatch.setattr(
        "nodepool.driver.fake.adapter.FakeOpenStackCloud._get_server_console",
        staticmethod(lambda name_or_id: "first line\n\x1b[31msecond line\n"),
    )
    pool = bench.start(config(provider(label={"console-log": True})))
    with caplog.at_level(logging.INFO, "nodepool"):
        bench.wait_request(bench.submit("fake-label"), "failed")
        bench.wait_nodes(0)
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    for line in ("first line", "second line"):
        assert sum(line in message for message in messages) == 3, line
    assert not [r for r in caplog.records if r.exc_info and "Launch" in r.name], (
        "a failed scan needs no traceback"
    )
    statsd.wait("nodepool.launch.error.keyscan", "1|c")
    assert not bench.servers("fake-provider")
    # The node's history has it too, for the page and the command; a terminal is not given what it
    # would obey.
    consoles = [event for event in pool.zk.feed.since(0)[0] if event["type"] == "console-log"]
    assert [event["tail"] for event in consoles] == ["first line\n\\x1b[31msecond line"] * 3
    text = explain(
        pool.zk, "node", consoles[0]["node"], HistoryReader(), pool.zk.feed.since(0)[0]
    ).text()
    assert (
        "the console of the machine said last\n      | first line\n      | \\x1b[31msecond line\n"
        in text
    )
    (problem,) = pool.getProviderManager("fake-provider").label_problems.listed()
    assert (
        "check that sshd starts on the machine" in problem.help and "boot-timeout" in problem.help
    )


def fail_scans(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    from nodepool import exceptions

    left = [times]
    original = NodescanRequest.advance

    def advance(self: NodescanRequest, socket_ready: bool) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise exceptions.LaunchKeyscanException("induced")
        original(self, socket_ready)

    monkeypatch.setattr(NodescanRequest, "advance", advance)


@pytest.mark.spec("LAU-21.78; DRV-14.20")
def test_session_loss_at_launch(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that raises session loss fails without a further attempt, and leaves nothing
    behind.
    """
    from kazoo.exceptions import SessionExpiredError

    from nodepool.driver.openstack.machines import OpenStackCreateStateMachine

    attempts: list[str] = []

    def advance(self: Any) -> None:
        attempts.append(self.hostname)
        raise SessionExpiredError

    monkeypatch.setattr(OpenStackCreateStateMachine, "advance", advance)
    bench.start(config(provider()))
    bench.wait_request(bench.submit("fake-label"), "failed")
    assert len(attempts) == 1
    bench.wait_nodes(0)


@pytest.mark.spec("LAU-21.81; DRV-14.20; ZK-2")
def test_a_lost_session_drops_the_handlers(bench: LauncherBench) -> None:
    """All locks are lost: the request is served again; nothing is served twice, no server is left
    behind.
    """
    pool = bench.start(config(provider()))
    cloud = bench.cloud("fake-provider")
    cloud.pause_creates = True
    request_id = bench.submit("fake-label")
    wait_for(lambda: cloud._server_list)
    worker = pool.getPoolWorkers("fake-provider")[0]
    handler = worker.request_handlers[0]
    expire_session(pool)
    wait_for(lambda: handler.done and handler not in worker.request_handlers)
    cloud.pause_creates = False
    for server in list(cloud._server_list):
        server.event.set()
    record = bench.wait_request(request_id, "fulfilled")
    bench.wait_nodes(1)
    wait_for(
        lambda: [s.id for s in cloud._server_list] == [bench.node(record["nodes"][0]).external_id]
    )
    bench.wait_ready(pool)
    assert len(bench.zk.getRegisteredPools()) == 1
    bench.use_up(request_id)


@pytest.mark.spec("LAU-21.73")
def test_failing_provider_leaves_requests_to_others(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.statemachine.handler import StateMachineHandler

    original = StateMachineHandler.imagesAvailable

    def images(self: Any) -> bool:
        if self.provider.name == "fake-one":
            raise RuntimeError("induced")
        return original(self)

    monkeypatch.setattr(StateMachineHandler, "imagesAvailable", images)
    pool = bench.start(config(provider("fake-one", priority=1), provider("fake-two", priority=2)))
    request_id, nodes = bench.fulfilled("fake-label")
    assert nodes[0].provider == "fake-two"
    worker = pool.getPoolWorkers("fake-one")[0]
    assert bench.zuul.request(request_id)["declined_by"] == [worker.launcher_id]


@pytest.mark.spec("LAU-21.75; DRV-14.4")
def test_provider_that_does_not_start_harms_no_other(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nodepool.driver.statemachine import StateMachineProvider

    original = StateMachineProvider.start

    def start(self: Any, zk_conn: Any) -> None:
        if self.provider.name == "fake-broken":
            raise RuntimeError("induced")
        original(self, zk_conn)

    monkeypatch.setattr(StateMachineProvider, "start", start)
    pool = bench.start(
        config(provider("fake-broken", labels=["only-broken"]), provider("fake-good"))
    )
    assert any(
        "fake-broken" in r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR
    )
    failed = bench.submit("only-broken")
    bench.fulfilled("fake-label")
    assert bench.wait_request(failed, "failed")["declined_by"]
    assert any("fake-broken" in detail for detail in pool.getReadiness()[1])


@pytest.mark.spec("OST-3.15, LAU-9: a failing server list does not end a healthy launch")
def test_a_failing_list_is_survived(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(config(provider(**{"launch-retries": 1})))
    adapter = bench.adapter("fake-provider")
    left, original = [3], adapter._getServer

    def flaky(external_id: str) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("induced")
        return original(external_id)

    monkeypatch.setattr(adapter, "_getServer", flaky)
    bench.fulfilled("fake-label")
    assert left == [0]
