#!/bin/sh
# pytest 9.0.2 with pytest-rerunfailures 16.7 and junitparser 5.0.3 (PyPI): with --reruns, each attempt that has failed is an
# element <testcase> of its own in the file of --junitxml, without <failure> or any other child, which is the form of a test
# that has passed. So programs that read the file (here junitparser, which decides as CI systems do) count two passed tests
# for one that failed three times, and two for one that passed at the second attempt. The number `tests` of the suite is
# that of the tests, and not of the elements. The terminal shows the attempts as "rerun".
# Seen: "broken: passed passed failed; unsteady: passed passed; tests=2, elements=5".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pytest==9.0.2 pytest-rerunfailures==16.7 junitparser==5.0.3
cat >"$work/test_it.py" <<'END'
import pathlib


def test_broken():
    raise AssertionError


def test_unsteady(mark=pathlib.Path(__file__).with_name("mark")):
    before = mark.exists()
    mark.touch()
    assert before
END
cd "$work"
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider --reruns 2 --junitxml=result.xml test_it.py >log 2>&1 || :
grep -q '1 failed, 1 passed, 3 rerun' log
"$work/venv/bin/python" - <<'END' | tee seen
from junitparser import JUnitXml

(suite,) = JUnitXml.fromfile("result.xml")
found = {}
for case in suite:
    found.setdefault(case.name.removeprefix("test_"), []).append("passed" if case.is_passed else "failed")
for name, words in found.items():
    print(f"{name}: {' '.join(words)}", end="; ")
print(f"tests={suite.tests}, elements={len(list(suite))}")
END
grep -qx 'broken: passed passed failed; unsteady: passed passed; tests=2, elements=5' seen
