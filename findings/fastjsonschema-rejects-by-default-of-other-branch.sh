#!/bin/sh
# fastjsonschema 2.22.3, compared with jsonschema 4.26.0 and jsonschema-rs 0.60.3 (PyPI): by default, fastjsonschema adds
# the defaults of a schema to the document while it validates. It also adds those of a branch of anyOf, oneOf, if or not
# that then turns out not to apply, and validates the next branch with them: a document that the second branch describes
# is refused for a property that it never had. Where nothing refuses it, the document keeps the default of a branch for
# other documents. With use_default=False the three agree.
# Seen: "jsonschema: valid; jsonschema-rs: valid; fastjsonschema: refused; without defaults: valid; open second branch:
# valid, driver region; not: valid, driver region" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check fastjsonschema==2.22.3 jsonschema==4.26.0 jsonschema-rs==0.60.3
cat >"$work/run.py" <<'END'
import fastjsonschema
import jsonschema
import jsonschema_rs

DRAFT = "http://json-schema.org/draft-07/schema#"
CLOUD = {"properties": {"region": {"default": "eu-1"}, "driver": {"const": "aws"}}}
STATIC = {"properties": {"driver": {"const": "static"}}}
DOCUMENT = {"driver": "static"}
SCHEMA = {"$schema": DRAFT, "anyOf": [CLOUD, {**STATIC, "additionalProperties": False}]}


def fast(schema, **options):
    document = dict(DOCUMENT)
    try:
        fastjsonschema.compile({"$schema": DRAFT, **schema}, **options)(document)
    except fastjsonschema.JsonSchemaValueException:
        return "refused"
    return " ".join(["valid,", *document])


def name(valid):
    return "valid" if valid else "refused"


print(
    f"jsonschema: {name(jsonschema.Draft7Validator(SCHEMA).is_valid(DOCUMENT))}; "
    f"jsonschema-rs: {name(jsonschema_rs.validator_for(SCHEMA).is_valid(DOCUMENT))}; "
    f"fastjsonschema: {fast(SCHEMA)}; "
    f"without defaults: {fast(SCHEMA, use_default=False).split(',')[0]}; "
    f"open second branch: {fast({'anyOf': [CLOUD, STATIC]})}; "
    f"not: {fast({'not': CLOUD})}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
seen='jsonschema: valid; jsonschema-rs: valid; fastjsonschema: refused; without defaults: valid'
grep -qx "$seen; open second branch: valid, driver region; not: valid, driver region" "$work/seen"
