#!/bin/sh
# pytest-testinfra 10.2.2, ansible-core 2.19.4 and pytest 9.0.2 (PyPI): if no host of the inventory matches (a misspelled or
# empty group), the tests of a machine are skipped, and pytest ends with status 0. Nothing in its output names the group.
# A loop over get_hosts() runs zero times, and its test passes. A gate for new images is passed without one check.
# Seen: "group web: 1 failed (1); group wbe: 1 skipped (0), test with get_hosts(): 1 passed (0)".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pytest-testinfra==10.2.2 ansible-core==2.19.4 pytest==9.0.2
export PATH="$work/venv/bin:$PATH" HOME="$work"
cd "$work"
printf '[web]\nlocalhost ansible_connection=local\n' >hosts
cat >test_fixture.py <<'END'
def test_image(host):
    assert host.file("/marker-of-the-image").exists
END
cat >test_loop.py <<'END'
import testinfra


def test_image():
    for host in testinfra.get_hosts(["ansible://wbe"], ansible_inventory="hosts"):
        assert host.file("/marker-of-the-image").exists
END
# The summary of a run, and its status.
run() {
    status=0
    pytest -p no:cacheprovider --ansible-inventory=hosts "$@" >out 2>&1 || status=$?
    echo "$(tail -n 1 out | grep -oE '[0-9]+ [a-z]+' | head -n 1) ($status)"
}
seen="group web: $(run --hosts=ansible://web test_fixture.py); group wbe: $(run --hosts=ansible://wbe test_fixture.py)"
[ -z "$(grep -iE 'wbe|match|warning' out)" ]
seen="$seen, test with get_hosts(): $(run test_loop.py)"
echo "$seen"
[ "$seen" = 'group web: 1 failed (1); group wbe: 1 skipped (0), test with get_hosts(): 1 passed (0)' ]
