#!/bin/sh
# google-cloud-compute 1.57.0 with google-api-core 2.44.0 (PyPI): result() of an operation that has failed raises the class
# of a failed call with the same HTTP status. An exhausted quota is Forbidden, as a missing permission is. A zone without
# capacity is ServiceUnavailable, which the predicate if_transient_error takes for an error of the service: a Retry around
# insert() and result() repeats the creation in the same zone until its time is over, and each attempt is a new operation.
# The code of the reason is in the items of "errors", which are messages for operations (.code) and dictionaries for calls
# (["reason"]).
# Seen: "call denied: Forbidden, dict; quota: Forbidden, Errors QUOTA_EXCEEDED; no capacity: ServiceUnavailable, Errors
# ZONE_RESOURCE_POOL_EXHAUSTED, transient; with Retry: repeated, RetryError" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check google-cloud-compute==1.57.0 google-api-core==2.44.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

from google.api_core.retry import Retry, if_transient_error
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

# Status, text and reason of operations, as Compute Engine reports them.
FAILURES = {
    "quota": (403, "FORBIDDEN", "QUOTA_EXCEEDED"),
    "no capacity": (503, "SERVICE UNAVAILABLE", "ZONE_RESOURCE_POOL_EXHAUSTED"),
}
calls = 0


class Compute(http.server.BaseHTTPRequestHandler):
    """Refuse the call, or return an operation that has failed."""

    def do_POST(self):
        global calls
        calls += 1
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["name"]
        if name in FAILURES:
            status, (code, text, reason) = 200, FAILURES[name]
            value = {"name": "create", "status": "DONE", "httpErrorStatusCode": code, "httpErrorMessage": text}
            value["error"] = {"errors": [{"code": reason, "message": "refused"}]}
        else:
            status = 403
            value = {"error": {"code": 403, "message": "denied", "errors": [{"reason": "forbidden", "message": "denied"}]}}
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Compute)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
client = compute_v1.InstancesClient(credentials=AnonymousCredentials(), client_options={"api_endpoint": url})


def create(name):
    client.insert(project="project", zone="zone", instance_resource={"name": name}).result(timeout=20)


def failure(name):
    try:
        create(name)
    except Exception as error:
        (item,) = error.errors
        what = f"{type(error).__name__}, {type(item).__name__}"
        if not isinstance(item, dict):
            what += f" {item.code}"
        return f"{name}: {what}{', transient' if if_transient_error(error) else ''}"


seen = "; ".join(map(failure, ("call denied", *FAILURES)))
calls = 0
try:
    Retry(initial=0.1, maximum=0.1, timeout=2)(create)("no capacity")
    end = "no error"
except Exception as error:
    end = type(error).__name__
print(f"{seen}; with Retry: {'repeated' if calls > 2 else f'{calls} calls'}, {end}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='call denied: Forbidden, dict; quota: Forbidden, Errors QUOTA_EXCEEDED'
second='no capacity: ServiceUnavailable, Errors ZONE_RESOURCE_POOL_EXHAUSTED, transient; with Retry: repeated, RetryError'
grep -qx "$first; $second" "$work/seen"
