#!/bin/sh
# pykube-ng 23.6.0 (PyPI): get() of a query is documented to get an object "by name, namespace, label". With a name, the
# namespace of the same call is ignored without an error: get(name="db", namespace="ci") returns, and a delete() after it
# deletes, the object of that name in the default namespace; get_or_none() the same. Without a name, or with the namespace
# in filter() before, the namespace applies.
# Seen: "get(name, namespace): default; get_or_none: default; get(namespace): ci; filter(namespace).get(name): ci".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pykube-ng==23.6.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import pykube


class Cluster(http.server.BaseHTTPRequestHandler):
    """Each namespace has one pod, named db."""

    def do_GET(self):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "db", "namespace": self.path.split("/")[4]}}
        body = json.dumps(pod if self.path.endswith("/db") else {"kind": "PodList", "items": [pod]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
threading.Thread(target=server.serve_forever, daemon=True).start()
api = pykube.HTTPClient(pykube.KubeConfig.from_url(f"http://127.0.0.1:{server.server_port}"))
pods = pykube.Pod.objects(api)
found = {
    "get(name, namespace)": pods.get(name="db", namespace="ci"),
    "get_or_none": pods.get_or_none(name="db", namespace="ci"),
    "get(namespace)": pods.get(namespace="ci"),
    "filter(namespace).get(name)": pods.filter(namespace="ci").get(name="db"),
}
print("; ".join(f"{call}: {pod.namespace}" for call, pod in found.items()))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'get(name, namespace): default; get_or_none: default; get(namespace): ci; filter(namespace).get(name): ci' "$work/seen"
