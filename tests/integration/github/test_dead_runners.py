"""Runners that die while they are idle, or while they have a job: how long the next job waits.

Constants are those of the daemon. The scale sets of a test run at the same time.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from nodepool.adapters.github.program import GitHub
from nodepool.adapters.runners import runner
from nodepool.client import Pool
from tests.conftest import wait_for
from tests.integration.github.conftest import Site
from tests.integration.lease.conftest import places
from tests.support.deadline import limit
from tests.support.github import Emulator, Program
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer

pytestmark = [pytest.mark.github, pytest.mark.exhaustive]
#: Seconds in which the next job has to start, and after which the measurement ends.
TARGET, LONGEST = 90.0, 150.0
#: How runners die: idle ones, those that start, those whose job the forge has ended, and those
#: whose job it does not end.
IDLE, START, JOB, LOST = (
    ("killed", "unreachable", "hung, online", "hung, offline", "hung, unknown"),
    ("fails 4 times",),
    ("hung until its job ended",),
    ("killed with a job", "unreachable with a job", "record lost with a job"),
)
PLACES = 24


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, PLACES, per_owner=PLACES) as made:
        yield made


@pytest.fixture
def site(tmp_path: pathlib.Path, pool: Pool, service: Emulator, program: Program) -> Iterator[Site]:
    """With the constants of the daemon, unlike other tests."""
    made = Site(tmp_path, pool, service, program)
    try:
        yield made
    finally:
        made.stop()
        for lease in pool.leases():
            lease.give_back()
        # Runners that hang, or whose nodes do not answer, end with nobody else.
        subprocess.run(["pkill", "-KILL", "-f", f"{tmp_path}/"], check=False, timeout=30)


@dataclass
class Scenario:
    """One scale set.

    :ivar waited: seconds until a job has started; None: it has not.
    :ivar erase: removes the record of a node.
    """

    kind: str
    least: int
    most: int
    program: Program
    waited: float | None = None
    erase: Callable[[str], object] | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return f"set-{self.least}-{self.most}"

    def run(self, daemon: GitHub, service: Emulator) -> None:
        one = next(each for each in daemon.sets if each.name == self.name)
        wait_for(lambda: self._session(service), 60, "a session")
        began = time.monotonic()
        if self.kind in START:
            self.program.behave(early=1)
            number = self._job(service)
            wait_for(lambda: len(self.program.started()) >= 4, LONGEST, "failures")
            self.program.behave()
        elif self.kind in JOB + LOST:
            self.program.behave(seconds=3600)
            firsts = [self._job(service) for _ in range(1 if self.kind in JOB else self.most)]
            wait_for(
                lambda: all(self._state(service, each) == "running" for each in firsts),
                60,
                "the first jobs",
            )
            victims = wait_for(
                lambda: (
                    found
                    if len(found := [each for each in one.fleet.runners() if each.had_job])
                    == len(firsts)
                    else None
                ),
                60,
            )
            self.program.behave()
            for victim in victims:
                self._lose(victim)
            if self.kind in JOB:
                service.call("POST", f"/jobs/{firsts[0]}/complete", {"result": "failed"})
            began = time.monotonic()
            number = self._job(service)
        else:
            self.program.behave(deaf=True)
            number = 0 if self.least else self._job(service)
            [victim] = wait_for(
                lambda: [each for each in one.fleet.runners() if each.state == runner.IDLE], 60
            )
            wait_for(lambda: victim.name in self.program.started(), 60, "its program")
            self.program.behave()
            self._end(victim, one, service)
            began = time.monotonic() if self.least else began
            number = number or self._job(service)
        wait_for(lambda: self._state(service, number) in ("running", "completed"), LONGEST)
        self.waited = time.monotonic() - began

    def _lose(self, victim: Any) -> None:
        """End a runner that has a job."""
        if self.kind == "killed with a job":
            self._kill(victim, signal.SIGKILL)
            return
        self._kill(victim, signal.SIGSTOP)
        if self.kind in LOST:
            self._silence(victim)
        if self.kind == "record lost with a job":
            assert self.erase is not None
            self.erase(victim.lease.nodes[0].id)

    @staticmethod
    def _silence(victim: Any) -> None:
        """Let the node of a runner give no answer any more."""
        lost = threading.Event()

        def silent(_script: str, timeout: float, **_options: Any) -> None:
            lost.wait(timeout)
            raise subprocess.TimeoutExpired("ssh", timeout)

        vars(victim.lease)["run"] = silent
        for process in list(victim.lease._running):
            process.kill()

    def _end(self, victim: Any, one: Any, service: Emulator) -> None:
        known = one.presence
        if self.kind == "killed":
            self._kill(victim, signal.SIGKILL)
        elif self.kind == "unreachable":
            self._kill(victim, signal.SIGSTOP)
            self._silence(victim)
        else:
            self._kill(victim, signal.SIGSTOP)
            seen = {"hung, online": True, "hung, offline": False, "hung, unknown": None}[self.kind]
            one.presence = lambda name: seen if name == victim.name else known(name)
            if seen is None:
                one.remove(victim.name)

    @staticmethod
    def _kill(victim: Any, number: int) -> None:
        folder = pathlib.Path("~root").expanduser() / runner.FOLDER / victim.name
        session = (folder / "pid").read_text().strip()
        subprocess.run(["pkill", f"-{number}", "-s", session], check=True)

    def _session(self, service: Emulator) -> bool:
        state, number = service.state(), service.set_id(self.name)
        return any(each["scaleSetId"] == number for each in state["sessions"])

    def _job(self, service: Emulator) -> int:
        return service.add_job(self.name)

    @staticmethod
    def _state(service: Emulator, number: int) -> str:
        return next(str(each["state"]) for each in service.jobs() if each["id"] == number)


@pytest.mark.parametrize("kind", [*IDLE, *START, *JOB, *LOST])
def test_next_job_after_a_dead_runner_starts_within_90_s(
    site: Site, service: Emulator, bench: LauncherBench, tmp_path: pathlib.Path, kind: str
) -> None:
    scenarios = [
        Scenario(kind, least, most, Program(tmp_path / f"runner-{least}-{most}", service.url))
        for least, most in product((0, 1), (1, 3))
    ]
    for each in scenarios:
        each.erase = lambda node: bench.zuul.client.delete(
            f"/nodepool/nodes/{node}", recursive=True
        )
    daemon = site.start(
        *(
            {
                "name": each.name,
                "min": each.least,
                "max": each.most,
                "folder": str(each.program.folder),
            }
            for each in scenarios
        )
    )

    def run(each: Scenario) -> None:
        try:
            each.run(daemon, service)
        except BaseException as error:
            each.error = f"{type(error).__name__}: {error}"

    threads = [
        threading.Thread(target=run, args=(each,), name=each.name, daemon=True)
        for each in scenarios
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(LONGEST * 2))
    figures = {
        f"min {each.least} max {each.most}": each.error or round(each.waited or 0.0)
        for each in scenarios
    }
    if path := os.environ.get("NODEPOOL_FIGURES"):
        with open(path, "a") as file:
            file.write(f"{kind}: {figures}\n")
    assert all(each.waited is not None and each.waited <= TARGET for each in scenarios), figures
