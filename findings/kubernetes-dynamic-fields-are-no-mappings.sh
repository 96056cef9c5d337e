#!/bin/sh
# kubernetes 37.0.1 (PyPI), its dynamic client: objects and their maps are read as attributes and by keys, but do not answer
# questions as mappings of Python do. `"app" in pod.metadata.labels` is false although the label exists, since the map
# iterates over pairs. hasattr() is true for every name, and the default of getattr() is never used: an object that is not being
# deleted "has" a deletionTimestamp. A map without entries is true.
# Seen: "labels.app: ci; 'app' in labels: False; hasattr(metadata, 'deletionTimestamp'): True, None; bool of no data: True".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.1
cat >"$work/run.py" <<'END'
import http.server
import json
import os
import tempfile
import threading

import kubernetes
from kubernetes.dynamic import DynamicClient

FOUND = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ci", "labels": {"app": "ci"}}, "data": {}}
ANSWERS = {
    "/version": {"major": "1", "minor": "34"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "resources": [{"name": "configmaps", "namespaced": True, "kind": "ConfigMap", "verbs": ["get"]}],
    },
}


class Cluster(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(ANSWERS.get(self.path.rstrip("/"), FOUND)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
api = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url))
with tempfile.TemporaryDirectory() as folder:
    client = DynamicClient(api, cache_file=os.path.join(folder, "discovery"))
    found = client.resources.get(api_version="v1", kind="ConfigMap").get(name="ci", namespace="ci")
labels, metadata = found.metadata.labels, found.metadata
deleted = getattr(metadata, "deletionTimestamp", "default")
print(
    f"labels.app: {labels.app}; 'app' in labels: {'app' in labels}; "
    f"hasattr(metadata, 'deletionTimestamp'): {hasattr(metadata, 'deletionTimestamp')}, {deleted}; "
    f"bool of no data: {bool(found.data)}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first="labels.app: ci; 'app' in labels: False; hasattr(metadata, 'deletionTimestamp'): True, None"
grep -qxF "$first; bool of no data: True" "$work/seen"
