#!/bin/sh
# paramiko 5.1.0 (PyPI), compared with ssh of OpenSSH 9.2: of most options in ssh_config the first value holds. Some add up
# over all blocks that match (ssh_config(5)): IdentityFile, CertificateFile, SendEnv, DynamicForward, LocalForward and
# RemoteForward. paramiko's SSHConfig adds up only IdentityFile. It returns lists of LocalForward and RemoteForward, but
# those of the first block only, and a single value of the three others, even within one block. The key of a general
# block is returned, and the certificate that belongs to it is not.
# Seen: "ssh: identityfile 2, certificatefile 2, sendenv 2, dynamicforward 2, localforward 3; paramiko: identityfile 2,
# certificatefile 1, sendenv 1, dynamicforward 1, localforward 2" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check paramiko==5.1.0
cat >"$work/config" <<'END'
Host web.example
    IdentityFile /keys/web
    CertificateFile /keys/web-cert.pub
    SendEnv LANG
    DynamicForward 1080
    DynamicForward 1081
    LocalForward 8001 127.0.0.1:1
    LocalForward 8002 127.0.0.1:2
Host *.example
    IdentityFile /keys/all
    CertificateFile /keys/all-cert.pub
    SendEnv TERM
    LocalForward 8003 127.0.0.1:3
END
ssh -G -F "$work/config" web.example >"$work/ssh"
cat >"$work/run.py" <<'END'
import sys

import paramiko

NAMES = ["identityfile", "certificatefile", "sendenv", "dynamicforward", "localforward"]
config, by_ssh = sys.argv[1:]
returned = paramiko.SSHConfig.from_path(config).lookup("web.example")
with open(by_ssh) as file:
    lines = [line.split()[0] for line in file if line.strip()]


def number(value):
    return len(value) if isinstance(value, list) else 1


print(
    f"ssh: {', '.join(f'{name} {lines.count(name)}' for name in NAMES)}; "
    f"paramiko: {', '.join(f'{name} {number(returned[name])}' for name in NAMES)}"
)
END
"$work/venv/bin/python" "$work/run.py" "$work/config" "$work/ssh" | tee "$work/seen"
ssh='ssh: identityfile 2, certificatefile 2, sendenv 2, dynamicforward 2, localforward 3'
grep -qx "$ssh; paramiko: identityfile 2, certificatefile 1, sendenv 1, dynamicforward 1, localforward 2" "$work/seen"
