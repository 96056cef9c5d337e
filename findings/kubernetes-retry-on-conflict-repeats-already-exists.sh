#!/bin/sh
# kubernetes 37.0.2 (PyPI, the Python client): retry_on_conflict() is documented to do exactly what RetryOnConflict of
# client-go does (0.37.2), which goes by the reason of an error. The Python function uses the status alone, and servers
# answer 409 also with the reason AlreadyExists, which no repetition changes: a function that creates an object whose
# name is in use is called five times instead of once, with everything else that it does. The last error is raised.
# Seen: "Conflict: 5 calls, ConflictException; AlreadyExists: 5 calls, ConflictException; Forbidden: 1 calls,
# ForbiddenException" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.2
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

from kubernetes import client
from kubernetes.utils import retry_on_conflict

CODES = {"Conflict": 409, "AlreadyExists": 409, "Forbidden": 403}
reason = ""
calls = 0


class Cluster(http.server.BaseHTTPRequestHandler):
    """Refuse all pods, for the current reason."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": CODES[reason]}
        body = json.dumps(status).encode()
        self.send_response(CODES[reason])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
threading.Thread(target=server.serve_forever, daemon=True).start()
configuration = client.Configuration()
configuration.host = f"http://127.0.0.1:{server.server_port}"
api = client.CoreV1Api(client.ApiClient(configuration))


def create():
    global calls
    calls += 1
    return api.create_namespaced_pod("ci", {"metadata": {"name": "node"}, "spec": {"containers": []}})


seen = []
for reason in CODES:
    calls = 0
    try:
        retry_on_conflict(create)
    except Exception as error:
        seen.append(f"{reason}: {calls} calls, {type(error).__name__}")
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx "Conflict: 5 calls, ConflictException; AlreadyExists: 5 calls, ConflictException; Forbidden: 1 calls, ForbiddenException" "$work/seen"
