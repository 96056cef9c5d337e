#!/bin/sh
# kubernetes 37.0.2 (PyPI, the Python client): Watch.stream() resumes a watch that the server has ended, as servers do
# every few minutes, from the version of the last event. It learns this version only while it builds model objects. With
# deserialize=False, or with a function whose return type it cannot find (a lambda around the API method), it resumes
# from the resource_version that it was given, and yields all events since then again, each time. If it was given none,
# the loop ends without an error when the server ends the first watch.
# Seen: "models: 901 902 903; raw: 901 901 902 901 902 903; lambda: 901 901 902 901 902 903; raw without version: 901, end".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.2
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import urllib.parse

from kubernetes import client, watch

happened = []


class Cluster(http.server.BaseHTTPRequestHandler):
    """With each watch one more pod is created; each ends after the events since the version asked for."""

    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        happened.append(901 + len(happened))
        since = int(query.get("resourceVersion", ["0"])[0])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        for version in happened:
            if version > since:
                metadata = {"name": f"pod-{version}", "namespace": "ci", "resourceVersion": str(version)}
                pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}
                self.wfile.write(json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n")

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
threading.Thread(target=server.serve_forever, daemon=True).start()
configuration = client.Configuration()
configuration.host = f"http://127.0.0.1:{server.server_port}"
api = client.CoreV1Api(client.ApiClient(configuration))


def versions(function, *args, **options):
    """Return the events until the version 903 is seen, or until the watch ends."""
    happened.clear()
    seen = []
    for event in watch.Watch().stream(function, *args, **options):
        pod = event["object"]
        seen.append(pod["metadata"]["resourceVersion"] if isinstance(pod, dict) else pod.metadata.resource_version)
        if seen[-1] == "903":
            return " ".join(seen)
    return " ".join(seen) + ", end"


pods = api.list_namespaced_pod
print(
    f"models: {versions(pods, 'ci', resource_version='900')}; "
    f"raw: {versions(pods, 'ci', resource_version='900', deserialize=False)}; "
    f"lambda: {versions(lambda **options: pods('ci', **options), resource_version='900')}; "
    f"raw without version: {versions(pods, 'ci', deserialize=False)}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'models: 901 902 903; raw: 901 901 902 901 902 903; lambda: 901 901 902 901 902 903; raw without version: 901, end' "$work/seen"
