#!/bin/sh
# openstacksdk 4.22.0 with keystoneauth1 5.18.1 (PyPI): in clouds with reclaim_instance_interval, a deleted server has the
# status SOFT_DELETED for hours or days until Nova removes it (Nova's documentation, "Soft Delete and Shadow Tables").
# delete_server() with wait=True, and compute.wait_for_delete(), know only DELETED and "not found": they wait until their
# time is over (180 s by default), and raise ResourceTimeout for a deletion that has succeeded.
# Seen: "DELETED: True after less than 3 s; SOFT_DELETED: ResourceTimeout after 6 s or more".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check openstacksdk==4.22.0 keystoneauth1==5.18.1
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import time

import openstack

STATUS = STATUS_OF_DELETED = ""


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
            self.answer(200, {"server": {"id": "web", "name": "web", "status": STATUS}})
        else:
            links = [{"rel": "self", "href": f"{endpoint}/"}]
            version = {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1", "links": links}
            self.answer(200, {"version": version})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(202)

    def do_DELETE(self):
        global STATUS
        STATUS = STATUS_OF_DELETED
        self.answer(204)

    def log_message(self, *_args):
        pass


nova = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nova)
threading.Thread(target=nova.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{nova.server_port}/v2.1"
cloud = openstack.connection.Connection(auth_type="none", endpoint=endpoint, compute_endpoint_override=endpoint)


def deleted(status):
    global STATUS, STATUS_OF_DELETED
    STATUS, STATUS_OF_DELETED = "ACTIVE", status
    start = time.monotonic()
    try:
        outcome = cloud.delete_server("web", wait=True, timeout=6)
    except Exception as error:
        outcome = type(error).__name__
    return f"{status}: {outcome} after {'less than 3 s' if time.monotonic() - start < 3 else '6 s or more'}"


print(f"{deleted('DELETED')}; {deleted('SOFT_DELETED')}")
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
grep -qx 'DELETED: True after less than 3 s; SOFT_DELETED: ResourceTimeout after 6 s or more' "$work/seen"
