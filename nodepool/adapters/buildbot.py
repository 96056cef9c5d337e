"""A latent worker of Buildbot: a node is leased while builds need it.

::

    from nodepool.adapters.buildbot import NodepoolLatentWorker

    c["workers"] = [NodepoolLatentWorker("pool-1", label="small-noble",
    master="buildbot.example.org:9989")]

The lease is attached to the master: a thread of ``nodepool.client`` renews it, and if the master is
killed, it ends within two minutes. What blocks runs in threads of the worker, never in Buildbot's
own, which are few.
"""

from __future__ import annotations

import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from buildbot import config
from buildbot.interfaces import LatentWorkerCannotSubstantiate, LatentWorkerFailedToSubstantiate
from buildbot.worker.base import AbstractWorker
from buildbot.worker.latent import AbstractLatentWorker
from twisted.internet import defer, task, threads
from twisted.python import log
from twisted.python.threadpool import ThreadPool

from nodepool.client import (
    SHOWN,
    SOCKET,
    Duration,
    Lease,
    LeaseEnded,
    NodepoolError,
    NotAllowed,
    Pool,
    read_secret,
    seconds,
)
from nodepool.texts import one_line

#: Seconds between two checks of a lease in use.
CHECK_EVERY = 15.0
#: Seconds for a command on the node; at the end, the node may be dead.
COMMAND_TIMEOUT, END_TIMEOUT = 60.0, 10.0
#: One starts, one cancels, one checks.
THREADS = 3
#: Refusals that another attempt would get, too.
FINAL = ("bad-request", "unknown-label")
#: Below the home directory of the login user.
FOLDER = ".buildbot-worker"
#: Of this process of the master.
START_ID = secrets.token_hex(8)

END = """
if p=$(cat worker.pid 2>/dev/null) && grep -qa buildbot "/proc/$p/cmdline" 2>/dev/null; then
    kill "$p"; n=0
    while kill -0 "$p" 2>/dev/null && [ $n -lt 30 ]; do sleep 0.1; n=$((n + 1)); done
    kill -KILL "$p" 2>/dev/null
fi
rm -f worker.pid buildbot.tac
"""
#: Standard input is the worker's configuration, with its password.
START = """
command -v {program} >/dev/null || {{ echo "{program} is not installed" >&2; exit 1; }}
(umask 077; cat > buildbot.tac) || exit 1
setsid {program} start --nodaemon . </dev/null >worker.log 2>&1 &
echo $! > worker.pid
"""
CHECK = (
    'p=$(cat worker.pid) && kill -0 "$p" 2>/dev/null || { cat worker.log twistd.log '
    "2>/dev/null | tail -n 5; exit 1; }"
)
TAC = """
import os
from buildbot_worker.bot import Worker
from twisted.application import service
application = service.Application('buildbot-worker')
options = dict(useTls={tls}, maxdelay=10)
worker = Worker({host!r}, {port}, {name!r}, {password!r}, os.getcwd(), 60, **options)
worker.setServiceParent(application)
"""

T = TypeVar("T")
Show = Callable[[str], object]
#: Of Buildbot, which has no types.
Build = Any


class NodeError(Exception):
    """The node does not do what it should."""


@dataclass(frozen=True)
class Settings:
    """Where a worker's node comes from, see :class:`NodepoolLatentWorker`."""

    label: str
    master: str
    url: str = SOCKET
    token_file: str | None = None
    key_file: str | None = None
    tenant: str | None = None
    priority: str | None = None
    wait: Duration = "30m"
    program: str = "buildbot-worker"
    tls: bool = False

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":")
        if not self.label:
            raise ValueError("label is missing: the label of the node, such as small-noble")
        if not host or not port.isdecimal():
            raise ValueError(
                f"master must be HOST:PORT, as nodes reach the master, and not {self.master!r}"
            )
        seconds(self.wait)
        Pool(self.url)

    def pool(self) -> Pool:
        token = read_secret(self.token_file) if self.token_file else None
        return Pool(self.url, token, self.key_file, most_output=SHOWN)


class Machine:
    """The node of a worker, or none; all methods block.

    :param mark: identifies the worker among those of all masters, in the notes of its leases.
    """

    def __init__(self, settings: Settings, name: str, mark: str) -> None:
        self._settings, self._name, self._mark = settings, name, mark
        self._canceled = threading.Event()
        self.lease: Lease | None = None

    def return_old(self) -> None:
        """Release what an earlier process of the master has left."""
        for lease in self._settings.pool().leases(owner="me"):
            notes = lease.notes or {}
            if notes.get("buildbot") == self._mark and notes.get("start") != START_ID:
                log.msg(
                    f"worker {self._name}: returning lease {lease.id} of an earlier start of the "
                    "master"
                )
                lease.give_back()

    def start(self, purpose: str, password: str, show: Show) -> None:
        """Lease a node and start the worker's program on it.

        :raises NodepoolError, NodeError: there is no node, or it is not usable.
        """
        settings, notes = self._settings, {"buildbot": self._mark, "start": START_ID}
        # Returns immediately, so that canceling need not wait for a node.
        self.lease = lease = settings.pool().lease(
            settings.label,
            wait=None,
            tenant=settings.tenant,
            priority=settings.priority,
            purpose=one_line(purpose, 200),
            notes=notes,
        )
        self._wait(lease, time.monotonic() + seconds(settings.wait), show)
        host, _, port = settings.master.rpartition(":")
        text = TAC.format(
            host=host, port=port, name=self._name, password=password, tls=settings.tls
        )
        self._run(
            lease,
            END + START.format(program=shlex.quote(settings.program)),
            COMMAND_TIMEOUT,
            text.encode(),
        )

    def _wait(self, lease: Lease, limit: float, show: Show) -> None:
        text = "requested"
        for change in lease.changes(limit):
            if self._canceled.is_set():
                raise NodeError("canceled")
            if change.state == "held":
                show(f"starting on node {lease.nodes[0].id}, lease {lease.id}")
                return
            why = change.why or {}
            place = (
                f"position {why['queue_position']} in the queue, "
                if why.get("queue_position")
                else ""
            )
            text = (
                f"waiting for a node {self._settings.label}: "
                f"{place}{why.get('text') or 'requested'}"
            )
            show(text)
        raise NodeError(f"gave up after {self._settings.wait}: {text}")

    def cancel(self) -> None:
        """Let ``start`` end soon if it waits for a node."""
        self._canceled.set()
        lease = self.lease
        if lease is not None and lease.state != "held":
            lease.give_back()

    def lost(self) -> str:
        """Return why the lease has ended; empty: it has not, as far as known."""
        try:
            if self.lease is not None:
                self.lease.refresh()
        except LeaseEnded as error:
            return str(error)
        except NodepoolError as error:
            log.msg(f"worker {self._name}: its lease cannot be checked: {error}")
        return ""

    def check(self) -> tuple[bool, str]:
        """Return whether the worker's program runs, and why not."""
        if self.lease is None or (reason := self.lost()):
            return False, "it has no node" if self.lease is None else reason
        try:
            self._run(self.lease, CHECK, COMMAND_TIMEOUT)
        except (NodeError, NodepoolError, OSError, subprocess.SubprocessError) as error:
            return False, str(error)
        return True, ""

    def stop(self) -> None:
        """End the worker's program and return the node."""
        lease, self.lease = self.lease, None
        if lease is None:
            return
        try:
            if lease.state == "held":
                self._run(lease, END, END_TIMEOUT)
        except (NodeError, NodepoolError, OSError, subprocess.SubprocessError) as error:
            log.msg(f"worker {self._name}: its program could not be ended: {error}")
        finally:
            lease.give_back()

    def _run(self, lease: Lease, script: str, timeout: float, data: bytes | None = None) -> None:
        folder = shlex.quote(f"{FOLDER}/{self._name}")
        done = lease.run(
            f"cd && mkdir -p {folder}/info && cd {folder} || exit 1\n{script}",
            input=data,
            timeout=timeout,
        )
        if done.status:
            text = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise NodeError(f"node {lease.nodes[0].id}: {text[-500:] or f'status {done.status}'}")


class NodepoolLatentWorker(AbstractLatentWorker):
    """A worker on a leased node.

    :param label: of the node.
    :param master: ``HOST:PORT``, as the worker reaches the master.
    :param url, token_file, key_file: of the pool, and the private key for SSH; see
        :class:`nodepool.client.Pool`. The file with the token is read at each start.
    :param tenant, priority: of the lease.
    :param wait: longest time to wait for a node.
    :param program: of the worker, on the node.
    :param tls: encrypt the connection to the master.
    """

    _settings: Settings
    _threads: ThreadPool | None = None
    _machine: Machine | None = None
    _starting = False
    _watch: task.LoopingCall | None = None

    def checkConfig(self, name: str, **options: object) -> None:
        settings, others = _split(options)
        try:
            Settings(**settings)
        except (TypeError, ValueError) as error:
            config.error(f"NodepoolLatentWorker {name}: {error}")
        super().checkConfig(name, None, **others)

    def _generate_random_password(self) -> str:
        return secrets.token_urlsafe(32)

    def reconfigService(self, name: str, **options: object) -> Any:
        settings, others = _split(options)
        self._settings = Settings(**settings)
        if self._threads is None:
            self._threads = ThreadPool(0, THREADS, f"nodepool-{name}")
            self._threads.start()
            self._in_thread(self._new_machine().return_old).addErrback(
                log.err, f"worker {name}: old leases are not returned"
            )
        return super().reconfigService(name, self.getRandomPass(), **others)

    def _new_machine(self) -> Machine:
        return Machine(self._settings, self.name, f"{self.master.name}:{self.name}")

    def start_instance(self, build: Build) -> defer.Deferred[bool]:
        return defer.ensureDeferred(self._start(build))

    async def _start(self, build: Build) -> bool:
        if build.stopped:
            # A master that ends waits for the build, and no longer lets workers log in.
            raise LatentWorkerFailedToSubstantiate(self.name, "the build was stopped")
        await self._forget_password()
        machine, reactor = self._new_machine(), self.master.reactor
        self._machine = machine

        def show(text: str) -> None:
            reactor.callFromThread(_in_background, self._show(build, text))

        self._starting = True
        try:
            purpose = f"worker {self.name}, build {build.number} of {build.builder.name}"
            await self._in_thread(lambda: machine.start(purpose, self.password, show))
        except (NodepoolError, NodeError, OSError, ValueError, subprocess.SubprocessError) as error:
            final = isinstance(error, NotAllowed) or (
                isinstance(error, NodepoolError) and error.code in FINAL
            )
            kind = LatentWorkerCannotSubstantiate if final else LatentWorkerFailedToSubstantiate
            raise kind(self.name, str(error)) from error
        finally:
            self._starting = False
        self._watch = task.LoopingCall(lambda: defer.ensureDeferred(self._check_machine(machine)))
        self._watch.clock = reactor
        self._watch.start(CHECK_EVERY, now=False).addErrback(log.err)
        return True

    async def _show(self, build: Build, text: str) -> None:
        """Show a text in the list of the build's steps."""
        log.msg(f"worker {self.name}: {text}")
        data = self.master.data
        step = await data.get(("builds", build.buildid, "steps", "worker_preparation"))
        await data.updates.setStepStateString(step["stepid"], text)

    async def _check_machine(self, machine: Machine) -> None:
        reason = await self._in_thread(machine.lost)
        if reason and machine is self._machine and self.conn is not None:
            log.msg(f"worker {self.name}: disconnected, its builds are repeated: {reason}")
            await self._forget_password()
            # As if the machine had died: the base class repeats the builds and ends the worker. If
            # we ended it, too, a login in between could block it until a restart.
            await AbstractWorker.disconnect(self)

    async def _forget_password(self) -> None:
        """Let no program of an earlier lease log in, where its node has not been deleted: Buildbot
        would take it for that of the next lease.
        """
        self.password = self._generate_random_password()
        await self.registration.update(self, self.master.config)

    def check_instance(self) -> defer.Deferred[tuple[bool, str]]:
        return self._in_thread((self._machine or self._new_machine()).check)

    def stop_instance(self, fast: bool = False) -> defer.Deferred[None]:
        machine, self._machine = self._machine, None
        if self._watch is not None and self._watch.running:
            self._watch.stop()
        return defer.succeed(None) if machine is None else self._in_thread(machine.stop)

    def insubstantiate(
        self, fast: bool = False, force_substantiation_build: Build | None = None
    ) -> defer.Deferred[None]:
        self._cancel()
        return super().insubstantiate(fast, force_substantiation_build)

    def stopService(self) -> defer.Deferred[None]:
        self._cancel()
        return defer.ensureDeferred(self._stop())

    async def _stop(self) -> None:
        await super().stopService()
        if self._threads is not None:
            await threads.deferToThread(self._threads.stop)

    def _cancel(self) -> None:
        """Let a start end that waits for a node: the methods of the base class wait for it."""
        if self._starting and self._machine is not None:
            self._in_thread(self._machine.cancel).addErrback(log.err)

    def _in_thread(self, function: Callable[[], T]) -> defer.Deferred[T]:
        return threads.deferToThreadPool(self.master.reactor, self._threads, function)


def _split(options: dict[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our options and those of Buildbot."""
    ours = {name: value for name, value in options.items() if name in Settings.__dataclass_fields__}
    others = {"build_wait_timeout": 0, **options}
    return {"label": "", "master": "", **ours}, {
        name: value for name, value in others.items() if name not in ours
    }


def _in_background(coroutine: Coroutine[Any, Any, None]) -> None:
    defer.ensureDeferred(coroutine).addErrback(log.err)
