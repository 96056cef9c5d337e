#!/bin/sh
# boto3 1.44.8 with s3transfer 0.19.3 (PyPI), against moto 5.2.5: whether upload_fileobj() closes the file of the caller
# depends on the size. A file below the threshold for multipart uploads (8 MiB by default) is closed, a larger file is
# left open. put_object() closes neither. A caller that rewinds the file for a second attempt works with images and fails
# with small test files (ValueError: I/O operation on closed file). The documentation mentions neither.
# Seen: "upload_fileobj of 7 MB: closed; of 9 MB: open; of 7 MB with a lower threshold: open; put_object of 7 MB: open".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check boto3==1.44.8 s3transfer==0.19.3 'moto[s3]==5.2.5'
cat >"$work/run.py" <<'END'
import sys

import boto3
from boto3.s3.transfer import TransferConfig
from moto import mock_aws

MB = 1000 * 1000


def after(call, size):
    with open(sys.argv[1], "w+b") as image:
        image.truncate(size)
        call(image)
        return "closed" if image.closed else "open"


with mock_aws():
    s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    s3.create_bucket(Bucket="images")
    lower = TransferConfig(multipart_threshold=6 * MB)
    seen = [
        after(lambda image: s3.upload_fileobj(image, "images", "image"), 7 * MB),
        after(lambda image: s3.upload_fileobj(image, "images", "image"), 9 * MB),
        after(lambda image: s3.upload_fileobj(image, "images", "image", Config=lower), 7 * MB),
        after(lambda image: s3.put_object(Body=image, Bucket="images", Key="image"), 7 * MB),
    ]
print(
    f"upload_fileobj of 7 MB: {seen[0]}; of 9 MB: {seen[1]}; of 7 MB with a lower threshold: {seen[2]}; "
    f"put_object of 7 MB: {seen[3]}"
)
END
"$work/venv/bin/python" "$work/run.py" "$work/image" | tee "$work/seen"
grep -qx 'upload_fileobj of 7 MB: closed; of 9 MB: open; of 7 MB with a lower threshold: open; put_object of 7 MB: open' "$work/seen"
