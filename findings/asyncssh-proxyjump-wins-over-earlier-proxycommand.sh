#!/bin/sh
# asyncssh 2.24.1 and paramiko 5.1.0 (PyPI), with ssh of OpenSSH 9.2: in ssh_config, ProxyCommand and ProxyJump are one
# setting: whichever comes first holds, and the other is ignored (ssh_config(5)). asyncssh and paramiko keep both. A host
# with a ProxyCommand of its own before a general ProxyJump is reached by its ProxyCommand with ssh, and by way of the
# general jump host with asyncssh. paramiko's SSHConfig returns both to its caller.
# Seen: "ssh: ProxyCommand; asyncssh: ProxyJump; paramiko returns: proxycommand, proxyjump".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check asyncssh==2.24.1 paramiko==5.1.0
cat >"$work/run.py" <<'END'
import asyncio
import pathlib
import subprocess
import sys

import asyncssh
import paramiko

work = pathlib.Path(sys.argv[1])
config, ran = work / "config", work / "ran"
reached = []


def way():
    seen = [*reached, *(["ProxyCommand"] if ran.exists() else [])]
    reached.clear()
    ran.unlink(missing_ok=True)
    return " ".join(seen)


async def main():
    async def accept(_, writer):
        reached.append("ProxyJump")
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lines = ["Host web.example", f"ProxyCommand touch {ran}", "Host *.example", f"ProxyJump 127.0.0.1:{port}"]
    config.write_text("\n".join(lines) + "\n")
    command = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "web.example", "true"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await process.wait()
    by_ssh = way()
    try:
        await asyncssh.connect("web.example", config=[str(config)], known_hosts=None, login_timeout=30)
    except (OSError, asyncssh.Error):
        pass
    by_asyncssh = way()
    returned = sorted(name for name in paramiko.SSHConfig.from_path(str(config)).lookup("web.example") if "proxy" in name)
    print(f"ssh: {by_ssh}; asyncssh: {by_asyncssh}; paramiko returns: {', '.join(returned)}")
    server.close()


asyncio.run(main())
END
"$work/venv/bin/python" "$work/run.py" "$work" | tee "$work/seen"
grep -qx 'ssh: ProxyCommand; asyncssh: ProxyJump; paramiko returns: proxycommand, proxyjump' "$work/seen"
