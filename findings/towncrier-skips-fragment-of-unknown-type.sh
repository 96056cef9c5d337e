#!/bin/sh
# towncrier 26.9.0 (PyPI): a news fragment whose name has a type that is not configured (a typing error such as
# "+speed.nwe.rst") is neither an error nor a warning: "towncrier build" makes the page without it, exits with 0,
# and leaves the file in place for the next release, which omits it again.
# Seen: "exit status 0; the misnamed fragment is on the page: no; is mentioned in the output: no; is kept: yes".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check towncrier==26.9.0
mkdir -p "$work/project/news"
cd "$work/project"
cat >pyproject.toml <<'END'
[tool.towncrier]
name = "Example"
directory = "news"
filename = "NEWS.rst"

[[tool.towncrier.type]]
directory = "new"
name = "New"
showcontent = true
END
echo "Doors open." >news/+doors.new.rst
echo "Windows open." >news/+windows.nwe.rst
: >NEWS.rst
status=0
"$work/venv/bin/towncrier" build --yes --version 1.0 --date 2026-01-01 >"$work/output" 2>&1 || status=$?
grep -q "Doors open" NEWS.rst
page=no; grep -q "Windows open" NEWS.rst && page=yes
named=no; grep -q "windows" "$work/output" && named=yes
kept=no; [ -e news/+windows.nwe.rst ] && kept=yes
echo "exit status $status; the misnamed fragment is on the page: $page; is mentioned in the output: $named; is kept: $kept" |
    tee "$work/seen"
grep -qx 'exit status 0; the misnamed fragment is on the page: no; is mentioned in the output: no; is kept: yes' "$work/seen"
