#!/bin/sh
# python-openstackclient 10.5.0 with cliff 4.17.0 (PyPI): columns are printed in the order of the command's own table, not
# in the order of the options -c, in all formats. A script that reads `openstack flavor list -f value -c Name -c ID` with
# "while read name id" gets the id as the name and part of the name as the id; nothing reports that. All commands that
# are built with cliff do so.
# Seen: "-c Name -c ID: f1 small; -c ID -c Name: f1 small; csv: ID,Name".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-openstackclient==10.5.0 cliff==4.17.0 \
    openstacksdk==4.22.0 osc-lib==4.7.0
cat >"$work/run.py" <<'END'
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

work = pathlib.Path(sys.argv[1])


class Compute(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "flavors" in self.path:
            answer = {"flavors": [{"id": "f1", "name": "small", "ram": 512, "disk": 1, "vcpus": 1}]}
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
cloud = {"auth_type": "none", "auth": {"endpoint": f"{url}/v2.1"}, "compute_endpoint_override": f"{url}/v2.1"}
(work / "clouds.yaml").write_text(json.dumps({"clouds": {"test": cloud}}))
env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
env |= {"OS_CLIENT_CONFIG_FILE": str(work / "clouds.yaml"), "OS_CLOUD": "test", "HOME": str(work)}


def listed(style, *columns):
    options = [option for column in columns for option in ("-c", column)]
    command = [work / "venv/bin/openstack", "flavor", "list", "-f", style, *options]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


value, other, csv = listed("value", "Name", "ID"), listed("value", "ID", "Name"), listed("csv", "Name", "ID")
header = csv.splitlines()[0].replace('"', "")
print(f"-c Name -c ID: {value.strip()}; -c ID -c Name: {other.strip()}; csv: {header}")
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
grep -qx -e '-c Name -c ID: f1 small; -c ID -c Name: f1 small; csv: ID,Name' "$work/seen"
