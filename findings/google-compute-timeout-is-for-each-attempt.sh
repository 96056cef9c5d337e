#!/bin/sh
# google-cloud-compute 1.57.0 with google-api-core 2.44.0 (PyPI): the argument "timeout" of a call is documented as "The
# timeout for this request". It ends an attempt that gets no answer, but not the call: a call that reads is repeated for up
# to 600 s after each status 503, also with timeout=1. A loop over instances that relies on its timeouts stands still
# while the zone is out of order. The deadline of the call is the one in the argument "retry".
# Seen: "get(timeout=1): without an answer ReadTimeout; 503 for 8 s: the instance, after more than 8 s; 503 for 8 s with
# retry=Retry(timeout=1): RetryError within 8 s" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check google-cloud-compute==1.57.0 google-api-core==2.44.0
cat >"$work/run.py" <<'END'
import http.server
import threading
import time

from google.api_core.exceptions import ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.auth.credentials import AnonymousCredentials
from google.cloud.compute_v1 import InstancesClient
from google.cloud.compute_v1.services.instances.transports.rest import InstancesRestTransport

OUTAGE = 8  # seconds
silent = False
end = 0.0
done = threading.Event()


class Cloud(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if silent:
            done.wait(60)
            return
        available = time.monotonic() >= end
        body = b'{"name": "one"}' if available else b'{"error": {"code": 503, "message": "x"}}'
        self.send_response(200 if available else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"127.0.0.1:{server.server_port}"
client = InstancesClient(
    transport=InstancesRestTransport(host=address, url_scheme="http", credentials=AnonymousCredentials())
)


def get(**arguments):
    try:
        name = client.get(project="p", zone="z", instance="one", timeout=1, **arguments).name
        return "the instance" if name == "one" else name
    except Exception as error:
        return type(error).__name__


silent = True
seen = [f"without an answer {get()}"]
silent = False
end = time.monotonic() + OUTAGE
result = get()
after = "after more than" if time.monotonic() > end else "within"
seen.append(f"503 for {OUTAGE} s: {result}, {after} {OUTAGE} s")
end = time.monotonic() + OUTAGE
result = get(retry=Retry(if_exception_type(ServiceUnavailable), timeout=1))
after = "after more than" if time.monotonic() > end else "within"
seen.append(f"503 for {OUTAGE} s with retry=Retry(timeout=1): {result} {after} {OUTAGE} s")
done.set()
print("get(timeout=1): " + "; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='get(timeout=1): without an answer ReadTimeout; 503 for 8 s: the instance, after more than 8 s'
grep -qxF "$first; 503 for 8 s with retry=Retry(timeout=1): RetryError within 8 s" "$work/seen"
