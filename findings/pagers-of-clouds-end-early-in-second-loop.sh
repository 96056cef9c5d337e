#!/bin/sh
# boto3 1.44.8, google-cloud-compute 1.57.0, azure-mgmt-compute 39.0.0 and ibm-vpc 0.36.0 (PyPI): what list() or paginate()
# returns can be read twice without an error, for example to count the machines and then to delete them. The second loop
# gets the last page only from boto3 and Google, whose objects go on from the last token, and nothing from Azure and IBM.
# A test with a single page shows that for Azure and IBM only. build_full_result() of boto3 has the same gap after a loop;
# the collections of its resources start anew.
# Seen: "instances in the first and the second loop: boto3 6 2, google 6 2, azure 6 0, ibm 6 0, collection of boto3 6 6".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check azure-core==1.41.0 azure-mgmt-compute==39.0.0 \
    google-api-core==2.44.0 google-cloud-compute==1.57.0 ibm-cloud-sdk-core==3.28.0 ibm-vpc==0.36.0 boto3==1.44.8 botocore==1.44.8
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import urllib.parse

import boto3
from azure.core.credentials import AzureKeyCredential
from azure.core.pipeline.policies import AzureKeyCredentialPolicy
from azure.mgmt.compute import ComputeManagementClient
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1
from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport
from ibm_cloud_sdk_core.authenticators import NoAuthAuthenticator
from ibm_vpc.vpc_v1 import InstancesPager, VpcV1


class Cloud(http.server.BaseHTTPRequestHandler):
    """Each cloud has three pages of two instances; the address of the next page ends with page=NUMBER."""

    def do_GET(self):
        parts = urllib.parse.urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        query = dict(urllib.parse.parse_qsl(parts.query) + urllib.parse.parse_qsl(self.rfile.read(length).decode()))
        token = query.get("pageToken") or query.get("start") or query.get("page") or query.get("NextToken") or "1"
        page, more = int(token), int(token) < 3
        names = [f"vm-{2 * page - 1}", f"vm-{2 * page}"]
        if "Action" in query:
            items = "".join(f"<item><instancesSet><item><instanceId>{name}</instanceId></item></instancesSet></item>" for name in names)
            following = f"<nextToken>{page + 1}</nextToken>" if more else ""
            body = f"<DescribeInstancesResponse><reservationSet>{items}</reservationSet>{following}</DescribeInstancesResponse>"
        elif "virtualMachines" in self.path:
            answer = {"value": [{"name": name, "location": "x"} for name in names]}
            body = json.dumps(answer | ({"nextLink": f"{url}{parts.path}?page={page + 1}"} if more else {}))
        elif "/zones/" in self.path:
            answer = {"items": [{"name": name} for name in names]}
            body = json.dumps(answer | ({"nextPageToken": str(page + 1)} if more else {}))
        else:
            answer = {"instances": [{"name": name} for name in names]}
            body = json.dumps(answer | ({"next": {"href": f"{url}/v1/instances?start={page + 1}"}} if more else {}))
        self.send_response(200)
        self.send_header("Content-Type", "text/xml" if body.startswith("<") else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"

keys = {"endpoint_url": url, "aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
amazon = boto3.client("ec2", **keys).get_paginator("describe_instances").paginate()
collection = boto3.resource("ec2", **keys).instances.all()
transport = InstancesRestTransport(host=url.removeprefix("http://"), url_scheme="http", credentials=AnonymousCredentials())
google = compute_v1.InstancesClient(transport=transport).list(project="p", zone="z")
key = AzureKeyCredential("x")
azure = ComputeManagementClient(
    key, "subscription", base_url=url, authentication_policy=AzureKeyCredentialPolicy(key, "Authorization")
).virtual_machines.list_all()
service = VpcV1(version="2025-01-01", authenticator=NoAuthAuthenticator())
service.set_service_url(f"{url}/v1")
ibm = InstancesPager(client=service)
loops = {
    "boto3": lambda: [item for page in amazon for item in page["Reservations"]],
    "google": lambda: list(google),
    "azure": lambda: list(azure),
    "ibm": lambda: ibm.get_all(),
    "collection of boto3": lambda: list(collection),
}
counts = ", ".join(f"{name} {len(loop())} {len(loop())}" for name, loop in loops.items())
print(f"instances in the first and the second loop: {counts}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'instances in the first and the second loop: boto3 6 2, google 6 2, azure 6 0, ibm 6 0, collection of boto3 6 6' "$work/seen"
