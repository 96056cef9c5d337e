#!/bin/sh
# openstacksdk 4.22.0 (PyPI): of the pair clouds.yaml and secure.yaml, OS_CLIENT_CONFIG_FILE (and the argument config_files)
# moves the first only. A secure.yaml in the same directory is not read; that of the user's home directory is, and its
# secrets are merged into a cloud of the same name in the other file. A daemon thus has no password, or that of somebody's
# home directory, until OS_CLIENT_SECURE_FILE names the second file as well.
# Seen: "beside: none; with one at home: home; with OS_CLIENT_SECURE_FILE: beside".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check openstacksdk==4.22.0
mkdir -p "$work/home/.config/openstack" "$work/given"
cat >"$work/given/clouds.yaml" <<'END'
clouds:
  of-findings:
    auth: {auth_url: "http://keystone.example", username: robot, project_name: ci}
END
secret() {
    printf 'clouds:\n  of-findings:\n    auth: {password: %s}\n' "$1"
}
cat >"$work/run.py" <<'END'
import openstack.config

cloud = openstack.config.OpenStackConfig().get_one("of-findings")
print(cloud.config["auth"].get("password", "none"))
END
cd "$work/home"
password() {
    env -i HOME="$work/home" OS_CLIENT_CONFIG_FILE="$work/given/clouds.yaml" "$@" "$work/venv/bin/python" "$work/run.py"
}
secret beside >"$work/given/secure.yaml"
alone=$(password)
secret home >"$work/home/.config/openstack/secure.yaml"
seen="beside: $alone; with one at home: $(password)"
seen="$seen; with OS_CLIENT_SECURE_FILE: $(password OS_CLIENT_SECURE_FILE="$work/given/secure.yaml")"
echo "$seen"
[ "$seen" = "beside: none; with one at home: home; with OS_CLIENT_SECURE_FILE: beside" ]
