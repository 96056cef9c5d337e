"""Availability zones: one per request, configured or the cloud's, refreshed when they change
(LAU-5).
"""

from __future__ import annotations

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")


@pytest.mark.spec("LAU-21.42; OST-3.19")
def test_the_configured_zone_is_used(bench: LauncherBench) -> None:
    bench.start(config(provider(pool={"availability-zones": ["az2"]})))
    _id, nodes = bench.fulfilled("fake-label", "fake-label")
    assert [n.az for n in nodes] == ["az2", "az2"]
    server = bench.cloud("fake-provider").get_server(nodes[0].external_id)
    assert server["OS-EXT-AZ:availability_zone"] == "az2"


@pytest.mark.spec("LAU-5.3, OST-3.19: all nodes of a request share a zone")
def test_one_zone_per_request(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    ids = [bench.submit(*["fake-label"] * 3) for _ in range(6)]
    zones = []
    for request_id in ids:
        nodes = [bench.node(i) for i in bench.wait_request(request_id, "fulfilled")["nodes"]]
        assert len({n.az for n in nodes}) == 1
        zones.append(nodes[0].az)
    assert set(zones) <= {"az1", "az2"}


@pytest.mark.spec("LAU-5.3: the zone of the first reused node binds the others")
def test_reused_nodes_bind_the_zone(bench: LauncherBench) -> None:
    bench.start(config(provider(labels=["a", "b"])))
    first = bench.ready_node("fake-provider", "main", "a", az="az2")
    other = bench.ready_node("fake-provider", "main", "b", az="az1")
    request_id, nodes = bench.fulfilled("a", "b")
    assert [n.az for n in nodes] == ["az2", "az2"]
    used = bench.zuul.request(request_id)["nodes"]
    assert used[0] == first.id and used[1] != other.id


@pytest.mark.spec("LAU-21.23; OST-3.18")
def test_changed_zones_are_noticed(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(**{"launch-retries": 1})))
    bench.cloud("fake-provider")._azs = ["az1"]
    bench.adapter("fake-provider")._forget()
    assert bench.fulfilled("fake-label")[1][0].az == "az1"
    bench.cloud("fake-provider")._azs = ["az3"]
    bench.wait_request(bench.submit("fake-label"), "failed")
    assert bench.fulfilled("fake-label")[1][0].az == "az3"
    wait_for(lambda: not pool.getPoolWorkers("fake-provider")[0].request_handlers)
