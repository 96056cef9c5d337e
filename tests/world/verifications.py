"""Images that do not work, and the logins with which launchers notice it (BLD-25)."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

from nodepool import ssh
from nodepool.lab.simulation.kernel import current
from tests.world.cloud import Machine, clouds

if TYPE_CHECKING:
    from tests.world.world import Scenario

#: The part of the seeds with images in which these are verified, and of their images that do not
#: work unless the seed has no faults.
SHARE, BROKEN = 0.5, 0.4
#: How: no machine boots; no login; the command fails; it does not end.
BOOT, LOGIN, COMMAND, ENDLESS = "boot", "login", "command", "endless"
KINDS = (BOOT, LOGIN, COMMAND, ENDLESS)
#: What the launchers log in with, and seconds that they try it.
KEY, TIMEOUT = "id_verify", 10
#: Seconds by which an image is usable later than without verification, without faults.
LONGER = 20.0
#: The requestor of machines for verifications.
VERIFIER = "NodePool:verify"


def extend(scenario: Scenario) -> None:
    """Verify the images of some scenarios that have some."""
    choice = random.Random(f"verified {scenario.seed}")
    if not scenario.images.builders or choice.random() >= SHARE:
        return
    scenario.images.verified = True
    scenario.images.broken = BROKEN if scenario.faults else 0.0
    # Who uses an upload without verification gets what it is.
    scenario.image_actions = [each for each in scenario.image_actions if each.kind != "rollforward"]
    for request in scenario.demand:
        if not scenario.faults and any(label.endswith("-node") for label in request.labels):
            request.arrives += LONGER


def configure(images: list[dict[str, Any]]) -> None:
    """Add the option to the images of a configuration, and write the key."""
    with open(KEY, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write("a key\n")
    for image in images:
        image["verify"] = {"ssh-key": os.path.abspath(KEY), "command": "check", "timeout": TIMEOUT}


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
    if machine is None or how == LOGIN:
        raise ssh.Lost("connection refused")
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
