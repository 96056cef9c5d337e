#!/bin/sh
# boto3 1.44.8 with moto 5.2.5 (PyPI): an empty list of ids is not sent, so that the request is the same as one without the
# parameter: describe_instances(InstanceIds=[]) returns all instances of the region. With the collections of boto3, a
# cleanup that has found nothing to delete terminates everything: ec2.instances.filter(InstanceIds=[]).terminate().
# terminate_instances(InstanceIds=[]) itself is refused.
# Seen: "described: 3 of 3; filter([]).terminate(): terminated 3 of 3; terminate_instances([]): refused; body: Action
# Version" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check boto3==1.44.8 botocore==1.44.8 'moto[ec2]==5.2.5'
cat >"$work/run.py" <<'END'
import urllib.parse

import boto3
import botocore.exceptions
from moto import mock_aws

with mock_aws():
    cloud = boto3.resource("ec2", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    client = cloud.meta.client
    image = client.describe_images()["Images"][0]["ImageId"]
    cloud.create_instances(ImageId=image, MinCount=3, MaxCount=3)
    bodies = []
    client.meta.events.register("before-call.ec2.DescribeInstances", lambda params, **_: bodies.append(params["body"]))
    described = client.describe_instances(InstanceIds=[])["Reservations"][0]["Instances"]
    body = " ".join(sorted(bodies[0] if isinstance(bodies[0], dict) else urllib.parse.parse_qs(bodies[0])))
    try:
        client.terminate_instances(InstanceIds=[])
        alone = "accepted"
    except (botocore.exceptions.ClientError, botocore.exceptions.ParamValidationError):
        alone = "refused"
    cloud.instances.filter(InstanceIds=[]).terminate()
    states = [each.state["Name"] for each in cloud.instances.all()]
ended = f"terminated {states.count('terminated')} of {len(states)}"
print(f"described: {len(described)} of 3; filter([]).terminate(): {ended}; terminate_instances([]): {alone}; body: {body}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='described: 3 of 3; filter([]).terminate(): terminated 3 of 3; terminate_instances([]): refused'
grep -qxF "$first; body: Action Version" "$work/seen"
