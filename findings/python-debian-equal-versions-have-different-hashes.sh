#!/bin/sh
# python-debian 1.1.1 (PyPI), debian.debian_support.Version: versions that dpkg, and the class itself, take for equal (an
# epoch of 0 or none, a revision of 0 or none, 1.00 and 1.0) have different hashes. Sets and dictionaries thus keep both:
# a comparison of two package lists by sets reports a change that `==` denies.
# Seen: "1.0 == 0:1.0: True, in a set: 2; 1.0 == 1.0-0: True, in a set: 2; 1.0 == 1.00: True, in a set: 2".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-debian==1.1.1
cat >"$work/run.py" <<'END'
from debian.debian_support import Version

base = Version("1.0")
others = [Version(text) for text in ("0:1.0", "1.0-0", "1.00")]
print("; ".join(f"{base} == {other}: {base == other}, in a set: {len({base, other})}" for other in others))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx '1.0 == 0:1.0: True, in a set: 2; 1.0 == 1.0-0: True, in a set: 2; 1.0 == 1.00: True, in a set: 2' "$work/seen"
