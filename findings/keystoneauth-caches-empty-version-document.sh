#!/bin/sh
# keystoneauth1 5.18.1 (PyPI): a version document that is valid JSON but lists no version, as a service sends while it
# starts, is kept in the discovery cache of the session for good. All later look-ups of the endpoint fail without another
# request, although the service has long recovered. An error status or HTML at the same place is not cached: the next
# look-up asks again.
# Seen: "after HTML: 2 requests, found; after an empty list: 1 request, not found".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check keystoneauth1==5.18.1
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

from keystoneauth1 import discover, exceptions, session

answers, count = [], 0


class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        kind, body = answers.pop(0) if answers else ("application/json", GOOD)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
GOOD = json.dumps({"versions": [{"id": "v2.1", "status": "CURRENT", "links": [{"rel": "self", "href": url + "v2.1/"}]}]}).encode()


def attempt(first):
    global count
    answers[:], count, found = [first], 0, "not found"
    shared, cache = session.Session(), {}
    for _ in range(2):
        try:
            if discover.get_discovery(shared, url, cache=cache).url_for((2, 1)):
                found = "found"
        except exceptions.DiscoveryFailure:
            pass
    return f"{count} request{'s' * (count > 1)}, {found}"


html = attempt(("text/html", b"<html>starting</html>"))
empty = attempt(("application/json", b'{"versions": []}'))
print(f"after HTML: {html}; after an empty list: {empty}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'after HTML: 2 requests, found; after an empty list: 1 request, not found' "$work/seen"
