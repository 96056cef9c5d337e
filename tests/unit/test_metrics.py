from __future__ import annotations

import datetime
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodepool import metrics, prometheus, statsd_sender


@pytest.fixture
def server():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(5)
    yield sock
    sock.close()


@pytest.fixture
def client(server):
    client = metrics.Metrics(server.getsockname())
    yield client
    client.close()


def receive(server, count):
    lines = []
    while len(lines) < count:
        packet = server.recv(65536)
        assert len(packet) <= statsd_sender.PACKET_SIZE
        lines += packet.decode().split("\n")
    return lines


def scrape(client):
    text = prometheus.Exposition(client).render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.spec("cli-web-metrics.md 7: gauge name:value|g, counter name:1|c, timer name:12.000000|ms")
def test_wire_format(client, server):
    client.gauge("nodepool.nodes.ready", 1)
    client.incr("nodepool.launch.ready")
    client.timing("nodepool.launch.ready", 12)
    client.timing("nodepool.launch.ready", datetime.timedelta(seconds=1))
    client.gauge("nodepool.x", -3)
    assert receive(server, 6) == [
        "nodepool.nodes.ready:1|g", "nodepool.launch.ready:1|c", "nodepool.launch.ready:12.000000|ms",
        "nodepool.launch.ready:1000.000000|ms", "nodepool.x:0|g", "nodepool.x:-3|g",
    ]  # fmt: skip


def test_pipeline_sends_on_exit(client, server):
    with client.pipeline() as pipe:
        pipe.gauge("a", 1)
        pipe.incr("b", 2)
        pipe.timing("c", 3)
        assert client.snapshot() == metrics.Snapshot()
    assert receive(server, 3) == ["a:1|g", "b:2|c", "c:3.000000|ms"]
    pipe = client.pipeline()
    pipe.decr("b")
    pipe.send()
    pipe.send()
    assert client.snapshot().counters == {"b": 1}


def test_many_values_are_packed(client, server):
    for number in range(500):
        client.gauge(f"nodepool.label.some-label-{number:04}.nodes.ready", number)
    lines = receive(server, 500)
    assert len(lines) == 500 and lines[-1] == "nodepool.label.some-label-0499.nodes.ready:499|g"


def test_packets_limits():
    assert list(statsd_sender.packets(["a" * 300, "b" * 211, "c" * 600, "d"])) == [
        b"a" * 300 + b"\n" + b"b" * 211, b"c" * 600, b"d"
    ]  # fmt: skip
    assert list(statsd_sender.packets([])) == []


def test_line_breaks_cannot_forge_values():
    assert list(statsd_sender.format_line("a\nb:1|c", 1, "g")) == ["a_b_1_c:1|g"]


def test_nobody_listens():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    client = metrics.Metrics(address)
    for _ in range(3):
        client.incr("a")
        client.close()
    assert client.snapshot().counters == {"a": 3}


def test_unresolvable_host_never_fails():
    client = metrics.Metrics(("no-such-host.invalid", 8125))
    client.incr("a")
    client.close()
    assert client.snapshot().counters == {"a": 1}


def test_full_queue_drops(monkeypatch):
    sender = statsd_sender.StatsdSender(("127.0.0.1", 9), queue_length=2)
    monkeypatch.setattr(sender, "_start", lambda: None)
    for _ in range(5):
        sender.put("a", 1, "c")
    assert sender.dropped == 3


def test_thread_ends_and_starts_again(client, server):
    client.incr("a")
    assert receive(server, 1) == ["a:1|c"]
    assert [t for t in threading.enumerate() if t.name == "ThreadPoolExecutor-statsd"]
    client.close()
    assert not [t for t in threading.enumerate() if t.name == "ThreadPoolExecutor-statsd"]
    client.incr("b")
    assert receive(server, 1) == ["b:1|c"]


def test_close_sends_the_rest(client, server):
    client.incr("a")
    client.incr("b")
    client.close()
    server.settimeout(0)
    assert server.recv(100) == b"a:1|c\nb:1|c"


def test_recording_is_cheap(client):
    best = min(_time_of(client) for _ in range(5))
    assert best < 10e-6


def _time_of(client, count=1000):
    start = time.perf_counter()
    for _ in range(count):
        client.incr("nodepool.launch.ready")
        client.timing("nodepool.launch.ready", 1.5)
    return (time.perf_counter() - start) / count / 2


def test_address_from_environment():
    assert metrics.statsd_address({}) is None
    assert metrics.statsd_address({"STATSD_HOST": "h"}) == ("h", 8125)
    assert metrics.statsd_address({"STATSD_PORT": "77"}) == ("localhost", 77)
    with pytest.raises(ValueError, match="STATSD_PORT must be a port number, not 'x'"):
        metrics.statsd_address({"STATSD_PORT": "x"})


def test_shared_follows_the_environment():
    first = metrics.shared({"STATSD_HOST": "127.0.0.1"})
    assert first.address == ("127.0.0.1", 8125)
    assert metrics.shared({}) is first and first.address is None


def test_prometheus_labels():
    client = metrics.Metrics()
    client.gauge("nodepool.nodes.ready", 1)
    client.gauge("nodepool.nodes.in-use", 2)
    client.gauge("nodepool.provider.rack.west.nodes.ready", 3)
    client.gauge("nodepool.label.noble-8g.nodes.building", 4)
    client.gauge("nodepool.provider.rack.pool.main.addressable_requests", 5)
    client.gauge("nodepool.provider.rack.max_servers", 6)
    client.gauge("nodepool.tenant_limits.acme.cores", 7)
    client.gauge("nodepool.launcher.np01.zk.node_cache.event_queue", 8)
    client.incr("nodepool.provider.rack.leaked.ports", 2)
    client.incr("nodepool.something.else")
    values = scrape(client)
    for name, labels, value in [
        ("nodepool_nodes", {"state": "ready"}, 1),
        ("nodepool_nodes", {"state": "in-use"}, 2),
        ("nodepool_provider_nodes", {"provider": "rack.west", "state": "ready"}, 3),
        ("nodepool_label_nodes", {"label": "noble-8g", "state": "building"}, 4),
        ("nodepool_pool_addressable_requests", {"provider": "rack", "pool": "main"}, 5),
        ("nodepool_provider_max_servers", {"provider": "rack"}, 6),
        ("nodepool_tenant_limit", {"tenant": "acme", "limit": "cores"}, 7),
        ("nodepool_zookeeper_queue", {"host": "np01", "queue": "node_cache.event_queue"}, 8),
        ("nodepool_leaked_resources_total", {"provider": "rack", "kind": "ports"}, 2),
        ("nodepool_something_else_total", {}, 1),
    ]:
        assert values[(name, tuple(sorted(labels.items())))] == value
    assert ("process_resident_memory_bytes", ()) in values
    client.remove("nodepool.nodes.ready")
    assert ("nodepool_nodes", (("state", "ready"),)) not in scrape(client)


def test_prometheus_launches_with_zones_and_dots():
    client = metrics.Metrics()
    for result in ("ready", "error.quota"):
        for name in ("nodepool.launch.", "nodepool.launch.provider.rack.west.",
                     "nodepool.launch.provider.rack.west.az.1.", "nodepool.launch.requestor.NodePool_min-ready."):
            client.incr(name + result)
            client.timing(name + result, 2500)
    values = scrape(client)
    for result in ("ready", "error.quota"):
        for family, labels in [
            ("nodepool_launches", {}),
            ("nodepool_provider_launches", {"provider": "rack.west"}),
            ("nodepool_zone_launches", {"provider": "rack.west", "az": "az.1"}),
            ("nodepool_requestor_launches", {"requestor": "NodePool_min-ready"}),
        ]:
            key = tuple(sorted({**labels, "result": result}.items()))
            assert values[(f"{family}_total", key)] == 1
            assert values[(f"{family}_duration_seconds_count", key)] == 1
            assert values[(f"{family}_duration_seconds_sum", key)] == 2.5


def test_prometheus_builder_names():
    names = {
        "nodepool.dib_image_build.noble.qcow2.size": "nodepool_image_size_bytes",
        "nodepool.dib_image_build.noble.status.rc": "nodepool_image_build_exit_status",
        "nodepool.dib_image_build.noble.status.last_build": "nodepool_image_last_build_timestamp",
        "nodepool.image_build_requests": "nodepool_image_build_requests",
        "nodepool.image.noble.image_build_requests": "nodepool_image_build_requested",
        "nodepool.builder.nb01.example.org.image.noble.build.state": "nodepool_builder_build_state",
        "nodepool.builder.nb01.example.org.image.noble.provider.p.upload.state": "nodepool_builder_upload_state",
        "nodepool.builder.nb01.example.org.current_builds": "nodepool_builder_current_builds",
    }
    for name, family in names.items():
        assert prometheus.parse(name).family == family
    upload = dict(prometheus.parse("nodepool.builder.nb01.example.org.image.noble.provider.p.upload.state").labels)
    assert upload == {"host": "nb01.example.org", "image": "noble", "provider": "p"}


def test_series_that_look_alike_do_not_break_the_scrape():
    client = metrics.Metrics()
    client.gauge("a.b", 1)
    client.gauge("a_b", 2)
    client.gauge("c", float("nan"))
    assert scrape(client)[("a_b", ())] == 1
