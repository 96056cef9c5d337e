#!/bin/sh
# kubernetes 37.0.2 (PyPI): the dynamic client saves the API groups of a cluster in the temporary directory, in a file named
# after a hash of the address of the server. Another process reads this file, and does not ask the server again, although
# it may be another cluster by now: one of kind or behind a tunnel at 127.0.0.1:6443, or an upgraded one. It reports the
# version of the old cluster, and requests the API version of the old one, which has status 404 now. A loop that deletes
# what it finds takes that for "none there". Only a type that is missing in the file makes it ask.
# Seen: "cluster 1: version 1, requests /apis/ci.example/v1beta1/namespaces/x/runners: 1 found; cluster 2 at the address:
# version 1, requests /apis/ci.example/v1beta1/namespaces/x/runners: NotFoundError" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.2
cat >"$work/run.py" <<'END'
import http.server
import json
import subprocess
import sys
import threading

from kubernetes.client import ApiClient, Configuration
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError

# One process per cluster: this program starts itself with the address.
if len(sys.argv) > 1:
    configuration = Configuration()
    configuration.host = sys.argv[1]
    client = DynamicClient(ApiClient(configuration))
    runners = client.resources.get(kind="Runner")
    try:
        found = f"{len(runners.get(namespace='x').items)} found"
    except NotFoundError:
        found = "NotFoundError"
    path = runners.path(namespace="x")
    print(f"version {client.version['kubernetes']['minor']}, requests {path}: {found}", end="")
    sys.exit()

VERSIONS = {1: "v1beta1", 2: "v1"}
cluster = 1


def answer(path):
    version = VERSIONS[cluster]
    group = f"ci.example/{version}"
    names = {"groupVersion": group, "version": version}
    named = {"name": "ci.example", "versions": [names], "preferredVersion": names}
    runner = {"name": "runners", "singularName": "runner", "namespaced": True, "kind": "Runner", "verbs": ["list"]}
    item = {"apiVersion": group, "kind": "Runner", "metadata": {"name": "one", "namespace": "x"}}
    return {
        "/version": {"kind": "Info", "major": "1", "minor": str(cluster)},
        "/apis": {"kind": "APIGroupList", "groups": [named]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        f"/apis/{group}": {"kind": "APIResourceList", "groupVersion": group, "resources": [runner]},
        f"/apis/{group}/namespaces/x/runners": {"apiVersion": group, "kind": "RunnerList", "items": [item]},
    }.get(path)


class Cluster(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = answer(self.path.split("?")[0])
        body = json.dumps(found or {"kind": "Status", "code": 404}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = []
for cluster in VERSIONS:
    command = [sys.executable, __file__, f"http://127.0.0.1:{server.server_port}"]
    seen.append(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
print(f"cluster 1: {seen[0]}; cluster 2 at the address: {seen[1]}")
END
mkdir "$work/tmp"
TMPDIR="$work/tmp" "$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='version 1, requests /apis/ci.example/v1beta1/namespaces/x/runners'
grep -qxF "cluster 1: $first: 1 found; cluster 2 at the address: $first: NotFoundError" "$work/seen"
