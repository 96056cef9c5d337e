#!/bin/sh
# voluptuous 0.16.0 (PyPI): a dictionary in which two keys of one Exclusive group are set reports this error alone.
# Wrong values of other keys, unknown keys, missing required keys, and every error in dictionaries below it are not
# reported until the group is corrected, although MultipleInvalid otherwise has all errors of a dictionary.
# Seen: "with the group violated: 1 error; without: 3 errors".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check voluptuous==0.16.0
cat >"$work/run.py" <<'END'
import voluptuous as v

schema = v.Schema({v.Exclusive("id", "one"): str, v.Exclusive("name", "one"): str, "port": int, v.Required("host"): str})


def count(data):
    try:
        schema(data)
    except v.MultipleInvalid as error:
        return len(error.errors)
    return 0


wrong = {"id": "7", "port": "x", "unknown": 1}
violated, other = count({**wrong, "name": "n"}), count(wrong)
print(f"with the group violated: {violated} error; without: {other} errors")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'with the group violated: 1 error; without: 3 errors' "$work/seen"
