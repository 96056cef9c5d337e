"""Models of node managers: hosts that answer the calls of the ``nodemanager`` driver, and fail.

The driver and its client run unchanged, over HTTP on the simulated network. A host has no thread:
its calls are events of the kernel, so that it can be unreachable, slow or restarted without waiting
for anything.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodepool.lab.simulation.kernel import EPOCH, Kernel
from nodepool.nodemanager.client import xml_rpc
from tests.world import faults
from tests.world.faulty import FaultyConnection, FaultyNetwork

if TYPE_CHECKING:
    from tests.world.observer import Observer
    from tests.world.world import Scenario, World

#: The part of the seeds that has node managers.
SHARE = 0.3
#: The label that they serve.
LABEL = "sliver"
PORT = 812
#: Seconds that slivers live unless they are renewed: the least that the driver allows.
LEASE = 240
#: Seconds that a sliver needs to start, and to be deleted; at least and at most.
START, DELETE = (0.1, 4.0), (0.05, 2.0)
#: MiB of each sliver.
MEMORY = 1024
KEY = f"ssh-ed25519 {'A' * 68} zuul"
#: Fault codes of the API.
BAD_ARGUMENT, INTERNAL = 102, 104
#: Part of a lease that is left at least, once no more faults happen: the driver renews at three
#: quarters.
FRESH = 0.6


def extend(scenario: Scenario) -> None:
    """Add hosts, their label and requests for it to some scenarios."""
    choice = random.Random(f"node managers {scenario.seed}")
    if choice.random() >= SHARE:
        return
    quiet, duration = not scenario.faults, scenario.duration
    # Alongside idle nodes there is capacity for the largest request.
    slots = choice.choice(((6,), (3, 2), (4, 4), (7, 2)))
    hosts = {f"nm-{number}": 99 if quiet else count for number, count in enumerate(slots, 1)}
    scenario.labels[LABEL] = choice.choice((0, 1, 2))
    servers = 99 if quiet else choice.choice((5, 20))
    scenario.providers.append({"labels": [LABEL], "servers": servers, "slivers": hosts})
    scheduler = scenario.demand[0].scheduler
    scenario.demand += [
        scenario.request(choice, duration, [LABEL], scheduler)
        for _ in range(choice.choice((6, 12, 20)))
    ]
    if not quiet:
        scenario.faults = sorted(
            [*scenario.faults, *_plan(choice, duration)], key=lambda fault: fault.at
        )


def configure(name: str, provider: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a provider."""
    label = {"name": LABEL, "cloud-image": "host", "cpus": 1, "ram": MEMORY, "ssh-keys": KEY}
    return {
        "name": name,
        "driver": "nodemanager",
        "hosts": [{"name": host, "url": f"http://{host}:{PORT}"} for host in provider["slivers"]],
        "lease-time": LEASE,
        "cloud-images": [{"name": "host"}],
        "pools": [{"name": "main", "max-servers": provider["servers"], "labels": [label]}],
    }


class Fault(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Sliver:
    """
    :param recorded: nobody has deleted it.
    :param expiry: Unix time; 0: never.
    """

    name: str
    record: dict[str, Any]
    expiry: float = 0
    state: str = "creating"
    recorded: bool = True

    def describe(self) -> dict[str, Any]:
        if not self.recorded:
            return {"name": self.name, "state": self.state, "error": ""}
        rspec, metadata = self.record.get("rspec", {}), self.record.get("metadata", {})
        return {
            "name": self.name,
            "state": self.state,
            "error": "it did not start" if self.state == "failed" else "",
            "expiry": int(self.expiry),
            "effective": rspec,
            "metadata": metadata,
            "ssh_address": "192.0.2.1",
            "ssh_port": 22,
        }


class Host:
    """A machine with a node manager.

    :param slots: slivers that it has capacity for.
    """

    def __init__(
        self, name: str, slots: int, kernel: Kernel, network: FaultyNetwork, observer: Observer
    ) -> None:
        self.name = name
        self.slots = slots
        self._kernel = kernel
        self._network = network
        self._observer = observer
        self.slivers: dict[str, Sliver] = {}
        #: Slivers that were ready at some time.
        self.started: dict[str, None] = {}
        #: Counts restarts: calls from before a restart have no effect after it.
        self._life = 0
        self._calls: dict[str, Callable[..., Any]] = {
            "GetCapacity": self._capacity,
            "ListSlivers": self._list,
            "PutRecord": self._put,
            "DeleteSliver": self._delete,
            "RenewSliver": self._renew,
        }
        # Faults; all but the slowness are probabilities.
        self.down = self.unreachable = False
        self.slowness = self.lost_answer = self.refusal = self.failing = 0.0
        network.serve((name, PORT), self._accept)

    @property
    def machines(self) -> dict[str, Sliver]:
        """The slivers of launchers."""
        return {
            f"{self.name}/{sliver.name}": sliver
            for sliver in self.slivers.values()
            if "metadata" in sliver.record
        }

    def at_rest(self) -> list[str]:
        left = {
            name: sliver.expiry - EPOCH - self._kernel.now for name, sliver in self.machines.items()
        }
        return [
            f"the lease of {name} ends in {seconds:.0f} s"
            for name, seconds in left.items()
            if seconds < FRESH * LEASE
        ]

    # -- faults

    def _connections(self) -> list[FaultyConnection]:
        return [
            connection
            for connection in self._network.connections
            if connection.address == (self.name, PORT)
        ]

    def disconnect(self) -> None:
        """Hold back all that is sent; it arrives once the host can be reached again."""
        self.unreachable = True
        for connection in self._connections():
            connection.stall()

    def stop(self) -> None:
        """End the node manager; slivers continue."""
        self.down = True
        self._life += 1
        for connection in self._connections():
            connection.cut()

    def lose(self) -> None:
        """Lose all slivers and their records, as a machine that is installed again."""
        self.slivers.clear()

    def fill(self) -> None:
        """Give what is free to users who are no launchers."""
        while self._free() > 0:
            name = next(
                name
                for number in itertools.count(len(self.slivers))
                if (name := f"slice_{number}") not in self.slivers
            )
            self.slivers[name] = Sliver(name, {"rspec": {"nm_mem_limit": MEMORY}}, state="ready")

    def heal(self) -> None:
        self.down = False
        self.slowness = self.lost_answer = self.refusal = self.failing = 0.0
        self.slivers = {
            name: sliver for name, sliver in self.slivers.items() if "metadata" in sliver.record
        }
        if self.unreachable:
            self.unreachable = False
            for connection in self._connections():
                connection.unstall()

    # -- the server

    def _accept(self, connection: FaultyConnection) -> None:
        received = bytearray()
        connection.receive = lambda data: self._receive(connection, received, data)
        if self.down:
            connection.cut()
        elif self.unreachable:
            connection.stall()

    def _receive(self, connection: FaultyConnection, received: bytearray, data: bytes) -> None:
        received += data
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: ([0-9]+)", head)
        if length is None or len(body) < int(length[1]):
            return
        method, arguments = xml_rpc.parse_call(body)
        now, life = self._kernel.now, self._life
        delay = self._kernel.random.uniform(0.001, 0.05) + self._kernel.random.uniform(
            0.0, self.slowness
        )
        if method == "WaitEvents":
            self._kernel.call_at(
                now + arguments[3], lambda: self._answer(connection, xml_rpc.response([]))
            )
        elif method == "WaitSliver":
            name, state, seconds = arguments
            self._kernel.call_at(
                now + delay, lambda: self._wait(connection, name, state, now + seconds, life)
            )
        else:
            self._kernel.call_at(
                now + delay, lambda: self._call(connection, method, arguments, life)
            )

    def _call(
        self, connection: FaultyConnection, method: str, arguments: tuple[Any, ...], life: int
    ) -> None:
        if life != self._life:
            return
        try:
            result = self._calls[method](*arguments)
        except Fault as fault:
            self._answer(connection, xml_rpc.fault(fault.code, str(fault)))
        else:
            self._answer(connection, xml_rpc.response(1 if result is None else result))

    def _wait(
        self, connection: FaultyConnection, name: str, state: str, until: float, life: int
    ) -> None:
        if life != self._life or not connection.open:
            return
        sliver = self.slivers.get(name)
        found = sliver.describe() if sliver else {"name": name, "state": "absent", "error": ""}
        if found["state"] in {"ready": ("ready", "failed", "absent"), "gone": ("absent",)}[state]:
            self._answer(connection, xml_rpc.response(found))
        elif self._kernel.now >= until:
            self._answer(connection, xml_rpc.response({"name": name, "state": "waiting"}))
        else:
            self._kernel.call_at(
                self._kernel.now + 0.05, lambda: self._wait(connection, name, state, until, life)
            )

    def _answer(self, connection: FaultyConnection, body: bytes) -> None:
        if self._kernel.random.random() >= self.lost_answer:
            connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    # -- calls

    def _recorded(self) -> list[Sliver]:
        return [sliver for sliver in self.slivers.values() if sliver.recorded]

    def _sum(self, resource: str) -> int:
        return sum(sliver.record.get("rspec", {}).get(resource, 0) for sliver in self._recorded())

    def _free(self) -> int:
        return self.slots - len(self._recorded())

    def _capacity(self) -> dict[str, Any]:
        given = {
            "slivers": len(self._recorded()),
            "disk": 0,
            "cpu": self._sum("nm_cpu_guaranteed_share"),
            "memory": self._sum("nm_mem_limit"),
        }
        limits = {
            "cores": self.slots,
            "cpu": 1000,
            "memory": self.slots * MEMORY,
            "disk": 1 << 30,
            "slivers": self.slots,
        }
        return {
            **limits,
            "host": self.name,
            "allocated": given,
            "default": {"memory": 0, "disk": 0},
            "images": [],
        }

    def _list(self) -> list[dict[str, Any]]:
        return [sliver.describe() for sliver in self._recorded()]

    def _put(self, record: dict[str, Any]) -> dict[str, Any]:
        name = record["name"]
        self._kernel.call_at(record["expiry"] - EPOCH, lambda: self._expire(name))
        sliver = self.slivers.get(name)
        if sliver is not None and sliver.recorded:
            sliver.record, sliver.expiry = record, record["expiry"]
            return sliver.describe()
        if self._kernel.random.random() < self.refusal:
            raise Fault(
                INTERNAL,
                self._kernel.random.choice(
                    ("quota: no disk is left", "the disk cannot be written")
                ),
            )
        share = self._sum("nm_cpu_guaranteed_share") + record["rspec"].get(
            "nm_cpu_guaranteed_share", 0
        )
        if self._free() <= 0 or share > 1000:
            raise Fault(
                INTERNAL,
                f"quota: {len(self._recorded())} slivers, and {share} per mille of the CPU with "
                "another one",
            )
        # One of the same name that is being deleted is replaced.
        sliver = self.slivers[name] = Sliver(name, record, record["expiry"])
        self._observer.created(f"{self.name}/{name}", name)
        now, choice = self._kernel.now, self._kernel.random
        fails = choice.random() < self.failing
        self._kernel.call_at(now + choice.uniform(*START), lambda: self._start(sliver, fails))
        return sliver.describe()

    def _start(self, sliver: Sliver, fails: bool) -> None:
        if sliver.recorded:
            sliver.state = "failed" if fails else "ready"
            if not fails:
                self.started[f"{self.name}/{sliver.name}"] = None

    def _find(self, name: str) -> Sliver:
        sliver = self.slivers.get(name)
        if sliver is None or not sliver.recorded:
            raise Fault(BAD_ARGUMENT, f"there is no sliver {name} here")
        return sliver

    def _delete(self, name: str) -> None:
        sliver = self._find(name)
        if "metadata" not in sliver.record:
            self._observer.violated(
                f"sliver {name} of {self.name}, which belongs to no launcher, is deleted"
            )
        self._observer.destroyed(f"{self.name}/{name}")
        self._end(sliver)

    def _end(self, sliver: Sliver) -> None:
        sliver.recorded, sliver.state = False, "deleting"
        self._kernel.call_at(
            self._kernel.now + self._kernel.random.uniform(*DELETE), lambda: self._gone(sliver)
        )

    def _gone(self, sliver: Sliver) -> None:
        if self.slivers.get(sliver.name) is sliver:
            del self.slivers[sliver.name]

    def _renew(self, name: str, expiry: int) -> None:
        self._find(name).expiry = expiry
        self._kernel.call_at(expiry - EPOCH, lambda: self._expire(name))

    def _expire(self, name: str) -> None:
        """Delete a sliver whose lease has ended; it may have been renewed."""
        sliver = self.slivers.get(name)
        if sliver is not None and sliver.recorded and 0 < sliver.expiry - EPOCH <= self._kernel.now:
            self._observer.expired(f"{self.name}/{name}")
            self._end(sliver)


# -- faults


class HostFault(faults.Fault):
    """A fault of a host, with separate random numbers."""

    def apply(self, world: World) -> None:
        host = world.hosts[int(self.pick * len(world.hosts))]
        world.note("host", f"{self.kind} of {host.name}")
        KINDS[self.kind](host)
        world.kernel.call_at(world.kernel.now + self.lasts, host.heal)


def _plan(choice: random.Random, duration: float) -> list[faults.Fault]:
    found: list[faults.Fault] = []
    at, pause = 0.0, choice.choice((4.0, 10.0, 25.0))
    while (at := at + choice.expovariate(1 / pause)) < duration:
        found.append(
            HostFault(
                choice.choice(sorted(KINDS)),
                at,
                choice.choice((1.0, 4.0, 12.0, 40.0)),
                choice.random(),
            )
        )
    return found


def slow(host: Host) -> None:
    host.slowness = 12.0


def lost_answers(host: Host) -> None:
    host.lost_answer = 0.3


def refusals(host: Host) -> None:
    host.refusal = 0.5


def bad_slivers(host: Host) -> None:
    host.failing = 0.5


def reinstall(host: Host) -> None:
    host.stop()
    host.lose()


KINDS: dict[str, Callable[[Host], None]] = {
    "slow": slow,
    "lost_answers": lost_answers,
    "refusals": refusals,
    "bad_slivers": bad_slivers,
    "full": Host.fill,
    "unreachable": Host.disconnect,
    "restart": Host.stop,
    "reinstall": reinstall,
}
