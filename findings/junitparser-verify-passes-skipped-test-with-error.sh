#!/bin/sh
# junitparser 5.0.3 with pytest 9.2.0 (PyPI): "junitparser verify" is documented to "return a non-zero exit code if one of the
# testcases failed or errored". A test that is skipped, and whose fixture then fails in its teardown (a machine that cannot be
# returned), has both elements in the file of pytest, <skipped> and <error>. For verify, such a test is skipped, and the file
# passes, although pytest has ended with status 1, the file says errors="1", and is_error of the test is true.
# Seen: "pytest 1 (errors 1, skipped 1); junitparser verify 0; is_error True, is_skipped True".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check junitparser==5.0.3 pytest==9.2.0
cd "$work"
cat >test_node.py <<'END'
import pytest


@pytest.fixture
def node():
    yield
    raise RuntimeError("the node was not returned")


def test_driver(node):
    pytest.skip("no graphics card")
END
status=0
"$work/venv/bin/pytest" -q --junitxml=result.xml test_node.py >log || status=$?
counts=$(sed -n 's/.*<testsuite .* errors="\([0-9]*\)".* skipped="\([0-9]*\)".*/errors \1, skipped \2/p' result.xml)
verified=0
"$work/venv/bin/junitparser" verify result.xml || verified=$?
cat >read.py <<'END'
from junitparser import JUnitXml

for suite in JUnitXml.fromfile("result.xml"):
    for case in suite:
        print(f"is_error {case.is_error}, is_skipped {case.is_skipped}")
END
seen="pytest $status ($counts); junitparser verify $verified; $("$work/venv/bin/python" read.py)"
echo "$seen"
[ "$seen" = "pytest 1 (errors 1, skipped 1); junitparser verify 0; is_error True, is_skipped True" ]
