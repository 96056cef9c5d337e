#!/bin/sh
# pytest-split 0.11.0 with pytest 9.2.0 (PyPI): its default algorithm "aims to find optimal boundaries". In fact each group takes
# tests until it has more than its share. With one slow test, later groups stay empty, although there are more tests than
# groups, and a CI job without tests fails with status 5. If the slow test is the last, the first job runs everything, and
# all other jobs fail. Nothing but the file of durations has changed. With least_duration, each group has tests.
# Seen: "last test slow: groups 4 0 0, status 0 5 5; first test slow: groups 1 3 0, status 0 0 5; least_duration: groups 1 2 1,
# status 0 0 0" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pytest-split==0.11.0 pytest==9.2.0
cd "$work"
for test in a b c d; do
    printf 'def test_%s():\n    pass\n\n\n' "$test"
done >test_all.py
# The durations of a run, in seconds, by the order of the tests.
durations() {
    printf '{"test_all.py::test_a": %s, "test_all.py::test_b": %s, "test_all.py::test_c": %s, "test_all.py::test_d": %s}' "$@" \
        >.test_durations
}
# How many tests each group runs, and its status.
groups() {
    counts= statuses=
    for group in 1 2 3; do
        status=0
        "$work/venv/bin/pytest" -q --splits 3 --group "$group" "$@" >out 2>&1 || status=$?
        counts="$counts $(sed -n 's/^\([0-9]*\) passed.*/\1/p' out | grep . || echo 0)"
        statuses="$statuses $status"
    done
    echo "groups$counts, status$statuses"
}
durations 1 1 1 10
seen="last test slow: $(groups)"
least=$(groups --splitting-algorithm least_duration)
durations 10 1 1 1
seen="$seen; first test slow: $(groups); least_duration: $least"
echo "$seen"
first='last test slow: groups 4 0 0, status 0 5 5; first test slow: groups 1 3 0, status 0 0 5'
[ "$seen" = "$first; least_duration: groups 1 2 1, status 0 0 0" ]
