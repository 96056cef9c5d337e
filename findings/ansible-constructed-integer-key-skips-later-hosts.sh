#!/bin/sh
# ansible-core 2.19.14 (PyPI), its inventory plug-in constructed: if a key of keyed_groups is a number for a host, the plug-in
# ends at this host. The host itself and all after it get no groups, and all after it no variables of `compose`, either,
# although `strict: false` is documented as "skip and continue". There are warnings only, that name no host, and the
# status is 0: a playbook runs with one part of the hosts as intended, and with another part without these variables.
# Seen: "label of: node1 node2; in groups: node1; status 0" for racks "a", 7 and "b" of the hosts node1, node2, node3.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14
cat >"$work/hosts.yaml" <<'END'
all:
  hosts:
    node1: {rack: a}
    node2: {rack: 7}
    node3: {rack: b}
END
cat >"$work/constructed.yaml" <<'END'
plugin: ansible.builtin.constructed
strict: false
compose:
  label: "'rack ' ~ rack"
keyed_groups:
  - prefix: rack
    key: rack
END
cat >"$work/read.py" <<'END'
import json
import sys

data = json.load(sys.stdin)
labelled = sorted(name for name, variables in data["_meta"]["hostvars"].items() if "label" in variables)
grouped = sorted(host for name, group in data.items() if name.startswith("rack_") for host in group["hosts"])
print(f"label of: {' '.join(labelled)}; in groups: {' '.join(grouped)}")
END
export ANSIBLE_HOME="$work/home" ANSIBLE_CONFIG="$work/ansible.cfg"
echo '[defaults]' >"$work/ansible.cfg"
status=0
"$work/venv/bin/ansible-inventory" -i "$work/hosts.yaml" -i "$work/constructed.yaml" --list >"$work/list" 2>/dev/null || status=$?
seen="$(python3 "$work/read.py" <"$work/list"); status $status"
echo "$seen"
[ "$seen" = "label of: node1 node2; in groups: node1; status 0" ]
