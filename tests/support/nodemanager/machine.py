"""Real slivers for tests: a small cgroup service, a machine that makes slivers, and a check that
nothing stays behind.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nodepool.nodemanager.backends.base import Handle, Services, SliverSpec
from nodepool.nodemanager.backends.native import NativeBackend
from nodepool.nodemanager.helper.zygote import SpawnedProcess, Zygote
from nodepool.nodemanager.kernel import syscalls
from tests.support.deadline import limit
from tests.support.ports import ID_SPAN, id_base

#: Test processes side by side must not take each other's slivers for their own.
ID_BASE = id_base(8)


class SmallCgroups:
    """Memory, processes and freezer, wherever this host has them."""

    def __init__(self) -> None:
        self.root = f"nodepool-nm-test-{ID_BASE}"
        self.hierarchies: dict[str, pathlib.Path] = {}
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind == "cgroup":
                for controller in ("memory", "pids", "freezer"):
                    if controller in options:
                        self.hierarchies[controller] = pathlib.Path(fields[4])
            elif kind == "cgroup2":
                self.hierarchies["unified"] = pathlib.Path(fields[4])

    def paths(self, name: str) -> list[pathlib.Path]:
        return [mount / self.root / name for mount in dict.fromkeys(self.hierarchies.values())]

    def _hand_down(self) -> None:
        """Version 2 gives a group only the controllers that the groups above it pass on."""
        if "unified" in self.hierarchies:
            mount = self.hierarchies["unified"]
            (mount / self.root).mkdir(exist_ok=True)
            for group in (mount, mount / self.root):
                for controller in {"memory", "pids"} & set(
                    (group / "cgroup.controllers").read_text().split()
                ):
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")

    def create(self, name: str, rspec: Mapping[str, Any]) -> list[str]:
        self._hand_down()
        for path in self.paths(name):
            path.mkdir(parents=True, exist_ok=True)
        self.apply(name, rspec)
        return [str(path) for path in self.paths(name)]

    def _file(self, controller: str, name: str, *names: str) -> pathlib.Path | None:
        for hierarchy in (controller, "unified"):
            if hierarchy in self.hierarchies:
                for file in names:
                    path = self.hierarchies[hierarchy] / self.root / name / file
                    if path.exists():
                        return path
        return None

    def apply(self, name: str, rspec: Mapping[str, Any]) -> None:
        if (pids := self._file("pids", name, "pids.max")) is not None:
            pids.write_text(str(rspec.get("nm_pids_max", 1024)))
        memory = self._file("memory", name, "memory.limit_in_bytes", "memory.max")
        if memory is not None and rspec.get("nm_mem_limit"):
            memory.write_text(str(rspec["nm_mem_limit"] << 20))

    def procs_files(self, name: str) -> list[str]:
        return [str(path / "cgroup.procs") for path in self.paths(name)]

    def freeze(self, name: str, frozen: bool) -> None:
        if "freezer" in self.hierarchies:
            path = self.hierarchies["freezer"] / self.root / name / "freezer.state"
            path.write_text("FROZEN" if frozen else "THAWED")
        else:
            (self.hierarchies["unified"] / self.root / name / "cgroup.freeze").write_text(
                str(int(frozen))
            )

    def members(self, name: str) -> list[int]:
        found: set[int] = set()
        for path in self.paths(name):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in (path / "cgroup.procs").read_text().split())
        return sorted(pid for pid in found if pid > 0)

    def kill(self, name: str, deadline: float) -> None:
        end = time.monotonic() + deadline
        while members := self.members(name):
            assert time.monotonic() < end, members
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    select.select([pidfd], [], [], 1)
                    os.close(pidfd)

    def empty(self, name: str) -> bool:
        return not self.members(name)

    def remove(self, name: str) -> None:
        for path in self.paths(name):
            end = time.monotonic() + 5
            while path.exists():
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    assert time.monotonic() < end, path
                    time.sleep(0.001)

    def found(self) -> list[str]:
        for mount in self.hierarchies.values():
            with contextlib.suppress(FileNotFoundError):
                return [entry.name for entry in (mount / self.root).iterdir() if entry.is_dir()]
        return []

    def usage(self, name: str) -> dict[str, int]:
        numbers = {}
        if (
            memory := self._file("memory", name, "memory.usage_in_bytes", "memory.current")
        ) is not None:
            numbers["memory_bytes"] = int(memory.read_text())
        if (pids := self._file("pids", name, "pids.current")) is not None:
            numbers["pids"] = int(pids.read_text())
        return numbers

    def close(self) -> None:
        for mount in dict.fromkeys(self.hierarchies.values()):
            with contextlib.suppress(FileNotFoundError):
                (mount / self.root).rmdir()


@dataclass
class Output:
    status: int | None
    text: str


@dataclass
class Machine:
    """Makes slivers with a real backend and destroys them at the end."""

    backend: Any
    zygote: Zygote
    slivers: dict[str, tuple[SliverSpec, Handle]] = field(default_factory=dict)

    def sliver(self, name: str = "s1", index: int = 1, image: str = "host", **more: Any) -> Sliver:
        spec = SliverSpec(name, index, image, more.pop("rspec", {}), **more)
        return Sliver(self, spec, self.backend.create(spec))

    def close(self) -> None:
        for name in self.backend.found():
            spec, handle = self.slivers.get(name, (None, None))
            self.backend.destroy(name, spec.index if spec else 1, handle)
        self.zygote.stop()


class Sliver:
    """One sliver, and programs in it."""

    def __init__(self, machine: Machine, spec: SliverSpec, handle: Handle) -> None:
        self.machine = machine
        self.backend = machine.backend
        self.spec = spec
        self.handle = handle
        machine.slivers[spec.name] = (spec, handle)

    def keep(self, handle: Handle) -> None:
        self.handle = handle
        self.machine.slivers[self.spec.name] = (self.spec, handle)

    def change(self, **changes: Any) -> None:
        self.spec = replace(self.spec, **changes)
        self.keep(self.handle)

    def start_program(
        self, *argv: str, user: str = "root", stdin: int | None = None, output: int | None = None
    ) -> SpawnedProcess:
        return self.backend.spawn(self.handle, argv, stdin, output, output, user=user).process()

    def run(
        self,
        *argv: str,
        user: str = "root",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Output:
        """Run to the end; both outputs."""
        reading, writing = os.pipe()
        try:
            process = self.backend.spawn(
                self.handle, argv, None, writing, writing, env=env, user=user
            ).process()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with process:
            text = b""
            deadline = time.monotonic() + limit(timeout)
            while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
                data = os.read(reading, 65536)
                if not data:
                    break
                text += data
            os.close(reading)
            ended = process.wait(max(0.1, deadline - time.monotonic()))
            assert ended is not None, f"{argv} does not end: {text[-500:]!r}"
            return Output(ended.status, text.decode(errors="replace"))

    def shell(self, script: str, user: str = "root", timeout: float = 30.0) -> Output:
        return self.run("sh", "-c", script, user=user, timeout=timeout)

    def python(self, program: str, user: str = "root", timeout: float = 30.0) -> Output:
        """The machine's own Python, inside."""
        return self.run("/usr/bin/python3", "-I", "-c", program, user=user, timeout=timeout)

    def destroy(self) -> None:
        self.backend.destroy(self.spec.name, self.spec.index, self.handle)
        self.machine.slivers.pop(self.spec.name, None)


def processes_of(base: int = ID_BASE, span: int = ID_SPAN) -> list[int]:
    """Processes whose user ids are those of slivers of this test process."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                ids = syscalls.uid_range(int(entry))
                if ids is not None and base <= ids[0] < base + span:
                    found.append(int(entry))
    return found


def traces(state: pathlib.Path) -> dict[str, list[str]]:
    """All of a sliver that a host could keep."""
    mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "mounts": [line for line in mounts if str(state) in line],
        "processes": [str(pid) for pid in processes_of()],
        "cgroups": SmallCgroups().found(),
        "slivers": sorted(os.listdir(state / "slivers")) if (state / "slivers").exists() else [],
    }


@contextlib.contextmanager
def machine_at(
    state: pathlib.Path, cgroups: bool = True, factory: Any = NativeBackend
) -> Iterator[Machine]:
    """A machine whose slivers and all their traces are deleted afterwards."""
    zygote = Zygote()
    zygote.start()
    service = SmallCgroups() if cgroups else None
    machine = Machine(factory(state, Services(zygote, cgroups=service, id_base=ID_BASE)), zygote)
    try:
        yield machine
    finally:
        machine.close()
        if service is not None:
            service.close()
    deadline = time.monotonic() + limit(5)
    while any(traces(state).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(traces(state).values()), traces(state)
