#!/bin/sh
# moto 5.2.5 with its extra ec2, boto3 1.44.8 (PyPI): run_instances() with the same ClientToken twice launches two
# instances, also with a token and other parameters. EC2 answers the second call with the first instance, or with the error
# IdempotentParameterMismatch. Tests against moto therefore say nothing about a launcher that repeats a launch after a
# lost answer: one that relies on the token seems to leak, and one that forgets the token is not found out.
# Seen: "same token: other instance; same token, other type: no error; create_volume, same token: other volume".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check boto3==1.44.8 'moto[ec2]==5.2.5'
cat >"$work/run.py" <<'END'
import boto3
from botocore.exceptions import ClientError
from moto import mock_aws

TOKEN = "launch-1"

with mock_aws():
    ec2 = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]

    def launch(kind):
        answer = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, InstanceType=kind, ClientToken=TOKEN)
        return answer["Instances"][0]["InstanceId"]

    def volume():
        return ec2.create_volume(Size=1, AvailabilityZone="us-east-1a", ClientToken=TOKEN)["VolumeId"]

    again = "same" if launch("t3.micro") == launch("t3.micro") else "other"
    try:
        launch("t3.small")
        mismatch = "no error"
    except ClientError as error:
        mismatch = error.response["Error"]["Code"]
    volumes = "same" if volume() == volume() else "other"
print(f"same token: {again} instance; same token, other type: {mismatch}; create_volume, same token: {volumes} volume")
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
grep -qx 'same token: other instance; same token, other type: no error; create_volume, same token: other volume' "$work/seen"
