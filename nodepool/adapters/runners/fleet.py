"""Runners that do one job each, every one on its own leased node.

A forge (GitHub, Gitea) hands a job to any of its idle runners, so runners are counted and not paired with jobs. The program
on the node is the truth: a node is returned when its program has ended, or when the forge has agreed to remove an idle runner.
Nothing is stored here: after a crash, the next start continues from the leases and the programs on their nodes.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nodepool.client import Lease, LeaseEnded, NodepoolError, NotAllowed, Pool

#: Seconds that a lease lasts until its runner has started: what a daemon that is killed meanwhile may waste.
UNTIL_STARTED = 900
#: Seconds: of one check of a program, of a small command, and between two searches for leases without a thread.
LOOK, COMMAND, LOOK_FOR_LEASES = 30, 60, 300.0
#: Seconds until another attempt when the launcher does not answer, and for withdrawals at the end.
RETRY, STOP = 5.0, 10.0
#: Seconds that a runner above the wanted number may still be idle.
LINGER = 30.0
#: Seconds of the first and of the longest pause after runners that failed, and after runners that got no job.
FAILED_PAUSE, UNUSED_PAUSE = (5.0, 80.0), (60.0, 1800.0)
#: Runners in a row that got no job until the forge's numbers count as wrong.
UNUSED = 3
#: Seconds without any answer from a node after which it counts as lost.
SILENT = 600.0
#: Bytes of a program's output that are shown when it has failed.
TAIL = 1500
#: Folder on the node, below the home directory of the login user.
HOME, FOLDER = 'cd "${HOME:-/}"', ".nodepool-runner"

WAITING, STARTING, IDLE, BUSY, ENDING = "waiting", "starting", "idle", "busy", "ending"


class ForgeError(Exception):
    """The forge refuses a call, or does not answer."""


class Forge(Protocol):
    """What differs between forges.

    :ivar script: shell text that starts the runner, in a folder with the file ``secret``; its exit status is the runner's.
    :ivar worker: extended regular expression for the name of the process that exists while a job runs; empty: only the forge
        knows, and `Runner.works` is called.
    """

    script: str
    worker: str

    def register(self, name: str) -> bytes:
        """Register a runner of this name, again if there is one; return its secret.

        :raises ForgeError: it cannot be registered now.
        """
        ...

    def remove(self, name: str) -> bool:
        """Remove a runner, if it exists; False: it runs a job.

        :raises ForgeError: that is not known.
        """
        ...

    def failure(self, status: int | None) -> tuple[str, float] | None:
        """Return what is wrong with a program that has ended, and the least pause in seconds.

        :param status: None: the program was killed.
        :return: None: nothing is wrong.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """Which runners a fleet has.

    :param home: URL of what the runners belong to: with the name, it identifies the fleet among those of the token's owner.
    :param most: number of runners.
    :param job_time: seconds that a lease lasts from the start of its runner; it is renewed while the runner is alive.
    :param idle: seconds after which an idle runner above `least` is removed.
    """

    name: str
    label: str
    most: int
    least: int = 0
    tenant: str | None = None
    job_time: float = 6 * 3600.0
    idle: float = 900.0
    home: str = ""

    @property
    def mark(self) -> str:
        """Return what the notes of its leases contain."""
        return f"{self.home} {self.name}"


class Runner:
    """One lease, one registration, one program: a thread from the first to the last.

    :param lease: it exists already, from a daemon that has ended.
    """

    def __init__(self, fleet: Fleet, name: str, lease: Lease | None = None) -> None:
        self.fleet, self.name, self.lease = fleet, name, lease
        #: Whether the forge and the node may know it.
        self._registered = self.begun = lease is not None
        self.state, self.since = WAITING, time.monotonic()
        self.why = ""
        #: The job that it runs, if the forge reports it, and the one in the notes of the lease.
        self.job = self._noted = ""
        self.had_job = False
        #: There are more runners than needed: stop it unless it runs a job.
        self.surplus = False
        self.withdrawn = False
        #: The forge no longer knows it, so its program has no purpose.
        self.forgotten = False
        self._folder = f"{FOLDER}/{shlex.quote(name)}"
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._live, name=f"runner-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def enter(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()
        if state == BUSY:
            self.had_job = True

    def works(self, job: str) -> None:
        """Note that the forge has given this runner a job: it is busy until its program ends."""
        self.job = job
        if self.state in (STARTING, IDLE):
            self.enter(BUSY)

    def withdraw(self) -> None:
        """Stop waiting for a node."""
        self.withdrawn = True
        if self.lease is not None:
            try:
                self.lease.give_back()
            except NodepoolError as error:
                self._say(f"its lease cannot be withdrawn: {error}")

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self.fleet.log.log(level, "%s: runner %s (lease %s): %s", self.fleet.kind.name, self.name,
                           self.lease.id if self.lease else "none yet", text)  # fmt: skip

    # -- life

    def _live(self) -> None:
        try:
            self._serve()
        except (NodepoolError, ForgeError, OSError, subprocess.SubprocessError) as error:
            ended = "its lease has ended: " if isinstance(error, LeaseEnded) else ""
            if not self.withdrawn:
                self._failed(ended + (str(error) or type(error).__name__))
            self._forget()
        except Exception as error:
            self.fleet.log.exception("%s: runner %s", self.fleet.kind.name, self.name)
            self._failed(f"{type(error).__name__}: {error}")
            self._forget()
        finally:
            if not self.fleet.stopping.is_set():
                self.enter(ENDING)
                self._return()
            self.fleet.ended(self)

    def _failed(self, text: str, pause: float = 0.0) -> None:
        self._say(text, logging.WARNING)
        self.fleet.failed(text, pause)

    def _serve(self) -> None:
        lease = self._leased()
        self.enter(STARTING)
        self._heard = time.monotonic()
        self.why = f"on node {lease.nodes[0].id}"
        if not self.begun:
            self._begin(lease)
        self._watch(lease)

    def _leased(self) -> Lease:
        kind = self.fleet.kind
        if self.lease is None:
            self.lease = self.fleet.pool(self.name).lease(
                kind.label, for_=UNTIL_STARTED, wait=None, key=self.name, tenant=kind.tenant,
                purpose=f"runner of {kind.name}", notes={"fleet": kind.mark, "runner": self.name},
            )  # fmt: skip
        while not self.fleet.stopping.is_set() and not self.withdrawn:
            try:
                for change in self.lease.changes():
                    self.why = str((change.why or {}).get("text") or change.state)
                return self.lease
            except NodepoolError as error:
                if error.code != "busy":
                    raise
            self.fleet.stopping.wait(LOOK)
        raise LeaseEnded("stopped", "it is no longer needed")

    def _begin(self, lease: Lease) -> None:
        self._registered = True
        secret = self.fleet.forge.register(self.name)
        inner = f"{self.fleet.forge.script}\ns=$?; echo $s > status.new && mv status.new status"
        script = (
            f"umask 077; {HOME}; mkdir -p {FOLDER} && mkdir {self._folder} && cd {self._folder} && cat > secret && "
            f"{{ setsid sh -c {shlex.quote(inner)} > log 2>&1 < /dev/null & echo $! > pid; }}"
        )
        try:
            done = lease.run(script, input=secret, timeout=COMMAND)
        except LeaseEnded:
            raise
        except (NodepoolError, OSError, subprocess.SubprocessError) as error:
            self._uncertain(str(error))
            return
        if done.status == 255:  # of ssh
            self._uncertain(_end_of(done.stderr))
            return
        if done.status:
            raise ForgeError(f"the runner cannot be started on {self.why}: {_end_of(done.stderr)}")
        self.enter(BUSY if self.job else IDLE)
        self.begun = True
        self._say(f"started {self.why}")
        self._renew(lease)

    def _uncertain(self, text: str) -> None:
        """It may have started: the next look shows."""
        self._say(f"it is not known whether it has started {self.why}: {text}", logging.WARNING)
        self.fleet.stopping.wait(RETRY)

    def _renew(self, lease: Lease) -> None:
        try:
            lease.renew(self.fleet.kind.job_time)
        except (NotAllowed, NodepoolError) as error:
            if isinstance(error, LeaseEnded):
                raise
            self._say(f"its lease is not renewed and ends at {lease.ends}: {error}", logging.WARNING)

    def _look(self, longest: int) -> tuple[str, str]:
        """Return what the program does, and its status and last output.

        :param longest: seconds to wait for its end.
        :return: first none, lost, ended, busy or idle.
        """
        assert self.lease is not None
        # Of the runner's own session: the node may have other runners.
        worker = f"^[0-9]+ \\({self.fleet.forge.worker}\\) . [0-9]+ [0-9]+ "
        script = (
            f"{HOME}; cd {self._folder} 2> /dev/null || {{ echo none; exit 0; }}; p=$(cat pid); "
            f'timeout {longest} tail -s 0.2 --pid="$p" -f /dev/null 2> /dev/null; '
            f'alive=; kill -0 "$p" 2> /dev/null && alive=1; '
            f'if [ -e status ]; then echo ended "$(cat status)"; tail -c {TAIL} log; '
            f'elif [ -z "$alive" ]; then echo lost; tail -c {TAIL} log; '
            f'elif grep -sqE {shlex.quote(worker)}"$p " /proc/[0-9]*/stat; then echo busy; else echo idle; fi'
        )
        done = self.lease.run(script, timeout=longest + COMMAND)
        first, _, rest = done.stdout.decode("utf-8", "replace").partition("\n")
        word, _, status = first.partition(" ")
        if done.status or word not in ("none", "ended", "lost", "busy", "idle"):
            raise OSError(f"no answer from the node: {_end_of(done.stderr)}")
        self._heard = time.monotonic()
        return word, f"{status}\n{rest}"

    def _watch(self, lease: Lease) -> None:
        kind, renewed = self.fleet.kind, time.monotonic()
        while not self.fleet.stopping.is_set():
            try:
                word, text = self._look(1 if self.surplus and self.state != BUSY else LOOK)
            except (NodepoolError, OSError, subprocess.SubprocessError) as error:
                self._unheard(error)
                continue
            if word in ("ended", "lost"):
                self._over(word, text)
                return
            if word == "none":
                # A daemon was killed before it could start the program; or somebody has removed its folder.
                if self.state != STARTING:
                    raise OSError("the runner's folder is no longer on the node")
                if self.surplus:
                    return
                self._begin(lease)
                continue
            self.enter(BUSY if word == "busy" or self.job else IDLE)
            if self.forgotten:
                self._say("stopped: the forge no longer knows it")
                self._kill(lease)
                return
            if self.state == IDLE and self._is_dismissed(lease):
                return
            if self.job != self._noted:
                self._note(lease)
            if time.monotonic() - renewed > kind.job_time / 2:
                renewed = time.monotonic()
                self._renew(lease)

    def _note(self, lease: Lease) -> None:
        try:
            lease.note(job=self.job[:200])
            self._noted = self.job
        except NodepoolError as error:
            if isinstance(error, LeaseEnded):
                raise
            self._say(f"its job is not noted with the lease: {error}")

    def _unheard(self, error: Exception) -> None:
        """The node, or the launcher, does not answer: a job may run there all the same."""
        if isinstance(error, LeaseEnded):
            raise error
        assert self.lease is not None
        try:
            self.lease.refresh()
        except LeaseEnded:
            raise
        except NodepoolError:
            # It says nothing about the node.
            self.why, self._heard = "the launcher does not answer", time.monotonic()
        longest = SILENT if self.begun else COMMAND
        if time.monotonic() - self._heard > longest:
            raise OSError(f"nothing heard of the node for {longest:g} s; at last: {error}") from error
        self.fleet.stopping.wait(RETRY)

    def _over(self, word: str, text: str) -> None:
        status, _, output = text.partition("\n")
        number = int(status) if word == "ended" and status.lstrip("-").isdecimal() else None
        failure = self.fleet.forge.failure(number)
        if failure is not None:
            text = f"{failure[0]}; its last output: {output.strip()[-TAIL:] or 'none'}"
            if self.had_job:
                self._say(text, logging.WARNING)  # others start and get jobs as this one did
            else:
                self._failed(text, failure[1])
            self._forget()
        else:
            self._say("has ended")
            self.fleet.succeeded(self.had_job)

    def _forget(self) -> None:
        """Remove what the forge may have registered, unless it runs a job."""
        if self._registered and not self.fleet.stopping.is_set():
            try:
                self.fleet.forge.remove(self.name)
            except ForgeError as error:
                self._say(f"it may still be registered: {error}", logging.WARNING)

    def _is_dismissed(self, lease: Lease) -> bool:
        """Stop the idle runner if it is not needed, and the forge agrees."""
        kind, idle = self.fleet.kind, time.monotonic() - self.since
        unused = idle > kind.idle and self.fleet.above_least(self)
        if not unused and not (self.surplus and idle > LINGER):
            return False
        try:
            if not self.fleet.forge.remove(self.name):
                self.enter(BUSY)
                return False
        except ForgeError as error:
            self._say(f"it is not known whether it runs a job: {error}", logging.WARNING)
            self.fleet.stopping.wait(5.0)
            return False
        self._say(f"removed: idle for {idle:.0f} s, and not needed")
        if not self.surplus:
            self.fleet.unused()
        self._kill(lease)
        return True

    def _kill(self, lease: Lease) -> None:
        """End the program: the node is deleted, but a static one goes to the next user."""
        # Steps of a job may have process groups of their own, in the session of the runner.
        script = f'{HOME}; p=$(cat {self._folder}/pid); pkill -KILL -s "$p" 2> /dev/null || kill -KILL -- -"$p"'
        lease.run(script, timeout=COMMAND)

    def _return(self) -> None:
        """Return the node; what cannot be returned now is found again by the next look for leases."""
        if self.lease is None:
            return
        try:
            if self.lease.state == "held":
                try:
                    self.lease.run(f"{HOME}; rm -rf {self._folder}", timeout=COMMAND)
                except (NodepoolError, OSError, subprocess.SubprocessError):
                    self.why = "its node does not answer"
            self.lease.give_back()
        except NodepoolError as error:
            self._say(f"its node is not returned yet: {error}", logging.WARNING)


@dataclass
class Pause:
    """After failures in a row: none is started for a while, twice as long each time."""

    first: float
    longest: float
    after: int = 1
    count: int = 0
    until: float = 0.0
    text: str = ""

    def add(self, text: str, least: float = 0.0) -> None:
        self.count += 1
        if self.count >= self.after:
            pause = min(self.longest, self.first * 2 ** min(self.count - self.after, 16))
            self.until, self.text = max(self.until, time.monotonic() + max(pause, least)), text

    def clear(self) -> None:
        self.count, self.until, self.text = 0, 0.0, ""

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())


@dataclass
class Fleet:
    """The runners of one kind: as many as the last call of `want` or `need` asked for.

    :param pool: makes a pool whose SSH files are of one runner.
    """

    kind: Kind
    forge: Forge
    pool: Callable[[str], Pool]
    stopping: threading.Event
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("nodepool.adapters.runners"))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._runners: dict[str, Runner] = {}
        self._looked: float | None = None
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"fleet-{self.kind.name}", daemon=True)
        #: None: not told yet; nothing is started or taken over.
        self.wanted: int | None = None
        #: As told by `need`.
        self._free: int | None = None
        #: Why the number cannot be kept now.
        self.trouble = ""
        self.done = self.failures = 0
        self.broken = Pause(*FAILED_PAUSE)
        self.idled = Pause(*UNUSED_PAUSE, after=UNUSED)

    def runners(self) -> list[Runner]:
        with self._lock:
            return list(self._runners.values())

    def find(self, name: str) -> Runner | None:
        with self._lock:
            return self._runners.get(name)

    def start(self) -> None:
        self._thread.start()

    def want(self, number: int) -> None:
        """Set how many runners are needed; do not wait."""
        self.wanted = max(0, min(number, self.kind.most))
        self._changed.set()

    def need(self, number: int) -> None:
        """Set how many runners are needed beyond those that run a job; do not wait."""
        with self._lock:
            self._free = self.wanted = max(0, number)
        self._changed.set()

    def _count(self) -> int | None:
        busy = [runner for runner in self.runners() if runner.state == BUSY]
        with self._lock:
            if self._free is not None:
                self.wanted = min(self._free + len(busy), self.kind.most)
            return self.wanted

    def _keep(self) -> None:
        while not self.stopping.is_set():
            wait = LOOK_FOR_LEASES
            try:
                if self.wanted is not None:
                    self._adopt()
                    self._adjust(self._count() or 0)
                    self.trouble = ""
                    wait = max(self.broken.left, self.idled.left) or wait
            except NodepoolError as error:
                self.trouble, wait = str(error), RETRY
            except Exception as error:
                self.log.exception("%s", self.kind.name)
                self.trouble, wait = f"{type(error).__name__}: {error}", RETRY
            self._changed.wait(wait)
            self._changed.clear()

    def _adjust(self, wanted: int) -> None:
        """Start missing runners, or dismiss some that wait or are idle."""
        runners = self.runners()
        alive = [runner for runner in runners if runner.state != ENDING]
        for runner in alive:
            runner.surplus = False
        missing = wanted - len(runners)
        if missing > 0 and not max(self.broken.left, self.idled.left):
            # One at a time while the last ones have failed.
            for _ in range(1 if self.broken.count else missing):
                self._add(f"np-{uuid.uuid4().hex[:12]}")
        order = {WAITING: 0, IDLE: 1, STARTING: 2}
        spare = sorted((each for each in alive if each.state in order), key=lambda each: (order[each.state], -each.since))
        for runner in spare[: max(0, len(alive) - wanted)]:
            runner.surplus = True
            if runner.state == WAITING:
                runner.withdraw()

    def stop(self) -> None:
        """Withdraw leases whose runners have not started; `stopping` is set.

        Runners continue, and the next start adopts them.
        """
        self._changed.set()
        waiting = [runner for runner in self.runners() if runner.state == WAITING or not runner.begun]
        threads = [threading.Thread(target=each.withdraw, name=f"withdraw-{each.name}", daemon=True) for each in waiting]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + STOP
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _add(self, name: str, lease: Lease | None = None) -> None:
        runner = Runner(self, name, lease)
        with self._lock:
            self._runners[name] = runner
        runner.start()

    def _adopt(self) -> None:
        now = time.monotonic()
        if self._looked is not None and now - self._looked < LOOK_FOR_LEASES:
            return
        for lease in self.pool("").leases(owner="me"):
            notes = lease.notes or {}
            name = notes.get("runner")
            if notes.get("fleet") == self.kind.mark and isinstance(name, str) and self.find(name) is None:
                with contextlib.suppress(LeaseEnded):
                    self._add(name, self.pool(name).get(lease.id))
                    self.log.info("%s: runner %s (lease %s) is adopted", self.kind.name, name, lease.id)
        self._looked = now

    def above_least(self, runner: Runner) -> bool:
        others = [each for each in self.runners() if each is not runner and each.state in (STARTING, IDLE)]
        return len(others) >= self.kind.least

    # -- told by runners

    def ended(self, runner: Runner) -> None:
        with self._lock:
            self._runners.pop(runner.name, None)
        self._changed.set()

    def failed(self, text: str, pause: float = 0.0) -> None:
        with self._lock:
            self.failures += 1
            self.broken.add(text, pause)

    def succeeded(self, had_job: bool) -> None:
        with self._lock:
            self.done += 1
            self.broken.clear()
            if had_job:
                self.idled.clear()
            elif self._free:
                self._free -= 1  # a short job, which the forge has not reported yet

    def unused(self) -> None:
        text = f"{UNUSED} runners in a row got no job: the forge reports too many jobs, or other runners take them"
        with self._lock:
            self.idled.add(text)

    def status(self) -> Mapping[str, object]:
        """Return name, label, numbers, trouble and runners.

        Each runner has its state, the seconds in it, lease, job and reason.
        """
        runners = [
            {"name": each.name, "state": each.state, "seconds": round(time.monotonic() - each.since), "job": each.job,
             "lease": each.lease.id if each.lease else None, "why": each.why}
            for each in sorted(self.runners(), key=lambda each: each.name)
        ]  # fmt: skip
        pause = max((self.broken, self.idled), key=lambda each: each.left)
        trouble = f"{pause.text} (none is started for {pause.left:.0f} s)" if pause.left else self.trouble
        return {
            "name": self.kind.name, "label": self.kind.label, "least": self.kind.least, "most": self.kind.most,
            "wanted": self.wanted, "ended": self.done, "failed": self.failures, "trouble": trouble, "runners": runners,
        }  # fmt: skip


def _end_of(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()[-TAIL:] or "no text"
