#!/bin/sh
# fabric 3.2.3 with invoke 2.2.1 and paramiko 5.1.0 (PyPI), asyncssh 2.24.1 (PyPI), and an sshd of OpenSSH 9.2 (Debian 12) on
# this machine: what `timeout` does to a command depends on where it runs. invoke kills a local one. For a remote one,
# fabric raises the same CommandTimedOut, but only closes the channel: the command goes on, and a step that is repeated
# then runs beside the first one. With pty=True, the server ends it. asyncssh also leaves it running.
# Seen: "invoke: CommandTimedOut, killed; fabric: CommandTimedOut, goes on; fabric with pty: CommandTimedOut, killed;
# asyncssh: TimeoutError, goes on".
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check fabric==3.2.3 invoke==2.2.1 paramiko==5.1.0 asyncssh==2.24.1
for name in host key; do
    ssh-keygen -q -t ed25519 -N '' -f "$work/$name"
done
port=$("$work/venv/bin/python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat >"$work/config" <<END
ListenAddress 127.0.0.1
Port $port
HostKey $work/host
PidFile none
UsePAM no
StrictModes no
AuthorizedKeysFile $work/key.pub
END
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd
PATH=$PATH:/usr/sbin
"$(command -v sshd)" -D -e -f "$work/config" 2>"$work/log" &
server=$!
cat >"$work/run.py" <<'END'
import asyncio
import getpass
import pathlib
import sys
import time

import asyncssh
import fabric
import invoke

port, work = int(sys.argv[1]), pathlib.Path(sys.argv[2])
key = {"key_filename": str(work / "key"), "look_for_keys": False, "allow_agent": False}
connection = fabric.Connection("127.0.0.1", user=getpass.getuser(), port=port, connect_kwargs=key)
for _ in range(100):
    try:
        connection.open()
        break
    except OSError:
        time.sleep(0.1)


def with_asyncssh(command, timeout):
    async def run():
        options = {"known_hosts": None, "client_keys": [str(work / "key")], "config": None}
        async with asyncssh.connect("127.0.0.1", port, **options) as there:
            await there.run(command, timeout=timeout)

    asyncio.run(run())


def fate(name, run, **options):
    begun, ended = work / f"{name}.begun", work / f"{name}.ended"
    try:
        run(f"echo > '{begun}'; sleep 3; echo > '{ended}'", timeout=1, **options)
        error = "no error"
    except (invoke.exceptions.CommandTimedOut, asyncssh.TimeoutError) as found:
        error = type(found).__name__
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline and not ended.exists():
        time.sleep(0.1)
    assert begun.exists()
    return f"{name}: {error}, {'goes on' if ended.exists() else 'killed'}"


print(
    fate("invoke", invoke.run, hide=True),
    fate("fabric", connection.run, hide=True),
    fate("fabric with pty", connection.run, hide=True, pty=True),
    fate("asyncssh", with_asyncssh),
    sep="; ",
)
END
"$work/venv/bin/python" "$work/run.py" "$port" "$work" | tee "$work/seen"
grep -qx 'invoke: CommandTimedOut, killed; fabric: CommandTimedOut, goes on; fabric with pty: CommandTimedOut, killed; asyncssh: TimeoutError, goes on' "$work/seen"
