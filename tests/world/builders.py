"""Builders, and the machines that they run on: programs, files and full disks.

The builder runs unchanged, on real files below the directory of the run. What it asks its machine
for is replaced: the image-building command, the process table, mounts and free space.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from nodepool.builder.building.process import ProcessResult
from nodepool.builder.machine.processes import MARKER_VARIABLE, Origin
from nodepool.builder.machine.processes import Process as Found
from nodepool.lab.simulation.kernel import EPOCH, Process, Task, current
from tests.world import faults, verifications

if TYPE_CHECKING:
    from tests.world.cloud import Cloud
    from tests.world.world import Scenario, World

#: The part of the seeds that has builders.
SHARE = 0.3
#: Seconds that a build takes, at least and at most.
BUILD = (0.5, 3.0)
#: Where all builders have their temporary trees.
TEMPORARY = "tmp"
#: Seconds after which the system starts a builder again that could not start.
RESTART = 5.0


@dataclass
class Action:
    """What an operator does.

    :param kind: build, pause, unpause, delete-upload, delete-build, edit, rollback or rollforward.
    :param pick: selects among the uploads or builds that exist at that time, or a rebuild-age; from
        0 to 1.
    """

    kind: str
    image: str
    at: float
    pick: float


@dataclass
class Images:
    """What a scenario has of disk images.

    :param builders: how many there are.
    :param workers: build workers of each.
    :param uploaders: upload workers of each.
    :param ages: images, and the age in seconds at which they are built again.
    :param hook: providers have a program that runs after uploads.
    :param thrifty: image files are deleted after their uploads.
    :param verified: launchers try new uploads before they use them.
    :param broken: the part of the uploads that do not work.
    """

    builders: int = 0
    uploaders: int = 0
    ages: dict[str, int] = field(default_factory=dict)
    hook: bool = False
    thrifty: bool = False
    workers: int = 1
    verified: bool = False
    broken: float = 0.0


def extend(scenario: Scenario) -> None:
    """Add builders, images, labels and requests for them to some scenarios."""
    choice = random.Random(f"images {scenario.seed}")
    if choice.random() >= SHARE:
        return
    quiet, duration = not scenario.faults, scenario.duration
    names = ["debian", "fedora-40"][: choice.choice((1, 1, 2))]
    ages = {name: choice.choice((30, 45, 90, 600)) for name in names}
    scenario.images = Images(
        choice.choice((1, 2)),
        choice.choice((1, 2, 4)),
        ages,
        choice.random() < 0.3,
        choice.random() < 0.3,
    )
    labels = {f"{name}-node": choice.choice((0, 1)) for name in names}
    scenario.labels |= labels
    for _ in range(choice.choice((1, 1, 2))):
        servers = 99 if quiet else choice.choice((8, 20))
        scenario.providers.append({"labels": sorted(labels), "servers": servers, "images": names})
    if not quiet:
        scenario.faults = sorted(
            [*scenario.faults, *_plan(choice, duration)], key=lambda fault: fault.at
        )
    scheduler = scenario.demand[0].scheduler
    for _ in range(choice.choice((2, 4, 6))):
        request = scenario.request(choice, duration, sorted(labels), scheduler)
        # Without faults an image is there by then; before, requests are declined.
        request.arrives = max(request.arrives, 20.0) if quiet else request.arrives
        scenario.demand.append(request)
    kinds = (
        ("build", "build", "pause", "unpause")
        if quiet
        else ("build", "pause", "unpause", "delete-upload", "delete-build")
    )
    actions = [
        Action(
            choice.choice(kinds),
            choice.choice(names),
            choice.uniform(0.0, duration),
            choice.random(),
        )
        for _ in range(choice.choice((0, 2, 4)))
    ]
    # With separate random numbers: seeds without either remain what they are.
    more = random.Random(f"builders {scenario.seed}")
    scenario.images.workers = more.choice((1, 1, 2))
    if not quiet and more.random() < 0.5:
        actions += [
            Action("edit", more.choice(names), more.uniform(0.0, duration), more.random())
            for _ in range(3)
        ]
    rolls = random.Random(f"rollbacks {scenario.seed}")
    if rolls.random() < 0.5:
        actions += [
            Action(
                rolls.choice(("rollback", "rollback", "rollforward")),
                rolls.choice(names),
                rolls.uniform(duration / 2, duration),
                rolls.random(),
            )
            for _ in range(3)
        ]
    scenario.image_actions = sorted(actions, key=lambda action: action.at)
    verifications.extend(scenario)


def configure(scenario: Scenario, config: dict[str, Any]) -> None:
    """Add images to the configuration, and write those of the builders."""
    images = scenario.images
    if not images.builders:
        return
    config["diskimages"] = [
        {
            "name": name,
            "rebuild-age": age,
            "build-timeout": 20,
            "delete-after-upload": images.thrifty,
        }
        for name, age in images.ages.items()
    ]
    if images.verified:
        verifications.configure(config["diskimages"])
    for provider, options in zip(scenario.providers, config["providers"], strict=True):
        if "images" in provider:
            options["diskimages"] = [{"name": name} for name in provider["images"]]
            options["pools"][0]["labels"] = [
                {"name": label, "diskimage": label.removesuffix("-node")}
                for label in provider["labels"]
            ]
            if images.hook:
                options["post-upload-hook"] = "/usr/local/bin/hook"
    Path(TEMPORARY).mkdir()
    for number in range(1, images.builders + 1):
        directory = Path(f"builder-{number}")
        (directory / "images").mkdir(parents=True)
        own = {
            "images-dir": f"{directory}/images",
            "build-log-dir": f"{directory}/logs",
            "build-log-retention": 2,
        }
        Path(f"{directory}.yaml").write_text(yaml.safe_dump(config | own))


class Builder:
    """A process that runs a builder."""

    def __init__(self, world: World, number: int) -> None:
        self.name = f"builder-{number}"
        self._world = world
        self.process: Process = world.kernel.process(self.name)
        self.service: Any = None

    def start(self) -> None:
        self.process, self.service = self._world.kernel.process(self.name), None
        self._world.kernel.spawn(
            threading.Thread(target=self._run, name="main").start, process=self.process
        )

    def _run(self) -> None:
        from nodepool.builder import NodePoolBuilder

        images = self._world.scenario.images
        service: Any = NodePoolBuilder(f"{self.name}.yaml", None, images.workers, images.uploaders)
        service.cleanup_interval = 5
        try:
            service.start()
        except Exception as error:
            self._ended(error)
        self.service = service

    def _ended(self, error: Exception) -> None:
        """The daemon ends when it cannot start."""
        world, process = self._world, self.process
        world.note("exit", f"{self.name}: {type(error).__name__}")
        if world.scenario.quiet:
            world.violated(f"{self.name} cannot start: {error}")
        world.kernel.call_at(
            world.kernel.now + RESTART, lambda: self.start() if self.process is process else None
        )
        world.kernel.kill(process)


# -- faults


class BuilderFault(faults.Fault):
    """A fault of builders, of their machines or of the clouds that have images."""

    def apply(self, world: World) -> None:
        KINDS[self.kind](world, self)


def _plan(choice: random.Random, duration: float) -> list[faults.Fault]:
    found: list[faults.Fault] = []
    at, pause = 0.0, choice.choice((4.0, 10.0, 25.0))
    while (at := at + choice.expovariate(1 / pause)) < duration:
        lasts = choice.choice((0.05, 1.0, 4.0, 12.0, 25.0))
        found.append(BuilderFault(choice.choice(sorted(KINDS)), at, lasts, choice.random()))
    return found


def _builder(world: World, fault: faults.Fault) -> Builder:
    return world.builders[int(fault.pick * len(world.builders))]


def _cloud(world: World, fault: faults.Fault) -> Cloud:
    """A cloud that has images."""
    found = [
        cloud
        for cloud in world.image_clouds
        if "images" in world.scenario.providers[int(cloud.name.rpartition("-")[2])]
    ]
    return found[int(fault.pick * len(found))]


def _strike(
    world: World, fault: faults.Fault, kind: Callable[[World, faults.Fault, Builder | Any], None]
) -> None:
    """Do it to the builder that writes the next record of an image, up to 0.3 s later."""

    def strike(name: str) -> None:
        [victim] = [builder for builder in world.builders if builder.name == name]
        digits = fault.pick * 1000 % 1
        world.kernel.call_at(world.kernel.now + 0.3 * digits**2, lambda: kind(world, fault, victim))

    world.observer.images.strikes.append(strike)


def kill_at_work(world: World, fault: faults.Fault) -> None:
    _strike(world, fault, faults.kill_process)


def pause_at_work(world: World, fault: faults.Fault) -> None:
    _strike(world, fault, faults.pause_process)


def isolate_at_work(world: World, fault: faults.Fault) -> None:
    _strike(world, fault, faults.isolate_process)


def stop(world: World, fault: faults.Fault) -> None:
    """Stop a builder in order and start it again."""
    builder = _builder(world, fault)
    process, service = builder.process, builder.service
    if not process.alive or service is None:
        return
    world.note("stop", builder.name)

    def run() -> None:
        service.stop(fault.pick * 100 % 1 < 0.5)
        world.note("stopped", builder.name)
        world.kernel.call_at(
            world.kernel.now + fault.lasts,
            lambda: builder.start() if builder.process is process else None,
        )
        world.kernel.kill(process)

    world.kernel.spawn(threading.Thread(target=run, name="stop").start, process=process)


def disk_full(world: World, fault: faults.Fault) -> None:
    name = _builder(world, fault).name
    machine.full[name] = None
    world.kernel.call_at(world.kernel.now + fault.lasts, lambda: machine.full.pop(name, None))


def bad_builds(world: World, fault: faults.Fault) -> None:
    machine.failing = 0.5

    def heal() -> None:
        machine.failing = 0.0

    world.kernel.call_at(world.kernel.now + fault.lasts, heal)


def image_errors(world: World, fault: faults.Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.refusal = 0.5
    world.kernel.call_at(world.kernel.now + fault.lasts, cloud.heal)


def image_silence(world: World, fault: faults.Fault) -> None:
    cloud = _cloud(world, fault)
    cloud.lost_answer = 0.5
    world.kernel.call_at(world.kernel.now + fault.lasts, cloud.heal)


KINDS: dict[str, Callable[[World, faults.Fault], None]] = {
    function.__name__: function
    for function in (
        kill_at_work,
        pause_at_work,
        isolate_at_work,
        stop,
        disk_full,
        bad_builds,
        image_errors,
        image_silence,
    )
}


def heal(world: World) -> None:
    """End all faults that last."""
    world.scenario.images.broken = 0.0
    world.observer.images.strikes.clear()
    machine.full.clear()
    machine.failing = 0.0
    for image, age in world.scenario.images.ages.items():
        edit(world, image, age)


def edit(world: World, image: str, age: int) -> None:
    """Change the rebuild-age of an image in the configuration files of all builders."""
    for builder in world.builders:
        path = f"{builder.name}.yaml"
        config = yaml.safe_load(Path(path).read_text())
        [options] = [options for options in config["diskimages"] if options["name"] == image]
        if options["rebuild-age"] != age:
            options["rebuild-age"] = age
            Path(path).write_text(yaml.safe_dump(config))
            stamp = int((EPOCH + world.kernel.now) * 1_000_000_000)
            os.utime(path, ns=(stamp, stamp))


# -- the machine


class Machine:
    """What runs on the machines of all builders, and which of their disks are full.

    :param failing: probability that a build fails, hangs or omits the image.
    """

    def __init__(self) -> None:
        self.programs: dict[int, Program] = {}
        self.full: dict[str, None] = {}
        self.failing = 0.0

    def is_full(self) -> bool:
        return current().running_process.name in self.full


machine = Machine()


def _no_space(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Program:
    """The image-building command; it outlives a builder that is killed."""

    def __init__(
        self,
        args: Sequence[str],
        marker: str,
        output: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        kernel = current()
        self.builder = kernel.running_process.name
        self.marker = marker
        self.process = kernel.process(f"{self.builder}-build")
        self._output, self._ended = output, ended
        self.base = args[args.index("-o") + 1]
        self.formats = args[args.index("-t") + 1].split(",")
        self.status: int | None = None
        machine.programs[self.process.pid] = self
        kernel.spawn(self._run, process=self.process)

    def _run(self) -> None:
        kernel = current()
        failing, seconds = kernel.random.random() < machine.failing, kernel.random.uniform(*BUILD)
        self._output("dib-run-parts Running /tmp/dib/root.d")
        kernel.sleep(seconds / 2)
        os.makedirs(f"{self.base}.d", exist_ok=True)
        Path(f"{self.base}.d", "manifest").write_text("packages")
        self._output("dib-run-parts Running /tmp/dib/finalise.d")
        if failing and kernel.random.random() < 0.3:
            kernel.sleep(3600.0)
        Path(f"{self.base}.{self.formats[0]}.tmp").write_text("a part")
        kernel.sleep(seconds / 2)
        if failing or self.builder in machine.full:
            self._output("No space left on device")
            self._end(1)
            return
        os.unlink(f"{self.base}.{self.formats[0]}.tmp")
        for each in self.formats:
            Path(f"{self.base}.{each}").write_text("image")
            for kind, length in (("md5", 32), ("sha256", 64)):
                Path(f"{self.base}.{each}.{kind}").write_text("0" * length)
        self._end(0)

    def _end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            del machine.programs[self.process.pid]
            self._ended()

    def kill(self, number: int) -> None:
        self._end(-number)
        current().kill(self.process)


class SimulatedBuildProcess:
    """As :class:`nodepool.builder.building.process.BuildProcess`."""

    def __init__(
        self,
        args: Sequence[str],
        environment: Mapping[str, str],
        log_file: BinaryIO,
        on_line: Callable[[str], object],
        secrets: Iterable[str] = (),
    ) -> None:
        self._args, self._marker = list(args), environment[MARKER_VARIABLE]
        self._log_file, self._on_line = log_file, on_line
        self._lines: list[str] = []
        self._program: Program | None = None
        self._reason: str | None = None
        self._task: Task | None = None
        self._began = 0.0
        self.pid: int | None = None

    def start(self) -> None:
        self._began = current().now
        self._program = Program(self._args, self._marker, self._output, self._wake)
        self.pid = self._program.process.pid

    def _output(self, line: str) -> None:
        self._lines.append(line)
        self._wake()

    def _wake(self) -> None:
        if self._task is not None:
            current().wake(self._task)

    def terminate(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._wake()

    def wait(self, deadline_monotonic: float) -> ProcessResult:
        kernel, program = current(), self._program
        assert program is not None
        self._task = kernel.task
        timed_out = False
        while program.status is None and self._reason is None and not timed_out:
            if not self._lines:
                timed_out = not kernel.park(deadline_monotonic)
            while self._lines:
                self._on_line(self._lines.pop(0))
        while self._lines:
            self._on_line(self._lines.pop(0))
        reason = self._reason if program.status is None else None
        if program.status is None:
            program.kill(15)
        if not machine.is_full():
            self._log_file.write(f"Exit code: {program.status}\n".encode())
        return ProcessResult(
            program.status, timed_out and reason is None, reason, kernel.now - self._began
        )


def _find(origin: Origin) -> list[Found]:
    return [
        Found(pid, 1, pid, pid)
        for pid, program in machine.programs.items()
        if program.marker == origin.marker
    ]


def _read_process(pid: int) -> Found | None:
    return Found(pid, 1, pid, pid) if pid in machine.programs else None


def _signal_all(found: list[Found], number: int, _until: float) -> None:
    for each in found:
        if each.pid in machine.programs and number != signal.SIGSTOP:
            machine.programs[each.pid].kill(int(number))


def _free_bytes(_path: str) -> int:
    return 0 if machine.is_full() else 2**40


def _run_hook(args: Sequence[str], _timeout: float) -> tuple[int, str]:
    kernel = current()
    kernel.sleep(kernel.random.uniform(0.0, 1.0))
    return int(kernel.random.random() < machine.failing), ""


def replace_machine() -> None:
    """Put these functions in place of those that ask the machine. Call it once, before the first
    run.
    """
    # The environment of the image-building command depends on where this program is.
    os.environ.clear()
    os.environ["PATH"] = "/usr/bin:/bin"
    sys.executable = "/usr/bin/python3"
    from nodepool.builder.building import process, run
    from nodepool.builder.machine import build_journal, image_files, mounts, processes

    real_mkstemp, real_open_log, real_acquire = (
        tempfile.mkstemp,
        image_files.open_log,
        build_journal.acquire_images_dir,
    )
    real_listdir, real_entries = os.listdir, vars(image_files)["_entries"]

    def mkstemp(*arguments: Any, **named: Any) -> tuple[int, str]:
        if machine.is_full():
            raise _no_space(str(named.get("dir")))
        return real_mkstemp(*arguments, **named)

    def open_log(path: str) -> BinaryIO:
        if machine.is_full():
            raise _no_space(path)
        return real_open_log(path)

    def acquire_images_dir(images_dir: str) -> Any:
        """The kernel releases the lock of a killed process."""
        lock = real_acquire(images_dir)
        current().running_process.at_exit[lock.close] = None
        return lock

    replaced: list[tuple[Any, str, Any]] = [
        (run, "BuildProcess", SimulatedBuildProcess),
        (process, "run_hook", _run_hook),
        (processes, "find", _find),
        (processes, "read_process", _read_process),
        (processes, "signal_all", _signal_all),
        (processes, "run_privileged", lambda command, timeout=0.0: f"{command[0]}: not simulated"),
        (mounts, "run_privileged", lambda command, timeout=0.0: f"{command[0]}: not simulated"),
        (mounts, "mount_points", lambda directories: []),
        (mounts, "loop_devices", lambda wanted: []),
        (image_files, "free_bytes", _free_bytes),
        # Depends on the file system that the simulation runs on.
        (image_files, "close_to_others", lambda directory: None),
        (image_files, "open_log", open_log),
        (build_journal, "acquire_images_dir", acquire_images_dir),
        (tempfile, "mkstemp", mkstemp),
        # Machines lose no power.
        (os, "fsync", lambda descriptor: None),
        # The order of a directory depends on its file system.
        (os, "listdir", lambda *path: sorted(real_listdir(*path))),
        (
            image_files,
            "_entries",
            lambda directory: sorted(real_entries(directory), key=lambda entry: str(entry.name)),
        ),
    ]
    for module, name, value in replaced:
        vars(module)[name] = value


def begin() -> None:
    """Begin a run with machines on which nothing runs."""
    global machine
    machine = Machine()
    vars(tempfile)["_name_sequence"] = map("{:08}".format, itertools.count(1))
    os.environ["TMPDIR"] = TEMPORARY


def start(world: World) -> None:
    """Start the builders and their operator."""
    for builder in world.builders:
        builder.start()
    if world.scenario.image_actions:
        Operator(world).start()


# -- operators


class Operator:
    """Carries out the actions of a scenario."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting = list(world.scenario.image_actions)

    def start(self) -> None:
        kernel = self._world.kernel
        kernel.spawn(
            threading.Thread(target=self._run, name="operator").start,
            process=kernel.process("operator"),
        )

    def _run(self) -> None:
        from kazoo.client import KazooClient

        from nodepool.lab.simulation.zookeeper import ADDRESS
        from tests.world.zuul import LOST

        kernel = self._world.kernel
        client: Any = KazooClient(f"{ADDRESS[0]}:{ADDRESS[1]}", timeout=10.0)
        client.start(timeout=3600)
        while self._waiting:
            action = self._waiting[0]
            kernel.sleep(max(0.0, action.at - kernel.now))
            try:
                self._act(client, action)
            except LOST:
                kernel.sleep(1.0)
                continue
            self._waiting.pop(0)
        client.stop()

    def _act(self, client: Any, action: Action) -> None:
        from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

        image = f"/nodepool/images/{action.image}"
        self._world.note("operator", f"{action.kind} {action.image}")
        try:
            if action.kind == "build":
                client.create(f"{image}/request-build", makepath=True)
            elif action.kind == "pause":
                client.create(f"{image}/pause", makepath=True)
            elif action.kind == "unpause":
                client.delete(f"{image}/pause")
            elif action.kind.startswith("roll"):
                self._roll(action)
            elif action.kind == "edit":
                edit(self._world, action.image, (5, 20, 600)[int(action.pick * 3)])
            else:
                self._delete(client, action)
        except (NodeExistsError, NoNodeError, BadVersionError):
            pass

    def _roll(self, action: Action) -> None:
        """Roll back or forward as the commands do."""
        from nodepool.lab.simulation.zookeeper import ADDRESS
        from nodepool.zk import ZooKeeperClient
        from nodepool.zk.rollback import RollbackRefused, Rollbacks
        from nodepool.zk.zookeeper import ZooKeeper

        client = ZooKeeperClient(f"{ADDRESS[0]}:{ADDRESS[1]}", timeout=10.0, insecure=True)
        client.connect(timeout=3600)
        rollbacks = Rollbacks(ZooKeeper(client, enable_cache=False), time.time)
        try:
            if action.kind == "rollback":
                result = rollbacks.back(action.image, None, "operator", "world")
            else:
                result = rollbacks.forward(action.image, None)
        except RollbackRefused as refused:
            self._world.note("operator", f"{action.kind} refused: {refused}")
        else:
            self._world.note("operator", f"{action.kind} {len(result.changed)}")
        finally:
            client.disconnect()

    def _delete(self, client: Any, action: Action) -> None:
        """Mark a record as the commands ``image-delete`` and ``dib-image-delete`` do."""
        images = self._world.observer.images
        records = images.uploads if action.kind == "delete-upload" else images.builds
        paths = sorted(
            path for path in records if path.startswith(f"/nodepool/images/{action.image}/")
        )
        if paths:
            path = paths[int(action.pick * len(paths))]
            data, stat = client.get(path)
            record = json.loads(data)
            if record["state"] not in ("building", "uploading", "deleting"):
                client.set(
                    path, json.dumps(record | {"state": "deleting"}).encode(), version=stat.version
                )
