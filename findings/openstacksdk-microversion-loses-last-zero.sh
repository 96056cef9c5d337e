#!/bin/sh
# openstacksdk 4.22.0 (PyPI): a microversion in clouds.yaml is read as a number unless it is quoted, and becomes a text
# again without the zero at its end: compute_default_microversion: 2.90 requests the microversion 2.9, which is 81 versions
# older, without an error or a warning. 2.89 and 2.91 work without quotes.
# Seen: "2.89: compute 2.89; 2.90: compute 2.9; "2.90": compute 2.90".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check openstacksdk==4.22.0
cat >"$work/run.py" <<'END'
import http.server
import json
import os
import pathlib
import sys
import threading

import openstack

path, received = pathlib.Path(sys.argv[1]) / "clouds.yaml", []


class Compute(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "servers" in self.path:
            received.append(self.headers["OpenStack-API-Version"])
            answer = {"servers": []}
        else:
            links = [{"rel": "self", "href": f"{url}/v2.1/"}]
            answer = {"version": {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1", "links": links}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Compute)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
for name in [name for name in os.environ if name.startswith("OS_")]:
    del os.environ[name]
os.environ["OS_CLIENT_CONFIG_FILE"] = str(path)
seen = []
for version in ("2.89", "2.90", '"2.90"'):
    path.write_text(f"""
clouds:
  test:
    auth_type: none
    auth:
      endpoint: {url}/v2.1
    compute_endpoint_override: {url}/v2.1
    compute_default_microversion: {version}
""")
    list(openstack.connect(cloud="test").compute.servers())
    seen.append(f"{version}: {received[-1]}")
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
grep -qx '2.89: compute 2.89; 2.90: compute 2.9; "2.90": compute 2.90' "$work/seen"
