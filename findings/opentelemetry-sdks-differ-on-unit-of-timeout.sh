#!/bin/sh
# opentelemetry-exporter-otlp-proto-http 1.45.2 (PyPI) and @opentelemetry/exporter-trace-otlp-http 0.223.1 (npm): the
# specification and the exporter of JavaScript read OTEL_EXPORTER_OTLP_TIMEOUT in milliseconds, the exporter of Python reads
# it in seconds, although OTEL_BSP_SCHEDULE_DELAY is in milliseconds there, too. The value 2000, set for all services of a
# CI system, is 2 s for one service and 33 min for the other: a thread of the Python daemon waits that long for a receiver
# that does not answer. With 2, services in JavaScript lose all traces that take longer than 2 ms.
# Seen: "OTEL_EXPORTER_OTLP_TIMEOUT=2000: JavaScript gives up, Python waits; =2: JavaScript gives up, Python gives up".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
cd "$work"
npm install --silent --no-audit --no-fund --cache "$work/npm" @opentelemetry/exporter-trace-otlp-http@0.223.1 \
    @opentelemetry/sdk-trace-base@2.12.1 >/dev/null
cat >export.js <<'END'
const { OTLPTraceExporter } = require("@opentelemetry/exporter-trace-otlp-http");
const { BasicTracerProvider, SimpleSpanProcessor } = require("@opentelemetry/sdk-trace-base");
const processor = new SimpleSpanProcessor(new OTLPTraceExporter());
const provider = new BasicTracerProvider({ spanProcessors: [processor] });
provider.getTracer("test").startSpan("launch").end();
provider.forceFlush().then(() => process.exit(0), () => process.exit(0));
END
cat >export.py <<'END'
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
provider.get_tracer("test").start_span("launch").end()
END
cat >run.py <<'END'
import os
import socket
import subprocess
import sys

# Connections are accepted, but never answered.
with socket.create_server(("127.0.0.1", 0)) as server:
    programs = {"JavaScript": ["node", "export.js"], "Python": [sys.executable, "export.py"]}
    endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    seen = []
    for value in ("2000", "2"):
        env = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": value}
        for name, command in programs.items():
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(15)
                seen.append(f"{name} gives up")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                seen.append(f"{name} waits")
print(f"OTEL_EXPORTER_OTLP_TIMEOUT=2000: {seen[0]}, {seen[1]}; =2: {seen[2]}, {seen[3]}")
END
venv/bin/python run.py | tee seen
grep -qx 'OTEL_EXPORTER_OTLP_TIMEOUT=2000: JavaScript gives up, Python waits; =2: JavaScript gives up, Python gives up' seen
