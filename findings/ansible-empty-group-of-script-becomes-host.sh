#!/bin/sh
# ansible-core 2.19.14 (PyPI): a group without hosts, vars and children in the output of an inventory script is not an
# empty group if it is written as {}: Ansible adds a host with the name of the group. The documentation of inventory
# scripts allows to omit the elements of a group that are empty, and {} is what is left of an empty group. A play for
# the group then tries to connect to a machine of that name; a play for "all" counts one machine too many. Ansible
# writes a deprecation warning and exits with 0. With "hosts": [] the group is empty.
# Seen: "hosts of all: n1 large; hosts of large: large; hosts of huge: none".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14
cat >"$work/inventory" <<'END'
#!/bin/sh
echo '{"_meta": {"hostvars": {}}, "small": {"hosts": ["n1"]}, "large": {}, "huge": {"hosts": []}}'
END
chmod +x "$work/inventory"
export HOME="$work"
unset ANSIBLE_CONFIG ANSIBLE_INVENTORY
cd "$work"
hosts() {
    venv/bin/ansible "$1" -i "$work/inventory" --list-hosts 2>/dev/null >listed
    found=$(sed -n 's/^    //p' listed)
    echo ${found:-none}
}
echo "hosts of all: $(hosts all); hosts of large: $(hosts large); hosts of huge: $(hosts huge)" | tee "$work/seen"
grep -qx 'hosts of all: n1 large; hosts of large: large; hosts of huge: none' "$work/seen"
