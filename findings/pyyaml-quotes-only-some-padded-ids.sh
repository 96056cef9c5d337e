#!/bin/sh
# PyYAML 6.0.4 (PyPI), read by ruamel.yaml 0.19.1 (PyPI, YAML 1.2): of zero-padded ids that are strings, safe_dump
# quotes those whose digits are all below 8, which PyYAML itself would read as octal numbers, and writes those with an
# 8 or 9 without quotes. For a reader of YAML 1.2, the latter are decimal numbers: the type of an id depends on its
# digits, and its leading zeros are lost. Strings such as 12e34567 (short hashes) are not quoted, either: the reader
# gets a floating point number. PyYAML itself reads all of them as the strings that they were.
# Seen: "'0000000017' -> '0000000017', '0000000018' -> 18, '12e34567' -> inf".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check PyYAML==6.0.4 ruamel.yaml==0.19.1
cat >"$work/run.py" <<'END'
import ruamel.yaml
import yaml

ids = ["0000000017", "0000000018", "12e34567"]
text = yaml.safe_dump({"ids": ids})
assert yaml.safe_load(text) == {"ids": ids}
read = ruamel.yaml.YAML(typ="safe", pure=True).load(text)["ids"]
print(", ".join(f"{before!r} -> {after!r}" for before, after in zip(ids, read)))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx "'0000000017' -> '0000000017', '0000000018' -> 18, '12e34567' -> inf" "$work/seen"
