#!/bin/sh
# apache-libcloud 3.9.1 with paramiko 5.1.0 (PyPI), against an SSH server of asyncssh 2.24.1: deploy_node() creates a node and
# runs steps on it; max_tries says "how many times to retry if a deployment fails", and DeploymentError is raised for "a later
# error". A script that ends with status 7 is no failure: it is not repeated, the next step runs on the unfinished node, and
# deploy_node() returns the node as if it were ready. The status is in the attribute exit_status of each ScriptDeployment,
# which only the program that keeps the steps can read.
# Seen: "deploy_node: node-1 returned, no error; scripts that ran: first second; exit_status: 7 0".
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check apache-libcloud==3.9.1 paramiko==5.1.0 asyncssh==2.24.1
mkdir "$work/home"
cat >"$work/server.py" <<'END'
import asyncio
import sys

import asyncssh


class Server(asyncssh.SSHServer):
    def password_auth_supported(self):
        return True

    def validate_password(self, username, password):
        return True


async def command(process):
    started = await asyncio.create_subprocess_shell(process.command)
    process.exit(await started.wait())


async def main():
    keys = [asyncssh.generate_private_key("ssh-ed25519")]
    found = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=Server, server_host_keys=keys, process_factory=command, sftp_factory=True
    )
    with open(sys.argv[1], "w") as file:
        print(found.get_port(), file=file)
    await asyncio.Event().wait()


asyncio.run(main())
END
cat >"$work/run.py" <<'END'
import pathlib
import sys
import time

from libcloud.compute.base import Node, NodeAuthPassword, NodeDriver
from libcloud.compute.deployment import MultiStepDeployment, ScriptDeployment
from libcloud.compute.types import NodeState, Provider


class Cloud(NodeDriver):
    """A cloud with one node, whose machine is the SSH server."""

    type = Provider.DUMMY
    features = {"create_node": ["password"]}

    def create_node(self, name, auth):
        self.node = Node("1", name, NodeState.RUNNING, ["127.0.0.1"], [], self)
        return self.node

    def list_nodes(self):
        return [self.node]


port, ran = pathlib.Path(sys.argv[1]), pathlib.Path("ran")
end = time.monotonic() + 60
while not port.exists() or not port.read_text().endswith("\n"):
    assert time.monotonic() < end
    time.sleep(0.1)
steps = [
    ScriptDeployment(f"#!/bin/sh\necho {name} >>{ran.absolute()}\nexit {status}\n")
    for name, status in (("first", 7), ("second", 0))
]
try:
    node = Cloud(None).deploy_node(
        MultiStepDeployment(steps), name="node-1", auth=NodeAuthPassword("x"), ssh_port=int(port.read_text()), timeout=60
    )
    result = f"{node.name} returned, no error"
except Exception as problem:
    result = repr(problem)
statuses = " ".join(str(step.exit_status) for step in steps)
print(f"deploy_node: {result}; scripts that ran: {' '.join(ran.read_text().split())}; exit_status: {statuses}")
END
cd "$work/home"
"$work/venv/bin/python" "$work/server.py" "$work/port" 2>"$work/log" &
server=$!
"$work/venv/bin/python" "$work/run.py" "$work/port" | tee "$work/seen"
grep -qxF 'deploy_node: node-1 returned, no error; scripts that ran: first second; exit_status: 7 0' "$work/seen"
