"""A whole installation: ZooKeeper, clouds, launchers and Zuul, with faults."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import random
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nodepool.lab.simulation import install
from nodepool.lab.simulation.kernel import Process, SimulationError
from nodepool.lab.simulation.zookeeper import ADDRESS, ZooKeeper
from tests.world import (
    builders,
    capacity,
    faults,
    history,
    hosts,
    lines,
    logins,
    nodemanagers,
    operators,
    probes,
)
from tests.world.cloud import Cloud
from tests.world.explain import Explainer
from tests.world.faulty import FaultyKernel, FaultyNetwork
from tests.world.history import History
from tests.world.observer import Observer
from tests.world.openstack import OpenStack
from tests.world.zuul import Request, Zuul

#: Virtual seconds that a world gets to come to rest after the last fault and the last build.
SETTLING = 900.0
#: The same without faults: less than the periodic checks of the launcher wait.
QUICK_SETTLING = 25.0
#: Seconds between two comparisons of a launcher's queue with its mirror: longer than any world, so
#: that a request whose wake-up is lost is never served.
RESYNC = 86400.0
#: Seconds without an event after which the world is at rest: work in progress is waited for.
CALM = 5.0
#: Longest pause between two min-ready requests for a label whose pools are full.
MIN_READY_BACKOFF = 30.0
#: Servers of a provider that has capacity for whatever is asked for.
ROOM = 99
#: Seconds from submission to fulfillment without faults, when there is capacity: booting takes up
#: to 8 s.
LONGEST_LAUNCH = 15.0

#: How often a thread may read the clock a thousand times without waiting.
MOST_BUSY = 20

#: Of the OpenStack provider, in seconds.
TIMEOUTS: dict[str, Any] = {"launch-timeout": 120, "boot-timeout": 60}


@dataclass
class Scenario:
    """What a seed stands for; everything in it can be made smaller to find the cause of a
    violation.

    :param duration: virtual seconds during which requests arrive and faults happen.
    """

    seed: int
    launchers: int
    duration: float
    providers: list[dict[str, Any]]
    labels: dict[str, int]
    demand: list[Request]
    faults: list[faults.Fault]
    lines: int
    delay: float
    #: Mean seconds that a message takes.
    latency: float
    images: builders.Images = field(default_factory=builders.Images)
    image_actions: list[builders.Action] = field(default_factory=list)
    operations: list[operators.Operation] = field(default_factory=list)
    #: The limit of each tenant in instances.
    tenants: dict[str, int] = field(default_factory=dict)
    #: Seconds after which every held node is deleted; 0: never.
    max_hold_age: int = 0
    #: Labels whose idle nodes are probed -> seconds between two probes.
    probed: dict[str, int] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Without faults, and with capacity for all requests but those for scarce labels:
        everything has to be quick.
        """
        if any(operation.kind in operators.DISTURBING for operation in self.operations):
            return False
        return not self.faults and all(
            provider.get("servers", ROOM) == ROOM
            for provider in self.providers
            if "limit" not in provider
        )

    @property
    def scarce(self) -> set[str]:
        """Labels whose providers may be full."""
        return {
            label
            for provider in self.providers
            if "limit" in provider
            for label in provider["labels"]
        }

    @classmethod
    def from_seed(cls, seed: int, duration: float = 90.0) -> Scenario:
        choice = random.Random(seed)
        # One seed in four has no faults.
        quiet = seed % 4 == 0
        labels: dict[str, int] = {
            "small": choice.choice((0, 1, 3)),
            "large": choice.choice((0, 0, 1)),
        }
        providers: list[dict[str, Any]] = []
        for number in range(choice.choice((1, 1, 2))):
            served = (
                sorted(labels)
                if number == 0
                else choice.choice((["small"], ["large"], ["large", "small"]))
            )
            # There is capacity for the largest request alongside idle nodes.
            servers = max(choice.choice((4, 5, 8, 20)), sum(labels.values()) + 3)
            providers.append({"labels": served, "servers": ROOM if quiet else servers})
        if choice.random() < 0.4:
            # Separate, and with capacity: idle slots keep their backing nodes, and requests would
            # wait for them.
            labels |= {"slot": choice.choice((0, 0, 1)), "backing": 0}
            providers.append({"labels": ["backing"], "servers": ROOM})
            providers.append(
                {"backing": "backing", "slots": choice.choice((2, 3)), "labels": ["slot"]}
            )
        schedulers, wanted = choice.choice((1, 1, 2)), sorted(labels.keys() - {"backing"})
        demand = [
            cls.request(choice, duration, wanted, scheduler)
            for scheduler in range(1, schedulers + 1)
            for _ in range(choice.choice((5, 15, 30)) // schedulers)
        ]
        launchers = choice.choice((1, 2, 2, 3))
        plan = [] if quiet else faults.plan(choice, duration)
        lines, delay = choice.choice((0, 200, 1000)), choice.choice((0.0, 0.002, 0.02))
        latency = choice.choice((0.001, 0.001, 0.01))
        cls._extend(seed, providers, labels, demand)
        tenants = cls._tenants(seed, demand)
        operations = operators.plan(seed, duration, gentle=seed % 8 == 0)
        scenario = cls(
            seed, launchers, duration, providers, labels, demand, plan, lines, delay, latency
        )
        scenario.operations, scenario.tenants = operations, tenants
        builders.extend(scenario)
        capacity.extend(scenario)
        choice = random.Random(f"held {seed}")
        scenario.max_hold_age = choice.choice((10, 20, 60)) if choice.random() < 0.25 else 0
        nodemanagers.extend(scenario)
        probes.extend(scenario)
        return scenario

    @staticmethod
    def _extend(
        seed: int, providers: list[dict[str, Any]], labels: dict[str, int], demand: list[Request]
    ) -> None:
        """Have another driver for the first provider in some seeds, and static hosts in some."""
        choice = random.Random(f"drivers {seed}")
        if choice.random() < 0.2:
            providers[0]["driver"] = "fake"
        if choice.random() < 0.3 and seed % 4:
            labels["metal"] = 0
            hosts = {
                f"host-{number}": choice.choice((1, 2))
                for number in range(1, choice.choice((1, 2, 3)) + 1)
            }
            providers.append({"labels": ["metal"], "hosts": hosts})
            for request in demand:
                if choice.random() < 0.3:
                    request.labels = ["metal"] * choice.randint(1, min(2, sum(hosts.values())))

    @staticmethod
    def _tenants(seed: int, demand: list[Request]) -> dict[str, int]:
        """Have some builds hold their nodes, and give all of them a tenant in some seeds; return
        the limits of the tenants.
        """
        choice = random.Random(f"tenants {seed}")
        # A slot counts with its backing node, and a request of three slots has to fit.
        limits = (
            {"red": choice.choice((6, 7)), "blue": 8} if choice.random() < 0.3 and seed % 4 else {}
        )
        for request in demand:
            request.tenant = choice.choice(sorted(limits)) if limits else None
            if choice.random() < 0.1:
                request.held = choice.choice((0.0, 5.0, 30.0))
        return limits

    @staticmethod
    def request(
        choice: random.Random, duration: float, labels: list[str], scheduler: int
    ) -> Request:
        wanted = [choice.choice(labels) for _ in range(choice.choice((1, 1, 1, 2, 3)))]
        # Half of them arrive in bursts.
        arrives = choice.choice(
            (choice.uniform(0, duration), 10.0 * choice.randrange(max(1, int(duration / 10.0))))
        )
        lasts = choice.choice((0.5, 5.0, 20.0, 60.0))
        request = Request(
            scheduler,
            wanted,
            arrives,
            lasts,
            choice.choice((100, 200, 300)),
            choice.choice((0, 1, 5)),
        )
        if choice.random() < 0.1:
            request.cancelled = choice.uniform(0.01, 10.0)
        if choice.random() < 0.1:
            request.reprioritized = choice.uniform(0.01, 10.0)
        return request


@dataclass
class Result:
    seed: int
    violations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    #: Equal for equal runs.
    digest: str = ""
    virtual: float = 0.0
    cpu: float = 0.0
    requests: int = 0
    faults: int = 0
    switches: int = 0
    #: Who had which node; see :mod:`tests.world.history`.
    history: list[history.Entry] = field(default_factory=list)


class Launcher:
    """A process that runs a launcher."""

    def __init__(self, world: World, number: int) -> None:
        self.name = f"launcher-{number}"
        self._world = world
        self.process: Process = world.kernel.process(self.name)
        self.pool: Any = None

    def start(self) -> None:
        self.process = self._world.kernel.process(self.name)
        self.pool = None
        self._world.kernel.spawn(self._run, process=self.process)

    def _run(self) -> None:
        from nodepool.launcher import NodePool, verification
        from nodepool.launcher.requests import assignment

        assignment.RESYNC = RESYNC
        if self._world.scenario.images.verified:
            verification.RESYNC = RESYNC

        def main() -> None:
            pool: Any = NodePool(None, self._world.config_file)
            pool.cleanup_interval = 5
            self.pool = pool
            pool.start()

        threading.Thread(target=main, name="main").start()


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.kernel = FaultyKernel(scenario.seed, lines=scenario.lines, delay=scenario.delay)
        self.kernel.on_busy_loop = self._busy
        #: How often threads have read the clock many times without waiting.
        self._busy_loops: Counter[str] = Counter()
        self.network = FaultyNetwork(self.kernel, mean=scenario.latency)
        install.begin(self.kernel, self.network)
        lines.begin()
        builders.begin()
        self.events: list[str] = []
        self.violations: list[str] = []
        #: When the last event was.
        self.noted = 0.0
        #: Seconds that a wall clock has been wrong by at most.
        self.skew = 0.0
        self._digest = hashlib.sha256()
        self.history = History(self.kernel)
        self.observer = Observer(self)
        logins.on_login = self.observer.logged_in
        probes.probed = set(scenario.probed)
        self.zookeeper = ZooKeeper(self.kernel, self.network, self.observer.changed)
        self.clouds: list[Cloud | OpenStack] = []
        #: Those that run node managers.
        self.hosts: list[nodemanagers.Host] = []
        self.config_file = "nodepool.yaml"
        self.operators = operators.Operators(self, self._configuration(), self.config_file)
        self.capacity = capacity.Capacity(self)
        self.explainer = Explainer(self)
        self.launchers = [Launcher(self, number) for number in range(1, scenario.launchers + 1)]
        self.builders = [
            builders.Builder(self, number) for number in range(1, scenario.images.builders + 1)
        ]
        demand: dict[int, list[Request]] = {}
        for request in sorted(scenario.demand, key=lambda request: request.scheduler):
            demand.setdefault(request.scheduler, []).append(request)
        self.zuuls = [
            Zuul(self.kernel, f"zuul-{number}", requests, self.note, self.history)
            for number, requests in demand.items()
        ]

    @property
    def image_clouds(self) -> list[Cloud]:
        return [cloud for cloud in self.clouds if isinstance(cloud, Cloud)]

    def _configuration(self) -> dict[str, Any]:
        """Create the clouds, and return the content of the configuration file."""
        scenario = self.scenario
        providers: list[dict[str, Any]] = []
        for number, provider in enumerate(scenario.providers):
            pool: dict[str, Any] = {"name": "main"}
            if "backing" in provider:
                pool["labels"] = [
                    {
                        "name": label,
                        "backing-label": provider["backing"],
                        "max-parallel-jobs": provider["slots"],
                        "grace-time": 5,
                        "host-key-checking": False,
                    }
                    for label in provider["labels"]
                ]
                providers.append(
                    {"name": f"provider-{number}", "driver": "metastatic", "pools": [pool]}
                )
                continue
            if "hosts" in provider:
                hosts.hosts.update(dict.fromkeys(provider["hosts"], True))
                pool["nodes"] = [
                    {
                        "name": name,
                        "labels": provider["labels"],
                        "max-parallel-jobs": slots,
                        "timeout": 2,
                        "connection-type": hosts.CONNECTION,
                        "connection-port": hosts.PORT,
                    }
                    for name, slots in provider["hosts"].items()
                ]
                entry: dict[str, Any] = {
                    "name": f"provider-{number}",
                    "driver": "static",
                    "pools": [pool],
                }
                if provider.get("priority") is not None:
                    entry["priority"] = provider["priority"]
                providers.append(entry)
                continue
            if "slivers" in provider:
                self.hosts += [
                    nodemanagers.Host(name, slots, self.kernel, self.network, self.observer)
                    for name, slots in provider["slivers"].items()
                ]
                providers.append(nodemanagers.configure(f"provider-{number}", provider))
                continue
            quota = provider["servers"] + (0 if provider.get("limit") == capacity.QUOTA else 2)
            observer = self.observer
            fake = provider.get("driver") == "fake"
            cloud_type: type[Cloud | OpenStack] = OpenStack if fake else Cloud
            cloud = cloud_type(
                f"cloud-{number}",
                self.kernel,
                quota,
                (0.5, 8.0),
                observer.created,
                observer.destroyed,
            )
            if isinstance(cloud, Cloud):
                cloud.image_gone = observer.images.gone
                cloud.quality = self._quality
            self.clouds.append(cloud)
            pool |= {"labels": provider["labels"], "max-servers": provider["servers"]}
            entry = {
                "name": f"provider-{number}",
                "driver": "simulated",
                "cloud-dir": cloud.name,
                "pools": [pool],
            }
            if fake:
                labels = [
                    {"name": label, "cloud-image": "image", "min-ram": 1024}
                    for label in provider["labels"]
                ]
                pool |= {"labels": labels, "host-key-checking": False}
                images = [{"name": "image", "image-id": "fake-image-id"}]
                entry = {
                    "name": entry["name"],
                    "driver": "fake",
                    "cloud": cloud.name,
                    "cloud-images": images,
                    "pools": [pool],
                }
                entry |= TIMEOUTS
            if "limit" in provider:
                capacity.configure(provider, entry, pool)
            # Machines of these clouds fail in rows, and requests would wait until an hour is over.
            entry["max-launch-failures-per-hour"] = 0
            providers.append(entry)
        config: dict[str, Any] = {
            "zookeeper-servers": [{"host": ADDRESS[0], "port": ADDRESS[1]}],
            "zookeeper-insecure": True,
            "labels": [
                {"name": name, "min-ready": count} for name, count in scenario.labels.items()
            ],
            "providers": providers,
            "tenant-resource-limits": [
                {"tenant-name": name, "max-servers": limit}
                for name, limit in scenario.tenants.items()
            ],
        }
        if scenario.max_hold_age:
            config["max-hold-age"] = scenario.max_hold_age
        builders.configure(scenario, config)
        probes.configure(scenario, config)
        return config

    def _quality(self) -> str | None:
        """Return how the next image is broken."""
        images, choice = self.scenario.images, self.kernel.random
        if images.broken and choice.random() < images.broken:
            return choice.choice(logins.KINDS)
        return None

    # -- what is seen

    def _busy(self) -> None:
        name = f"{self.kernel.running_process.name}: {threading.current_thread().name}"
        self._busy_loops[name] += 1
        if self._busy_loops[name] == MOST_BUSY:
            self.violated(f"thread {name} loops without waiting")

    def note(self, kind: str, text: str) -> None:
        """Add an event to the story of this run."""
        self.noted = self.kernel.now
        line = f"{self.kernel.now:9.3f} {kind:<8} {text}"
        self.events.append(line)
        self._digest.update(line.encode() + b"\n")
        if kind == "stuck":
            self.violated(text)

    def violated(self, text: str) -> None:
        self.violations.append(text)
        self.events.append(f"{self.kernel.now:9.3f} VIOLATED {text}")

    # -- running

    def run(self) -> Result:
        began = time_of_cpu()
        result = Result(self.scenario.seed)
        try:
            with (
                _logging(self),
                contextlib.redirect_stdout(io.StringIO()) as out,
                contextlib.redirect_stderr(out),
            ):
                self.kernel.run(self._main, until=self.scenario.duration + 4 * SETTLING)
        except SimulationError as error:
            self.violated(str(error))
        result.violations, result.events = self.violations, self.events
        result.history = self.history.entries()
        self._digest.update(str(self.kernel.trace).encode())
        result.digest = self._digest.hexdigest()
        result.virtual, result.cpu = self.kernel.now, time_of_cpu() - began
        result.requests = sum(zuul.ended for zuul in self.zuuls)
        result.faults, result.switches = len(self.scenario.faults), self.kernel.switches
        return result

    def _main(self) -> None:
        for launcher in self.launchers:
            launcher.start()
        builders.start(self)
        for zuul in self.zuuls:
            zuul.start()
        for fault in sorted(
            [*self.scenario.faults, *self.scenario.operations], key=lambda fault: fault.at
        ):
            delay = fault.at - self.kernel.now
            if delay > 0:
                self.kernel.sleep(delay)
            self.note("fault" if type(fault) is faults.Fault else "operate", str(fault))
            fault.apply(self)
        self.kernel.sleep(max(0.0, self.scenario.duration - self.kernel.now))
        faults.heal(self)
        builders.heal(self)
        self.operators.heal()
        self.note("healed", "no more faults")
        limit = self.kernel.now + 2 * SETTLING
        while not all(zuul.done for zuul in self.zuuls) and self.kernel.now < limit:
            self.operators.tidy()
            self.kernel.sleep(1.0)
        for zuul in self.zuuls:
            if not zuul.done:
                self.violated(
                    f"builds of {zuul.name} have not ended {2 * SETTLING:.0f} s after the last "
                    "fault"
                )
            zuul.forget_killed()
        settling = (
            QUICK_SETTLING + (MIN_READY_BACKOFF if self.scenario.scarce else 0.0)
            if self.scenario.quiet
            else SETTLING
        )
        limit = max(self.kernel.now, self.observer.last_expiry()) + settling
        while (wrong := self.observer.at_rest()) and (
            self.kernel.now < limit
            or (self.kernel.now - self.noted < CALM and self.kernel.now < limit + SETTLING)
        ):
            self.operators.tidy()
            self.kernel.sleep(5.0)
        for text in wrong:
            self.violated(f"at rest: {text}")
        for zuul in self.zuuls if self.scenario.quiet else ():
            for seconds, request in zuul.latencies:
                if seconds > LONGEST_LAUNCH and not self.scenario.scarce.intersection(
                    request.labels
                ):
                    self.violated(
                        f"a request for {request.labels} at {request.arrives:.1f} s took "
                        f"{seconds:.1f} s"
                    )
        self.observer.at_end()


class _Recorder(logging.Handler):
    """Every record is formatted in every run, so that a verbose run is the same run."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        kernel = self._world.kernel
        kernel.quiet += 1
        try:
            text = (
                f"{record.levelname} {kernel.running_process.name} {record.name}: "
                f"{record.getMessage()}"
            )
            if record.exc_info and record.exc_info[0] is not None:
                text += f" [{record.exc_info[0].__name__}: {record.exc_info[1]}]"
            self._world.observer.logged(record, text)
        finally:
            kernel.quiet -= 1


@contextlib.contextmanager
def _logging(world: World) -> Iterator[None]:
    root = logging.getLogger()
    handler = _Recorder(world)
    before, root.handlers[:] = list(root.handlers), [handler]
    root.setLevel(logging.DEBUG)
    # Nothing shows where in the program a message was logged, nor its thread.
    vars(logging).update(
        _srcfile=None, logThreads=False, logProcesses=False, logMultiprocessing=False
    )
    threading.excepthook = lambda args: world.violated(
        f"a thread ended: {args.thread and args.thread.name}: "
        f"{''.join(traceback.format_exception(args.exc_value))}"
    )
    try:
        yield
    finally:
        root.handlers[:] = before


def time_of_cpu() -> float:
    used = os.times()
    return used.user + used.system
