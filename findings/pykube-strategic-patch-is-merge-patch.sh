#!/bin/sh
# pykube-ng 23.6.0, with kubernetes 37.0.1 (PyPI): patch(strategic_merge_patch) is documented to send a strategic merge
# patch, which merges lists by name, but sends a JSON merge patch, which replaces them: {"spec": {"containers": [{"name":
# "main", "image": "new"}]}} removes all other containers of a deployment, and all other fields of the one that it names.
# The client of Kubernetes sends the same dictionary as a strategic merge patch. update() with its is_strategic=True sends
# the whole object as a merge patch, and so writes back what others have changed meanwhile in the fields that it has read.
# Seen: "pykube patch: merge-patch; pykube update: merge-patch with 2 containers; kubernetes patch: strategic-merge-patch".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pykube-ng==23.6.0 kubernetes==37.0.1
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import kubernetes
import pykube

received = []


class Cluster(http.server.BaseHTTPRequestHandler):
    def do_PATCH(self):
        kind = self.headers["Content-Type"].removeprefix("application/").removesuffix("+json")
        received.append((kind, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        body = json.dumps(deployment).encode()
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
containers = [{"name": "main", "image": "old"}, {"name": "log", "image": "log"}]
deployment = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "ci", "namespace": "ci"},
    "spec": {"selector": {}, "template": {"spec": {"containers": containers}}},
}
patch = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "new"}]}}}}

found = pykube.Deployment(pykube.HTTPClient(pykube.KubeConfig.from_url(url)), json.loads(json.dumps(deployment)))
found.patch(patch)
found.labels["checked"] = "yes"
found.update()
api = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url))
kubernetes.client.AppsV1Api(api).patch_namespaced_deployment("ci", "ci", patch)
(patched, _), (updated, body), (other, _) = received
count = len(body["spec"]["template"]["spec"]["containers"])
print(f"pykube patch: {patched}; pykube update: {updated} with {count} containers; kubernetes patch: {other}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'pykube patch: merge-patch; pykube update: merge-patch with 2 containers; kubernetes patch: strategic-merge-patch' "$work/seen"
