#!/bin/sh
# opentelemetry-sdk 1.45.2 with opentelemetry-exporter-otlp-proto-http 1.45.2 (PyPI): the time limit of force_flush() is
# documented as "the maximum amount of time to wait for spans to be exported", and that of the processor's constructor and
# OTEL_BSP_EXPORT_TIMEOUT as the longest time of an export. Neither has an effect: the call blocks until the exporter gives
# up. It then returns True, although the exporter has failed and the spans are lost.
# Seen: "force_flush(500) with a receiver that is silent: True after 3 s, export failed".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
cat >"$work/run.py" <<'END'
import http.server
import logging
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

stop, results = threading.Event(), []


class Silent(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        stop.wait(60)


class Exporter(OTLPSpanExporter):
    def export(self, spans):
        results.append(super().export(spans))
        return results[-1]


logging.disable(logging.CRITICAL)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
exporter = Exporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", timeout=3)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60000, export_timeout_millis=500))
provider.get_tracer("test").start_span("launch").end()
begin = time.monotonic()
answer = provider.force_flush(500)
seconds = time.monotonic() - begin
took = "3 s" if seconds > 2.5 else "0.5 s"
outcome = "export failed" if results == [SpanExportResult.FAILURE] else f"export: {results}"
print(f"force_flush(500) with a receiver that is silent: {answer} after {took}, {outcome}")
stop.set()
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'force_flush(500) with a receiver that is silent: True after 3 s, export failed' "$work/seen"
