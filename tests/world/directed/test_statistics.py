"""Gauges (LAU-20)."""

from __future__ import annotations

import pytest

from nodepool.base import hostnames
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider


@pytest.mark.spec("LAU-21.93")
def test_addressable_requests_are_counted(bench: LauncherBench, statsd: StatsdReceiver) -> None:
    pool = bench.start(
        config(
            provider("fake-one", labels=["a", "b"], pool={"max-servers": 1}),
            provider("fake-two", labels=["b"], pool={"max-servers": 1}),
        )
    )
    bench.fulfilled("b", provider="fake-one")
    bench.fulfilled("b", provider="fake-two")
    for labels in (("a",), ("b",), ("a",), ("b",)):
        bench.submit(*labels)
    wait_for(lambda: pool.assignment.waiting() or True)
    prefix = "nodepool.provider.{}.pool.main.addressable_requests"
    statsd.wait(prefix.format("fake-one"), "6|g")
    statsd.wait(prefix.format("fake-two"), "4|g")


@pytest.mark.spec("LAU-20: zero-filled gauges by state, label and provider; elected reporter")
def test_node_gauges_are_zero_filled_and_sent_by_one_launcher(
    bench: LauncherBench, statsd: StatsdReceiver
) -> None:
    from nodepool.zk.records import Node

    content = config(
        provider("fake-one", labels=["a"], pool={"max-servers": 7}),
        provider("fake-two", labels=["unused"]),
    )
    first = bench.start(content, name="one.yaml")
    wait_for(lambda: first.statistics.elected)
    second = bench.start(content, name="two.yaml")
    request_id, _nodes = bench.fulfilled("a")
    for state in Node.VALID_STATES:
        for what in ("", "label.a.", "label.unused.", "provider.fake-one.", "provider.fake-two."):
            name = f"nodepool.{what}nodes.{state}"
            statsd.wait_any(name)
    for name in ("nodepool.nodes", "nodepool.label.a.nodes", "nodepool.provider.fake-one.nodes"):
        statsd.wait(f"{name}.ready", "1|g")
    statsd.wait("nodepool.provider.fake-one.max_servers", "7|g")
    assert statsd.last("nodepool.provider.fake-two.max_servers") is None
    assert not second.statistics.elected
    bench.zuul.accept(request_id)
    statsd.wait("nodepool.nodes.in-use", "1|g")
    bench.stop(first)
    wait_for(lambda: second.statistics.elected, what="the other one reports")


@pytest.mark.spec("LAU-20: launch results by provider, zone and requestor")
def test_launch_results_are_counted_by_provider_zone_and_requestor(
    bench: LauncherBench, statsd: StatsdReceiver
) -> None:
    bench.start(config(provider(pool={"availability-zones": ["az1"]})))
    bench.fulfilled("fake-label", requestor="a.b:c")
    for name in (
        "ready",
        "provider.fake-provider.ready",
        "provider.fake-provider.az1.ready",
        "requestor.a_b_c.ready",
    ):
        statsd.wait(f"nodepool.launch.{name}", "1|c")
        statsd.wait_line(rf"nodepool\.launch\.{name}:.*\|ms")


@pytest.mark.spec(
    "issue: time from request to fulfilment per label and tenant; statsd and Prometheus from one "
    "definition"
)
def test_wait_of_requests(bench: LauncherBench) -> None:
    pool = bench.start(
        config(
            provider("fake-wait", labels=["wait-a", "wait-b"]), labels={"wait-b": {"min-ready": 1}}
        )
    )
    host = hostnames.short()
    # Of this process, so those of other tests are among them.
    before = pool.statsd.snapshot().timers
    bench.fulfilled("wait-a", "wait-a", tenant_name="wait.1")
    names = ["nodepool.label.wait-a.request_wait", "nodepool.tenant.wait_1.request_wait"]
    wait_for(lambda: set(names) <= set(pool.statsd.snapshot().timers), what="the timers")
    timers = pool.statsd.snapshot().timers

    def added(name: str) -> tuple[int, float]:
        number, total = (before[name].number, before[name].total) if name in before else (0, 0.0)
        return timers[name].number - number, timers[name].total - total

    # Its parts, and those of its launches (and of the node that is kept ready).
    parts = [f"nodepool.launcher.{host}.request_step.{step}" for step in ("accept", "serve")]
    steps = [f"nodepool.provider.fake-wait.launch_step.{step}" for step in ("create", "scan")]
    for name, numbers in [
        *((name, {1}) for name in (*names, *parts)),
        *((name, {2, 3}) for name in steps),
    ]:
        number, total = added(name)
        assert number in numbers and 0 <= total < 60_000 * number, (name, number, total)
    launches = [f"nodepool.launch.{kind}.ready" for kind in ("label.wait-a", "tenant.wait_1")]
    assert [added(name)[0] for name in launches] == [2, 2]
    # Each of the three is rounded to whole milliseconds.
    assert added(names[0])[1] == pytest.approx(added(parts[0])[1] + added(parts[1])[1], abs=1.6)
    wait_for(
        lambda: f"nodepool.launcher.{host}.zk.mirror_lag" in pool.statsd.snapshot().timers,
        what="lag of the mirror",
    )
    bench.wait_nodes(1, state="ready", allocated_to=None)
    assert "nodepool.label.wait-b.request_wait" not in pool.statsd.snapshot().timers
