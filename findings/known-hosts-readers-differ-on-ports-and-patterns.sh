#!/bin/sh
# asyncssh 2.24.1 and paramiko 5.1.0 (PyPI), with ssh of OpenSSH 9.2: for a server at another port than 22, ssh and asyncssh
# also accept the key of a line that names the host without a port. paramiko does not, and "*" and "?", which sshd(8) allows
# in names, mean nothing to it, also in a line with the port. A file of keys that all tools of a CI system share works for
# some of them, and is "not found in known_hosts" for others.
# Seen: "exact: ssh asyncssh paramiko; no port: ssh asyncssh; pattern: ssh asyncssh".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check asyncssh==2.24.1 paramiko==5.1.0
cd "$work"
cat >run.py <<'END'
import asyncio

import asyncssh
import paramiko


class Server(asyncssh.SSHServer):
    def begin_auth(self, _username):
        return False


async def by_ssh(port):
    words = f"ssh -F none -p {port} u@127.0.0.1 true".split()
    options = ["BatchMode=yes", "StrictHostKeyChecking=yes", "UserKnownHostsFile=known", "GlobalKnownHostsFile=none"]
    words[1:1] = [word for option in options for word in ("-o", option)]
    process = await asyncio.create_subprocess_exec(*words, stdin=-3, stdout=-3, stderr=-3)
    return await process.wait() == 0


async def by_asyncssh(port):
    try:
        async with asyncssh.connect("127.0.0.1", port, username="u", known_hosts="known", config=[]):
            return True
    except asyncssh.HostKeyNotVerifiable:
        return False


def by_paramiko(port):
    with paramiko.SSHClient() as client:
        client.load_host_keys("known")
        try:
            client.connect("127.0.0.1", port, "u", "x", look_for_keys=False, allow_agent=False)
        except paramiko.SSHException as error:
            assert "not found in known_hosts" in str(error), error
            return False
        return True


async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    options = {"server_host_keys": [key], "server_factory": Server, "process_factory": lambda process: process.exit(0)}
    server = await asyncssh.listen("127.0.0.1", 0, **options)
    port = server.get_port()
    lines = {
        "exact": f"[127.0.0.1]:{port}",
        "no port": "127.0.0.1",
        "pattern": f"[127.0.0.*]:{port}",
    }
    seen = []
    for name, hosts in lines.items():
        with open("known", "w") as file:
            file.write(f"{hosts} {key.export_public_key().decode()}")
        accepted = {
            "ssh": await by_ssh(port),
            "asyncssh": await by_asyncssh(port),
            "paramiko": await asyncio.to_thread(by_paramiko, port),
        }
        seen.append(f"{name}: {' '.join(reader for reader, result in accepted.items() if result)}")
    print("; ".join(seen))


asyncio.run(main())
END
HOME="$work" venv/bin/python run.py | tee seen
grep -qx 'exact: ssh asyncssh paramiko; no port: ssh asyncssh; pattern: ssh asyncssh' seen
