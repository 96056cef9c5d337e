#!/bin/sh
# python-novaclient 18.13.1 and python-cinderclient 9.10.0 with keystoneauth1 5.18.1 (PyPI): list() drops each filter in
# search_opts whose value is false, zero, empty or None. All servers of the cloud are "those of the project" if the
# project id is an empty text, all servers are without a power state (0), and all volumes are "not bootable". A script that
# deletes what it listed deletes everything. Two filters of Nova are exceptions: "locked" and "config_drive". The
# documentation says that the key / value pairs "will be appended to the query string".
# Seen: "servers: project_id '': ?all_tenants=1, power_state 0: no query, power_state 1: ?power_state=1, locked False:
# ?locked=False; volumes: project_id '': ?all_tenants=1, bootable False: no query, bootable 'false': ?bootable=false" (on
# one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-novaclient==18.13.1 python-cinderclient==9.10.0 \
    keystoneauth1==5.18.1
cat >"$work/run.py" <<'END'
import http.server
import threading

from cinderclient.client import Client as Cinder
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token
from novaclient.client import Client as Nova

queries = []


class Cloud(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = self.path.partition("?")[2]
        queries.append(f"?{query}" if query else "no query")
        body = b'{"servers": [], "volumes": []}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
session = Session(auth=Token(f"http://127.0.0.1:{server.server_port}", "token"))


def query(manager, key, value, **others):
    manager.list(search_opts={**others, key: value})
    return f"{key} {value!r}: {queries[-1]}"


servers = Nova("2.90", session=session).servers
volumes = Cinder("3.59", session=session).volumes
of_servers = (
    query(servers, "project_id", "", all_tenants=1),
    query(servers, "power_state", 0),
    query(servers, "power_state", 1),
    query(servers, "locked", False),
)
of_volumes = (
    query(volumes, "project_id", "", all_tenants=1),
    query(volumes, "bootable", False),
    query(volumes, "bootable", "false"),
)
print(f"servers: {', '.join(of_servers)}; volumes: {', '.join(of_volumes)}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first="servers: project_id '': ?all_tenants=1, power_state 0: no query, power_state 1: ?power_state=1, locked False: ?locked=False"
second="volumes: project_id '': ?all_tenants=1, bootable False: no query, bootable 'false': ?bootable=false"
grep -qxF "$first; $second" "$work/seen"
