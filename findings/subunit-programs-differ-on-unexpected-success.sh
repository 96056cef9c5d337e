#!/bin/sh
# python-subunit 1.4.6 and stestr 4.2.1 with testtools 2.9.1 (PyPI): the programs do not agree whether a test that passes
# although it is marked as an expected failure has failed. For `stestr run` and subunit2junitxml it has, with status 1.
# `stestr failing` says PASSED for the same run, and `stestr run --failing` finds nothing to repeat; subunit-stats counts
# the test as passed, with status 0, and subunit2csv writes "success", with status 1.
# Seen: "stestr run 1, stestr last 1, stestr failing 0 (PASSED); subunit2junitxml 1 (failures: 1), subunit-stats 0 (failed: 0),
# subunit2csv 1 (success)" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-subunit==1.4.6 stestr==4.2.1 testtools==2.9.1 junitxml==0.7
PATH="$work/venv/bin:$PATH"
cd "$work"
mkdir t
touch t/__init__.py
cat >t/test_one.py <<'END'
import unittest


class One(unittest.TestCase):
    @unittest.expectedFailure
    def test_repaired(self):
        pass
END
printf '[DEFAULT]\ntest_path=./t\n' >.stestr.conf
# The status of a command, with its output in the file "out".
status() {
    status=0
    "$@" >out 2>err || status=$?
    echo "$status"
}
seen="stestr run $(status stestr run), stestr last $(status stestr last), stestr failing $(status stestr failing)"
seen="$seen ($(grep -o PASSED out))"
stestr last --subunit >stream
seen="$seen; subunit2junitxml $(status subunit2junitxml stream) (failures: $(sed -n 's/.* failures="\([0-9]*\)".*/\1/p' out))"
seen="$seen, subunit-stats $(status subunit-stats stream) (failed: $(sed -n 's/^Failed tests: *//p' out))"
seen="$seen, subunit2csv $(status subunit2csv stream) ($(sed -n 's/^[^,]*test_repaired,\([a-z]*\),.*/\1/p' out))"
echo "$seen"
first='stestr run 1, stestr last 1, stestr failing 0 (PASSED)'
[ "$seen" = "$first; subunit2junitxml 1 (failures: 1), subunit-stats 0 (failed: 0), subunit2csv 1 (success)" ]
