#!/bin/sh
# boto3 with botocore 1.44.8 (PyPI): a waiter that gets filters instead of ids never ends well if they match nothing. A
# deleted volume is not listed any more, so that "volume_deleted" with a filter by tag, which the method accepts and documents,
# fails for each successful deletion: after 40 attempts in 10 minutes, with "Max attempts exceeded". The same applies to
# "instance_terminated" when the instances are gone from the list, or when there were none. With an id, the error
# "not found" is the success of "volume_deleted".
# Seen: "volume_deleted: id 1 call, filter 40 calls: Max attempts exceeded; instance_terminated: filter 40 calls: Max
# attempts exceeded; 15 s between calls" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check boto3==1.44.8 botocore==1.44.8
cat >"$work/run.py" <<'END'
import http.server
import threading
import urllib.parse

import boto3
from botocore.exceptions import WaiterError

LISTS = {"DescribeInstances": "reservationSet", "DescribeVolumes": "volumeSet"}
calls = []


class Cloud(http.server.BaseHTTPRequestHandler):
    """EC2 without volumes and instances."""

    def do_POST(self):
        arguments = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        action = arguments["Action"][0]
        calls.append(action)
        if any(name.startswith("VolumeId") for name in arguments):
            error = "<Code>InvalidVolume.NotFound</Code><Message>x</Message>"
            status, text = 400, f"<Response><Errors><Error>{error}</Error></Errors></Response>"
        else:
            status, text = 200, f"<{action}Response><{LISTS[action]}/></{action}Response>"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
ec2 = boto3.client(
    "ec2",
    region_name="us-east-1",
    endpoint_url=f"http://127.0.0.1:{server.server_port}",
    aws_access_key_id="x",
    aws_secret_access_key="x",
)
filters = {"Filters": [{"Name": "tag:build", "Values": ["5"]}]}


def wait(name, **selection):
    calls.clear()
    delays.add(ec2.get_waiter(name).config.delay)
    try:
        # Only the pause is shorter than by default.
        ec2.get_waiter(name).wait(WaiterConfig={"Delay": 0}, **selection)
        return f"{len(calls)} call"
    except WaiterError as error:
        return f"{len(calls)} calls: {str(error).rpartition('failed: ')[2]}"


delays = set()
seen = f"volume_deleted: id {wait('volume_deleted', VolumeIds=['vol-00000000000000001'])}"
seen += f", filter {wait('volume_deleted', **filters)}"
seen += f"; instance_terminated: filter {wait('instance_terminated', **filters)}"
print(f"{seen}; {', '.join(map(str, delays))} s between calls")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='volume_deleted: id 1 call, filter 40 calls: Max attempts exceeded'
grep -qxF "$first; instance_terminated: filter 40 calls: Max attempts exceeded; 15 s between calls" "$work/seen"
