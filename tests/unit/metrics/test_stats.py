from __future__ import annotations

from types import SimpleNamespace

import pytest

from nodepool import metrics
from nodepool.metrics import launches


class Reporter(launches.StatsReporter):
    def __init__(self, client, az=None, requestor=None, tenant=None):
        super().__init__(client)
        self.provider_config = SimpleNamespace(name="rack.west")
        self.node = SimpleNamespace(az=az, type=["small", "other"], tenant_name=tenant)
        self.handler = SimpleNamespace(request=SimpleNamespace(requestor=requestor))


@pytest.mark.spec("CLI-7.2: launches, each name as timer and counter")
def test_launch_result_is_recorded_under_all_names():
    client = metrics.Metrics()
    Reporter(client, az="az1", requestor="NodePool:min-ready", tenant="t.1").recordLaunchStats(
        "error.quota", 12.5
    )
    names = {
        "nodepool.launch.error.quota",
        "nodepool.launch.provider.rack.west.error.quota",
        "nodepool.launch.provider.rack.west.az1.error.quota",
        "nodepool.launch.requestor.NodePool_min-ready.error.quota",
        "nodepool.launch.label.small.error.quota",
        "nodepool.launch.tenant.t_1.error.quota",
    }
    snapshot = client.snapshot()
    assert snapshot.counters == dict.fromkeys(names, 1)
    assert {name: timer[:2] for name, timer in snapshot.timers.items()} == dict.fromkeys(
        names, (1, 12.5)
    )


def test_without_zone_and_requestor():
    client = metrics.Metrics()
    Reporter(client).recordLaunchStats("ready", 1)
    names = {
        "nodepool.launch.ready",
        "nodepool.launch.provider.rack.west.ready",
        "nodepool.launch.label.small.ready",
    }
    assert set(client.snapshot().counters) == names


def test_launch_without_a_statsd_client_is_ignored():
    Reporter(None).recordLaunchStats("ready", 1)


def test_statsd_client_uses_the_environment(monkeypatch):
    monkeypatch.delenv("STATSD_HOST", raising=False)
    monkeypatch.delenv("STATSD_PORT", raising=False)
    assert launches.get_client() is None
    monkeypatch.setenv("STATSD_PORT", "8126")
    assert launches.get_client().address == ("localhost", 8126)
    monkeypatch.setenv("STATSD_HOST", "192.0.2.1")
    assert launches.get_client().address == ("192.0.2.1", 8126)
    monkeypatch.delenv("STATSD_HOST")
    monkeypatch.delenv("STATSD_PORT")
    assert launches.get_client() is None


def test_special_characters_in_statsd_names_are_replaced():
    assert launches.normalize_statsd_name("NodePool:metastatic:a.b") == "NodePool_metastatic_a_b"
