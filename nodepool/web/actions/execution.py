"""Programs on the nodes of a lease, without SSH: the launcher relays their streams."""

from __future__ import annotations

import base64
import binascii
import http
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from nodepool.access.identity import Role
from nodepool.driver.provider import Execution
from nodepool.exceptions import RemoteException
from nodepool.lease import ssh
from nodepool.web.actions import frames
from nodepool.web.actions.bodies import NewProgram
from nodepool.web.actions.leases import LeaseCalls
from nodepool.web.actions.routes import Call, Refused, Reply, Route, Stream, busy
from nodepool.web.tables import Leasing

#: Programs at a time, seconds for the start of one, and for its input to be sent.
MOST, START, INPUT = 50, 5.0, 30.0
#: Seconds after which something is sent in any case, and between two checks whether the client is still connected.
HEARTBEAT, CHECK = 15.0, 1.0

log = logging.getLogger("nodepool.lease")


class Relay(Stream):
    """A running program whose streams :meth:`run` relays on a separate thread."""

    def __init__(self, lease_id: str, execution: Execution, data: bytes, deadline: float, done: Callable[[], object]) -> None:
        self.lease_id = lease_id
        self._execution = execution
        self._data = data
        self._deadline = deadline
        self._done = done

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
        finally:
            self._execution.close()
            self._done()


class ProgramCalls:
    """The call that runs a program."""

    def __init__(self, launcher: Leasing | None, leases: LeaseCalls) -> None:
        self._launcher = launcher
        self._leases = leases
        self._places = threading.BoundedSemaphore(MOST)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/leases/{id}/exec", self.execute, "Run a program on a node of a lease", Role.BORROW,
                  {http.HTTPStatus.OK: bytes}, NewProgram, of_lease=True, target="lease {id}"),
        ]  # fmt: skip

    def execute(self, call: Call) -> Reply | Relay:
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
        if not self._places.acquire(blocking=False):
            raise busy(f"{MOST} programs run already; try again")
        try:
            execution = None
            with suppress(KeyError):  # a provider of another launcher
                if self._launcher is not None:
                    execution = self._launcher.getProviderManager(str(node.provider)).execute(node, body.command, timeout=START)
        except (RemoteException, TimeoutError) as error:
            self._places.release()
            raise Refused(http.HTTPStatus.BAD_GATEWAY, "unreachable", f"Node {node.id}: {error}") from error
        except BaseException:
            self._places.release()
            raise
        if execution is None:
            self._places.release()
            text = f"Node {node.id} of provider {node.provider} runs no programs through this launcher; use SSH"
            raise Refused(http.HTTPStatus.CONFLICT, "no-exec", text)
        return Relay(lease.id, execution, data, time.monotonic() + body.timeout, self._places.release)
