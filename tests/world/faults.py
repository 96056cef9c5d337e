"""What can go wrong. A fault is planned from the seed alone, so that leaving one out does not
change the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodepool.lab.simulation.zookeeper import ADDRESS
from tests.world.hosts import hosts

if TYPE_CHECKING:
    from tests.world.builders import Builder
    from tests.world.cloud import Cloud
    from tests.world.faulty import FaultyConnection
    from tests.world.openstack import OpenStack
    from tests.world.world import Launcher, World
    from tests.world.zuul import Zuul


@dataclass
class Fault:
    """
    :param at: virtual seconds.
    :param lasts: seconds, for those that last.
    :param pick: selects among what exists at that time; from 0 to 1.
    """

    kind: str
    at: float
    lasts: float
    pick: float

    def __str__(self) -> str:
        return f"{self.kind} (pick {self.pick:.3f}, {self.lasts:.2f} s)"

    def apply(self, world: World) -> None:
        KINDS[self.kind](world, self)


def plan(choice: random.Random, duration: float) -> list[Fault]:
    found, at = [], choice.uniform(0.0, 10.0)
    pause = choice.choice((2.0, 6.0, 15.0))
    while at < duration:
        found.append(
            Fault(
                choice.choice(sorted(KINDS)),
                at,
                choice.choice((0.05, 1.0, 4.0, 12.0, 25.0)),
                choice.random(),
            )
        )
        at += choice.expovariate(1 / pause)
    return found


def _process(world: World, fault: Fault) -> Launcher | Builder | Zuul:
    """A launcher, a builder or a scheduler."""
    members: list[Launcher | Builder | Zuul] = [
        *world.launchers,
        *world.launchers,
        *world.builders,
        *world.zuuls,
    ]
    return members[int(fault.pick * len(members))]


def _later(world: World, fault: Fault, function: Callable[[], None]) -> None:
    world.kernel.call_at(world.kernel.now + fault.lasts, function)


def kill(world: World, fault: Fault) -> None:
    kill_process(world, fault, _process(world, fault))


def kill_process(world: World, fault: Fault, victim: Launcher | Builder | Zuul) -> None:
    if not victim.process.alive:
        return
    world.note("kill", victim.name)
    world.kernel.kill(victim.process)

    def restart() -> None:
        if not victim.process.alive:
            world.note("start", victim.name)
            victim.start()

    _later(world, fault, restart)


def pause(world: World, fault: Fault) -> None:
    pause_process(world, fault, _process(world, fault))


def pause_process(world: World, fault: Fault, victim: Launcher | Builder | Zuul) -> None:
    process = victim.process
    if process.paused or not process.alive:
        return
    world.note("pause", victim.name)
    world.kernel.pause(process)

    def resume() -> None:
        world.note("resume", victim.name)
        world.kernel.resume(process)

    _later(world, fault, resume)


def isolate(world: World, fault: Fault) -> None:
    isolate_process(world, fault, _process(world, fault))


def isolate_process(world: World, fault: Fault, victim: Launcher | Builder | Zuul) -> None:
    process = victim.process
    world.note("isolate", victim.name)
    world.network.isolate(process)

    def rejoin() -> None:
        world.note("rejoin", victim.name)
        world.network.rejoin(process)

    _later(world, fault, rejoin)


def _connection(world: World, fault: Fault) -> FaultyConnection | None:
    connections = list(world.network.connections)
    return connections[int(fault.pick * len(connections))] if connections else None


def cut(world: World, fault: Fault) -> None:
    connection = _connection(world, fault)
    if connection is not None:
        world.note("cut", f"connection of {connection.client.name}")
        connection.cut()


def mute(world: World, fault: Fault) -> None:
    connection = _connection(world, fault)
    if connection is not None:
        world.note("mute", f"connection of {connection.client.name}")
        connection.mute()
        _later(world, fault, connection.cut)


def restart_zookeeper(world: World, _fault: Fault) -> None:
    for connection in list(world.network.connections):
        if connection.address == ADDRESS:
            connection.cut()


def expire(world: World, fault: Fault) -> None:
    sessions = list(world.zookeeper.server.sessions.values())
    if sessions:
        session = sessions[int(fault.pick * len(sessions))]
        world.note("expire", f"session 0x{session.id:x}")
        world.zookeeper.server.end_session(session)


def _cloud(world: World, fault: Fault) -> Cloud | OpenStack:
    return world.clouds[int(fault.pick * len(world.clouds))]


def cloud_errors(world: World, fault: Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.refusal = 0.3
    _later(world, fault, cloud.heal)


def cloud_silence(world: World, fault: Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.lost_answer = 0.3
    _later(world, fault, cloud.heal)


def bad_machines(world: World, fault: Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.failing_machines = 0.5
    _later(world, fault, cloud.heal)


def old_lists(world: World, fault: Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.list_lag = fault.lasts
    _later(world, fault, cloud.heal)


def vanish(world: World, fault: Fault) -> None:
    cloud = _cloud(world, fault)
    machines = list(cloud.machines)
    if machines:
        machine = machines[int(fault.pick * len(machines))]
        world.note("vanish", f"machine {machine}")
        cloud.vanish(machine)


def switch_off(world: World, fault: Fault) -> None:
    """A static host does not answer for a while."""
    names = sorted(hosts)
    if names:
        name = names[int(fault.pick * len(names))]
        world.note("host", f"{name} is off")
        hosts[name] = False

        def switch_on() -> None:
            hosts[name] = True

        _later(world, fault, switch_on)


def clock_step(world: World, fault: Fault) -> None:
    """The wall clock of a process is set."""
    process = _process(world, fault).process
    process.skew += (fault.pick - 0.5) * fault.lasts
    world.skew = max(world.skew, abs(process.skew))


KINDS: dict[str, Callable[[World, Fault], None]] = {
    function.__name__: function
    for function in (
        kill,
        pause,
        isolate,
        cut,
        mute,
        restart_zookeeper,
        expire,
        cloud_errors,
        cloud_silence,
        bad_machines,
        old_lists,
        vanish,
        clock_step,
        switch_off,
    )
}


def heal(world: World) -> None:
    """End all faults that last."""
    members: list[Launcher | Builder | Zuul] = [*world.launchers, *world.builders, *world.zuuls]
    for member in members:
        world.network.rejoin(member.process)
        world.kernel.resume(member.process)
        member.process.skew = 0.0
        if not member.process.alive:
            member.start()
    for connection in list(world.network.connections):
        if connection.muted:
            connection.cut()
    for each in (*world.clouds, *world.hosts):
        each.heal()
    for name in hosts:
        hosts[name] = True
