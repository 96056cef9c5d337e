"""A label whose launches keep failing in a provider stops costing machines (LAU-9.6)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.cmd import nodepoolcmd
from nodepool.nodescan import NodescanRequest
from nodepool.zk.failures import Failures
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, expire_session, provider, reason_for

pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")

HOUR = 3600.0


class Machines:
    """The machines of the fake clouds, and whether their keys can be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nodepool.driver.fake.adapter import FakeAdapter

        self.created: list[float] = []
        #: Providers whose machines are broken; how all clouds refuse creations.
        self.broken = {"fake-provider"}
        self.refusal: Exception | None = None
        create, advance = FakeAdapter._createServer, NodescanRequest.advance

        def created(adapter: Any, *args: Any, **kwargs: Any) -> Any:
            if self.refusal is not None:
                raise self.refusal
            server = create(adapter, *args, **kwargs)
            if adapter.provider.name in self.broken:
                self.created.append(time.time())
            return server

        def advanced(request: NodescanRequest, socket_ready: bool) -> None:
            if request.node.provider in self.broken:
                raise exceptions.LaunchKeyscanException("no key")
            advance(request, socket_ready)

        monkeypatch.setattr(FakeAdapter, "_createServer", created)
        monkeypatch.setattr(NodescanRequest, "advance", advanced)

    @property
    def most_in_an_hour(self) -> int:
        return max(
            sum(began <= other < began + HOUR for other in self.created) for began in self.created
        )


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(monkeypatch)


def waits(bench: LauncherBench, label: str = "fake-label", pool: Any = None) -> str:
    """Submit a request; return its id when it waits for launches that fail."""
    request_id = bench.submit(label)
    wait_for(lambda: "keep failing" in reason(bench, request_id, pool))
    return request_id


def reason(bench: LauncherBench, request_id: str, pool: Any = None) -> str:
    return reason_for((pool or bench.pools[0]).assignment, request_id)


def stop_launches(bench: LauncherBench, machines: Machines) -> None:
    """Let five launches of the label fail, in two requests."""
    for _ in range(2):
        bench.wait_request(bench.submit("fake-label"), "failed")
    assert len(machines.created) == 5
    bench.wait_nodes(0)


def retry(bench: LauncherBench, *options: str) -> int:
    path = str(bench.tmp / "nodepool.yaml")
    return nodepoolcmd.main(["-c", path, "retry", *options])


def test_failing_launches_cost_five_machines_an_hour(
    bench: LauncherBench, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = bench.start(config(provider()))
    stop_launches(bench, machines)
    ids = [waits(bench), *(bench.submit("fake-label") for _ in range(19))]
    assert reason(bench, ids[0]) == (
        "fake-provider-main: launches of fake-label keep failing: no key"
    )
    problems = [problem for problem in pool.problems() if problem.label == "fake-label"]
    assert [problem.text for problem in problems] == [
        "5 launches in a row have failed, the last one: no key"
    ]
    assert "`nodepool retry fake-label`" in problems[0].help
    time.sleep(HOUR - 60)
    assert len(machines.created) == 5
    # Each failed trial stops launches again.
    time.sleep(3 * HOUR)
    assert 15 < len(machines.created) <= 20
    assert machines.most_in_an_hour <= 5
    machines.broken.clear()
    time.sleep(HOUR)
    for request_id in ids:
        if bench.zuul.request(request_id)["state"] != "failed":
            bench.wait_request(request_id, "fulfilled")
    assert bench.zk.readNotes(Failures) == []
    assert [problem for problem in pool.problems() if problem.label] == []


def test_successful_trial_lets_all_requests_launch(
    bench: LauncherBench, machines: Machines
) -> None:
    bench.start(config(provider()))
    stop_launches(bench, machines)
    machines.broken.clear()
    ids = [waits(bench), *(bench.submit("fake-label") for _ in range(9))]
    time.sleep(HOUR - 60)
    assert not bench.nodes()
    for request_id in ids:
        bench.wait_request(request_id, "fulfilled", timeout=120)
    assert bench.zk.readNotes(Failures) == []


def test_other_pools_and_labels_are_served(bench: LauncherBench, machines: Machines) -> None:
    bench.start(
        config(
            provider(labels=["fake-label", "other"], **{"max-launch-failures-per-hour": 1}),
            provider("fake-second", pool={"priority": 200}),
        )
    )
    # The first one declines after one machine, and is not asked again.
    for _ in range(20):
        _id, [node] = bench.fulfilled("fake-label")
        assert node.provider == "fake-second"
    assert len(machines.created) == 1
    machines.broken.clear()
    _id, [node] = bench.fulfilled("other")
    assert node.provider == "fake-provider"


def test_ready_nodes_are_assigned_while_launches_are_stopped(
    bench: LauncherBench, machines: Machines
) -> None:
    bench.start(config(provider()))
    stop_launches(bench, machines)
    bench.ready_node("fake-provider", "main", "fake-label")
    request_id = bench.submit("fake-label", "fake-label")
    wait_for(lambda: "keep failing" in reason(bench, request_id))
    _id, [node] = bench.fulfilled("fake-label")
    assert node.provider == "fake-provider" and len(machines.created) == 5


def test_min_ready_creates_no_requests_while_launches_are_stopped(
    bench: LauncherBench, machines: Machines
) -> None:
    pool = bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    wait_for(lambda: len(machines.created) == 5, timeout=600)
    time.sleep(HOUR / 2)
    assert len(machines.created) == 5
    assert not pool.zk.request_tree.snapshot()
    machines.broken.clear()
    bench.wait_nodes(1, timeout=HOUR, state="ready", allocated_to=None)


def test_retry_lets_launches_start_immediately(
    bench: LauncherBench, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.start(config(provider()))
    stop_launches(bench, machines)
    request_id = waits(bench)
    machines.broken.clear()
    assert retry(bench, "fake-label", "--provider", "second") == 0
    assert "provider second is neither in" in capsys.readouterr().err
    assert retry(bench, "fake-lable") == 0
    assert "label fake-lable is not in" in capsys.readouterr().err
    assert bench.zuul.request(request_id)["state"] == "requested"
    assert retry(bench, "fake-label", "--provider", "fake-provider") == 0
    assert "label fake-label in provider fake-provider may start" in capsys.readouterr().out
    bench.wait_request(request_id, "fulfilled")
    assert retry(bench, "fake-label") == 0
    assert capsys.readouterr().out == "No launches of label fake-label have failed.\n"


def test_changed_configuration_lets_launches_start_immediately(
    bench: LauncherBench, machines: Machines
) -> None:
    bench.start(config(provider()))
    stop_launches(bench, machines)
    request_id = waits(bench)
    machines.broken.clear()
    bench.config(config(provider(label={"min-ram": 4096})))
    bench.wait_request(request_id, "fulfilled", timeout=60)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit(bench: LauncherBench, machines: Machines, limit: int) -> None:
    bench.start(config(provider(**{"max-launch-failures-per-hour": limit})))
    for _ in range(4):
        bench.wait_request(bench.submit("fake-label"), "failed")
    assert len(machines.created) == 12
    assert bench.zk.readNotes(Failures) == []


def test_success_clears_the_failures(bench: LauncherBench, machines: Machines) -> None:
    bench.start(config(provider(**{"launch-retries": 1})))
    for _ in range(3):
        machines.broken = {"fake-provider"}
        for _ in range(4):
            bench.wait_request(bench.submit("fake-label"), "failed")
        machines.broken = set()
        bench.use_up(bench.fulfilled("fake-label")[0])
    assert len(machines.created) == 12


@pytest.mark.parametrize(
    "refusal",
    [
        exceptions.CapacityException("sold out"),
        exceptions.OfferRefusedException("sold out; another offer will be tried"),
        exceptions.QuotaException("too many"),
        ConnectionError("no route"),
        exceptions.TimeoutException("no answer"),
        exceptions.LaunchStatusException("the cloud answered 503"),
        exceptions.LaunchNodepoolException("no such network"),
    ],
)
def test_creations_without_a_machine_do_not_count(
    bench: LauncherBench, machines: Machines, refusal: Exception
) -> None:
    pool = bench.start(config(provider()))
    machines.refusal = refusal
    ids = [bench.submit("fake-label") for _ in range(4)]
    time.sleep(60)
    assert not pool.state.launch_failures._stored
    assert not bench.zk.readNotes(Failures)
    machines.refusal, machines.broken = None, set()
    bench.fulfilled("fake-label")
    assert ids


@pytest.mark.parametrize("how", ["stop", "session"])
def test_restart_forgets_no_failure(bench: LauncherBench, machines: Machines, how: str) -> None:
    pool = bench.start(config(provider()))
    bench.wait_request(bench.submit("fake-label"), "failed")
    if how == "stop":
        bench.stop(pool)
        pool = bench.start(config(provider()))
    else:
        expire_session(pool)
        wait_for(lambda: pool.zk.connected and pool.zk.synced)
        bench.wait_ready(pool)
    bench.wait_request(bench.submit("fake-label"), "failed")
    assert len(machines.created) == 5
    if how == "stop":
        bench.stop(pool)
        bench.start(config(provider()))
    waits(bench)
    time.sleep(HOUR / 2)
    assert len(machines.created) == 5


def test_two_launchers_share_the_failures(bench: LauncherBench, machines: Machines) -> None:
    content = config(provider(**{"launch-retries": 1}))
    for name in ("nodepool.yaml", "b.yaml"):
        bench.start(content, name=name)
    wait_for(lambda: all(len(p.zk.getRegisteredPools()) == 2 for p in bench.pools))
    ids = []
    for _ in range(20):
        ids.append(bench.submit("fake-label"))
        time.sleep(30)
    assert len(machines.created) == 5
    # Many requests wait for the next trial, in both launchers.
    ids += [bench.submit("fake-label") for _ in range(20)]
    time.sleep(2 * HOUR)
    assert machines.most_in_an_hour <= 5 < len(machines.created)
    machines.broken.clear()
    time.sleep(HOUR)
    left = {each for each in ids if bench.zuul.request(each)["state"] != "failed"}
    while left:
        # An earlier one may wait for the quota that the nodes of later ones take.
        served = wait_for(
            lambda: [each for each in left if bench.zuul.request(each)["state"] == "fulfilled"],
            300,
            f"one of {left}",
        )
        bench.use_up(*served)
        left.difference_update(served)
