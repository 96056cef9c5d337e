"""Idle machines that stop answering, and the probes that notice it (LAU-12.7)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.world import faults, logins

if TYPE_CHECKING:
    from tests.world.world import Scenario, World

#: The part of the seeds in which idle nodes are probed.
SHARE = 0.3
#: Seconds that launchers try a machine, and between two probes.
TIMEOUT, INTERVALS = 5, (3, 10, 30)
#: Machines that stop answering in one scenario: fewer than an outage.
MOST = 2
#: A host key of all machines that are probed.
HOST_KEY = f"ssh-ed25519 {'A' * 68}"
#: Labels of the run whose nodes are probed.
probed: set[str] = set()


def extend(scenario: Scenario) -> None:
    """Probe labels of simulated clouds in some scenarios, and silence some of their machines."""
    choice = random.Random(f"probes {scenario.seed}")
    if choice.random() >= SHARE:
        return
    others = {"driver", "backing", "hosts", "slivers"}
    foreign = {
        label
        for provider in scenario.providers
        if others.intersection(provider)
        for label in [*provider["labels"], provider.get("backing")]
    }
    interval = choice.choice(INTERVALS)
    scenario.probed = dict.fromkeys(
        sorted(scenario.labels.keys() - foreign - {"backing"}), interval
    )
    if scenario.faults and scenario.probed:
        silences = [
            Silence("silence", choice.uniform(0.0, scenario.duration), 0.0, choice.random())
            for _ in range(MOST)
        ]
        scenario.faults = sorted([*scenario.faults, *silences], key=lambda fault: fault.at)


def configure(scenario: Scenario, config: dict[str, Any]) -> None:
    for label in config["labels"]:
        if (interval := scenario.probed.get(label["name"])) is not None:
            options = {"method": "command", "interval": interval}
            label["probe"] = options | logins.options(TIMEOUT)


class Silence(faults.Fault):
    """An idle machine does not answer any more."""

    def apply(self, world: World) -> None:
        idle = [
            machine
            for cloud in world.image_clouds
            for machine in cloud.machines.values()
            if world.observer.idle_on(machine.id) is not None
        ]
        if idle:
            machine = idle[int(self.pick * len(idle))]
            machine.silent = True
            world.note("silent", machine.id)
