"""One runner: a lease, a registration with the forge, and a program on the node."""

from __future__ import annotations

import logging
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from nodepool.adapters.runners.forge import KILLS, Forge, ForgeError, Kind
from nodepool.client import Lease, LeaseEnded, NodepoolError, NotAllowed, Pool
from nodepool.texts import killed

#: Seconds that a lease lasts until its runner has started: what a daemon that is killed meanwhile
#: may waste.
UNTIL_STARTED = 900
#: Seconds of one check of a program, of a small command, of one that ends a program, and until
#: another attempt when the launcher does not answer.
CHECK, COMMAND, QUICK, RETRY = 30, 60, 15, 5.0
#: Seconds that a runner above the wanted number may still be idle.
LINGER = 30.0
#: Seconds without any answer from a node after which it no longer counts for the largest number of
#: runners, and after which its runner is given up.
QUIET, SILENT = 35.0, 600.0
#: Seconds between two questions to the forge, that an idle runner may be offline, and that one may
#: be unknown or without its job.
COMPARE, OFFLINE, UNKNOWN = 60.0, 300.0, 120.0
#: Bytes of a program's output that are shown when it has failed.
TAIL = 1500
#: Seconds to wait for the news that a process was killed for memory, and processes that are named:
#: as many as a node manager names.
NEWS, MOST_KILLS = 1.0, 20
#: Folder on the node, below the home directory of the login user.
HOME, FOLDER = 'cd "${HOME:-/}"', ".nodepool-runner"

WAITING, STARTING, IDLE, BUSY, ENDING = "waiting", "starting", "idle", "busy", "ending"


class Host(Protocol):
    """The fleet, as its runners see it."""

    kind: Kind
    forge: Forge
    stopping: threading.Event
    log: logging.Logger

    @property
    def pool(self) -> Callable[[str], Pool]:
        """Return what creates a pool whose SSH files are of one runner."""

    def above_least(self, runner: Runner) -> bool:
        """Return whether enough idle runners remain without this one."""

    def ended(self, runner: Runner) -> None: ...

    def failed(self, text: str, pause: float = 0.0) -> None:
        """Count a failure; start none for at least `pause` seconds."""

    def lost(self) -> None:
        """Count again: a runner is lost, or its node answers again."""

    def succeeded(self, had_job: bool) -> None: ...

    def unused(self) -> None:
        """Count a runner that got no job."""


class Runner:
    """One lease, one registration, one program: a thread from the first to the last.

    :param lease: it exists already, from a daemon that has ended.
    """

    def __init__(self, fleet: Host, name: str, lease: Lease | None = None) -> None:
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
        #: Its lease is no longer needed: withdrawn while it waited, or dismissed by the forge.
        self.withdrawn = False
        #: Whether its node can be cleaned up.
        self._answers = True
        #: Why its node should be returned soon; empty: no operator drains it.
        self.drained = ""
        #: A line for each process that was killed for memory on its node.
        self.kills: list[str] = []
        #: The forge has reported the end of its job.
        self.finished = False
        #: When that happened, or it was last asked to leave.
        self.asked = 0.0
        #: When the forge was asked, and when it last knew it and saw it online.
        self._compared = self._known = self._seen = time.monotonic()
        #: Its node does not answer, or it has ended, and the forge has not ended its job: it does
        #: not count for the largest number of runners.
        self.lost = False
        #: Seconds that its node may need for an answer until it may be lost.
        self._patience = QUICK
        #: The forge has said that a job runs, when the ended runner was last removed.
        self._left = False
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

    def drain(self, why: str) -> None:
        """Note why the node should be returned soon; then dismiss an idle runner, do not wait."""
        self.drained = why
        if why and self.state == IDLE:
            self.dismiss_soon(why)

    def killed(self, kill: Mapping[str, object]) -> None:
        """Note that a process was killed for memory on the node; this may be repeated."""
        line = self._killed(kill)
        if line and self.begun and self.fleet.forge.shows_kills:
            threading.Thread(
                target=self._show, args=(line,), name=f"kill-{self.name}", daemon=True
            ).start()

    def _killed(self, kill: Mapping[str, object]) -> str:
        """Note a kill; return its line, or nothing for one that is known or too many."""
        line = killed(kill)
        if line not in self.kills and len(self.kills) < MOST_KILLS:
            self.kills.append(line)
            self._report(line, logging.WARNING)
            return line
        return ""

    def _show(self, line: str) -> None:
        """Give the line to the script that runs at the end of the job."""
        assert self.lease is not None
        try:
            self.lease.run(
                f"{HOME}; cat >> {self._folder}/{KILLS}", input=f"{line}\n".encode(), timeout=QUICK
            )
        except (NodepoolError, OSError, subprocess.SubprocessError) as error:
            self._report(f"the log of the job does not name what was killed: {error}")

    def dismiss_soon(self, why: str) -> None:
        """Dismiss the runner; do not wait."""
        self.asked = time.monotonic()
        threading.Thread(
            target=self.dismiss, args=(why,), name=f"dismiss-{self.name}", daemon=True
        ).start()

    def finish(self, finished: bool) -> None:
        """Note whether the forge has reported the end of its job."""
        if finished != self.finished:
            self.finished, self.asked = finished, time.monotonic()

    def withdraw(self) -> None:
        """Stop waiting for a node."""
        self.withdrawn = True
        if self.lease is not None:
            try:
                self.lease.give_back()
            except NodepoolError as error:
                self._report(f"its lease cannot be withdrawn: {error}")

    def _report(self, text: str, level: int = logging.INFO) -> None:
        self.fleet.log.log(
            level,
            "%s: runner %s (lease %s): %s",
            self.fleet.kind.name,
            self.name,
            self.lease.id if self.lease else "none yet",
            text,
        )

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
                self._wait_for_end_of_job()
            self.fleet.ended(self)

    def _wait_for_end_of_job(self) -> None:
        """Release the node; the runner counts as lost until the forge has ended its job."""
        self._lose(self._left)
        returned, until = self._return(), time.monotonic() + self.fleet.kind.job_time
        while self._left and not self.finished and time.monotonic() < until:
            self.why = "it has ended, and the forge has not ended its job yet"
            if self.fleet.stopping.wait(RETRY):
                return
            if not self.finished and time.monotonic() - self._compared > COMPARE:
                self._compared = time.monotonic()
                returned = returned or self._return()
                self._forget()

    def _lose(self, lost: bool) -> None:
        """Note whether it is lost; the fleet counts again."""
        if lost != self.lost:
            self.lost = lost
            self.fleet.lost()

    def _failed(self, text: str, pause: float = 0.0) -> None:
        text = "; ".join((text, *self.kills))
        self._report(text, logging.WARNING)
        self.fleet.failed(text, pause)

    def _serve(self) -> None:
        lease = self._leased()
        self.drained = lease.drained or ""
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
                kind.label,
                for_=UNTIL_STARTED,
                wait=None,
                key=self.name,
                tenant=kind.tenant,
                purpose=f"runner of {kind.name}",
                notes={"fleet": kind.mark, "runner": self.name},
            )
        while not self.fleet.stopping.is_set() and not self.withdrawn:
            try:
                for change in self.lease.changes():
                    self.why = str((change.why or {}).get("text") or change.state)
                return self.lease
            except NodepoolError as error:
                if error.code != "busy":
                    raise
            self.fleet.stopping.wait(CHECK)
        raise LeaseEnded("stopped", "it is no longer needed")

    def _begin(self, lease: Lease) -> None:
        self._registered = True
        secret = self.fleet.forge.register(self.name)
        inner = f"{self.fleet.forge.script}\ns=$?; echo $s > status.new && mv status.new status"
        script = (
            f"umask 077; {HOME}; mkdir -p {FOLDER} && mkdir {self._folder} && cd {self._folder} && "
            "cat > secret && "
            f"{{ setsid sh -c {shlex.quote(inner)} > log 2>&1 < /dev/null & echo $! > pid; }}"
        )
        try:
            done = lease.run(script, input=secret, timeout=COMMAND)
        except LeaseEnded:
            raise
        except (NodepoolError, OSError, subprocess.SubprocessError) as error:
            # The next check shows.
            text = f"it is not known whether it has started {self.why}: {error}"
            self._report(text, logging.WARNING)
            self.fleet.stopping.wait(RETRY)
            return
        if done.status:
            raise ForgeError(f"the runner cannot be started on {self.why}: {_end_of(done.stderr)}")
        self.enter(BUSY if self.job else IDLE)
        self.begun = True
        self._report(f"started {self.why}")
        self._renew(lease)

    def _renew(self, lease: Lease) -> None:
        try:
            lease.renew(self.fleet.kind.job_time)
        except (NotAllowed, NodepoolError) as error:
            if isinstance(error, LeaseEnded):
                raise
            self._report(
                f"its lease is not renewed and ends at {lease.ends}: {error}", logging.WARNING
            )

    def _check(self, longest: int, limit: float = COMMAND) -> tuple[str, str]:
        """Return what the program does, and its status and last output.

        :param longest: seconds to wait for its end.
        :param limit: seconds beyond them for the answer.
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
            f'elif grep -sqE {shlex.quote(worker)}"$p " /proc/[0-9]*/stat; then echo busy; else '
            "echo idle; fi"
        )
        done = self.lease.run(script, timeout=longest + limit)
        first, _, rest = done.stdout.decode("utf-8", "replace").partition("\n")
        word, _, status = first.partition(" ")
        if done.status or word not in ("none", "ended", "lost", "busy", "idle"):
            raise OSError(f"no answer from the node: {_end_of(done.stderr)}")
        self._heard = time.monotonic()
        if self.lost:  # it was only slow: do not lose it again and again
            self._patience = COMMAND
        self._lose(False)
        return word, f"{status}\n{rest}"

    def _watch(self, lease: Lease) -> None:
        kind, renewed = self.fleet.kind, time.monotonic()
        while not (self.fleet.stopping.is_set() or self.withdrawn):
            try:
                longest = 1 if self.surplus and self.state != BUSY else CHECK
                # A lost node is noticed soon; later, one with a heavy load may be slow.
                recent = time.monotonic() - self._heard < QUIET
                word, text = self._check(longest, self._patience if recent else COMMAND)
            except (NodepoolError, OSError, subprocess.SubprocessError) as error:
                self._unheard(error)
                continue
            if word in ("ended", "lost"):
                self._over(word, text)
                return
            if word == "none":
                # A daemon was killed before it could start the program; or somebody has removed its
                # folder.
                if self.state != STARTING:
                    raise OSError("the runner's folder is no longer on the node")
                if self.surplus:
                    return
                self._begin(lease)
                continue
            self.enter(BUSY if word == "busy" or self.job else IDLE)
            if self._is_lost():
                self._kill(lease)
                self._forget()
                return
            if self.state == IDLE and self._is_dismissed():
                return
            if self.job != self._noted:
                self._note(lease)
            if time.monotonic() - renewed > kind.job_time / 2:
                renewed = time.monotonic()
                self._renew(lease)

    def _is_lost(self) -> bool:
        """Return whether its program has no purpose for the forge any longer."""
        now = time.monotonic()
        if now - self._compared < COMPARE:
            return False
        self._compared = now
        try:
            online = self.fleet.forge.presence(self.name)
        except ForgeError as error:
            self._report(f"it is not known whether it is online: {error}")
            self._known = self._seen = now
            return False
        self._seen = now if online else self._seen
        self._known = self._known if online is None or self.finished else now
        if now - self._known > UNKNOWN:
            self._report(
                "stopped: its job has ended"
                if self.finished
                else "stopped: the forge no longer knows it"
            )
            return True
        if self.state == IDLE and (offline := now - max(self._seen, self.since)) > OFFLINE:
            self._failed(
                f"replaced: it runs {self.why}, but the forge has not seen it online for "
                f"{offline:.0f} s"
            )
            return True
        return False

    def _note(self, lease: Lease) -> None:
        try:
            lease.note(job=self.job[:200])
            self._noted = self.job
        except NodepoolError as error:
            if isinstance(error, LeaseEnded):
                raise
            self._report(f"its job is not noted with the lease: {error}")

    def _unheard(self, error: Exception) -> None:
        """The node, or the launcher, does not answer: a job may run there all the same."""
        if isinstance(error, LeaseEnded) or self.withdrawn:
            raise error
        assert self.lease is not None
        try:
            self.lease.refresh()
            busy = isinstance(error, NodepoolError) and error.code == "busy"
        except LeaseEnded:
            raise
        except NodepoolError:
            busy = True
        if busy:  # it says nothing about the node
            self.why, self._heard = "the launcher does not answer, or is busy", time.monotonic()
        longest, silence = SILENT if self.begun else COMMAND, time.monotonic() - self._heard
        if silence > longest:
            raise OSError(
                f"nothing heard of the node for {longest:g} s; at last: {error}"
            ) from error
        if silence > QUIET and self.state == BUSY and not self.lost:
            self.why = f"its node does not answer: {error}"
            self._report(self.why, logging.WARNING)
            self._lose(True)
        self.fleet.stopping.wait(RETRY)

    def _over(self, word: str, text: str) -> None:
        if self.withdrawn:  # its program was ended
            return
        status, _, output = text.partition("\n")
        number = int(status) if word == "ended" and status.lstrip("-").isdecimal() else None
        failure = self.fleet.forge.failure(number)
        assert self.lease is not None
        for kill in self.lease.find_kills(0.0 if failure is None or self.kills else NEWS):
            self._killed(kill)
        if failure is not None:
            text = f"{failure[0]}; its last output: {output.strip()[-TAIL:] or 'none'}"
            if self.had_job:
                # Others start and get jobs as this one did.
                self._report("; ".join((text, *self.kills)), logging.WARNING)
            else:
                self._failed(text, failure[1])
            self._forget()
        else:
            self._report("has ended")
            self.fleet.succeeded(self.had_job)

    def _forget(self) -> None:
        """Remove what the forge may have registered, unless it runs a job."""
        if self._registered and not self.fleet.stopping.is_set():
            try:
                self._left = not self.fleet.forge.remove(self.name)
            except ForgeError as error:
                self._report(f"it may still be registered: {error}", logging.WARNING)

    def _is_dismissed(self) -> bool:
        """Stop the idle runner if it is not needed, and the forge agrees."""
        kind, idle = self.fleet.kind, time.monotonic() - self.since
        unused = idle > kind.idle and self.fleet.above_least(self)
        if not (unused or self.drained or (self.surplus and idle > LINGER)):
            return False
        self._remove(self.drained or "not needed")
        if self.withdrawn and not (self.surplus or self.drained):
            self.fleet.unused()
        return self.withdrawn

    def dismiss(self, why: str) -> None:
        """Stop the runner if no job runs on its node, and the forge agrees; on another thread.

        A job whose end the forge has reported does not count.

        A node that does not answer is returned if the forge has given its runner no job.
        """
        answers = True
        try:
            if self._check(1, QUICK)[0] != "idle" and not self.finished:
                return
        except (NodepoolError, OSError, subprocess.SubprocessError):
            answers = False
        self._remove(why, answers)

    def _remove(self, why: str, answers: bool = True) -> None:
        """Remove the runner from the forge, unless that has given it a job; end its program."""
        try:
            if not self.fleet.forge.remove(self.name):
                self.enter(BUSY)
                return
        except ForgeError as error:
            self._report(f"it is not known whether it runs a job: {error}", logging.WARNING)
            self.fleet.stopping.wait(5.0)
            return
        self.withdrawn, self._answers = True, answers
        self._report(f"removed: {self.state} for {time.monotonic() - self.since:.0f} s, and {why}")
        assert self.lease is not None
        try:
            if answers:
                self._kill(self.lease)
                return
        except (NodepoolError, OSError, subprocess.SubprocessError) as error:
            self._report(f"its program is not ended: {error}", logging.WARNING)
            self._answers = False
        # The runner's own thread may wait for the node for another minute.
        self._return()
        self.fleet.ended(self)

    def _kill(self, lease: Lease) -> None:
        """End the program: the node is deleted, but a static one goes to the next user."""
        # Steps of a job may have their own process groups, in the session of the runner.
        script = (
            f'{HOME}; p=$(cat {self._folder}/pid); pkill -KILL -s "$p" 2> /dev/null || kill '
            '-KILL -- -"$p"'
        )
        lease.run(script, timeout=QUICK)

    def _return(self) -> bool:
        """Release the node; the next search for leases finds what cannot be released now."""
        if self.lease is None:
            return True
        try:
            if self.lease.state == "held" and self._answers:
                try:
                    self.lease.run(f"{HOME}; rm -rf {self._folder}", timeout=COMMAND)
                except (NodepoolError, OSError, subprocess.SubprocessError):
                    self.why = "its node does not answer"
            self.lease.give_back()
        except NodepoolError as error:
            self._report(f"its node is not returned yet: {error}", logging.WARNING)
            return False
        return True


def _end_of(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()[-TAIL:] or "no text"
