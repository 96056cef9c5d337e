#!/bin/sh
# ansible-runner 2.4.3 with ansible-core 2.19.14 (PyPI): extravars and envvars of run() are written to env/ of the
# private_data_dir, and stay there. The next run in the same directory that passes none gets those of the run before,
# although nothing in its call says so: variables and secrets of one job apply to the next. Both runs are successful.
# An empty dictionary does not help: it counts as none.
# Seen: "first run: prod secret; next run without arguments: prod secret; with empty ones: prod secret".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ansible-runner==2.4.3 ansible-core==2.19.14
mkdir -p "$work/data/project" "$work/data/inventory"
echo 'localhost ansible_connection=local' >"$work/data/inventory/hosts"
cat >"$work/data/project/play.yml" <<'END'
- hosts: all
  gather_facts: false
  tasks:
    - debug:
        msg: "{{ stage | default('none') }} {{ lookup('env', 'JOB_TOKEN') or 'none' }}"
END
cat >"$work/run.py" <<'END'
import sys

import ansible_runner


def message(**arguments):
    run = ansible_runner.run(private_data_dir=sys.argv[1], playbook="play.yml", quiet=True, **arguments)
    assert run.status == "successful", run.status
    return next(each["event_data"]["res"]["msg"] for each in run.events if each["event"] == "runner_on_ok")


first = message(extravars={"stage": "prod"}, envvars={"JOB_TOKEN": "secret"})
print(f"first run: {first}; next run without arguments: {message()}; with empty ones: {message(extravars={}, envvars={})}")
END
export HOME="$work" PATH="$work/venv/bin:$PATH" LC_ALL=C.UTF-8
python "$work/run.py" "$work/data" | tee "$work/seen"
grep -qx 'first run: prod secret; next run without arguments: prod secret; with empty ones: prod secret' "$work/seen"
