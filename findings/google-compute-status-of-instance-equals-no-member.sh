#!/bin/sh
# google-cloud-compute 1.57.0 (PyPI): the status of an Operation is a member of Operation.Status. The status of an Instance
# is a text, although Instance.Status exists, and its documentation refers to it: a comparison with
# Instance.Status.RUNNING is false for a running instance, without an error. A program that waits for it waits until its
# time is over. Assigning a member to a field of text raises TypeError.
# Seen: "Operation DONE: Status, equal; Instance RUNNING: str, not equal; its name: equal; assigned: TypeError".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check google-cloud-compute==1.57.0
cat >"$work/run.py" <<'END'
from google.cloud.compute_v1 import Instance, Operation


def equal(one, other):
    return "equal" if one == other else "not equal"


# As the client reads the answers of the service.
operation = Operation.from_json('{"name": "insert", "status": "DONE"}')
instance = Instance.from_json('{"name": "web", "status": "RUNNING"}')
try:
    Instance(status=Instance.Status.RUNNING)
    assigned = "no error"
except Exception as error:
    assigned = type(error).__name__
print(
    f"Operation DONE: {type(operation.status).__name__}, {equal(operation.status, Operation.Status.DONE)}; "
    f"Instance RUNNING: {type(instance.status).__name__}, {equal(instance.status, Instance.Status.RUNNING)}; "
    f"its name: {equal(instance.status, Instance.Status.RUNNING.name)}; assigned: {assigned}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'Operation DONE: Status, equal; Instance RUNNING: str, not equal; its name: equal; assigned: TypeError' "$work/seen"
