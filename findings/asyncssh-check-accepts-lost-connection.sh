#!/bin/sh
# asyncssh 2.24.1, with paramiko 5.1.0 (PyPI): run(..., check=True) is documented to raise an error for a non-zero status.
# If the connection is lost while the command runs, because the machine was deleted or rebooted, no error is raised: the
# result has the part of the output that had arrived and the status None, also as returncode, although the documented type
# of both is int. A build on a machine that disappears has passed, and "if result.exit_status:" does not notice it either.
# paramiko returns -1 for it, and ssh 255.
# Seen: "connection lost: asyncssh with check: no error, status None, output 'half'; paramiko: -1; status 3: ProcessError".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check asyncssh==2.24.1 paramiko==5.1.0
cat >"$work/run.py" <<'END'
import asyncio

import asyncssh
import paramiko


async def execute(process):
    """Run the command "exit 3", or lose the connection in the middle of any other command."""
    if process.command == "exit 3":
        process.exit(3)
        return
    process.stdout.write("half")
    await process.stdout.drain()
    # The client closes the lost connection; the output is there before.
    await asyncio.sleep(0.5)
    process.channel.get_connection().abort()


class Server(asyncssh.SSHServer):
    def begin_auth(self, username):
        return username == "password"

    def password_auth_supported(self):
        return True

    def validate_password(self, _username, _password):
        return True


def with_paramiko(port):
    with paramiko.SSHClient() as client:
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        options = {"username": "password", "password": "x", "look_for_keys": False, "allow_agent": False}
        client.connect("127.0.0.1", port, timeout=30, **options)
        return client.exec_command("make")[1].channel.recv_exit_status()


async def attempt(port, command):
    options = {"known_hosts": None, "username": "none", "client_keys": None, "config": None}
    async with asyncssh.connect("127.0.0.1", port, **options) as client:
        try:
            result = await client.run(command, check=True, timeout=30)
        except asyncssh.Error as error:
            return type(error).__name__
        return f"no error, status {result.exit_status}, output {result.stdout!r}"


async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(Server, "127.0.0.1", 0, server_host_keys=[key], process_factory=execute)
    port = server.sockets[0].getsockname()[1]
    lost, failed = await attempt(port, "make"), await attempt(port, "exit 3")
    other = await asyncio.to_thread(with_paramiko, port)
    print(f"connection lost: asyncssh with check: {lost}; paramiko: {other}; status 3: {failed}")
    server.close()


asyncio.run(main())
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
first="connection lost: asyncssh with check: no error, status None, output 'half'; paramiko: -1"
grep -qxF "$first; status 3: ProcessError" "$work/seen"
