"""Serve one forge: poll its queue, and report to each fleet how many runners are missing.

A fleet has the runners for one set of labels. The queue is the truth; a webhook only causes an
earlier poll.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nodepool.adapters.gitea.api import Api, Job
from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.forge import ForgeError, Kind
from nodepool.adapters.runners.program import Pools
from nodepool.adapters.runners.runner import BUSY

log = logging.getLogger("nodepool.adapters.gitea")

#: Seconds: at least between two polls, and at most after errors.
LEAST, LONGEST = 0.5, 60.0
#: Seconds: between two reads of all registrations, and until one without a lease is removed.
SWEEP, STRAY = 30.0, 300.0
#: How the names of our runners begin.
PREFIX = "np-"


class Runners:
    """The forge of one fleet: registers runners with one set of labels.

    :param labels: as the runner's program knows them, such as ``noble:host``.
    :param command: program and arguments that start the runner.
    """

    shows_kills = False

    def __init__(
        self,
        kind: Kind,
        api: Api,
        labels: Sequence[str],
        command: str,
        pools: Pools,
        stopping: threading.Event,
    ) -> None:
        self._api, self._labels, self._command = api, list(labels), command
        self.names = frozenset(label.partition(":")[0] for label in labels)
        self.script = api.script(command, self._labels)
        # The program that runs one certain job and ends is busy from the beginning; that of Gitea
        # looks the same while it waits.
        self.worker = (
            re.sub("[^A-Za-z0-9_-]", ".", command.split()[0].rpartition("/")[2][:15])
            if api.binds
            else ""
        )
        self.fleet = Fleet(kind, self, pools, stopping, log)
        #: Jobs that runners are registered for, by the name of the runner.
        self._bound: dict[str, Job] = {}
        self._waiting: list[Job] = []
        #: Ids of registrations by the name of the runner, also of those that no longer exist.
        self.ids: dict[str, int] = {}
        #: Whether those are online that the last list contained.
        self.online: dict[str, bool] = {}
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def update(self, jobs: Sequence[Job]) -> None:
        """Take the queue; the fleet learns how many runners are missing, and which are busy."""
        alive = {runner.name: runner for runner in self.fleet.runners()}
        with self._lock:
            self._bound = {name: job for name, job in self._bound.items() if name in alive}
            known = {**self._bound, **{job.runner: job for job in jobs if job.runner}}
            bound = {job.handle for job in self._bound.values()}
            self._waiting = sorted(
                (
                    job
                    for job in jobs
                    if not job.runner
                    and job.labels == self.names
                    and not (job.handle and job.handle in bound)
                ),
                key=lambda job: job.id,
            )
        for name, runner in alive.items():
            # Forgejo lists no jobs that run: it removes the runner.
            runner.finish(runner.state == BUSY and name not in known and not self._api.binds)
        for name, job in known.items():
            if name in alive and alive[name].state != BUSY:
                alive[name].works(job.name)
        self._need()

    def _need(self) -> None:
        self.fleet.need(self.waiting)

    # -- as the forge of its runners

    def register(self, name: str) -> bytes:
        if name in self.ids:
            self.remove(name)
        with self._lock:
            job = self._waiting.pop(0) if self._api.binds and self._waiting else None
            if job is not None:
                self._bound[name] = job
        runner = self.fleet.find(name)
        if job is not None and runner is not None:
            runner.works(job.name)
            self._need()
        self.ids[name], secret = self._api.register(name, self._labels, job)
        return secret

    def remove(self, name: str) -> bool:
        return all(self._api.remove(each.id) for each in self._api.runners() if each.name == name)

    def presence(self, name: str) -> bool | None:
        if name in self.online:
            return self.online[name]
        # The list is sorted by the time of the last call, so that a page may miss a runner.
        number = self.ids.get(name)
        return False if number is not None and self._api.exists(number) else None

    def failure(self, status: int | None) -> tuple[str, float] | None:
        program = self._command.split()[0]
        if status == 0 or status in self._api.no_job:
            return None
        if status == 127:
            return f"{program} is not in PATH on the node: install it, or set command", 0.0
        return (
            f"{program} was killed" if status is None else f"{program} ended with status {status}",
            0.0,
        )


class Instance:
    """One forge, and its fleets.

    :param runners: each with different labels.
    :param interval: seconds between two polls.
    :param secret: returns that of the webhook; None: it is refused.
    """

    def __init__(
        self,
        name: str,
        api: Api,
        runners: Sequence[Runners],
        interval: float,
        stopping: threading.Event,
        secret: Callable[[], str] | None = None,
    ) -> None:
        self.name, self.runners = name, runners
        self._api, self._interval, self._stopping, self._secret = api, interval, stopping, secret
        #: Why the queue cannot be read now.
        self.trouble = "not connected yet"
        self._unserved: Counter[str] = Counter()
        self._swept: float | None = None
        #: Since when a registration has no lease.
        self._suspects: dict[str, float] = {}
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"gitea-{name}", daemon=True)

    def start(self) -> None:
        for each in self.runners:
            each.fleet.start()
        self._thread.start()

    def wake(self) -> None:
        """Read the queue now."""
        self._wake.set()

    def join(self, timeout: float) -> None:
        self._wake.set()
        self._thread.join(timeout)

    def _serve(self) -> None:
        pause = self._interval
        while not self._stopping.is_set():
            try:
                self.sweep()
                self.poll()
            except ForgeError as error:
                self._report(str(error))
                pause = min(LONGEST, pause * 2)
            except Exception as error:
                log.exception("%s: reading the queue failed", self.name)
                self._report(f"{type(error).__name__}: {error}")
                pause = min(LONGEST, pause * 2)
            else:
                self._report("")
                pause = self._interval
            if not self._stopping.wait(min(LEAST, pause)):
                self._wake.wait(pause - min(LEAST, pause))
                self._wake.clear()

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("%s: the queue cannot be read: %s", self.name, trouble)
        elif self.trouble and not trouble:
            log.info("%s: the queue is read", self.name)
        self.trouble = trouble

    def poll(self) -> None:
        jobs = self._api.queue()
        served = {each.names for each in self.runners}
        unserved = Counter(
            ", ".join(sorted(job.labels))
            for job in jobs
            if not job.runner and job.labels not in served
        )
        for labels in unserved.keys() - self._unserved.keys():
            log.info(
                "%s: jobs wait for the labels %s, which no entry of runners has",
                self.name,
                labels or "(none)",
            )
        self._unserved = unserved
        for each in self.runners:
            each.update(jobs)

    def sweep(self) -> None:
        """Compare the registrations with the runners; remove those that have none."""
        now = time.monotonic()
        if self._swept is not None and now - self._swept < SWEEP:
            return
        fleets = [each.fleet for each in self.runners]
        alive = {runner.name: runner for fleet in fleets for runner in fleet.runners()}
        found = self._api.runners()
        known = {each.name: each.id for each in found}
        for each in self.runners:
            each.ids = {name: number for name, number in each.ids.items() if name in alive} | known
            each.online = {registration.name: registration.online for registration in found}
        # Those of another daemon are online from the moment in which they start.
        strays = {
            f"{each.name} ({each.id})": each
            for each in found
            if each.name.startswith(PREFIX) and not each.online and each.name not in alive
        }
        self._suspects = {name: self._suspects.get(name, now) for name in strays}
        for name, since in self._suspects.items():
            if now - since > STRAY and not any(fleet.trouble for fleet in fleets):
                log.info(
                    "%s: the registration of runner %s, which has no lease, is removed",
                    self.name,
                    name,
                )
                self._api.remove(strays[name].id)
        self._swept = now

    def receive(self, headers: Mapping[str, str], body: bytes) -> int:
        """Return the HTTP status for a message of the webhook.

        A valid message causes a poll; nothing else is taken from it.
        """
        given = {name.lower(): value for name, value in headers.items()}
        if self._secret is None:
            return 403
        expected = hmac.new(self._secret().encode(), body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected.encode(), given.get("x-gitea-signature", "").encode()):
            log.warning("%s: a message of the webhook without the right signature", self.name)
            return 403
        try:
            action = json.loads(body)["action"]
        except (ValueError, KeyError, TypeError):
            return 400
        if given.get("x-gitea-event") == "workflow_job" and action == "queued":
            self.wake()
        return 204

    def status(self) -> list[Mapping[str, object]]:
        """Return the status of each fleet; the first also names labels that nobody serves."""
        found: list[Mapping[str, object]] = []
        others = [
            f"not served here: {labels or 'no labels'} ({number} jobs)"
            for labels, number in self._unserved.items()
        ]
        for each in self.runners:
            found.append({**each.fleet.status(), "notes": [f"{each.waiting} jobs wait", *others]})
            others = []
        return found
