#!/bin/sh
# stestr 4.2.1 with python-subunit 1.4.6 and testtools 2.9.1 (PyPI): a worker that is killed (by the OOM killer, for example)
# while it is not inside of a test takes the rest of its tests with it, and the run has passed: status 0, no failed test,
# nothing for `stestr failing`. Here that happens in setUpClass(): two of five tests run. The status of the worker is not
# checked, and the tests that ran are not compared with those that were listed; only the total is lower. Killed inside of
# a test, the run fails.
# Seen: "5 tests; killed in setUpClass: run 0 (Ran: 2, Failed: 0), last 0, failing 0 (PASSED); killed in a test: run 1 (Ran:
# 3, Failed: 0)" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check stestr==4.2.1 python-subunit==1.4.6 testtools==2.9.1
PATH="$work/venv/bin:$PATH"
cd "$work"
mkdir t
touch t/__init__.py
cat >t/test_all.py <<'END'
import os
import signal
import unittest


def die(place):
    if os.environ.get("DIE") == place:
        os.kill(os.getpid(), signal.SIGKILL)


class First(unittest.TestCase):
    def test_one(self):
        pass

    def test_two(self):
        pass


class Second(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        die("setUpClass")

    def test_one(self):
        die("test")

    def test_two(self):
        pass


class Third(unittest.TestCase):
    def test_one(self):
        pass
END
printf '[DEFAULT]\ntest_path=./t\n' >.stestr.conf
# The status of a command, with its output in the file "out".
status() {
    status=0
    "$@" >out 2>err || status=$?
    echo "$status"
}
totals() {
    echo "(Ran: $(sed -n 's/^Ran: \([0-9]*\) tests.*/\1/p' out), Failed: $(sed -n 's/^ - Failed: //p' out))"
}
stestr init
tests=$(stestr list | grep -c '^t\.')
export DIE=setUpClass
seen="$tests tests; killed in setUpClass: run $(status stestr run --serial) $(totals), last $(status stestr last)"
seen="$seen, failing $(status stestr failing) ($(grep -o PASSED out))"
export DIE=test
seen="$seen; killed in a test: run $(status stestr run --serial) $(totals)"
echo "$seen"
first='5 tests; killed in setUpClass: run 0 (Ran: 2, Failed: 0), last 0, failing 0 (PASSED)'
[ "$seen" = "$first; killed in a test: run 1 (Ran: 3, Failed: 0)" ]
