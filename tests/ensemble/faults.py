"""What happens to the servers and to clocks; a seed chooses which, to whom and when."""

from __future__ import annotations

import pathlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.ensemble import network
from tests.ensemble.load import BUILDER, Load
from tests.ensemble.servers import NUMBERS, SESSION, Ensemble, Server

#: Seconds that a fault longer than the session lasts.
LONG = SESSION * 1.25
#: Seconds that other faults last.
SHORT = 2.0
#: Steps of a clock, in seconds.
STEPS = (-86400, -3600, -30, 30, 3600, 86400)


@dataclass(frozen=True)
class Window:
    """When a fault happened; times of the monotonic clock.

    :ivar served: from when on the servers could serve: the begin, unless the fault stops all.
    """

    fault: str
    began: float
    served: float
    #: Nodes and requests from before are lost, as the manual says.
    forgets: bool


class Faults:
    """The faults of one seed."""

    def __init__(
        self, ensemble: Ensemble, load: Load, folder: pathlib.Path, chance: random.Random
    ) -> None:
        self._ensemble = ensemble
        self._load = load
        self._folder = folder
        self._chance = chance
        self.windows: list[Window] = []

    def back_up(self) -> None:
        """Keep copies of the data for the faults that restore them."""
        for server in self._ensemble.servers:
            server.copy(self._copy(server))

    def _copy(self, server: Server) -> pathlib.Path:
        return self._folder / f"copy{server.number}"

    def happen(self, fault: str) -> None:
        """Let one of `KINDS` happen, and wait until all servers serve again."""
        kind = KINDS[fault]
        began = time.monotonic()
        served = kind.happens(self)
        if kind.forgets:
            # Before the window begins: what Zuul had is lost.
            self._load.renew()
        self.windows.append(Window(fault, began, served or began, kind.forgets))
        self._ensemble.wait_served()
        if kind.forgets:
            # The copies are of another history now, which the servers would refuse.
            self.back_up()

    def _any(self) -> Server:
        return self._chance.choice(self._ensemble.servers)

    # -- kills

    def leader_killed(self) -> None:
        server = self._ensemble.leader()
        server.kill()
        time.sleep(SHORT)
        server.start()

    def rolling_restart(self) -> None:
        for server in self._chance.sample(self._ensemble.servers, len(NUMBERS)):
            server.stop()
            server.start()
            self._ensemble.wait_served()

    # -- servers that answer nothing

    def _hang(self, server: Server) -> None:
        server.hang()
        try:
            time.sleep(LONG)
        finally:
            server.resume()

    def leader_hung(self) -> None:
        self._hang(self._ensemble.leader())

    def follower_hung(self) -> None:
        self._hang(self._ensemble.follower())

    # -- partitions

    @contextmanager
    def _cut(self, server: Server, clients: bool, *directions: str) -> Iterator[None]:
        peers = [network.address(number) for number in NUMBERS if number != server.number]
        network.cut(server.number, peers + [network.CLIENTS] * clients, directions)
        try:
            yield
        finally:
            network.heal(server.number)

    def one_way_partition(self) -> None:
        """A server does not hear the others, or they do not hear it."""
        server, way = self._any(), self._chance.choice(["input", "output"])
        with self._cut(server, self._chance.random() < 0.5, way):
            time.sleep(LONG)

    def full_partition(self) -> None:
        """A server is cut off from everybody, or from the other servers only."""
        with self._cut(self._any(), self._chance.random() < 0.5, "input", "output"):
            time.sleep(LONG)

    # -- disks and clocks

    def slow_disk(self) -> None:
        servers = self._chance.choice([[self._any()], self._ensemble.servers])
        for server in servers:
            self._ensemble.slow_disk(server)
        try:
            time.sleep(LONG)
        finally:
            for server in servers:
                self._ensemble.normal_disk(server)

    def clock_steps(self) -> None:
        """The clocks of a server and of a launcher or the builder step, and later return."""
        daemon = self._chance.choice(self._load.daemons)
        clocks = [self._any().clock, daemon.clock]
        steps = [self._chance.choice(STEPS) for _ in clocks]
        if daemon.name == BUILDER:
            # An image from the future would not be built again until then.
            steps[1] = -abs(steps[1])
        # A lease ends by the clock of the launcher that hands it over.
        self._load.wait_lease()
        for clock, step in zip(clocks, steps, strict=True):
            clock.step(step)
        time.sleep(SHORT)
        for clock in clocks:
            clock.step(0)

    # -- lost data

    def _start_all(self, replace: Callable[[Server], pathlib.Path | None]) -> float:
        for server in self._ensemble.servers:
            server.kill()
        for server in self._ensemble.servers:
            server.replace(replace(server))
        self._ensemble.start()
        return time.monotonic()

    def all_emptied(self) -> float:
        return self._start_all(lambda server: None)

    def all_restored(self) -> float:
        return self._start_all(self._copy)

    def one_restored(self) -> None:
        """A server returns with an old copy of its data; the others know better."""
        server = self._any()
        server.kill()
        server.replace(self._copy(server))
        time.sleep(SHORT / 2)
        server.start()


@dataclass(frozen=True)
class Kind:
    """A fault, and what it may cost.

    :ivar longest: seconds without a fulfilled request that are allowed while the servers could
        serve.
    """

    happens: Callable[[Faults], float | None]
    longest: float
    forgets: bool = False


AFTER_KILL, AFTER_HANG = 3.0, SESSION + 3.0
KINDS = {
    "leader killed": Kind(Faults.leader_killed, AFTER_KILL),
    "leader hung": Kind(Faults.leader_hung, AFTER_HANG),
    "follower hung": Kind(Faults.follower_hung, AFTER_HANG),
    "one-way partition": Kind(Faults.one_way_partition, AFTER_HANG),
    "full partition": Kind(Faults.full_partition, AFTER_HANG),
    "rolling restart": Kind(Faults.rolling_restart, AFTER_HANG),
    "slow disk": Kind(Faults.slow_disk, AFTER_HANG),
    "clock steps": Kind(Faults.clock_steps, AFTER_KILL),
    "all emptied": Kind(Faults.all_emptied, AFTER_HANG, forgets=True),
    "one restored from an old copy": Kind(Faults.one_restored, AFTER_HANG),
    "all restored from an old copy": Kind(Faults.all_restored, AFTER_HANG, forgets=True),
}
