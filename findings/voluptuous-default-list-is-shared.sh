#!/bin/sh
# voluptuous 0.16.0 (PyPI): a default that is a list or dictionary is handed out itself, if the validator is a type (list,
# dict), object, or All of these: a program that changes what it was given changes the default of all later validations,
# for example when it loads its configuration again. With a schema of the elements ([str], {str: int}) each validation
# gets a copy, and so does Maybe of such a schema. The type works as a default (default=list), and a function, too.
# Seen: "default after one result was changed: changed with list, dict, All(list), object; as before with [str], {str: int},
# Maybe([str])" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check voluptuous==0.16.0
cat >"$work/run.py" <<'END'
import voluptuous as v

cases = {
    "list": (["base"], list),
    "dict": ({"base": 1}, dict),
    "All(list)": (["base"], v.All(list, v.Length(min=1))),
    "object": (["base"], object),
    "[str]": (["base"], [str]),
    "{str: int}": ({"base": 1}, {str: int}),
    "Maybe([str])": (["base"], v.Maybe([str])),
}
changed, as_before = [], []
for name, (default, validator) in cases.items():
    schema = v.Schema({v.Optional("option", default=default): validator})
    result = schema({})["option"]
    result.append("more") if isinstance(result, list) else result.update(more=2)
    (as_before if len(schema({})["option"]) == 1 else changed).append(name)
print(f"default after one result was changed: changed with {', '.join(changed)}; as before with {', '.join(as_before)}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
expected='changed with list, dict, All(list), object; as before with [str], {str: int}, Maybe([str])'
grep -Fqx "default after one result was changed: $expected" "$work/seen"
