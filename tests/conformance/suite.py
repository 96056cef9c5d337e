"""The driver conformance suite: tests that any driver, ours or not, has to pass.

A driver is put to the test by a subclass whose fixture ``cloud`` gives a
:class:`~tests.conformance.cloud.CloudUnderTest`; see test_fake.py for the smallest example.
"""

from __future__ import annotations

import functools
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.zk.zookeeper import (
    ABORTED,
    BUILDING,
    DELETING,
    FAILED,
    FULFILLED,
    IN_USE,
    PENDING,
    READY,
    REQUESTED,
)
from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest, Unsupported
from tests.conftest import Chroot, wait_for, zookeeper_server
from tests.support.driver_scene import DriverBench
from tests.support.faults.launcher import Bench
from tests.support.node_ids import spend_node_ids

#: Seconds between two passes that look for leaks, vanished nodes and the like.
PASS = 1.0
TENANT_KEYS = {"nodepool_node_id", "nodepool_pool_name", "nodepool_provider_name"}


def supported(test: Callable[..., None]) -> Callable[..., None]:
    """Skips when the cloud cannot be brought into the state that the test is about."""

    @functools.wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        try:
            test(*args, **keywords)
        except Unsupported as reason:
            pytest.skip(str(reason))

    return run


def config(cloud: CloudUnderTest, min_ready: int = 0) -> dict[str, Any]:
    return {"labels": [{"name": LABEL, "min-ready": min_ready}], "providers": [cloud.provider()]}


class DriverConformance:
    """Inherit, and give the fixture ``cloud``."""

    @pytest.fixture
    def cloud(self) -> Iterator[CloudUnderTest]:
        raise NotImplementedError
        yield

    @pytest.fixture
    def bench(
        self, zk_chroot: Chroot, cloud: CloudUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[DriverBench]:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("nodepool.driver.lifecycle.LAUNCH_GRACE", 0.3)
        bench = DriverBench(zk_chroot)
        try:
            yield bench
        finally:
            bench.stop()
            bench.zk.disconnect()

    def start(self, bench: DriverBench, cloud: CloudUnderTest, min_ready: int = 0) -> None:
        pool = bench.start(config(cloud, min_ready), cleanup_interval=PASS, delete_interval=0.3)
        wait_for(lambda: pool.ready, 30, "a ready launcher")
        cloud.attach(pool)

    @staticmethod
    def wait_empty(bench: DriverBench, cloud: CloudUnderTest) -> None:
        wait_for(lambda: not cloud.instances(), cloud.patience, "a cloud without instances")
        wait_for(lambda: not bench.nodes(state=None), cloud.patience, "no node records")

    # -- the usual life

    @supported
    def test_create_use_delete(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        self.start(bench, cloud)
        (node,) = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        instance = cloud.instance_of(node.external_id)
        assert cloud.instances() == {instance}
        assert node.provider == PROVIDER and node.type == [LABEL] and node.interface_ip
        assert node.resources and node.resources.get("instances") == 1
        found = cloud.metadata(instance)
        assert found.keys() >= TENANT_KEYS
        assert found["nodepool_node_id"] == node.id and found["nodepool_provider_name"] == PROVIDER
        bench.give_back(node)
        self.wait_empty(bench, cloud)

    @supported
    def test_four_launches_run_concurrently(
        self, bench: DriverBench, cloud: CloudUnderTest
    ) -> None:
        self.start(bench, cloud)
        requests = [bench.submit(LABEL) for _ in range(4)]
        nodes = [
            node
            for request in requests
            for node in bench.accept(bench.wait_state(request, FULFILLED, cloud.patience * 2))
        ]
        assert (
            len({cloud.instance_of(node.external_id) for node in nodes})
            == 4
            == len(cloud.instances())
        )
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    @supported
    def test_several_nodes_of_one_request(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        self.start(bench, cloud)
        nodes = bench.accept(
            bench.wait_state(bench.submit(LABEL, LABEL), FULFILLED, cloud.patience * 2)
        )
        assert len({node.az for node in nodes}) == 1, "nodes of one request are in one zone"
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    # -- too little of something

    @supported
    def test_quota_exceeded(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """Whoever does not fit waits, and is served when there is capacity."""
        cloud.limit(1)
        self.start(bench, cloud)
        first = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        second = bench.submit(LABEL)
        wait_for(
            lambda: bench.state(second) in (PENDING, REQUESTED), cloud.patience, "the second waits"
        )
        assert len(cloud.instances()) == 1
        bench.give_back(*first)
        nodes = bench.accept(bench.wait_state(second, FULFILLED, cloud.patience * 2))
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    @supported
    def test_quota_taken_away_by_others(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """The limit shrinks after it was read: the failed creation is not a failed request."""
        self.start(bench, cloud)
        first = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        cloud.limit(1)
        second = bench.submit(LABEL)
        wait_for(
            lambda: bench.state(second) in (PENDING, REQUESTED), cloud.patience, "the second waits"
        )
        bench.give_back(*first)
        nodes = bench.accept(bench.wait_state(second, FULFILLED, cloud.patience * 3))
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    @supported
    def test_no_capacity(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        cloud.sold_out(True)
        self.start(bench, cloud)
        request = bench.submit(LABEL)
        wait_for(
            lambda: bench.state(request) in ("failed", PENDING, REQUESTED),
            cloud.patience,
            "an answer",
        )
        wait_for(
            lambda: bench.state(request) == "failed",
            cloud.patience * 2,
            "a failed request: nobody else can serve it",
        )
        self.wait_empty(bench, cloud)
        cloud.sold_out(False)
        nodes = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience * 2))
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    # -- instances that end by themselves

    @supported
    def test_ready_instance_vanishes(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """It is never handed out; another one takes its place."""
        self.start(bench, cloud, min_ready=1)
        (node,) = bench.wait_nodes(LABEL, 1, cloud.patience)
        cloud.remove(cloud.instance_of(node.external_id))
        bench.wait_gone(node.id)
        (other,) = bench.wait_nodes(LABEL, 1, cloud.patience)
        assert cloud.instance_of(other.external_id) in cloud.instances()

    @supported
    def test_ready_instance_stops(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        self.start(bench, cloud, min_ready=1)
        (node,) = bench.wait_nodes(LABEL, 1, cloud.patience)
        cloud.halt(cloud.instance_of(node.external_id))
        bench.wait_gone(node.id)
        (other,) = bench.wait_nodes(LABEL, 1, cloud.patience)
        assert cloud.instances() == {cloud.instance_of(other.external_id)}

    @supported
    def test_used_instance_vanishes(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """The node is left to whoever uses it, and its deletion is not an error."""
        self.start(bench, cloud)
        (node,) = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        cloud.remove(cloud.instance_of(node.external_id))
        found = bench.zk.getNode(node.id)
        assert found is not None and found.state == IN_USE
        bench.give_back(node)
        self.wait_empty(bench, cloud)

    @supported
    def test_instance_vanishes_while_it_is_made(
        self, bench: DriverBench, cloud: CloudUnderTest
    ) -> None:
        cloud.pause(True)
        self.start(bench, cloud)
        request = bench.submit(LABEL)
        (instance,) = wait_for(cloud.instances, cloud.patience, "an instance")
        cloud.remove(instance)
        cloud.pause(False)
        nodes = bench.accept(bench.wait_state(request, FULFILLED, cloud.patience * 3))
        assert cloud.instance_of(nodes[0].external_id) != instance
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    # -- an API in trouble

    @supported
    def test_api_down_before_a_launch(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """It is noticed, and everything continues automatically afterwards."""
        self.start(bench, cloud)
        cloud.down(True)
        request = bench.submit(LABEL)
        wait_for(cloud.unanswered, cloud.patience, "a call that is not answered")
        cloud.down(False)
        if bench.state(request) == "failed":  # all attempts were over meanwhile
            request = bench.submit(LABEL)
        wait_for(
            lambda: bench.state(request) in (FULFILLED, "failed"), cloud.patience * 2, "an end"
        )
        if bench.state(request) == "failed":
            request = bench.submit(LABEL)
        nodes = bench.accept(bench.wait_state(request, FULFILLED, cloud.patience * 2))
        bench.give_back(*nodes)
        self.wait_empty(bench, cloud)

    @supported
    def test_api_down_harms_no_healthy_node(
        self, bench: DriverBench, cloud: CloudUnderTest
    ) -> None:
        self.start(bench, cloud, min_ready=1)
        (node,) = bench.wait_nodes(LABEL, 1, cloud.patience)
        cloud.down(True)
        worker, begun = bench.pools[0].cleanup, set()
        wait_for(lambda: begun.add(worker._last_full) or len(begun) > 2, 10 * PASS, "two passes")
        cloud.down(False)
        found = bench.zk.getNode(node.id)
        assert found is not None and found.state == READY
        assert cloud.instance_of(node.external_id) in cloud.instances()

    @supported
    def test_api_down_during_a_deletion(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        self.start(bench, cloud)
        nodes = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        cloud.down(True)
        bench.give_back(*nodes)
        wait_for(lambda: bench.nodes(state=DELETING), cloud.patience, "a deletion that is tried")
        cloud.down(False)
        self.wait_empty(bench, cloud)

    @supported
    def test_throttled(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """No request fails of it."""
        self.start(bench, cloud)
        cloud.throttle(6)
        nodes = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience * 3))
        assert cloud.throttled() > 0
        bench.give_back(*nodes)
        wait_for(lambda: not cloud.instances(), cloud.patience * 2, "a cloud without instances")
        self.wait_empty(bench, cloud)

    # -- leaks

    @supported
    def test_leak(self, bench: DriverBench, cloud: CloudUnderTest) -> None:
        """Ours without a record goes; those of others, and the ones in use, stay."""
        spend_node_ids(bench.zk)
        ours = {
            "nodepool_node_id": "0000000099",
            "nodepool_pool_name": "main",
            "nodepool_provider_name": PROVIDER,
        }
        leaked = cloud.stray(ours)
        foreign = cloud.stray({**ours, "nodepool_provider_name": "of-others"})
        self.start(bench, cloud)
        (node,) = bench.accept(bench.wait_state(bench.submit(LABEL), FULFILLED, cloud.patience))
        wait_for(
            lambda: leaked not in cloud.instances(), cloud.patience + 5 * PASS, "the leak is gone"
        )
        assert cloud.instances() == {foreign, cloud.instance_of(node.external_id)}
        bench.give_back(node)
        wait_for(
            lambda: cloud.instances() == {foreign}, cloud.patience, "all but the stranger gone"
        )


class CrashConformance:
    """SIGKILL of the launcher in each state: nothing is lost, nothing stays. For clouds that
    outlive the launcher.
    """

    @pytest.fixture
    def cloud(self) -> Iterator[CloudUnderTest]:
        raise NotImplementedError
        yield

    @pytest.fixture
    def crash_bench(self, tmp_path: pathlib.Path) -> Iterator[Bench]:
        bench = Bench(zookeeper_server(), tmp_path / "crash")
        try:
            yield bench
        finally:
            bench.close()

    def configure(self, bench: Bench, cloud: CloudUnderTest) -> pathlib.Path:
        return bench.config(cloud.provider(), labels=[{"name": LABEL}])

    #: What a node looks like when the launcher is killed.
    STATES: dict[str, Callable[[dict[str, Any]], bool]] = {
        "before the cloud has answered": lambda node: (
            node.get("state") == BUILDING and not node.get("external_id")
        ),
        "while it is made": lambda node: (
            node.get("state") == BUILDING and bool(node.get("external_id"))
        ),
        "ready": lambda node: node.get("state") == READY,
        "while it is deleted": lambda node: node.get("state") == DELETING,
        "failed": lambda node: node.get("state") in (FAILED, ABORTED),
    }

    @pytest.mark.fault
    @pytest.mark.parametrize(
        "state",
        ["before the cloud has answered", "while it is made", "ready", "while it is deleted"],
    )
    @supported
    def test_killed(self, crash_bench: Bench, cloud: CloudUnderTest, state: str) -> None:
        if not cloud.outside:
            raise Unsupported("this cloud lives in the launcher, and ends with it")
        bench, seen = crash_bench, self.STATES[state]
        path, environment = (
            self.configure(bench, cloud),
            {**cloud.environment(), "PYTHONWARNINGS": "ignore"},
        )
        launcher = bench.start(path, **environment)
        if state == "while it is made":
            cloud.pause(True)
        request = bench.zuul.submit(LABEL)
        if state == "while it is deleted":
            bench.zuul.wait_fulfilled([request], cloud.patience)
            bench.zuul.use([request])
        wait_for(
            lambda: any(seen(node) for node in bench.zuul.read("nodes").values()),
            cloud.patience,
            f"a node {state}",
        )
        os.kill(launcher.process.pid, signal.SIGKILL)
        launcher.process.wait(10)
        if state == "while it is made":
            cloud.pause(False)
        bench.start(path, **environment)
        if state != "while it is deleted":
            bench.zuul.wait_fulfilled([request], cloud.patience * 3)
            bench.zuul.use([request])
        wait_for(lambda: not bench.zuul.read("nodes"), cloud.patience * 2, "no node records")
        wait_for(lambda: not cloud.instances(), cloud.patience * 2, "a cloud without instances")
        assert bench.zuul.twice() == []

    @pytest.mark.fault
    @pytest.mark.exhaustive
    @pytest.mark.parametrize("when", ["txn-before", "txn-sent", "txn-after"])
    @pytest.mark.parametrize("number", range(1, 8))
    @supported
    def test_killed_around_every_write(
        self, crash_bench: Bench, cloud: CloudUnderTest, when: str, number: int
    ) -> None:
        if not cloud.outside:
            raise Unsupported("this cloud lives in the launcher, and ends with it")
        bench, environment = crash_bench, {**cloud.environment(), "PYTHONWARNINGS": "ignore"}
        path = self.configure(bench, cloud)
        launcher = bench.start(path, crash_at=f"{when}:{number}", **environment)
        request = bench.zuul.submit(LABEL)
        used = False

        def over() -> bool:
            nonlocal used
            if not launcher.alive():
                return True
            if not used and bench.zuul.states([request])["fulfilled"]:
                bench.zuul.use([request])
                used = True
            return used and not bench.zuul.read("nodes")

        wait_for(over, cloud.patience * 2, "a crash, or the end of the node's life")
        if launcher.alive():
            launcher.kill()
        bench.start(path, **environment)
        if not used:
            bench.zuul.wait_fulfilled([request], cloud.patience * 3)
            bench.zuul.use([request])
        wait_for(lambda: not bench.zuul.read("nodes"), cloud.patience * 2, "no node records")
        wait_for(lambda: not cloud.instances(), cloud.patience * 2, "a cloud without instances")
        assert bench.zuul.twice() == []
