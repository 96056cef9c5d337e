#!/bin/sh
# reno 4.1.0 (PyPI): files with the same id are versions of one note. "reno new" appends a random id to the name. The id of a
# file that was named by hand is the first 16 characters of its name, if there is a "-" in the last 16: all notes
# "fix-timeouts-of-..." are one. Only the latest text is published, under the oldest version. Here, version 1.1.0 and its
# upgrade note are missing in the report, with status 0. Only "reno lint" reports a collision.
# Seen: "notes 3; report 0: 1.0.0 OPENSTACK; list: 1.0.0 fix-timeouts-of-openstack; lint 1".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check reno==4.1.0
mkdir -p "$work/home" "$work/tree/releasenotes/notes"
export HOME="$work/home" GIT_CONFIG_NOSYSTEM=1
cd "$work/tree"
git config --global user.name x
git config --global user.email x@example.org
git init -q .
note() {
    printf -- '---\n%s:\n  - |\n    %s\n' "$2" "$3" >"releasenotes/notes/$1.yaml"
    git add -A
    git commit -q -m "$3"
}
note fix-timeouts-of-aws fixes AWS
note fix-timeouts-of-azure fixes AZURE
git tag 1.0.0
note fix-timeouts-of-openstack upgrade OPENSTACK
git tag 1.1.0
notes=$(find releasenotes/notes -name '*.yaml' | wc -l)
report=0
"$work/venv/bin/reno" -q report . >"$work/report" 2>"$work/log" || report=$?
"$work/venv/bin/reno" -q list . >"$work/list" 2>>"$work/log"
lint=0
"$work/venv/bin/reno" -q lint . >>"$work/log" 2>&1 || lint=$?
reported=$(grep -oxE '1\.[01]\.0|- [A-Z]+' "$work/report" | sed 's/- //' | paste -sd ' ')
listed=$(sed -E 's,^\s*(releasenotes/notes/)?([^ ]*).*,\2,; s/\.yaml//' "$work/list" | paste -sd ' ')
seen="notes $notes; report $report: $reported; list: $listed; lint $lint"
echo "$seen"
[ "$seen" = "notes 3; report 0: 1.0.0 OPENSTACK; list: 1.0.0 fix-timeouts-of-openstack; lint 1" ]
