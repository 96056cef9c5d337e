#!/bin/sh
# voluptuous 0.16.0 (PyPI): Schema(..., required=True) makes the keys of a dictionary required, and those of
# dictionaries and lists below it, but only down to the next Any, All or Maybe: the keys of a dictionary in one of these
# are optional again. Adding a check to a dictionary, or allowing null instead of it, lets incomplete data pass. The
# combinators have an option required=True of their own.
# Seen: "missing key refused: plain, in a list; accepted: in All, in Any, in Maybe".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check voluptuous==0.16.0
cat >"$work/run.py" <<'END'
import voluptuous as v

label = {"name": str, "image": str}
incomplete = {"name": "small"}
cases = {
    "plain": (label, incomplete),
    "in a list": ([label], [incomplete]),
    "in All": (v.All(label, v.Length(min=1)), incomplete),
    "in Any": (v.Any(label, False), incomplete),
    "in Maybe": (v.Maybe(label), incomplete),
}
refused, accepted = [], []
for name, (schema, data) in cases.items():
    try:
        v.Schema({"label": schema}, required=True)({"label": data})
        accepted.append(name)
    except v.MultipleInvalid as error:
        assert "required key not provided" in str(error)
        refused.append(name)
print(f"missing key refused: {', '.join(refused)}; accepted: {', '.join(accepted)}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'missing key refused: plain, in a list; accepted: in All, in Any, in Maybe' "$work/seen"
