"""Serve scale sets: read the queue of each, and set the size of its fleet."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nodepool.adapters.github.service import Service, ServiceError, Session, moment
from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.forge import KILLS, ForgeError, Kind
from nodepool.adapters.runners.program import Pools
from nodepool.adapters.runners.runner import BUSY

log = logging.getLogger("nodepool.adapters.github")

#: Seconds: between attempts to open a session that another listener has, and of the pause after
#: failures.
CONFLICT, PAUSE, LONGEST_PAUSE = 30.0, 1.0, 60.0
#: Seconds for closing a session at the end, and until the next poll after an answer without
#: content.
CLOSE, EMPTY = 5.0, 1.0
#: Seconds without a new runner while the one in the image is too old.
OUTDATED = 1800.0
#: Jobs that are remembered as waiting; the numbers do not depend on them.
MOST_JOBS = 500


#: What the runner runs at the end of a job, in the job's log: it names what was killed for memory.
#: The control group shows a kill before its name arrives here.
JOB_ENDED = f"""\
cd "$(dirname "$0")"
n=0
while [ ! -s {KILLS} ] && [ $n -lt 30 ] && grep -q '^oom_kill [1-9]' \\
    /sys/fs/cgroup/memory.events 2> /dev/null; do sleep 0.1; n=$((n + 1)); done
sed 's/%/%25/g; s/^/::error title=Out of memory::/' {KILLS} 2> /dev/null || :
"""


@dataclass(frozen=True)
class Settings:
    """A scale set as configured.

    :param folder: of the runner program on the nodes.
    """

    kind: Kind
    group: str = "default"
    labels: tuple[str, ...] = ()
    folder: str = "/opt/actions-runner"


class ScaleSet:
    """One scale set: the forge of its fleet."""

    worker = r"Runner\.Worker"
    shows_kills = True

    def __init__(
        self, settings: Settings, service: Service, pools: Pools, stopping: threading.Event
    ) -> None:
        self.settings, self._service, self._stopping = settings, service, stopping
        # The secret leaves the disk before the runner starts, and the environment as soon as it
        # has. The image may name its own script for the end of a job.
        self.script = (
            f"printf %s {shlex.quote(JOB_ENDED)} > job-ended.sh; : > {KILLS}; "
            ': "${ACTIONS_RUNNER_HOOK_JOB_COMPLETED:=$PWD/job-ended.sh}"; '
            "export ACTIONS_RUNNER_HOOK_JOB_COMPLETED; "
            f"([ -x {shlex.quote(settings.folder)}/bin/Runner.Listener ] || exit 127; "
            "ACTIONS_RUNNER_INPUT_JITCONFIG=$(cat secret) && rm -f secret && export "
            "ACTIONS_RUNNER_INPUT_JITCONFIG "
            "ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE=1 RUNNER_ALLOW_RUNASROOT=1 "
            f"&& cd {shlex.quote(settings.folder)} && exec bin/Runner.Listener run)"
        )
        self.fleet = Fleet(settings.kind, self, pools, stopping, log)
        # A poll has reported the capacity for as long as it waits.
        self.fleet.resumed = self.close
        self.name = settings.kind.name
        #: What keeps it from listening now.
        self.trouble = "not connected yet"
        self.conflicts = 0
        self._jobs: dict[str, str] = {}
        #: Offered jobs by message, and how many are assigned, in this session.
        self._offers: dict[int, list[int]] = {}
        self.number = self._assigned = 0
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._listen, name=f"github-{self.name}", daemon=True
        )

    def start(self) -> None:
        self.fleet.start()
        self._thread.start()

    # -- as the forge of its runners

    def register(self, name: str) -> bytes:
        number = self.number or self._find()
        try:
            return self._service.register(number, name).encode() + b"\n"
        except ServiceError as error:
            if "AgentExists" not in error.kind:
                raise
        # Left over from a daemon that ended before the runner started.
        if not self.remove(name):
            raise ForgeError(
                f"GitHub says that {name} runs a job, but no runner has started with it"
            )
        return self._service.register(number, name).encode() + b"\n"

    def remove(self, name: str) -> bool:
        found = self._service.runner(name)
        number = found.get("id") if found else None
        return not isinstance(number, int) or self._service.remove(number)

    def presence(self, name: str) -> bool | None:
        found = self._service.runner(name)
        return None if found is None else found.get("status") != "offline"

    def failure(self, status: int | None) -> tuple[str, float] | None:
        label, folder = self.fleet.kind.label, self.settings.folder
        if status == 0:
            return None
        if status is None:
            return "the runner was killed on its node", 0.0
        if status == 7:
            return (
                f"GitHub no longer takes the runner's version: rebuild the image of {label} with a "
                "new one",
                OUTDATED,
            )
        if status in (126, 127):
            return f"there is no runner in {folder} on nodes {label}", 0.0
        if status == 5:
            return "another runner uses the same registration", 0.0
        return (
            f"the runner has ended with status {status}: its registration was deleted, or is not "
            "accepted",
            0.0,
        )

    # -- listening

    def _listen(self) -> None:
        pause = PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._serve()
                wait = PAUSE
            except ServiceError as error:
                wait, self.trouble = pause, str(error)
                if error.status == 409 or "SessionConflict" in error.kind:
                    self.conflicts += 1
                    wait, self.trouble = (
                        CONFLICT,
                        f"another listener has the session of this scale set: {error}",
                    )
            except ForgeError as error:
                wait, self.trouble = pause, str(error)
            except Exception as error:
                log.exception("%s", self.name)
                wait, self.trouble = pause, f"{type(error).__name__}: {error}"
            if self.trouble and not self._stopping.is_set():
                log.warning("%s: %s; again in %.0f s", self.name, self.trouble, wait)
            pause = (
                PAUSE if time.monotonic() - began > LONGEST_PAUSE else min(LONGEST_PAUSE, pause * 2)
            )
            self._stopping.wait(wait)

    def _find(self) -> int:
        """Return the id of the set, which is created if it does not exist."""
        group = self._service.group(self.settings.group)
        found = self._service.find(self.name, group)
        if found is None:
            found = self._service.create(self.name, group, list(self.settings.labels))
            log.info("%s: scale set created", self.name)
        number = found.get("id")
        if not isinstance(number, int):
            raise ServiceError(0, "", "the service's scale set has no id")
        self.number = number
        return number

    def _serve(self) -> None:
        """Listen until the session or the set no longer exists.

        :raises ServiceError: it cannot be opened, or fails for long.
        """
        number = self._find()
        session = self._service.open(number, socket.gethostname())
        with self._opened(session):
            self.trouble = ""
            log.info("%s: listening to scale set %d", self.name, number)
            self.count(session.statistics)
            self._offers.clear()
            last, renewed = 0, False
            while not self._stopping.is_set():
                try:
                    message = self._service.poll(session, last, self.capacity())
                    renewed = False
                    if message is None:
                        self._acquire(number, session)  # there may be capacity again
                        continue
                    last = self.handle(number, session, message) or last
                except ServiceError as error:
                    if error.status == 404:
                        log.info("%s: the session has ended: %s", self.name, error)
                        return
                    if error.status != 401 or renewed:
                        raise
                    session, renewed = self._service.renew(number, session), True
                    self._session = session

    @contextlib.contextmanager
    def _opened(self, session: Session) -> Iterator[None]:
        with self._lock:
            self._session = session
        try:
            yield
        finally:
            if not self._stopping.is_set():
                self.close()

    def close(self) -> None:
        """Close the session, so that another listener need not wait.

        A poll that waits ends with it.
        """
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            try:
                self._service.close(self.number, session, CLOSE)
            except (ForgeError, OSError) as error:
                log.info("%s: the session is not closed: %s", self.name, error)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def capacity(self) -> int:
        """How many runners the service may count on."""
        paused = self.fleet.drained or self.fleet.broken.left > LONGEST_PAUSE * 2
        return 0 if paused else self.fleet.kind.most + self.fleet.lost_jobs()

    def count(self, statistics: Mapping[str, object]) -> None:
        self._assigned = _count_of(statistics, "totalAssignedJobs")
        waiting = self._assigned - _count_of(statistics, "totalRunningJobs")
        self.fleet.want(self._assigned, waiting)

    def handle(self, number: int, session: Session, message: Mapping[str, object]) -> int:
        """Act on a message, then acknowledge it.

        If this program is killed in between, the message comes again, which does no harm.
        """
        ident, statistics = message.get("messageId"), message.get("statistics")
        offered = [
            event["runnerRequestId"]
            for event in _events(message.get("body"))
            if self._is_offer(event)
        ]
        if isinstance(statistics, dict) and statistics:
            self.count(statistics)
        if not isinstance(ident, int):
            self._stopping.wait(EMPTY)
            return 0
        self._offers[ident] = [each for each in offered if isinstance(each, int)]
        self._acquire(number, session)
        return ident

    def _acquire(self, number: int, session: Session) -> None:
        """Acquire as many offered jobs as can run; acknowledge messages without further offers."""
        for ident, offers in sorted(self._offers.items()):
            free = self.capacity() - self._assigned
            taken, self._offers[ident] = offers[: max(0, free)], offers[max(0, free) :]
            if taken:
                self._service.acquire(number, session, taken)
                self._assigned += len(taken)
            if not self._offers[ident]:
                self._service.acknowledge(session, ident)
                del self._offers[ident]

    def _is_offer(self, event: Mapping[str, object]) -> bool:
        """Store what an event reports; return whether it offers a job."""
        kind, ident = (
            event.get("messageType"),
            str(event.get("jobId") or event.get("runnerRequestId") or ""),
        )
        if kind == "JobAssigned":
            self._note(ident, event)
        elif kind in ("JobStarted", "JobCompleted"):
            self._jobs.pop(ident, None)
            runner = self.fleet.find(str(event.get("runnerName") or ""))
            if kind == "JobCompleted":
                log.info("%s: %s: %s", self.name, _describe(event), event.get("result"))
                if runner is not None:
                    runner.finish(True)
            elif runner is not None:
                runner.job = _describe(event)
                runner.enter(BUSY)
        return kind == "JobAvailable"

    def _note(self, ident: str, event: Mapping[str, object]) -> None:
        if ident and len(self._jobs) < MOST_JOBS:
            since = moment(event.get("queueTime"))
            self._jobs[ident] = f"{_describe(event)} waits for a runner" + (
                f" since {since:%H:%M:%S %Z}" if since else ""
            )

    def status(self) -> dict[str, object]:
        found = dict(self.fleet.status())
        if trouble := self._service.trouble or self.trouble:
            found["trouble"] = trouble
        return {**found, "notes": sorted(self._jobs.values()), "conflicts": self.conflicts}


def _events(body: object) -> list[Mapping[str, object]]:
    try:
        found = json.loads(body) if isinstance(body, str) and body else []
    except ValueError:
        log.warning("a message's body is not JSON; its statistics count")
        return []
    return [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []


def _count_of(statistics: Mapping[str, object], name: str) -> int:
    value = statistics.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _describe(event: Mapping[str, object]) -> str:
    owner, repository, name = (
        str(event.get(key) or "?")[:100]
        for key in ("ownerName", "repositoryName", "jobDisplayName")
    )
    return f"{owner}/{repository}: {name} (run {event.get('workflowRunId')})"
