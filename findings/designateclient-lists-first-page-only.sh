#!/bin/sh
# python-designateclient 7.0.0, python-cinderclient 9.10.0 and python-glanceclient 4.13.0 (PyPI): list() of Designate's
# library returns the first page only, 20 entries unless the service is configured otherwise. The lists of the clients for
# Cinder and Glance, the list commands of the same package and openstacksdk read all pages. A program that compares the
# record sets of a zone with its nodes finds that those after the first 20 do not exist, creates them again or never
# deletes them. Nothing is raised or logged; only the attribute next_page of the list, which is not explained in the
# documentation, says that there is more.
# Seen: "25 each: zones 20 (next_page True), recordsets 20 (next_page True), volumes 25, images 25; openstack recordset
# list: 25" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-designateclient==7.0.0 python-cinderclient==9.10.0 \
    python-glanceclient==4.13.0 python-openstackclient==10.3.0
cat >"$work/run.py" <<'END'
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

from cinderclient.client import Client as Cinder
from designateclient.v2.client import Client as Designate
from glanceclient import Client as Glance
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

TOTAL, PAGE = 25, 20
ZONE = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"


class Cloud(http.server.BaseHTTPRequestHandler):
    """Services with 25 entries in each of their lists, and at most 20 of them in an answer."""

    def do_GET(self):
        address = urllib.parse.urlsplit(self.path)
        if address.path.endswith("/schemas/image"):
            return self.answer({"name": "image", "properties": {"id": {}, "name": {}}})
        query = dict(urllib.parse.parse_qsl(address.query))
        start = int(query.get("marker", -1)) + 1
        ids = range(TOTAL)[start : start + min(PAGE, int(query.get("limit", PAGE)))]
        key = next(key for key in ("volumes", "images", "recordsets", "zones") if key in address.path.split("/"))
        value = {key: [{"id": str(number), "name": f"n{number}", "records": []} for number in ids]}
        if ids and ids[-1] < TOTAL - 1:
            path = f"{address.path}?marker={ids[-1]}"
            url = f"http://{self.headers['Host']}{path}"
            # As Glance, Cinder and Designate name the next page.
            value |= {"next": path, f"{key}_links": [{"rel": "next", "href": url}], "links": {"next": url}}
        self.answer(value)

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def session(path):
    return Session(Token(url + path, "token"))


dns = Designate(session=session("/v2"))
zones, recordsets = dns.zones.list(), dns.recordsets.list(ZONE)
volumes = Cinder("3", session=session("/v3")).volumes.list()
images = list(Glance("2", session=session("")).images.list())
command = [sys.argv[1], "--os-auth-type", "admin_token", "--os-endpoint", f"{url}/v2", "--os-token", "token"]
command += ["recordset", "list", ZONE, "-f", "value", "-c", "id"]
env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
listed = subprocess.run(command, capture_output=True, text=True, env=env)
print(
    f"25 each: zones {len(zones)} (next_page {zones.next_page}), recordsets {len(recordsets)} (next_page "
    f"{recordsets.next_page}), volumes {len(volumes)}, images {len(images)}; openstack recordset list: "
    f"{len(listed.stdout.split()) or listed.stderr}"
)
END
"$work/venv/bin/python" "$work/run.py" "$work/venv/bin/openstack" | tee "$work/seen"
first='25 each: zones 20 (next_page True), recordsets 20 (next_page True), volumes 25, images 25'
grep -qxF "$first; openstack recordset list: 25" "$work/seen"
