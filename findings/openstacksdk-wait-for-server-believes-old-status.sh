#!/bin/sh
# openstacksdk 4.22.0 with keystoneauth1 5.18.1 (PyPI): compute.wait_for_server() (and wait_for_status()) first compares
# the status of the object that it gets, and asks the cloud only if that differs. reboot_server() does not change the
# object. A program that reboots and then waits for ACTIVE therefore continues without a request while the server
# restarts, and gets ACTIVE also if the reboot ends in ERROR. With an object that was fetched after the call, the wait
# fails as documented.
# Seen: "reboot, wait: ACTIVE after 0 questions; reboot, fetch, wait: ResourceFailure after 1 questions".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check openstacksdk==4.22.0 keystoneauth1==5.18.1
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import openstack

STATUS = "ACTIVE"
asked = []


class Nova(http.server.BaseHTTPRequestHandler):
    """One server."""

    def answer(self, code, document=None):
        body = json.dumps(document).encode() if document else b""
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if "/servers/" in self.path:
            asked.append(STATUS)
            self.answer(200, {"server": {"id": "web", "name": "web", "status": STATUS}})
        else:
            links = [{"rel": "self", "href": f"{endpoint}/"}]
            version = {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1", "links": links}
            self.answer(200, {"version": version})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(202)

    def log_message(self, *_args):
        pass


nova = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nova)
threading.Thread(target=nova.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{nova.server_port}/v2.1"
cloud = openstack.connection.Connection(auth_type="none", endpoint=endpoint, compute_endpoint_override=endpoint)


def waited(server):
    """Wait for the server after a reboot that has failed."""
    asked.clear()
    try:
        outcome = cloud.compute.wait_for_server(server, interval=0.1, wait=10).status
    except Exception as error:
        outcome = type(error).__name__
    return f"{outcome} after {len(asked)} questions"


server = cloud.compute.get_server("web")
cloud.compute.reboot_server(server, "HARD")
STATUS = "HARD_REBOOT"
fetched = cloud.compute.get_server("web")
STATUS = "ERROR"
print(f"reboot, wait: {waited(server)}; reboot, fetch, wait: {waited(fetched)}")
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
grep -qx 'reboot, wait: ACTIVE after 0 questions; reboot, fetch, wait: ResourceFailure after 1 questions' "$work/seen"
