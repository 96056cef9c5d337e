#!/bin/sh
# opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http 1.45.2 (PyPI): a receiver that rejects a part of the spans (a
# quota, a size, an attribute) answers with status 200 and a "partial success" that has their number and the reason. The
# exporter does not read the body: it returns SUCCESS, and logs nothing. The protocol says that the client must not repeat
# them, and the answer is the only sign of the loss. A refusal by status 400 is logged and returns FAILURE.
# Seen: "all spans rejected, status 200: SUCCESS, nothing logged; status 400: FAILURE, 1 message logged".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2 \
    opentelemetry-exporter-otlp-proto-http==1.45.2
cat >"$work/run.py" <<'END'
import http.server
import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import TracerProvider

status = 200


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = 1
        answer.partial_success.error_message = "quota exceeded"
        body = answer.SerializeToString()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


class Messages(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


messages = []
# Everything that the exporter logs, also details; not the requests that urllib3 logs.
logging.getLogger("opentelemetry").addHandler(Messages())
logging.getLogger("opentelemetry").setLevel(logging.DEBUG)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
threading.Thread(target=server.serve_forever, daemon=True).start()
exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
span = TracerProvider().get_tracer("x").start_span("x")
span.end()
seen = []
for status in (200, 400):
    messages.clear()
    result = exporter.export([span]).name
    logged = f"{len(messages)} message logged" if messages else "nothing logged"
    seen.append(f"status {status}: {result}, {logged}")
print("all spans rejected, " + "; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" 2>"$work/err" | tee "$work/seen" || { cat "$work/err"; exit 1; }
grep -qx 'all spans rejected, status 200: SUCCESS, nothing logged; status 400: FAILURE, 1 message logged' "$work/seen"
