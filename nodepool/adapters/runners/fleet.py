"""Runners that do one job each, every one on its own leased node.

A forge (GitHub, Gitea) hands a job to any of its idle runners, so runners are counted and not
paired with jobs. The program on the node is the truth: a node is returned when its program has
ended, or when the forge has agreed to remove an idle runner. Nothing is stored here: after a crash,
the next start continues from the leases and the programs on their nodes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nodepool.adapters.runners.forge import Forge, Kind
from nodepool.adapters.runners.runner import BUSY, ENDING, IDLE, RETRY, STARTING, WAITING, Runner
from nodepool.client import Lease, LeaseEnded, NodepoolError, Pool

#: Seconds between two searches for leases without a thread, and for withdrawals at the end.
FIND_LEASES, STOP = 300.0, 10.0
#: Seconds of the first and of the longest pause after runners that failed, and after runners that
#: got no job.
FAILED_PAUSE, UNUSED_PAUSE = (5.0, 30.0), (60.0, 1800.0)
#: Seconds that a job and an idle runner may wait for each other until the runner counts as dead,
#: doubled as long as that helps no job; and between two checks while a job waits.
PATIENCE, LOOK = 30.0, 10.0
#: Runners in a row that got no job until the forge's numbers count as wrong.
UNUSED = 3


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

    :param pool: creates a pool whose SSH files are of one runner.
    """

    kind: Kind
    forge: Forge
    pool: Callable[[str], Pool]
    stopping: threading.Event
    log: logging.Logger = field(
        default_factory=lambda: logging.getLogger("nodepool.adapters.runners")
    )

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._runners: dict[str, Runner] = {}
        self._searched: float | None = None
        self._changed = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, name=f"fleet-{self.kind.name}", daemon=True
        )
        #: None: not known yet; nothing is started or adopted.
        self.wanted: int | None = None
        #: Jobs that run or wait, as set by `want`, or that wait, as set by `need`.
        self._jobs: int | None = None
        self._free: int | None = None
        #: Jobs that wait for runners, and since when there are any.
        self._waiting, self._waiting_since = 0, 0.0
        #: How often runners counted as dead since the last job.
        self._dead = 0
        #: Why the number cannot be kept now.
        self.trouble = ""
        #: Why no pool gives out nodes of the label; empty: no operator has drained all of them.
        self.drained = ""
        #: Called when the capacity may have grown.
        self.resumed: Callable[[], object] = lambda: None
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

    def want(self, jobs: int, waiting: int = 0) -> None:
        """Set how many jobs run or wait, and how many of them wait; do not wait."""
        self._jobs = max(0, jobs)
        self._note_waiting(waiting)

    def need(self, jobs: int) -> None:
        """Set how many jobs wait; do not wait."""
        with self._lock:
            self._free = max(0, jobs)
        self._note_waiting(jobs)

    def adapt(self, kind: Kind) -> None:
        """Apply a changed configuration, but for the label, whose drains are known."""
        grown = kind.most > self.kind.most
        self.kind = replace(kind, label=self.kind.label)
        if grown:
            self.resumed()
        self._changed.set()

    def _note_waiting(self, jobs: int) -> None:
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting = max(0, jobs)
        self._count()
        self._changed.set()

    def drain(self, why: str, leases: Mapping[str, str]) -> None:
        """Apply the drains of the pool; do not wait.

        :param why: no node can be had.
        :param leases: id -> why its node should be returned; empty: it need not be.
        """
        before, self.drained = self.drained, why
        for runner in self.runners():
            runner.drain(leases.get(runner.lease.id if runner.lease else "", ""))
        if before and not why:
            self.resumed()
        self._changed.set()

    def killed(self, kill: Mapping[str, object]) -> None:
        """Note a process that was killed for memory, perhaps on the node of a runner."""
        for runner in self.runners():
            nodes = runner.lease.nodes if runner.lease else ()
            place = kill.get("node"), kill.get("provider")
            if place in [(node.id, node.provider) for node in nodes]:
                runner.killed(kill)

    def _count(self) -> int | None:
        runners, lost = self.runners(), self.lost_jobs()
        busy = [runner for runner in runners if runner.state == BUSY and not runner.lost]
        with self._lock:
            if self._free is not None:
                self.wanted = min(max(self._free, self.kind.least) + len(busy), self.kind.most)
            elif self._jobs is not None:
                jobs = max(0, self._jobs - lost)
                self.wanted = min(jobs + self.kind.least, self.kind.most)
            return self.wanted

    def _keep(self) -> None:
        while not self.stopping.is_set():
            wait = FIND_LEASES
            try:
                if self.wanted is not None:
                    self._adopt()
                    self._adjust(self._count() or 0)
                    self.trouble = ""
                    wait = max(self.broken.left, self.idled.left) or wait
                    wait = min(wait, self._replace_dead())
            except NodepoolError as error:
                self.trouble, wait = str(error), RETRY
            except Exception as error:
                self.log.exception("%s", self.kind.name)
                self.trouble, wait = f"{type(error).__name__}: {error}", RETRY
            self._changed.wait(wait)
            self._changed.clear()

    def _adjust(self, wanted: int) -> None:
        """Start missing runners, or dismiss some that wait or are idle."""
        runners = [runner for runner in self.runners() if not runner.lost]
        alive = [runner for runner in runners if runner.state != ENDING]
        for runner in alive:
            runner.surplus = False
        missing = wanted - len(runners)
        if missing > 0 and not (self.drained or max(self.broken.left, self.idled.left)):
            # One at a time while the last ones have failed.
            for _ in range(1 if self.broken.count else missing):
                self._add(f"np-{uuid.uuid4().hex[:12]}")
        order = {WAITING: 0, IDLE: 1, STARTING: 2}
        spare = sorted(
            (each for each in alive if each.state in order),
            key=lambda each: (order[each.state], -each.since),
        )
        for runner in spare[: max(0, len(alive) - wanted)]:
            runner.surplus = True
            if runner.state == WAITING:
                runner.withdraw()

    def _replace_dead(self) -> float:
        """Dismiss runners that take no job although jobs wait; return seconds to the next check."""
        since, now = self._waiting_since, time.monotonic()
        if not self._waiting:
            return FIND_LEASES
        patience = PATIENCE * 2 ** min(self._dead, 8)
        # One that has just started, or whose job has just ended, is given the same time.
        dead = [
            runner
            for runner in self.runners()
            if (runner.state == IDLE or (runner.finished and runner.state != ENDING))
            and now - max(since, runner.since, runner.asked) > patience
        ][: self._waiting]
        for runner in dead:
            runner.dismiss_soon(f"took no job although one has waited for {now - since:.0f} s")
        self._dead += bool(dead)
        return LOOK

    def stop(self) -> None:
        """Withdraw leases whose runners have not started; `stopping` is set.

        Runners continue, and the next start adopts them.
        """
        self._changed.set()
        waiting = [
            runner for runner in self.runners() if runner.state == WAITING or not runner.begun
        ]
        threads = [
            threading.Thread(target=each.withdraw, name=f"withdraw-{each.name}", daemon=True)
            for each in waiting
        ]
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
        if self._searched is not None and now - self._searched < FIND_LEASES:
            return
        for lease in self.pool("").leases(owner="me"):
            notes = lease.notes or {}
            name = notes.get("runner")
            if (
                notes.get("fleet") == self.kind.mark
                and isinstance(name, str)
                and self.find(name) is None
            ):
                with contextlib.suppress(LeaseEnded):
                    self._add(name, self.pool(name).get(lease.id))
                    self.log.info(
                        "%s: runner %s (lease %s) is adopted", self.kind.name, name, lease.id
                    )
        self._searched = now

    def above_least(self, runner: Runner) -> bool:
        others = [
            each for each in self.runners() if each is not runner and each.state in (STARTING, IDLE)
        ]
        return len(others) >= self.kind.least

    def lost_jobs(self) -> int:
        """Return how many jobs of runners that are lost the forge has not ended yet."""
        return sum(runner.lost and not runner.finished for runner in self.runners())

    # -- called by runners

    def lost(self) -> None:
        self.resumed()
        self._changed.set()

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
                self._dead = 0
            elif self._free:
                self._free -= 1  # a short job, which the forge has not reported yet

    def unused(self) -> None:
        text = (
            f"{UNUSED} runners in a row got no job: the forge reports too many jobs, or other "
            "runners take them"
        )
        with self._lock:
            self.idled.add(text)

    def status(self) -> Mapping[str, object]:
        """Return name, label, numbers, trouble and runners.

        Each runner has its state, the seconds in it, lease, job and reason.
        """
        runners = [
            {
                "name": each.name,
                "state": each.state,
                "seconds": round(time.monotonic() - each.since),
                "job": each.job,
                "lease": each.lease.id if each.lease else None,
                "why": each.why,
                "kills": list(each.kills),
            }
            for each in sorted(self.runners(), key=lambda each: each.name)
        ]
        pause = max((self.broken, self.idled), key=lambda each: each.left)
        trouble = (
            f"{pause.text} (none is started for {pause.left:.0f} s)" if pause.left else self.trouble
        )
        if self.drained:
            trouble = f"no node {self.kind.label} until a drain ends: {self.drained}"
        return {
            "name": self.kind.name,
            "label": self.kind.label,
            "least": self.kind.least,
            "most": self.kind.most,
            "wanted": self.wanted,
            "ended": self.done,
            "failed": self.failures,
            "trouble": trouble,
            "runners": runners,
        }
