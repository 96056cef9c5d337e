"""Programs on the nodes of a lease, without SSH: the launcher relays their streams."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import http
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress

from nodepool.access.identity import Role
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
from nodepool.web.tables import Leasing
from nodepool.zk.records import Node

#: Programs at a time: in all, of one owner, and of one lease.
MOST = (500, 250, 20)
#: The part of these places for programs of any length; the others are for those of at most that many seconds.
LONG, SHORT = 0.9, 60.0
#: Seconds for the start of a program, and for its input to be sent.
START, INPUT = 5.0, 30.0
#: Seconds after which something is sent in any case, and between two checks whether the client is still connected.
HEARTBEAT, CHECK = 15.0, 1.0
#: Seconds for the client to read what is sent; the server disconnects it earlier.
WRITE = 60.0

log = logging.getLogger("nodepool.lease")


class Relay(Stream, Later):
    """A program with its own thread, which starts it and relays its streams."""

    headers = (("Content-Type", frames.CONTENT_TYPE), *access.HEADERS)
    _execution: Execution

    def __init__(self, lease_id: str, data: bytes, deadline: float) -> None:
        self.lease_id = lease_id
        self._data = data
        self._deadline = deadline
        #: When the program runs, or why it does not; and when everything is relayed. Nobody can cancel them.
        self.started: Future[None] = Future()
        self._relayed: Future[None] = Future()
        for future in (self.started, self._relayed):
            future.set_running_or_notify_cancel()
        self._client: queue.SimpleQueue[Callable[[bytes], bool]] = queue.SimpleQueue()

    def live(self, start: Callable[[], Execution], done: Callable[[], object]) -> None:
        """Start the program, and relay its streams; on the program's thread.

        :param start: raises Refused if the program cannot be started.
        :param done: called when nothing is left of the program.
        """
        try:
            self._execution = start()
        except Exception as error:
            done()
            self.started.set_exception(error)
            return
        try:
            self.started.set_result(None)
            self.run(self._client.get(timeout=2 * START))
        except queue.Empty:
            log.info("Lease %s: a program is ended: its client has disconnected", self.lease_id)
        finally:
            self._relayed.set_result(None)
            self._execution.close()
            done()

    # -- on the loop of the server

    async def outcome(self, threads: Executor) -> Relay:
        try:
            async with asyncio.timeout(2 * START):
                await asyncio.wrap_future(self.started)
        except TimeoutError:
            raise busy("The program was not started in time") from None
        return self

    async def send(self, write: Write) -> None:
        loop, gone = asyncio.get_running_loop(), threading.Event()

        def put(data: bytes) -> bool:
            with suppress(ConnectionError, TimeoutError, RuntimeError, CancelledError):
                if data and not gone.is_set():
                    asyncio.run_coroutine_threadsafe(write(data), loop).result(WRITE)
                return not gone.is_set()
            return False

        self._client.put(put)
        try:
            await asyncio.wrap_future(self._relayed)
        finally:
            gone.set()

    def run(self, send: Callable[[bytes], bool]) -> None:
        """Relay until the program ends, the client disconnects or the time is over.

        :param send: returns False when the client has disconnected.
        """
        try:
            with suppress(TimeoutError, RemoteException):  # it has ended, or does not read its input
                if self._data:
                    self._execution.write(self._data, INPUT)
                self._execution.write(b"", INPUT)
            sent = time.monotonic()
            while send(b"") and (now := time.monotonic()) < self._deadline:
                try:
                    found = self._execution.read(CHECK)
                except TimeoutError:
                    if now - sent >= HEARTBEAT:
                        send(frames.pack(frames.NOTHING, b""))
                        sent = now
                    continue
                sent = now
                if found is None:
                    status = self._execution.status
                    send(frames.pack(frames.EXIT, b"" if status is None else b"%d" % status))
                    return
                send(frames.pack(*found))
        except RemoteException as error:
            log.info("Lease %s: a program ended: %s", self.lease_id, error)
        except Exception:
            log.exception("Lease %s: error while the streams of a program were relayed:", self.lease_id)


class ProgramCalls:
    """The call that runs a program."""

    def __init__(self, launcher: Leasing | None, leases: LeaseCalls) -> None:
        self._launcher = launcher
        self._leases = leases
        self.places = Places(*MOST)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/leases/{id}/exec", self.execute, "Run a program on a node of a lease", Role.BORROW,
                  {http.HTTPStatus.OK: bytes}, NewProgram, of_lease=True, target="lease {id}"),
        ]  # fmt: skip

    def execute(self, call: Call) -> Later:
        lease, body = self._leases.held(call), call.parsed(NewProgram)
        try:
            data = base64.b64decode(body.input, validate=True)
        except binascii.Error as error:
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", f"input is not base64: {error}") from None
        nodes = [node for _name, node in ssh.names(lease.nodes)]
        if body.node > len(nodes):
            text = f"Lease {lease.id} has {len(nodes)} nodes; there is no node {body.node}"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        node = nodes[body.node - 1]
        names = (lease.terms.owner, lease.id)
        if not self.places.take(*names, part=1.0 if body.timeout <= SHORT else LONG):
            raise busy(f"Too many programs run here, or for {names[0]} or lease {lease.id}; try again")
        relay = Relay(lease.id, data, time.monotonic() + body.timeout)
        work = (functools.partial(self._start, node, body.command), functools.partial(self.places.free, *names))
        threading.Thread(target=relay.live, args=work, name=f"Thread-WebApp-exec-{lease.id}", daemon=True).start()
        return relay

    def _start(self, node: Node, command: list[str]) -> Execution:
        execution = None
        try:
            with suppress(KeyError):  # a provider of another launcher
                if self._launcher is not None:
                    execution = self._launcher.getProviderManager(str(node.provider)).execute(node, command, timeout=START)
        except (RemoteException, TimeoutError) as error:
            raise Refused(http.HTTPStatus.BAD_GATEWAY, "unreachable", f"Node {node.id}: {error}") from error
        if execution is None:
            text = f"Node {node.id} of provider {node.provider} runs no programs through this launcher; use SSH"
            raise Refused(http.HTTPStatus.CONFLICT, "no-exec", text)
        return execution
