"""The logins of launchers on machines of the simulated clouds, and how these answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from nodepool import ssh
from nodepool.lab.simulation.kernel import current
from tests.world.cloud import Machine, clouds

#: How machines of an image fail: none boots; no login; the command fails; it does not end.
BOOT, LOGIN, COMMAND, ENDLESS = "boot", "login", "command", "endless"
KINDS = (BOOT, LOGIN, COMMAND, ENDLESS)
#: The command, and the key that launchers log in with.
PROGRAM, KEY = "check", "id_nodepool"
#: Called with the id of a machine at each login.
on_login: Callable[[str], object] = str


def options(timeout: int) -> dict[str, Any]:
    """Return the options of a command on a node, and write the key."""
    with open(KEY, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write("a key\n")
    return {"ssh-key": os.path.abspath(KEY), "command": PROGRAM, "timeout": timeout}


def address(machine_id: str) -> str:
    """Return the address of a machine of `cloud-<number>-<count>`."""
    _cloud, number, count = machine_id.split("-")
    return f"10.{number}.{int(count) // 256}.{int(count) % 256}"


def log_in(
    node: ssh.Node,
    _key: str,
    _command: str,
    _output: ssh.Output,
    deadline: float,
    running: ssh.Programs,
    insecure: bool = False,
) -> int:
    """Stand for :func:`nodepool.ssh.run_with_key`."""
    kernel = current()
    kernel.sleep(kernel.random.uniform(0.1, 0.5))
    machine = _machine(node.address)
    how = None if machine is None or machine.image is None else machine.image.broken
    if time.monotonic() >= deadline:
        raise TimeoutError("the login has not ended in time")
    if machine is None or machine.silent or how == LOGIN:
        raise ssh.Lost("connection refused")
    on_login(machine.id)
    end = time.monotonic() + kernel.random.uniform(0.1, 3.0)
    while time.monotonic() < end or how == ENDLESS:
        kernel.sleep(0.1)
        if running.stopped:
            return -15
        if _machine(node.address) is None:
            raise ssh.Interrupted("the connection was lost before the program ended")
        if time.monotonic() >= deadline:
            raise TimeoutError
    return int(how == COMMAND)


def _machine(wanted: str | None) -> Machine | None:
    return next(
        (
            machine
            for cloud in clouds.values()
            for machine in cloud.machines.values()
            if address(machine.id) == wanted
        ),
        None,
    )
