"""Operators: they run ``nodepool`` commands, edit the configuration file, and stop launchers in an
orderly way.

An operation is planned from the seed alone, as faults are, but with separate random numbers.
"""

from __future__ import annotations

import copy
import math
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nodepool.lab.simulation.kernel import EPOCH, Process
from nodepool.process.service import STOP_LIMIT
from tests.world.faults import Fault
from tests.world.verifications import VERIFIER

if TYPE_CHECKING:
    from tests.world.world import World

#: Seconds that threads waiting for a cloud may outlive `NodePool.stop`: an unanswered call, and
#: looking for what it created.
LONGEST_THREAD = 32.0
#: A fault this many seconds before or after an orderly stop disturbs it.
DISTURBANCE = 30.0
#: Seconds until launchers apply a changed file at the latest: they poll every 10 s, and may be
#: paused for 25 s.
LONGEST_RELOAD = 45.0
#: Operations that may delay requests.
DISTURBING = (
    *("drain", "erase", "fewer_servers", "remove_label", "remove_provider", "rotate"),
    "stop_launcher",
)
#: Operations of every third seed, planned with separate random numbers.
MAINTENANCE = ("drain", "rotate")
#: Options that limit the nodes of a pool, with the amount that each node needs.
LIMITS = {"max-servers": 1, "max-cores": 1, "max-ram": 1024}


@dataclass
class Operation(Fault):
    def apply(self, world: World) -> None:
        KINDS[self.kind](world, self)


def plan(seed: int, duration: float, gentle: bool) -> list[Operation]:
    """Return what the operators of a seed do.

    :param gentle: only what delays no request.
    """
    choice = random.Random(f"operators {seed}")
    pause = choice.choice((0.0, 8.0, 20.0))
    usual = KINDS.keys() - set(MAINTENANCE)
    found = _planned(choice, duration, pause, sorted(usual - set(DISTURBING) if gentle else usual))
    if seed % 3 == 0 and not gentle:
        found += _planned(random.Random(f"maintenance {seed}"), duration, 15.0, MAINTENANCE)
    return sorted(found, key=lambda operation: operation.at)


def _planned(
    choice: random.Random, duration: float, pause: float, kinds: Sequence[str]
) -> list[Operation]:
    found: list[Operation] = []
    at = choice.uniform(2.0, 15.0)
    while pause and at < duration:
        found.append(
            Operation(choice.choice(kinds), at, choice.choice((4.0, 20.0, 40.0)), choice.random())
        )
        at += choice.expovariate(1 / pause)
    return found


class DrainState(Enum):
    """The command runs; it has ended; it runs, and the drain is to end after it."""

    BEGINS, DRAINED, OVER = range(3)


class Operators:
    """What operators have asked for, and the configuration file that they edit."""

    def __init__(self, world: World, config: dict[str, Any], path: str) -> None:
        self._world = world
        self._config = config
        self._path = path
        self.edits: list[Callable[[dict[str, Any]], None]] = []
        #: Nodes that a command was asked to change: what happens to them is the operator's will.
        self.touched: dict[str, None] = {}
        #: Nodes that a command was asked to delete.
        self.deleted: dict[str, None] = {}
        #: Providers whose records were erased.
        self.erased: dict[str, None] = {}
        self._deleting: dict[str, None] = {}
        #: Kind and name of what is drained.
        self.drains: dict[tuple[str, str], DrainState] = {}
        #: How many nodes each provider may have, with the times until which these limits may be in
        #: force.
        self._limits: dict[str, list[tuple[float, float]]] = {}
        self._write(config)

    # -- configuration

    def _write(self, config: dict[str, Any]) -> None:
        now = self._world.kernel.now
        for provider in config["providers"]:
            limits = self._limits.setdefault(provider["name"], [])
            if limits:
                limits[-1] = (limits[-1][0], min(limits[-1][1], now + LONGEST_RELOAD))
            [pool] = provider["pools"]
            limits.append(
                (min(pool.get(name, math.inf) / need for name, need in LIMITS.items()), math.inf)
            )
        Path(self._path).write_text(yaml.safe_dump(config))
        # The modification time decides whether it is read again.
        stamp = int((EPOCH + now) * 1_000_000_000)
        os.utime(self._path, ns=(stamp, stamp))

    def limits(self, provider: str) -> list[float]:
        """Return the limits, in nodes, that a launcher may apply now."""
        now = self._world.kernel.now
        return [value for value, until in self._limits[provider] if until >= now]

    def edit(self, change: Callable[[dict[str, Any]], None], seconds: float, text: str) -> None:
        """Change the file, and undo the change after a while."""

        def undo() -> None:
            if change in self.edits:
                self.edits.remove(change)
                self._save(f"undo {text}")

        self.edits.append(change)
        self._save(text)
        self._world.kernel.call_at(self._world.kernel.now + seconds, undo)

    def _save(self, text: str) -> None:
        self._world.note("edit", text)
        config = copy.deepcopy(self._config)
        for change in self.edits:
            change(config)
        self._write(config)

    def labels(self) -> list[str]:
        return [label["name"] for label in self._config["labels"]]

    # -- commands

    def run(self, *arguments: str, then: Callable[[], None] = lambda: None) -> None:
        """Run a ``nodepool`` command in a separate process."""
        world = self._world
        process = world.kernel.process("operator")
        world.note("operator", f"nodepool {' '.join(arguments)}")

        def main() -> None:
            from nodepool.cmd import nodepoolcmd

            try:
                status = nodepoolcmd.main(["-c", self._path, "--connect-timeout", "60", *arguments])
                world.note("operator", f"nodepool {' '.join(arguments)}: status {status}")
            except Exception as error:  # the console script prints it
                world.note("operator", f"nodepool {' '.join(arguments)}: {type(error).__name__}")
            then()

        world.kernel.spawn(threading.Thread(target=main, name="main").start, process=process)

    def hold(self, node_id: str) -> None:
        self.touched[node_id] = None
        self.run("hold", node_id)

    def delete(self, *node_ids: str) -> None:
        def ended() -> None:
            for node_id in node_ids:
                self._deleting.pop(node_id, None)

        for node_id in node_ids:
            self.touched[node_id] = self.deleted[node_id] = self._deleting[node_id] = None
        self.run("delete", *node_ids, then=ended)

    def drain(self, target: tuple[str, str], *options: str) -> None:
        def ended() -> None:
            if self.drains.pop(target) is DrainState.OVER:
                self.run("undrain", *target)
            else:
                self.drains[target] = DrainState.DRAINED

        self.drains[target] = DrainState.BEGINS
        self.run("drain", *target, *options, then=ended)

    def undrain(self, target: tuple[str, str]) -> None:
        """End a drain once its command has ended, unless that is done."""
        if self.drains.get(target) is DrainState.DRAINED:
            del self.drains[target]
            self.run("undrain", *target)
        elif target in self.drains:
            self.drains[target] = DrainState.OVER

    # -- the end

    def heal(self) -> None:
        for target in list(self.drains):
            self.undrain(target)
        if self.edits:
            self.edits.clear()
            self._save("undo all")

    def tidy(self) -> None:
        """Delete the held nodes that do not expire."""
        observer = self._world.observer
        held = [name for name, node in observer.nodes.items() if node["state"] == "hold"]
        held = [name for name in held if observer.hold_limit(observer.nodes[name]) == math.inf]
        if held := [name for name in held if name not in self._deleting]:
            self.delete(*held)


# -- what they do


def _pick(operation: Operation, items: list[Any]) -> Any:
    return items[int(operation.pick * len(items))] if items else None


def _idle(world: World) -> list[str]:
    nodes = world.observer.nodes
    return [
        name
        for name, node in nodes.items()
        if node["state"] == "ready" and not node.get("allocated_to")
    ]


def hold(world: World, operation: Operation) -> None:
    node_id = _pick(operation, _idle(world))
    if node_id is None:
        return
    world.operators.hold(node_id)

    def delete() -> None:
        if world.observer.nodes.get(node_id, {}).get("state") == "hold":
            world.operators.delete(node_id)

    world.kernel.call_at(world.kernel.now + operation.lasts, delete)


def hold_in_use(world: World, operation: Operation) -> None:
    """The command waits 5 s for the lock of a node that is in use; if the build ends meanwhile,
    the node is held.
    """
    nodes = world.observer.nodes
    node_id = _pick(operation, [name for name, node in nodes.items() if node["state"] == "in-use"])
    if node_id is not None:
        world.operators.hold(node_id)


def delete(world: World, operation: Operation) -> None:
    held = [
        name
        for name, node in world.observer.nodes.items()
        if node["state"] == "hold" and not (world.scenario.quiet and node["requestor"] == VERIFIER)
    ]
    node_id = _pick(operation, [*_idle(world), *held])
    if node_id is not None:
        world.operators.delete(node_id)


def info(world: World, operation: Operation) -> None:
    world.operators.run("info", f"provider-{int(operation.pick * len(world.scenario.providers))}")


def min_ready(world: World, operation: Operation) -> None:
    index = int(operation.pick * len(world.scenario.labels))
    count = int(operation.pick * 1000) % 4

    def change(config: dict[str, Any]) -> None:
        # Backing nodes are launched on demand only, and those of static hosts are always ready.
        if config["labels"][index]["name"] not in ("backing", "metal", "iron"):
            config["labels"][index]["min-ready"] = count

    world.operators.edit(change, operation.lasts, f"min-ready of label {index} is {count}")


def _provider(world: World, operation: Operation) -> str | None:
    """A provider that is neither metastatic nor carries one: requests for slots would wait for
    it.
    """
    providers = world.scenario.providers
    names = [
        f"provider-{number}"
        for number, provider in enumerate(providers)
        if provider["labels"] != ["backing"]
    ]
    found: str | None = _pick(
        operation, [name for name in names if "servers" in providers[int(name.rpartition("-")[2])]]
    )
    return found


def _servers(world: World, operation: Operation, count: int) -> None:
    name = _provider(world, operation)

    def change(config: dict[str, Any]) -> None:
        for provider in config["providers"]:
            if provider["name"] == name:
                provider["pools"][0]["max-servers"] = count

    world.operators.edit(change, operation.lasts, f"max-servers of {name} is {count}")


def more_servers(world: World, operation: Operation) -> None:
    _servers(world, operation, 99)


def fewer_servers(world: World, operation: Operation) -> None:
    _servers(world, operation, 3)


def remove_label(world: World, operation: Operation) -> None:
    name = _provider(world, operation)

    def change(config: dict[str, Any]) -> None:
        for provider in config["providers"]:
            if provider["name"] == name and len(labels := provider["pools"][0]["labels"]) > 1:
                labels.pop()

    world.operators.edit(change, operation.lasts, f"{name} without its last label")


def remove_provider(world: World, operation: Operation) -> None:
    name = f"provider-{int(operation.pick * len(world.scenario.providers))}"

    def change(config: dict[str, Any]) -> None:
        config["providers"] = [
            provider for provider in config["providers"] if provider["name"] != name
        ]

    world.operators.edit(change, operation.lasts, f"no {name}")


def erase(world: World, operation: Operation) -> None:
    """Remove a provider and its records; its machines are leaks once it is put back.

    Not one with images: builders have separate configuration files, and would upload them
    again.
    """
    name = _provider(world, operation)
    if name is None or "images" in world.scenario.providers[int(name.rpartition("-")[2])]:
        return

    def change(config: dict[str, Any]) -> None:
        config["providers"] = [
            provider for provider in config["providers"] if provider["name"] != name
        ]

    def command() -> None:
        if change in world.operators.edits:
            world.operators.erased[name] = None
            world.operators.run("erase", name, "--force")

    world.operators.edit(change, operation.lasts + 15.0, f"no {name}")
    world.kernel.call_at(world.kernel.now + 15.0, command)


def stop_launcher(world: World, operation: Operation) -> None:
    """Stop a launcher as SIGTERM does, and start it again."""
    victim = world.launchers[int(operation.pick * len(world.launchers))]
    process, pool = victim.process, victim.pool
    if not process.alive or process.paused or pool is None or pool.stopped.is_set():
        return
    world.note("stop", victim.name)
    sessions = world.zookeeper.server.sessions
    own = [
        session.id
        for session in sessions.values()
        if session.connection and session.connection.peer == victim.name
    ]
    ended: list[float] = []

    def main() -> None:
        pool.stop()
        ended.append(world.kernel.now)

    def watch() -> None:
        began, paused = world.kernel.now, 0.0
        calm = all(abs(fault.at - began) > DISTURBANCE for fault in world.scenario.faults)
        while process.alive and not ended:
            world.kernel.sleep(0.25)
            paused += 0.25 if process.paused else 0.0
            if world.kernel.now - began > STOP_LIMIT + 2 * paused:
                # The daemon exits. It may do so while ZooKeeper does not answer.
                world.note("stopped", f"{victim.name}: not everything has ended")
                if calm:
                    world.violated(f"{victim.name} has not stopped after {STOP_LIMIT} s")
                break
        if process.alive and ended:
            world.note("stopped", f"{victim.name} after {ended[0] - began:.3f} s")
            if calm and (left := [session for session in own if session in sessions]):
                world.violated(f"{victim.name} has stopped and left {len(left)} sessions")
            _threads_end(world, process)
        world.kernel.kill(process)
        world.kernel.sleep(operation.lasts)
        if not victim.process.alive:
            world.note("start", victim.name)
            victim.start()

    world.kernel.spawn(threading.Thread(target=main, name="Shutdown").start, process=process)
    world.kernel.spawn(watch, process=world.kernel.outside)


def _threads_end(world: World, process: Process) -> None:
    """Wait until no thread of a stopped launcher is left."""
    limit = world.kernel.now + LONGEST_THREAD
    while process.alive and (left := _threads(world, process)) and world.kernel.now < limit:
        world.kernel.sleep(0.5)
        limit += 0.5 if process.paused else 0.0
    if process.alive and left:
        world.violated(f"{process.name} has stopped, and threads have not ended: {', '.join(left)}")


def _threads(world: World, process: Process) -> list[str]:
    """Return the names of the threads of a process, without those that are a part of a cloud."""
    by_ident: dict[int, threading.Thread] = vars(threading)["_active"]
    names = [
        by_ident[task.ident].name if task.ident in by_ident else "?"
        for task in world.kernel.tasks
        if task.process is process
    ]
    return [name for name in names if not name.startswith("cloud-")]


def drain(world: World, operation: Operation) -> None:
    """Drain a provider or a label, and use it again later."""
    labels = world.operators.labels()
    providers = [f"provider-{number}" for number in range(len(world.scenario.providers))]
    target = _pick(
        operation, [("provider", name) for name in providers] + [("label", name) for name in labels]
    )
    keep = ("--keep-idle",) if int(operation.pick * 1000) % 2 else ()
    if target not in world.operators.drains:
        world.operators.drain(target, *keep)
        world.kernel.call_at(
            world.kernel.now + operation.lasts, lambda: world.operators.undrain(target)
        )


def rotate(world: World, operation: Operation) -> None:
    world.operators.run("rotate", "label", _pick(operation, world.operators.labels()))


KINDS: dict[str, Callable[[World, Operation], None]] = {
    function.__name__: function
    for function in (
        hold,
        hold_in_use,
        delete,
        info,
        min_ready,
        more_servers,
        fewer_servers,
        remove_label,
        remove_provider,
        erase,
        stop_launcher,
        drain,
        rotate,
    )
}
