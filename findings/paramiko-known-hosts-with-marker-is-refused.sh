#!/bin/sh
# paramiko 5.1.0 (PyPI), compared with 2.12.0, ssh-keygen of OpenSSH 9.2 and asyncssh 2.24.1 (PyPI): a known_hosts file with
# a line that begins with @cert-authority or @revoked (sshd(8)) is refused as a whole: load_system_host_keys() raises
# InvalidHostKey, and the keys of all other hosts are missing. The marker is taken for the host name, and the name of the
# algorithm for the key. 2.12.0 logged such a line, and skipped it; 3.0.0 skips it, too, and 3.2.0 refuses the file.
# Seen: "ssh-keygen: web.example found; asyncssh: web.example found; paramiko 2.12.0: web.example found; paramiko 5.1.0:
# InvalidHostKey" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 2.12.0 5.1.0; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --disable-pip-version-check paramiko==$version cryptography==50.0.2 asyncssh==2.24.1
done
for name in authority host; do
    ssh-keygen -q -t ed25519 -N '' -C '' -f "$work/$name"
done
{
    echo "@cert-authority *.nodes.example $(cat "$work/authority.pub")"
    echo "web.example $(cat "$work/host.pub")"
} >"$work/known_hosts"
cat >"$work/run.py" <<'END'
import sys
import warnings

warnings.simplefilter("ignore")
import paramiko

client = paramiko.SSHClient()
try:
    client.load_system_host_keys(sys.argv[1])
    found = "web.example found" if client._system_host_keys.lookup("web.example") else "web.example not found"
except Exception as error:
    found = type(error).__name__
print(f"paramiko {paramiko.__version__}: {found}")
END
cat >"$work/other.py" <<'END'
import sys

import asyncssh

keys = asyncssh.known_hosts.match_known_hosts(sys.argv[1], "web.example", "", None)[0]
print("asyncssh: web.example", "found" if len(keys) == 1 else "not found")
END
seen="ssh-keygen: web.example"
if ssh-keygen -F web.example -f "$work/known_hosts" >/dev/null; then seen="$seen found"; else seen="$seen not found"; fi
seen="$seen; $("$work/5.1.0/bin/python" "$work/other.py" "$work/known_hosts")"
for version in 2.12.0 5.1.0; do
    seen="$seen; $("$work/$version/bin/python" "$work/run.py" "$work/known_hosts" 2>/dev/null)"
done
echo "$seen"
both='ssh-keygen: web.example found; asyncssh: web.example found'
[ "$seen" = "$both; paramiko 2.12.0: web.example found; paramiko 5.1.0: InvalidHostKey" ]
