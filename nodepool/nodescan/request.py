"""The scan of one node, as a state machine that never blocks."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.logconfig import Log
from nodepool.nodescan import ssh

CONNECT_TIMEOUT = 10.0
"""Limit of a single connection attempt, in seconds."""

RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.0)
"""Pauses after failed attempts, in seconds; the last one repeats."""

KEY_ATTEMPTS = 3
"""Attempts per further key type (busy servers drop connections)."""

SSH_TYPES = ("ssh", "network_cli")

Sockaddr = tuple[Any, ...]


class Scanning(Protocol):
    """The thread that advances scans, as used by a scan."""

    def wakeRequest(self, request: NodescanRequest) -> None: ...

    def registerDescriptor(self, fd: int, request: NodescanRequest) -> None: ...

    def unRegisterDescriptor(self, fd: int) -> None: ...


class NodescanEvent:
    """An event that a negotiation thread sets when it has ended."""

    def __init__(self, worker: Scanning | None, request: NodescanRequest) -> None:
        self._worker = worker
        self._request = request
        self._set = False

    def set(self) -> None:
        self._set = True
        if self._worker is not None:
            self._worker.wakeRequest(self._request)

    def is_set(self) -> bool:
        return self._set


class NodescanRequest:
    """Waits for the port of ``node`` and collects its SSH host keys.

    It ends within ``timeout`` seconds from its first step. ``advance`` belongs to one thread.
    ``on_complete(request)`` is called once, from that thread, and must be quick.
    """

    FAKE = False

    START = "start"
    CONNECTING_INIT = "connecting"
    NEGOTIATING_INIT = "negotiating"
    CONNECTING_KEY = "connecting key"
    NEGOTIATING_KEY = "negotiating key"
    COMPLETE = "complete"

    def __init__(
        self,
        node: Any,
        host_key_checking: bool,
        timeout: float,
        log: Log | None = None,
        on_complete: Callable[[NodescanRequest], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.host_key_checking = host_key_checking
        self.timeout = timeout
        self.log = log or logging.getLogger("nodepool.NodescanRequest")
        self.on_complete = on_complete
        self.clock = clock
        self.state = self.START
        self.complete = False
        self.worker: Scanning | None = None
        self.start_time: float | None = None
        self.wake_at = -math.inf
        """Latest time to advance without an event."""
        self.ip = str(node.interface_ip)
        self.gather_keys = node.connection_type in SSH_TYPES
        self.keys: dict[str, str] = {}
        """Host keys by type."""
        self.exception: BaseException | None = None
        self.last_error: BaseException | None = None
        self._sockaddr: tuple[int, Sockaddr] | None = None
        self._resolved: list[tuple[int, Sockaddr]] | OSError | None = None
        self._resolving = False
        self._sock: Any = None
        self._attempt_deadline = math.inf
        self._negotiation: ssh.Negotiation | None = None
        self._event: NodescanEvent | None = None
        self._failures = 0
        self._order: list[str] = []
        self._wanted: list[list[str]] = []
        self._key_failures = 0

    # For callers

    def needsNetwork(self) -> bool:
        """Return False if the scan ends without any connection."""
        return self.host_key_checking and not self._fake()

    def result(self) -> list[str]:
        """Return the keys as ``"<type> <base64>"``, or raise the exception that ended the scan."""
        if self.exception is not None:
            raise self.exception
        return [self.keys[name] for name in self._order if name in self.keys]

    def fail(self, exception: BaseException) -> None:
        """End the scan with this exception."""
        self.exception = exception
        self._finish()

    def cleanup(self) -> None:
        """Close everything that is open.

        Called from the thread that advances, or when no thread does any more.
        """
        self._drop_connection()

    def timeoutError(self) -> exceptions.ConnectionTimeoutException:
        reason = f", last error: {self.last_error}" if self.last_error else ""
        return exceptions.ConnectionTimeoutException(
            f"Timeout scanning {self.ip} port {self.node.connection_port} after {self.timeout} "
            "seconds "
            f"(state: {self.state}{reason})"
        )

    @property
    def deadline(self) -> float:
        """Return the end of the whole scan; infinite while it waits for its turn."""
        return math.inf if self.start_time is None else self.start_time + self.timeout

    # Steps

    def advance(self, socket_ready: bool) -> None:
        """Do what can be done without blocking.

        ``socket_ready``: the present socket or negotiation has an event.
        """
        if self.complete:
            return
        if self.state == self.START:
            self._start()
        elif self.state in (self.CONNECTING_INIT, self.CONNECTING_KEY):
            self._connect()
        elif (
            self.state in (self.NEGOTIATING_INIT, self.NEGOTIATING_KEY)
            and self._event
            and self._event.is_set()
        ):
            self._negotiated()

    def _fake(self) -> bool:
        return self.FAKE or "fake" in self.ip

    def _start(self) -> None:
        if self.needsNetwork():
            self._resolve()
        else:
            if self.host_key_checking and self.gather_keys:
                self._order = ["ssh-rsa"]
                self.keys["ssh-rsa"] = "ssh-rsa FAKEKEY"
            self._finish()

    def _resolve(self) -> None:
        if isinstance(self._resolved, OSError):
            error, self._resolved, self._resolving = self._resolved, None, False
            self._retry(error)
            return
        if self._resolved is None:
            if self._resolving:
                return
            try:
                # Addresses need no name service: this cannot block.
                self._resolved = self._addresses(socket.AI_NUMERICHOST)
            except socket.gaierror:
                self._resolving = True
                threading.Thread(
                    target=self._resolve_name, name=f"keyscan-resolve {self.ip}", daemon=True
                ).start()
                return
        self._sockaddr = self._resolved[0]
        self.state = self.CONNECTING_INIT
        self._connect()

    def _addresses(self, flags: int = 0) -> list[tuple[int, Sockaddr]]:
        found = socket.getaddrinfo(
            self.ip, int(self.node.connection_port), 0, socket.SOCK_STREAM, 0, flags
        )
        return [(family, sockaddr) for family, _type, _proto, _name, sockaddr in found]

    def _resolve_name(self) -> None:
        try:
            self._resolved = self._addresses()
        except (OSError, ValueError) as error:
            self._resolved = error if isinstance(error, OSError) else OSError(str(error))
        if self.worker is not None:
            self.worker.wakeRequest(self)

    def _connect(self) -> None:
        assert self._sockaddr is not None
        family, sockaddr = self._sockaddr
        try:
            if self._sock is None:
                self._attempt_deadline = self.clock() + CONNECT_TIMEOUT
                self._sock = socket.socket(family, socket.SOCK_STREAM)
                self._sock.setblocking(False)
            # The first call starts the connection; later calls return its result.
            self._sock.connect(sockaddr)
        except BlockingIOError:
            if self.clock() >= self._attempt_deadline:
                self._retry(TimeoutError(f"no answer within {CONNECT_TIMEOUT:g} seconds"))
                return
            self.wake_at = min(self.wake_at, self._attempt_deadline)
            if self.worker is not None:
                self.worker.registerDescriptor(self._sock.fileno(), self)
            return
        except OSError as error:
            self._retry(error)
            return
        self._unregister()
        if not self.gather_keys:
            self._finish()
            return
        self.state = (
            self.NEGOTIATING_INIT if self.state == self.CONNECTING_INIT else self.NEGOTIATING_KEY
        )
        self._event = NodescanEvent(self.worker, self)
        algorithms = self._wanted[0] if self.state == self.NEGOTIATING_KEY else None
        try:
            self._negotiation = ssh.Negotiation(
                self._sock, self._event, f"keyscan-ssh {self.ip}", algorithms
            )
        except Exception as error:
            self._retry(error)

    def _negotiated(self) -> None:
        assert self._negotiation is not None
        negotiation = self._negotiation
        try:
            error = negotiation.error()
            name, key = negotiation.key() if error is None else ("", "")
        except Exception as problem:
            error = problem
        if error is not None:
            if self.state == self.NEGOTIATING_KEY and ssh.is_no_common_algorithm(error):
                self._next_key()
            else:
                self._retry(error)
            return
        self.keys.setdefault(ssh.key_type(name), key)
        if self.state == self.NEGOTIATING_INIT:
            groups = ssh.group_by_type(negotiation.supported)
            self._order = list(dict.fromkeys([*groups, ssh.key_type(name)]))
            offered = negotiation.offered()
            self._wanted = [[]] + [
                algorithms
                for kind, algorithms in groups.items()
                if kind not in self.keys
                and (offered is None or not set(algorithms).isdisjoint(offered))
            ]
        self._next_key()

    def _next_key(self) -> None:
        """Continue with the next type of key."""
        self._drop_connection()
        self._key_failures = 0
        self._wanted.pop(0)
        if not self._wanted:
            self._finish()
            return
        self.state = self.CONNECTING_KEY
        self._connect()

    def _retry(self, error: BaseException) -> None:
        """Retry after a pause, because the connection or negotiation failed."""
        self._drop_connection()
        self.last_error = error
        if self._wanted:
            self._key_failures += 1
            if self._key_failures >= KEY_ATTEMPTS:
                self.log.warning(
                    "No key of type %s from %s: %s",
                    ssh.key_type(self._wanted[0][0]),
                    self.ip,
                    error,
                )
                self._next_key()
                return
            self.state = self.CONNECTING_KEY
        elif self._sockaddr is not None:
            self.state = self.CONNECTING_INIT
            if isinstance(error, OSError) and isinstance(self._resolved, list):
                # several addresses: use them in turn
                self._sockaddr = self._resolved[(self._failures + 1) % len(self._resolved)]
        delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
        self._failures += 1
        self.log.debug("Scan of %s: %s; retrying in %s s", self.ip, error, delay)
        self.wake_at = self.clock() + delay

    def _finish(self) -> None:
        if self.complete:
            return
        self._drop_connection()
        if self.exception is None and self.gather_keys and self.host_key_checking and not self.keys:
            # Without keys Zuul would not verify the host at all.
            self.exception = exceptions.LaunchKeyscanException(f"No host keys from {self.ip}")
        self.state = self.COMPLETE
        self.wake_at = math.inf
        self.complete = True
        if self.on_complete is not None:
            callback, self.on_complete = self.on_complete, None
            try:
                callback(self)
            except Exception:
                self.log.exception("Error in the callback of a finished scan:")

    def _unregister(self) -> None:
        if self.worker is not None and self._sock is not None:
            with contextlib.suppress(Exception):
                self.worker.unRegisterDescriptor(self._sock.fileno())

    def _drop_connection(self) -> None:
        self._event = None
        self._unregister()
        if self._negotiation is not None:
            self._negotiation.close()
            self._negotiation = None
        if self._sock is not None:
            with contextlib.suppress(Exception):
                self._sock.close()
            self._sock = None
