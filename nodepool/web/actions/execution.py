"""Programs on the nodes of a lease, without SSH: the launcher relays their streams."""

from __future__ import annotations

import asyncio
import base64
import functools
import http
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from nodepool.access.identity import Role
from nodepool.base import threads
from nodepool.driver.provider import Execution
from nodepool.exceptions import RemoteException
from nodepool.lease import ssh
from nodepool.web import access
from nodepool.web.actions import frames
from nodepool.web.actions.bodies import NewProgram
from nodepool.web.actions.leases import LeaseCalls
from nodepool.web.actions.places import Places
from nodepool.web.actions.routes import Call, Later, Refused, Route, busy
from nodepool.web.http import Stream, Write
from nodepool.web.shares import Share
from nodepool.web.tables import Leasing
from nodepool.zk.records import Node

#: Programs at a time: in all, of one owner, and of one lease. The last is less than what a sliver
#: runs (``ssh.connections``, 20 by default), which frees a place a little later.
MOST = (500, 250, 16)
#: The part of these places for programs of any length; the others are for those of at most that
#: many seconds.
LONG, SHORT = 0.9, 60.0
#: Seconds for the start of a program, and for its input to be sent.
START, INPUT = 5.0, 30.0
#: Seconds after which something is sent in any case, and for which one read waits.
HEARTBEAT, CHECK = 15.0, 1.0

log = logging.getLogger("nodepool.lease")


class Relay(Later, Stream):
    """A program, which is started and whose streams are relayed.

    :param take: takes a place, or raises Refused.
    :param start: raises Refused if the program cannot be started.
    :param done: called when nothing is left of the program.
    """

    headers = (("Content-Type", frames.CONTENT_TYPE), *access.HEADERS)

    def __init__(
        self,
        lease_id: str,
        data: bytes,
        timeout: float,
        take: Callable[[], None],
        start: Callable[[], Execution],
        done: Callable[[], None],
    ) -> None:
        self._lease_id = lease_id
        self._data = data
        self._deadline = time.monotonic() + timeout
        self._take = take
        self._start = start
        self._done = done
        self._execution: Execution | None = None
        # One job at a time, in order: the end waits for the start, or for a read.
        self._lane = threads.shared().lane(f"Thread-WebApp-exec-{lease_id}", 1)

    async def outcome(self, _share: Share) -> Relay:
        self._take()  # not before: a client that disconnects earlier leaves no place behind
        try:
            async with asyncio.timeout(2 * START):
                await asyncio.get_running_loop().run_in_executor(self._lane, self._begin)
        except BaseException as error:
            self._lane.submit(self._end)
            if isinstance(error, TimeoutError):
                raise busy("The program was not started in time") from None
            raise
        return self

    async def send(self, begin: Callable[[], Awaitable[Write]]) -> None:
        """Relay until the program ends, the client disconnects or the time is over."""
        run, execution = (
            functools.partial(asyncio.get_running_loop().run_in_executor, self._lane),
            self._execution,
        )
        assert execution is not None
        try:
            write = await begin()
            with suppress(
                TimeoutError, RemoteException
            ):  # it has ended, or does not read its input
                if self._data:
                    await run(execution.write, self._data, INPUT)
                await run(execution.write, b"", INPUT)
            sent = time.monotonic()
            while (now := time.monotonic()) < self._deadline:
                try:
                    found = await run(execution.read, CHECK)
                except TimeoutError:
                    if now - sent >= HEARTBEAT:
                        await write(frames.pack(frames.NOTHING, b""))
                        sent = now
                    continue
                sent = now
                if found is None:
                    status = execution.status
                    await write(frames.pack(frames.EXIT, b"" if status is None else b"%d" % status))
                    return
                await write(frames.pack(*found))
        except RemoteException as error:
            log.info("Lease %s: a program ended: %s", self._lease_id, error)
        finally:
            self._lane.submit(self._end)

    # -- on the lane

    def _begin(self) -> None:
        self._execution = self._start()

    def _end(self) -> None:
        try:
            if self._execution is not None:
                self._execution.close()
        finally:
            self._done()


class ProgramCalls:
    """The call that runs a program."""

    def __init__(self, launcher: Leasing, leases: LeaseCalls) -> None:
        self._launcher = launcher
        self._leases = leases
        self.places = Places(*MOST)

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/leases/{id}/exec",
                self.execute,
                "Run a program on a node of a lease",
                Role.BORROW,
                {http.HTTPStatus.OK: bytes},
                NewProgram,
                of_lease=True,
                target="lease {id}",
            )
        ]

    def execute(self, call: Call) -> Later:
        lease, body = self._leases.held(call), call.parsed(NewProgram)
        try:
            data = base64.b64decode(body.input, validate=True)
        except ValueError as error:
            raise Refused(
                http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", f"input is not base64: {error}"
            ) from None
        nodes = [node for _name, node in ssh.names(lease.nodes)]
        if body.node > len(nodes):
            text = f"Lease {lease.id} has {len(nodes)} nodes; there is no node {body.node}"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        node = nodes[body.node - 1]
        names = (lease.terms.owner, lease.id)
        return Relay(
            lease.id,
            data,
            body.timeout,
            functools.partial(self._take, *names, part=1.0 if body.timeout <= SHORT else LONG),
            functools.partial(self._start, node, body.command),
            functools.partial(self.places.free, *names),
        )

    def _take(self, owner: str, lease_id: str, part: float) -> None:
        if not self.places.take(owner, lease_id, part=part):
            raise busy(f"Too many programs run here, or for {owner} or lease {lease_id}; try again")

    def _start(self, node: Node, command: list[str]) -> Execution:
        execution = None
        try:
            with suppress(KeyError):  # a provider of another launcher
                provider = self._launcher.getProviderManager(str(node.provider))
                execution = provider.execute(node, command, timeout=START)
        except (RemoteException, TimeoutError) as error:
            raise Refused(
                http.HTTPStatus.BAD_GATEWAY, "unreachable", f"Node {node.id}: {error}"
            ) from error
        if execution is None:
            text = (
                f"Node {node.id} of provider {node.provider} runs no programs through this "
                "launcher; use SSH"
            )
            raise Refused(http.HTTPStatus.CONFLICT, "no-exec", text)
        return execution
