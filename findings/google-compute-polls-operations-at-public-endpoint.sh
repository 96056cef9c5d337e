#!/bin/sh
# google-cloud-compute 1.57.0 with google-api-core 2.44.0 (PyPI): a client that is created with an endpoint of its own
# (client_options.api_endpoint, for a network that reaches Google only by Private Service Connect) sends its calls there.
# The operation that insert() or delete() returns is polled by another client inside, which gets the credentials only, and
# asks https://compute.googleapis.com. The instance is created, and result() and done() fail, or go a way that a firewall
# closes; only ZoneOperationsClient with the same options, called by hand, polls where the instance was created.
# Here, a proxy stands for the public network, and refuses everything.
# Seen: "insert: the endpoint of the client; result(): CONNECT compute.googleapis.com:443, ProxyError; ZoneOperationsClient:
# DONE" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check google-cloud-compute==1.57.0 google-api-core==2.44.0
cat >"$work/run.py" <<'END'
import http.server
import json
import os
import threading

from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

asked = []
proxied = []


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Start and report one operation; as a proxy, refuse all connections."""

    def answer(self, status):
        operation = {"kind": "compute#operation", "name": "create", "zone": "zone", "status": status}
        body = json.dumps(operation).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        asked.append("POST")
        self.answer("RUNNING")

    def do_GET(self):
        self.answer("DONE")

    def do_CONNECT(self):
        proxied.append(f"CONNECT {self.path}")
        self.send_error(403)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
os.environ |= {"HTTPS_PROXY": url, "https_proxy": url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
settings = {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": url}}
client = compute_v1.InstancesClient(**settings)
operation = client.insert(project="project", zone="zone", instance_resource={"name": "node"})
try:
    operation.result(timeout=20)
    error = "no error"
except Exception as problem:
    error = type(problem).__name__
operations = compute_v1.ZoneOperationsClient(**settings)
status = operations.get(project="project", zone="zone", operation=operation.name).status.name
insert = "the endpoint of the client" if asked == ["POST"] else "elsewhere"
polled = " ".join(sorted(set(proxied))) or "its endpoint"
print(f"insert: {insert}; result(): {polled}, {error}; ZoneOperationsClient: {status}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='insert: the endpoint of the client; result(): CONNECT compute.googleapis.com:443, ProxyError'
grep -qx "$first; ZoneOperationsClient: DONE" "$work/seen"
