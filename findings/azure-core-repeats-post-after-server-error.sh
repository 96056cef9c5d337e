#!/bin/sh
# azure-core 1.41.0 with azure-mgmt-compute 39.0.0 (PyPI): POST is not in the list of methods that the retry policy repeats,
# but it is repeated three times after the statuses 500, 503 and 504, where nobody knows whether the request was executed:
# a command of begin_run_command() is sent four times. After 429, which says that the request was not executed, it is sent
# once (unless the answer has a Retry-After).
# Seen: "runCommand sent: 500 4, 503 4, 504 4, 429 1".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check azure-core==1.41.0 azure-mgmt-compute==39.0.0
cat >"$work/run.py" <<'END'
import http.server
import threading

from azure.core.credentials import AzureKeyCredential
from azure.core.exceptions import HttpResponseError
from azure.core.pipeline.policies import AzureKeyCredentialPolicy
from azure.mgmt.compute import ComputeManagementClient

received, status = [], 500


class Cloud(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        received.append(self.path)
        body = b'{"error": {"code": "x", "message": "x"}}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
key = AzureKeyCredential("x")
client = ComputeManagementClient(
    key,
    "subscription",
    base_url=f"http://127.0.0.1:{server.server_port}",
    authentication_policy=AzureKeyCredentialPolicy(key, "Authorization"),
    retry_backoff_factor=0.01,
)
counts = []
for status in (500, 503, 504, 429):
    received.clear()
    try:
        client.virtual_machines.begin_run_command("group", "vm", {"commandId": "RunShellScript", "script": ["date"]})
    except HttpResponseError:
        counts.append(f"{status} {len(received)}")
print("runCommand sent: " + ", ".join(counts))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'runCommand sent: 500 4, 503 4, 504 4, 429 1' "$work/seen"
