#!/bin/sh
# moto 5.2.5 with its extra ec2, boto3 1.44.8 (PyPI): delete_snapshot() deletes a snapshot although a registered image is
# made of it, and the image stays. EC2 refuses that with InvalidSnapshot.InUse until the image is deregistered. A cleanup
# that deletes in the wrong order passes its tests and leaves image and snapshot in the account. A second image of the
# same name is no error either (EC2: InvalidAMIName.Duplicate).
# Seen: "snapshot of an image: deleted; the image: available; second image of the name: registered".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check boto3==1.44.8 'moto[ec2]==5.2.5'
cat >"$work/run.py" <<'END'
import boto3
from botocore.exceptions import ClientError
from moto import mock_aws


def code(call, done):
    try:
        call()
        return done
    except ClientError as error:
        return error.response["Error"]["Code"]


with mock_aws():
    ec2 = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    volume = ec2.create_volume(Size=1, AvailabilityZone="us-east-1a")["VolumeId"]
    snapshot = ec2.create_snapshot(VolumeId=volume)["SnapshotId"]

    def register():
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"SnapshotId": snapshot}}
        return ec2.register_image(Name="image", RootDeviceName="/dev/sda1", BlockDeviceMappings=[disk])["ImageId"]

    image = register()
    second = code(register, "registered")
    deleted = code(lambda: ec2.delete_snapshot(SnapshotId=snapshot), "deleted")
    if deleted == "deleted" and code(lambda: ec2.describe_snapshots(SnapshotIds=[snapshot]), "there") == "there":
        deleted = "there"
    state = ec2.describe_images(ImageIds=[image])["Images"][0]["State"]
print(f"snapshot of an image: {deleted}; the image: {state}; second image of the name: {second}")
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
grep -qx 'snapshot of an image: deleted; the image: available; second image of the name: registered' "$work/seen"
