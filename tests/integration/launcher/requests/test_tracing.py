"""Traces: what a receiver of OpenTelemetry gets of a request, and exemplars that Prometheus
finds them by.
"""

from __future__ import annotations

import http.server
import json
import pathlib
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.base import optional
from nodepool.metrics import tracing
from nodepool.web.server import WebApp
from nodepool.zk.records import Node, NodeRequest
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
ZUUL = {
    "build_set_uuid": "bs",
    "span_info": {"trace_id": TRACE, "span_id": PARENT, "name": "RequestNodes"},
}


class Receiver:
    """Takes traces as OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        spans: list[Any] = []
        services: set[str] = set()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                message = ExportTraceServiceRequest.FromString(
                    self.rfile.read(int(self.headers["Content-Length"]))
                )
                for each in message.resource_spans:
                    services.update(
                        a.value.string_value
                        for a in each.resource.attributes
                        if a.key == "service.name"
                    )
                    spans.extend(span for scope in each.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self.spans, self.services = spans, services
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(
            target=self.server.serve_forever, name="otlp-receiver", daemon=True
        )
        self._thread.start()

    def named(self, name: str, **attributes: str) -> list[Any]:
        return [
            span
            for span in self.spans
            if span.name == name and attributes.items() <= values(span).items()
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def values(span: Any) -> dict[str, str]:
    return {each.key.removeprefix("nodepool."): each.value.string_value for each in span.attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracing.start()
    yield found
    tracing.stop()
    found.close()


@pytest.mark.spec("issue: traces continue the span that Zuul puts into requestor_data")
def test_request_and_launch(bench: LauncherBench, receiver: Receiver) -> None:
    bench.start(config(provider()))
    began = time.time_ns()
    request_id, (node,) = bench.fulfilled("fake-label", requestor_data=ZUUL, tenant_name="acme")
    wait_for(lambda: receiver.named("request", request=request_id), 10, "span of the request")
    (request,) = receiver.named("request", request=request_id)
    (launch,) = receiver.named("launch", node=node.id)
    assert (
        int.from_bytes(request.trace_id, "big") == int.from_bytes(launch.trace_id, "big") == TRACE
    )
    assert int.from_bytes(request.parent_span_id, "big") == PARENT
    assert launch.parent_span_id == request.span_id
    expected = {
        "labels": "fake-label",
        "tenant": "acme",
        "provider": "fake-provider",
        "result": "fulfilled",
        "nodes": node.id,
    }
    assert expected.items() <= values(request).items()
    assert {"result": "ready", "label": "fake-label"}.items() <= values(launch).items()
    slack = 10**9  # the clock of the record is that of the test
    assert began - slack < request.start_time_unix_nano <= launch.start_time_unix_nano
    assert launch.end_time_unix_nano <= request.end_time_unix_nano
    assert next(event.name for event in launch.events) == "attempt 1 of 3: server requested"
    assert receiver.services == {"nodepool-launcher"}
    # A node that was ready has no launch; its request has a separate trace when Zuul names none.
    bench.use_up(request_id)
    other, _nodes = bench.fulfilled("fake-label", requestor_data={"span_info": None})
    wait_for(lambda: receiver.named("request", request=other), 10, "span of the other request")
    assert receiver.named("request", request=other)[0].parent_span_id == b""
    tracer = tracing.current()
    assert tracer is not None and not tracer._spans


def test_request_without_a_creation_time_begins_before_its_launch(
    bench: LauncherBench, receiver: Receiver
) -> None:
    """Those of launchers for ``min-ready`` have none."""
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    wait_for(lambda: receiver.named("request"), 20, "span of the request")
    (request,), (launch,) = receiver.named("request"), receiver.named("launch")
    assert launch.parent_span_id == request.span_id
    # The creation time is that of ZooKeeper, in milliseconds.
    assert request.start_time_unix_nano <= launch.start_time_unix_nano


@pytest.mark.parametrize(
    "info",
    [
        {"trace_id": "x", "span_id": 1},
        {"trace_id": 1 << 200, "span_id": 1},
        {"trace_id": True, "span_id": 1},
        "text",
        [1],
        {},
        {"trace_id": -1, "span_id": 1},
        {"trace_id": 1.5, "span_id": 1},
        {"trace_id": "f" * 100000, "span_id": 1},
        7,
    ],
)
def test_invalid_parent_is_ignored(info: object) -> None:
    assert tracing.parent_context({"span_info": info}) is None
    assert tracing.parent_context(info) is None


def test_hexadecimal_parent_is_accepted() -> None:
    from opentelemetry import trace

    context = tracing.parent_context(
        {"span_info": {"trace_id": f"{TRACE:032x}", "span_id": f"{PARENT:016x}"}}
    )
    found = trace.get_current_span(context).get_span_context()
    assert (found.trace_id, found.span_id) == (TRACE, PARENT)


def test_launches_that_end_late(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its request was removed a launch still belongs to it; after it was declined, the
    next try is a separate span.
    """
    monkeypatch.setattr(tracing, "MOST", 2)
    tracer = tracing.current()
    assert tracer is not None

    def ended(request_id: str) -> tuple[NodeRequest, Node]:
        request, node = NodeRequest(request_id), Node(f"node-{request_id}")
        request.node_types = node.type = ["a"]
        tracer.launch_ended(request, node, "p", "error.quota", 1.0)
        return request, node

    removed, node = ended("removed")
    tracer.request_ended(removed, "removed", "p", "main")
    tracer.launch_ended(removed, node, "p", "ready", 1.0)
    declined, node = ended("declined")
    tracer.request_ended(declined, "declined", "p", "main")
    tracer.launch_ended(declined, node, "p", "ready", 1.0)
    tracer.request_ended(declined, "fulfilled", "p", "main")
    wait_for(
        lambda: len(receiver.named("launch")) == 4 and len(receiver.named("request")) == 3,
        10,
        "all spans",
    )
    (whole,) = receiver.named("request", request="removed")
    assert [each.parent_span_id for each in receiver.named("launch", node="node-removed")] == [
        whole.span_id
    ] * 2
    parents = {each.span_id for each in receiver.named("request", request="declined")}
    assert {
        each.parent_span_id for each in receiver.named("launch", node="node-declined")
    } == parents and len(parents) == 2
    for number in range(5):
        ended(f"open-{number}")
    assert list(tracer._spans) == ["open-3", "open-4"], "what never ends takes no memory"


def test_malformed_request_has_no_trace(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no trace, and does no harm."""
    request = NodeRequest("1")
    request.node_types = None  # type: ignore[assignment]
    tracer = tracing.current()
    assert tracer is not None and tracer.request_ended(request, "fulfilled", "p", "main") is None
    assert "Cannot record a trace" in caplog.text


@pytest.mark.spec(
    "issue: a receiver that does not answer harms no request, and the end of the launcher is not "
    "late"
)
def test_silent_receiver_delays_neither_requests_nor_the_stop(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        tracing.start()
        try:
            bench.start(config(provider()))
            bench.fulfilled("fake-label", requestor_data=ZUUL)
        finally:
            began = time.monotonic()
            tracing.stop()
            took = time.monotonic() - began
    assert took < tracing.CLOSE_LIMIT + 5
    assert tracing.current() is None


def test_missing_extra_disables_tracing_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        optional, "_is_there", lambda module: not module.startswith("opentelemetry")
    )
    tracing.start({})
    assert caplog.text == ""
    tracing.start({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert tracing.current() is None
    assert "although OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text
    assert (
        "pip install 'opentelemetry-exporter-otlp-proto-http>=1.28' 'opentelemetry-sdk>=1.28'"
        in caplog.text
    )


def ask(address: str, accept: str = "application/json") -> str:
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.spec("issue: exemplars")
def test_metrics_have_traces_as_exemplars(bench: LauncherBench, receiver: Receiver) -> None:
    """As Prometheus itself asks for them."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    pool = bench.start(config(provider()))
    web = WebApp(pool, port=0, listen_address="127.0.0.1")
    web.start()
    try:
        bench.fulfilled("fake-label", requestor_data=ZUUL)
        address = f"http://127.0.0.1:{web.server.socket.getsockname()[1]}/metrics"
        # Those of other tests are there, too: the metrics are of this process.
        wanted = {
            (f"nodepool_{name}_duration_seconds_bucket", f"{TRACE:032x}")
            for name in ("label_request_wait", "provider_launches")
        }

        def exemplars() -> set[tuple[str, str]]:
            families = text_string_to_metric_families(
                ask(address, "application/openmetrics-text; version=1.0.0")
            )
            samples = [
                sample for family in families for sample in family.samples if sample.exemplar
            ]
            return {(sample.name, sample.exemplar.labels["trace_id"]) for sample in samples}

        wait_for(lambda: wanted <= exemplars(), 10, "exemplars of the request and of its launch")
        assert "trace_id" not in ask(address, "text/plain")
        if shutil.which("prometheus"):
            with prometheus(bench.tmp, web.server.socket.getsockname()[1]) as server:
                query = (
                    "query=nodepool_label_request_wait_duration_seconds_bucket&start=0&"
                    "end=9999999999"
                )
                wait_for(
                    lambda: f"{TRACE:032x}" in ask(f"{server}/api/v1/query_exemplars?{query}"),
                    60,
                    "exemplar in Prometheus",
                )
                targets = json.loads(ask(f"{server}/api/v1/targets"))["data"]["activeTargets"]
                assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")]
    finally:
        web.stop()


class prometheus:
    """Debian's, on a separate port; gives its address."""

    def __init__(self, folder: pathlib.Path, target: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        scrape = {
            "job_name": "nodepool",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        self.command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            "--enable-feature=exemplar-storage",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        address = f"http://127.0.0.1:{self.port}"

        def there() -> bool:
            try:
                return "Ready" in ask(f"{address}/-/ready")
            except OSError:
                return False

        try:
            wait_for(there, 30, "prometheus ready")
        except BaseException:
            self.__exit__()
            raise
        return address

    def __exit__(self, *_error: object) -> None:
        self.process.terminate()
        self.process.wait(20)
