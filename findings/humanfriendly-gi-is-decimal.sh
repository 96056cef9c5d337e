#!/bin/sh
# humanfriendly 10.0 (PyPI), with kubernetes 37.0.1 (PyPI): parse_size() knows KiB, MiB and GiB, but reads the same units
# without the last letter, as Kubernetes and many tools write them (Ki, Mi, Gi), as decimal: 1Gi is 7 % less than 1GiB.
# An unknown unit of which only the first letter fits is taken for the decimal unit, without an error. With binary=True
# both are binary.
# Seen: "humanfriendly: 1GiB = 1073741824, 1Gi = 1000000000; kubernetes: 1Gi = 1073741824".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check humanfriendly==10.0 kubernetes==37.0.1
cat >"$work/run.py" <<'END'
from humanfriendly import parse_size
from kubernetes.utils import parse_quantity

print(f"humanfriendly: 1GiB = {parse_size('1GiB')}, 1Gi = {parse_size('1Gi')}; kubernetes: 1Gi = {parse_quantity('1Gi')}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'humanfriendly: 1GiB = 1073741824, 1Gi = 1000000000; kubernetes: 1Gi = 1073741824' "$work/seen"
