#!/bin/sh
# ansible-core 2.19.14 (PyPI), with the ssh of OpenSSH 9.2p1 (Debian 12) and a server of asyncssh 2.24.1 (PyPI): with
# the option "retries" of the connection (ANSIBLE_SSH_RETRIES, ansible_ssh_retries), documented as the number of
# attempts to connect, a command of the modules raw and script that exits with 255 is run again and again, with all its
# effects, although no connection has failed: ssh exits with 255, too, if it cannot connect, and Ansible cannot see the
# difference. The host is unreachable at the end. The same command with status 254 fails and is run once. The executor
# of Zuul 14.3.0 sets retries = 3. The modules command and shell send their status as JSON and are not concerned.
# Seen: "status 254: FAILED, runs: 1; status 255: UNREACHABLE, runs: 4".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
command -v ssh >/dev/null || { echo "ssh is not installed (Debian: openssh-client)" >&2; exit 2; }
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14 asyncssh==2.24.1
cat >"$work/run.py" <<'END'
import asyncio
import getpass
import json
import os
import subprocess

import asyncssh


async def run(process):
    pipe = asyncio.subprocess.PIPE
    shell = await asyncio.create_subprocess_shell(process.command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    output, errors = await shell.communicate()
    process.stdout.write(output)
    process.stderr.write(errors)
    process.exit(shell.returncode)


async def attempt(status):
    command = f"echo run >>{os.getcwd()}/runs-{status}; exit {status}"
    ansible = await asyncio.create_subprocess_exec(
        "venv/bin/ansible", "n1", "-i", "inventory.json", "-m", "raw", "-a", command, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await ansible.communicate()
    result = output.decode().partition(" | ")[2].split()[0].rstrip("!")
    with open(f"runs-{status}") as runs:
        return f"status {status}: {result}, runs: {len(runs.readlines())}"


async def main():
    user, host = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user.write_private_key("id")
    os.chmod("id", 0o600)
    user.write_public_key("authorized")
    server = await asyncssh.listen(
        "127.0.0.1", 0, server_host_keys=[host], authorized_client_keys="authorized", process_factory=run, encoding=None
    )
    port = server.get_port()
    with open("known_hosts", "w") as known:
        known.write(f"[127.0.0.1]:{port} {host.export_public_key().decode()}")
    options = f"-F none -o UserKnownHostsFile={os.getcwd()}/known_hosts -o IdentitiesOnly=yes"
    n1 = {
        "ansible_host": "127.0.0.1",
        "ansible_port": port,
        "ansible_user": getpass.getuser(),
        "ansible_ssh_private_key_file": os.path.abspath("id"),
        "ansible_ssh_args": options,
        "ansible_ssh_retries": 3,
    }
    with open("inventory.json", "w") as inventory:
        json.dump({"leased": {"hosts": {"n1": n1}}}, inventory)
    print("; ".join([await attempt(254), await attempt(255)]))


asyncio.run(main())
END
export HOME="$work"
unset ANSIBLE_CONFIG ANSIBLE_SSH_RETRIES
cd "$work"
venv/bin/python run.py 2>"$work/errors" | tee "$work/seen"
grep -qx 'status 254: FAILED, runs: 1; status 255: UNREACHABLE, runs: 4' "$work/seen"
