#!/bin/sh
# keystoneauth1 5.18.1, azure-core 1.41.0, ibm-cloud-sdk-core 3.28.0, botocore 1.44.8 and google-api-python-client 2.202.0
# (PyPI), each with its own retries switched on, against a server that answers 503 with "Retry-After: 4": the first three
# wait as long as the server says. botocore (in each of its modes) and Google's client do not read the header: they try
# again after a random time of at most about 2 s, as after every other error. A program for several clouds cannot leave
# the pauses to the SDKs, nor take one for a model of the others.
# Seen: "waits: keystoneauth azure ibm; does not: botocore-legacy botocore-standard botocore-adaptive google".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check keystoneauth1==5.18.1 azure-core==1.41.0 \
    ibm-cloud-sdk-core==3.28.0 boto3==1.44.8 botocore==1.44.8 google-api-python-client==2.202.0
cat >"$work/run.py" <<'END'
import http.server
import threading
import time

import boto3
import googleapiclient.http
import httplib2
from azure.core import PipelineClient
from azure.core.pipeline.policies import RetryPolicy
from azure.core.rest import HttpRequest
from botocore.config import Config
from ibm_cloud_sdk_core import BaseService
from ibm_cloud_sdk_core.authenticators import NoAuthAuthenticator
from keystoneauth1.noauth import NoAuth
from keystoneauth1.session import Session

WAIT = 4
BUSY = b"<Response><Errors><Error><Code>Busy</Code><Message>later</Message></Error></Errors></Response>"
times = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        times.append(time.monotonic())
        first, ec2 = len(times) == 1, self.path.startswith("/ec2")
        body = (BUSY if first else b"<DescribeInstancesResponse/>") if ec2 else b"{}"
        self.send_response(503 if first else 200)
        if first:
            self.send_header("Retry-After", str(WAIT))
        self.send_header("Content-Type", "text/xml" if ec2 else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def boto(mode):
    options = Config(retries={"mode": mode})
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    return boto3.client("ec2", endpoint_url=f"{url}/ec2", region_name="x", config=options, **keys)


ibm = BaseService(service_url=url, authenticator=NoAuthAuthenticator())
ibm.enable_retries(max_retries=2, retry_interval=30)
azure = PipelineClient(url, policies=[RetryPolicy()])
calls = {
    "keystoneauth": lambda: Session(auth=NoAuth()).get(url, status_code_retries=2),
    "azure": lambda: azure.send_request(HttpRequest("GET", url)),
    "ibm": lambda: ibm.send(ibm.prepare_request("GET", "/")),
    **{f"botocore-{mode}": boto(mode).describe_instances for mode in ("legacy", "standard", "adaptive")},
    "google": lambda: googleapiclient.http.HttpRequest(httplib2.Http(), lambda *_: 0, url).execute(num_retries=2),
}
waits, others = [], []
for name, call in calls.items():
    times.clear()
    call()
    assert len(times) == 2, name
    (waits if times[1] - times[0] >= WAIT - 0.1 else others).append(name)
print(f"waits: {' '.join(waits)}; does not: {' '.join(others)}")
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
grep -qx 'waits: keystoneauth azure ibm; does not: botocore-legacy botocore-standard botocore-adaptive google' "$work/seen"
