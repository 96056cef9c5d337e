#!/bin/sh
# cloud-init 22.4.2 (Debian 12), run by PyYAML 6.0.2, jsonschema 4.23.0 and others from PyPI: "cloud-init schema", which
# validates user data, refuses unknown keys inside of known ones (contents in place of content), and accepts unknown keys at
# the top: "runcmds" or "package" in place of runcmd or packages is a "Valid cloud-config", with status 0. At boot they are
# ignored without a warning. A check of the user data of all labels passes, and the nodes start without their software.
# Seen: "contents in write_files: refused (1); runcmds and package: Valid cloud-config (0)".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download cloud-init=22.4.2-1+deb12u4 && dpkg-deb -x cloud-init_*.deb root) >log 2>&1 || { cat log; exit 1; }
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check PyYAML==6.0.2 Jinja2==3.1.6 jsonschema==4.23.0 jsonpatch==1.33 \
    configobj==5.0.9 oauthlib==3.2.2 requests==2.32.3
export PYTHONPATH=root/usr/lib/python3/dist-packages
cat >nested.yaml <<'END'
#cloud-config
write_files:
  - {path: /etc/marker, contents: x}
END
cat >top.yaml <<'END'
#cloud-config
runcmds:
  - systemctl start worker
package: [worker]
END
# Validate a file, and print the result with the status.
validate() {
    status=0
    venv/bin/python -m cloudinit.cmd.main schema --config-file "$1" >out 2>&1 || status=$?
    result=refused
    grep -q "Additional properties are not allowed ('contents' was unexpected)" out || result=$(grep -o 'Valid cloud-config' out)
    echo "$result ($status)"
}
echo "contents in write_files: $(validate nested.yaml); runcmds and package: $(validate top.yaml)" | tee seen
grep -qx 'contents in write_files: refused (1); runcmds and package: Valid cloud-config (0)' seen
