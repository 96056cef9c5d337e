#!/bin/sh
# keystoneauth1 5.18.1 (PyPI): connect_retries repeats requests that the service has received. An answer that is late is
# reported as ConnectTimeout, a connection that is closed without an answer as ConnectFailure, although the connection was
# established in both cases. Both are retried, with every method: with connect_retries=1, the POST that creates a server
# arrives twice. Retry(connect=1, read=0) of urllib3 does not repeat it.
# Seen: "late: ConnectTimeout, 2 POST; closed: ConnectFailure, 2 POST; urllib3 late: ReadTimeoutError, 1 POST".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check keystoneauth1==5.18.1 requests==2.34.2 urllib3==2.8.0
cat >"$work/run.py" <<'END'
import http.server
import threading

import urllib3
from keystoneauth1 import adapter, noauth, session

received, stop = [], threading.Event()


class Service(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        received.append(self.path)
        if self.path == "/late":
            stop.wait(30)
        self.close_connection = True

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def attempt(call):
    received.clear()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}, {len(received)} POST"
    return "an answer"


login = session.Session(auth=noauth.NoAuth(), timeout=1)
compute = adapter.Adapter(login, endpoint_override=url, connect_retries=1, connect_retry_delay=0.1)
pool = urllib3.PoolManager(timeout=1, retries=urllib3.Retry(connect=1, read=0))
late = attempt(lambda: compute.post("/late", json={"server": {"name": "node"}}))
closed = attempt(lambda: compute.post("/closed", json={"server": {"name": "node"}}))
other = attempt(lambda: pool.request("POST", url + "/late", json={"server": {"name": "node"}}, redirect=False))
stop.set()
print(f"late: {late}; closed: {closed}; urllib3 late: {other}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'late: ConnectTimeout, 2 POST; closed: ConnectFailure, 2 POST; urllib3 late: ReadTimeoutError, 1 POST' "$work/seen"
