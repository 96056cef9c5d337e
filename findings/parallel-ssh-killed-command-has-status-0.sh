#!/bin/sh
# parallel-ssh 2.16.0.post1 with ssh2-python 1.2.0.post1 (PyPI), asyncssh 2.24.1 (PyPI) as the server: a command that is
# killed by a signal, as by the kernel when memory is short, has the exit code 0 like one that has succeeded. libssh2
# returns 0 if the server has sent a signal instead of a status, and the library does not check for signals. The status of
# a command that exits by itself is right. paramiko returns -1 for the same command, and ssh 255.
# Seen: "exit 3: parallel-ssh 3, paramiko 3; killed: parallel-ssh 0, paramiko -1".
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check parallel-ssh==2.16.0.post1 ssh2-python==1.2.0.post1 \
    paramiko==5.1.0 asyncssh==2.24.1
cat >"$work/server.py" <<'END'
import asyncio

import asyncssh


async def execute(process):
    if "killed" in process.command:
        process.exit_with_signal("KILL")
    else:
        process.exit(3)


class Server(asyncssh.SSHServer):
    def begin_auth(self, _username):
        return True

    def password_auth_supported(self):
        return True

    def validate_password(self, _username, _password):
        return True


async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(Server, "127.0.0.1", 0, server_host_keys=[key], process_factory=execute)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.wait_closed()


asyncio.run(main())
END
cat >"$work/run.py" <<'END'
import sys

import paramiko
from pssh.clients import SSHClient

port = int(sys.argv[1])


def with_parallel_ssh(command):
    options = {"user": "x", "password": "x", "allow_agent": False, "identity_auth": False, "num_retries": 1, "timeout": 30}
    client = SSHClient("127.0.0.1", port=port, **options)
    output = client.run_command(command)
    client.wait_finished(output)
    return output.exit_code


def with_paramiko(command):
    with paramiko.SSHClient() as client:
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        options = {"username": "x", "password": "x", "look_for_keys": False, "allow_agent": False}
        client.connect("127.0.0.1", port, timeout=30, **options)
        return client.exec_command(command)[1].channel.recv_exit_status()


seen = [f"{name}: parallel-ssh {with_parallel_ssh(name)}, paramiko {with_paramiko(name)}" for name in ("exit 3", "killed")]
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/server.py" >"$work/port" 2>"$work/log" &
server=$!
for _ in $(seq 100); do
    [ -s "$work/port" ] && break
    sleep 0.2
done
"$work/venv/bin/python" "$work/run.py" "$(cat "$work/port")" | tee "$work/seen"
grep -qx 'exit 3: parallel-ssh 3, paramiko 3; killed: parallel-ssh 0, paramiko -1' "$work/seen"
