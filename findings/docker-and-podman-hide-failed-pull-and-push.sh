#!/bin/sh
# docker 7.2.0 and podman 5.8.0 (PyPI): the engines report an error that occurs after the start of a pull or a push in the
# stream of an answer with status 200. docker's images.pull() ignores it and returns the old local image of that name, so
# that a CI system goes on with the image of yesterday; images.push() returns the text with the error in it. podman's
# pull() returns an image without an id, and its push() reads nothing of the answer, and returns a text of its own that says
# "Pushing". images.build() of docker reads the same stream and raises an error.
# Seen: "docker: pull sha256:old, push no error, build BuildError; podman: pull None, push no error, error named False".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check docker==7.2.0 podman==5.8.0
mkdir "$work/context"
echo 'FROM scratch' >"$work/context/Dockerfile"
cat >"$work/run.py" <<'END'
import http.server
import json
import sys
import threading

import docker
import podman

FAILED = b'{"errorDetail": {"message": "denied: unauthorized"}, "error": "denied: unauthorized"}\r\n'


class Engine(http.server.BaseHTTPRequestHandler):
    """An engine that has an old ci/image:latest, and whose pulls, pushes and builds fail after they have begun."""

    def do_GET(self):
        self.answer(json.dumps({"Id": "sha256:old", "RepoTags": ["ci/image:latest"]}).encode())

    def do_POST(self):
        # Contexts for builds come in chunks, which nobody needs here.
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True
        self.answer(FAILED)

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def attempt(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"tcp://127.0.0.1:{server.server_port}"
seen = []
client = docker.DockerClient(base_url=url, version="1.47")
pulled = attempt(lambda: client.images.pull("ci/image", "latest").id)
pushed = attempt(lambda: "no error" if client.images.push("ci/image", "latest") else "")
built = attempt(lambda: client.images.build(path=sys.argv[1]))
seen.append(f"docker: pull {pulled}, push {pushed}, build {built}")
client = podman.PodmanClient(base_url=url)
pulled = attempt(lambda: client.images.pull("ci/image", "latest").id)
text = attempt(lambda: client.images.push("ci/image", "latest"))
pushed = "no error" if "Pushing" in text else text
seen.append(f"podman: pull {pulled}, push {pushed}, error named {'denied' in text}")
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" "$work/context" | tee "$work/seen"
first='docker: pull sha256:old, push no error, build BuildError'
grep -qx "$first; podman: pull None, push no error, error named False" "$work/seen"
