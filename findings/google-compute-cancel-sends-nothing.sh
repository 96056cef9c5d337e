#!/bin/sh
# google-cloud-compute 1.57.0 with google-api-core 2.44.0 (PyPI): cancel() of the operation that insert() or delete() returns
# returns True and sends nothing: Compute Engine cannot cancel operations. In the long-running operations of Google's other
# libraries, True means that "the cancel RPC was made". After that, cancelled() is true as soon as the operation has ended,
# also if the instance was created: a launcher that cancels a late creation, and deletes no instance whose creation was
# canceled, leaves one that runs and is paid for.
# Seen: "cancel(): True, requests sent: 0; after the end: cancelled() True, result() None, instance RUNNING".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check google-cloud-compute==1.57.0 google-api-core==2.44.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

requests = []
status = "RUNNING"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Create one instance by an operation that ends when the program says so."""

    def do_GET(self):
        requests.append(f"{self.command} {self.path}")
        if "/operations" in self.path or self.command == "POST":
            value = {"kind": "compute#operation", "name": "create", "zone": "zone", "status": status}
        else:
            value = {"kind": "compute#instance", "name": "node", "status": "RUNNING"}
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    do_DELETE = do_GET

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"api_endpoint": f"http://127.0.0.1:{server.server_port}"}
client = compute_v1.InstancesClient(credentials=AnonymousCredentials(), client_options=options)
operations = compute_v1.ZoneOperationsClient(credentials=AnonymousCredentials(), client_options=options)
operation = client.insert(project="project", zone="zone", instance_resource={"name": "node"})
# Poll the endpoint of this program; the client itself asks the public one.
names = {"project": "project", "zone": "zone", "operation": "create"}
operation._refresh = lambda **_: operations.get(**names)
asked = len(requests)
canceled = operation.cancel()
# done() asks for the status once.
sent = [request for request in requests[asked:] if not request.startswith("GET ")]
status = "DONE"
ended = f"cancelled() {operation.cancelled()}, result() {operation.result(timeout=20)}"
instance = client.get(project="project", zone="zone", instance="node")
print(f"cancel(): {canceled}, requests sent: {len(sent)}; after the end: {ended}, instance {instance.status}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qxF 'cancel(): True, requests sent: 0; after the end: cancelled() True, result() None, instance RUNNING' "$work/seen"
