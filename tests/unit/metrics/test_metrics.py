from __future__ import annotations

import datetime
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodepool import metrics
from nodepool.metrics import prometheus, statsd_sender
from tests import REPOSITORY


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
        assert len(packet) <= 512
        lines += packet.decode().split("\n")
    return lines


def scrape(client):
    text = prometheus.Exposition(client).render()[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.spec("CLI-7: gauge name:value|g, counter name:1|c, timer name:12.000000|ms")
def test_values_use_the_statsd_format(client, server):
    client.gauge("nodepool.nodes.ready", 1)
    client.incr("nodepool.launch.ready")
    client.timing("nodepool.launch.ready", 12)
    client.timing("nodepool.launch.ready", datetime.timedelta(seconds=1))
    client.gauge("nodepool.x", -3)
    assert receive(server, 6) == [
        "nodepool.nodes.ready:1|g",
        "nodepool.launch.ready:1|c",
        "nodepool.launch.ready:12.000000|ms",
        "nodepool.launch.ready:1000.000000|ms",
        "nodepool.x:0|g",
        "nodepool.x:-3|g",
    ]


def test_pipeline_of_a_driver_records_each_value_once(client, server):
    with client.pipeline() as pipe:
        pipe.gauge("a", 1)
        pipe.incr("b", 2)
        pipe.timing("c", 3)
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


def test_names_cannot_forge_values(client, server):
    client.gauge("a\nb:1|c.\N{LATIN SMALL LETTER U WITH DIAERESIS}", 1)
    assert receive(server, 1) == ["a_b_1_c.?:1|g"]


def test_what_is_no_number_harms_nothing_else(client, server):
    with pytest.raises(TypeError):
        client.gauge("a", None)
    with pytest.raises(TypeError):
        client.incr("a", None)
    with pytest.raises(TypeError):
        client.timing("a", None)
    client.gauge("b", 1)
    assert receive(server, 1) == ["b:1|g"]
    assert scrape(client)[("b", ())] == 1


def test_values_are_counted_without_a_statsd_server():
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


def test_recording_costs_less_than_sending(client, server):
    """The recorder only collects: its caller pays for no system call.

    CPU time of both in turn, so that it depends neither on the machine nor on its load.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as direct:
        sent = server.getsockname()

        def send() -> None:
            direct.sendto(b"nodepool.launch.ready:1|c", sent)

        def record() -> None:
            client.incr("nodepool.launch.ready")

        times = [(_time_of(send), _time_of(record)) for _ in range(9)]
    sending, recording = (min(column) for column in zip(*times, strict=True))
    assert recording < sending, (recording, sending)


def _time_of(action, count=200):
    start = time.thread_time()
    for _ in range(count):
        action()
    return time.thread_time() - start


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


#: Each with values for its labels, the name that 11.0.0 gives it (or a new one), and the labels.
EXAMPLES = [
    (metrics.NODES, ("in-use",), "nodepool.nodes.in-use", {"state": "in-use"}),
    (
        metrics.PROVIDER_NODES,
        ("rack.west", "ready"),
        "nodepool.provider.rack.west.nodes.ready",
        {"provider": "rack.west", "state": "ready"},
    ),
    (
        metrics.LABEL_NODES,
        ("noble-8g", "building"),
        "nodepool.label.noble-8g.nodes.building",
        {"label": "noble-8g", "state": "building"},
    ),
    (
        metrics.ADDRESSABLE_REQUESTS,
        ("rack", "main"),
        "nodepool.provider.rack.pool.main.addressable_requests",
        {"provider": "rack", "pool": "main"},
    ),
    (metrics.MAX_SERVERS, ("rack",), "nodepool.provider.rack.max_servers", {"provider": "rack"}),
    (
        metrics.TENANT_LIMIT,
        ("acme", "cores"),
        "nodepool.tenant_limits.acme.cores",
        {"tenant": "acme", "limit": "cores"},
    ),
    (
        metrics.ZOOKEEPER_QUEUE,
        ("np01", "node_cache.event_queue"),
        "nodepool.launcher.np01.zk.node_cache.event_queue",
        {"host": "np01", "queue": "node_cache.event_queue"},
    ),
    (metrics.LAUNCHER_CONFIG_STALE, (), "nodepool.launcher.config_stale", {}),
    (
        metrics.IMAGE_SIZE,
        ("noble", "qcow2"),
        "nodepool.dib_image_build.noble.qcow2.size",
        {"image": "noble", "format": "qcow2"},
    ),
    (
        metrics.IMAGE_EXIT_STATUS,
        ("noble",),
        "nodepool.dib_image_build.noble.status.rc",
        {"image": "noble"},
    ),
    (
        metrics.IMAGE_LAST_BUILD,
        ("noble",),
        "nodepool.dib_image_build.noble.status.last_build",
        {"image": "noble"},
    ),
    (metrics.BUILD_REQUESTS, (), "nodepool.image_build_requests", {}),
    (
        metrics.BUILD_REQUESTED,
        ("noble",),
        "nodepool.image.noble.image_build_requests",
        {"image": "noble"},
    ),
    (
        metrics.BUILD_STATE,
        ("nb01.example.org", "noble"),
        "nodepool.builder.nb01.example.org.image.noble.build.state",
        {"host": "nb01.example.org", "image": "noble"},
    ),
    (
        metrics.UPLOAD_STATE,
        ("nb01.example.org", "noble", "p"),
        "nodepool.builder.nb01.example.org.image.noble.provider.p.upload.state",
        {"host": "nb01.example.org", "image": "noble", "provider": "p"},
    ),
    (
        metrics.CURRENT_BUILDS,
        ("nb01.example.org",),
        "nodepool.builder.nb01.example.org.current_builds",
        {"host": "nb01.example.org"},
    ),
]


@pytest.mark.parametrize(
    "definition,values,name,labels", EXAMPLES, ids=[example[2] for example in EXAMPLES]
)
def test_one_definition_two_forms(definition, values, name, labels):
    client = metrics.Metrics()
    client.gauge(definition(*values), 7)
    assert client.snapshot().gauges == {name: 7}
    assert scrape(client)[(definition.family, tuple(sorted(labels.items())))] == 7


def test_another_number_of_values_than_labels():
    with pytest.raises(TypeError):
        metrics.NODES()
    with pytest.raises(TypeError):
        metrics.NODES("ready", "again")


def test_launches_of_zones_and_dots():
    client = metrics.Metrics()
    for result in ("ready", "error.quota"):
        for series in (
            metrics.LAUNCHES(result),
            metrics.PROVIDER_LAUNCHES("rack.west", result),
            metrics.ZONE_LAUNCHES("rack.west", "az.1", result),
            metrics.REQUESTOR_LAUNCHES("NodePool_min-ready", result),
            metrics.LABEL_LAUNCHES("a.label", result),
            metrics.TENANT_LAUNCHES("tenant", result),
        ):
            client.incr(series)
            client.timing(series, 2500)
    values = scrape(client)
    for result in ("ready", "error.quota"):
        for family, labels in [
            ("nodepool_launches", {}),
            ("nodepool_provider_launches", {"provider": "rack.west"}),
            ("nodepool_zone_launches", {"provider": "rack.west", "az": "az.1"}),
            ("nodepool_requestor_launches", {"requestor": "NodePool_min-ready"}),
            ("nodepool_label_launches", {"label": "a.label"}),
            ("nodepool_tenant_launches", {"tenant": "tenant"}),
        ]:
            key = tuple(sorted({**labels, "result": result}.items()))
            assert values[(f"{family}_total", key)] == 1
            assert values[(f"{family}_duration_seconds_count", key)] == 1
            assert values[(f"{family}_duration_seconds_sum", key)] == 2.5
            assert (
                values[(f"{family}_duration_seconds_bucket", tuple(sorted([*key, ("le", "2.5")])))]
                == 1
            )
            assert (
                values[(f"{family}_duration_seconds_bucket", tuple(sorted([*key, ("le", "1.0")])))]
                == 0
            )


def test_scrape_has_no_control_characters_of_others():
    client = metrics.Metrics()
    client.incr(metrics.TENANT_LAUNCHES("red\x1b[31m\x9b\u202e", "ready"))
    text = prometheus.Exposition(client).render()[0].decode()
    assert all(line.isprintable() for line in text.splitlines())
    assert (
        "nodepool_tenant_launches_total",
        (("result", "ready"), ("tenant", "red\\x1b[31m\\x9b\\u202e")),
    ) in scrape(client)


def test_scrape_is_readable_with_quotes_and_backslashes_in_names():
    client = metrics.Metrics()
    tenant = 'MacBook 14" \\n R/W\\'
    client.incr(metrics.TENANT_LAUNCHES(tenant, "ready"))
    found = scrape(client)
    assert found["nodepool_tenant_launches_total", (("result", "ready"), ("tenant", tenant))] == 1


def test_drivers_of_others_record_any_name():
    client = metrics.Metrics()
    client.incr("nodepool.something.else")
    client.gauge("100%.{odd}", 3)
    values = scrape(client)
    assert values[("nodepool_something_else_total", ())] == 1
    assert values[("_100___odd_", ())] == 3
    assert ("process_resident_memory_bytes", ()) in values


def test_gauges_that_nothing_stands_behind_are_forgotten():
    client = metrics.Metrics()
    client.gauge("other", 1)
    for providers in (["a", "b"], ["b"]):
        values = {metrics.MAX_SERVERS(name): 5 for name in providers}
        client.keep("limits", values)
        for name, value in values.items():
            client.gauge(name, value)
    assert set(client.snapshot().gauges) == {"other", "nodepool.provider.b.max_servers"}


def test_each_definition_is_in_the_manual():
    manual = REPOSITORY.joinpath("doc/operation/metrics.rst").read_text()
    missing = [
        one.family
        for one in vars(metrics).values()
        if isinstance(one, metrics.Definition) and one.family not in manual
    ]
    assert not missing


def test_similar_series_do_not_break_the_scrape():
    client = metrics.Metrics()
    client.gauge("a.b", 1)
    client.gauge("a_b", 2)
    client.gauge("c", float("nan"))
    assert scrape(client)[("a_b", ())] == 1
