"""The scan of one node, as a generator that never blocks."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol, TypeAlias, TypeVar

from nodepool import exceptions
from nodepool.base import threads
from nodepool.logconfig import Log
from nodepool.nodescan import ssh

CONNECT_TIMEOUT = 10.0
"""Limit of a single connection attempt, in seconds."""

RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.0)
"""Pauses after failed attempts, in seconds; the last one repeats."""

KEY_ATTEMPTS = 3
"""Attempts per further key type (busy servers drop connections)."""

SSH_TYPES = ("ssh", "network_cli")

T = TypeVar("T")
Address: TypeAlias = tuple[int, tuple[Any, ...]]
#: Yields until when (monotonic seconds) it waits if nothing happens; returns ``T`` at the end.
Steps: TypeAlias = Generator[float, None, T]


class Scanning(Protocol):
    """The thread that advances scans, as used by a scan."""

    def wakeRequest(self, request: NodescanRequest) -> None: ...

    def registerDescriptor(self, fd: int, request: NodescanRequest) -> None: ...

    def unRegisterDescriptor(self, fd: int) -> None: ...


class NodescanEvent:
    """An event that another thread sets when it has ended."""

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
    ``on_complete(request)`` is called once, from that thread, and must be quick. If one of
    ``known_keys`` is the first key that the host presents, no others are collected.
    """

    FAKE = False

    def __init__(
        self,
        node: Any,
        host_key_checking: bool,
        timeout: float,
        log: Log | None = None,
        on_complete: Callable[[NodescanRequest], None] | None = None,
        *,
        known_keys: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.known_keys = frozenset(known_keys)
        self.host_key_checking = host_key_checking
        self.timeout = timeout
        self.log = log or logging.getLogger("nodepool.NodescanRequest")
        self.on_complete = on_complete
        self.clock = clock
        self.state = "start"
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
        self._failures = 0
        self._steps = self._scan()

    # For callers

    def needsNetwork(self) -> bool:
        """Return False if the scan ends without any connection."""
        return self.host_key_checking and not self._fake()

    def result(self) -> list[str]:
        """Return the keys as ``"<type> <base64>"``, or raise the exception that ended the scan."""
        if self.exception is not None:
            raise self.exception
        return list(self.keys.values())

    def fail(self, exception: BaseException) -> None:
        """End the scan with this exception."""
        self.exception = exception
        self._finish()

    def cleanup(self) -> None:
        """Close everything that is open.

        Called from the thread that advances, or when no thread does any more.
        """
        self._steps.close()

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

    def advance(self, socket_ready: bool) -> None:
        """Do what can be done without blocking.

        ``socket_ready``: the present socket or negotiation has an event.
        """
        if not self.complete:
            try:
                self.wake_at = min(self.wake_at, next(self._steps))
            except StopIteration:
                self._finish()

    def _fake(self) -> bool:
        return self.FAKE or "fake" in self.ip

    def _finish(self) -> None:
        if self.complete:
            return
        self.cleanup()
        if self.exception is None and self.gather_keys and self.host_key_checking and not self.keys:
            # Without keys Zuul would not verify the host at all.
            self.exception = exceptions.LaunchKeyscanException(f"No host keys from {self.ip}")
        self.state = "complete"
        self.wake_at = math.inf
        self.complete = True
        if self.on_complete is not None:
            try:
                self.on_complete(self)
            except Exception:
                self.log.exception("Error in the callback of a finished scan:")

    # Steps: resumed at any time, so check again after each yield

    def _scan(self) -> Steps[None]:
        """Wait for the port; read a key, then one of each further type that the host offers."""
        if not self.needsNetwork():
            if self.host_key_checking and self.gather_keys:
                self.keys["ssh-rsa"] = "ssh-rsa FAKEKEY"
            return
        addresses = yield from self._resolve()
        while True:
            try:
                first = yield from self._attempt(addresses[0])
                break
            except Exception as error:
                if isinstance(error, OSError):
                    addresses.append(addresses.pop(0))  # use several addresses in turn
                yield from self._pause(error)
        if first is None or not self.known_keys.isdisjoint(self.keys.values()):
            return
        groups = ssh.group_by_type(first.supported)
        offered = first.offered()
        for kind, algorithms in groups.items():
            if kind not in self.keys and (
                offered is None or not set(algorithms).isdisjoint(offered)
            ):
                yield from self._read_key(kind, addresses[0], algorithms)
        order = dict.fromkeys([*groups, *self.keys])
        self.keys = {kind: self.keys[kind] for kind in order if kind in self.keys}

    def _resolve(self) -> Steps[list[Address]]:
        try:
            # Addresses need no name service: this cannot block.
            return self._addresses(socket.AI_NUMERICHOST)
        except (ValueError, TypeError, OverflowError) as error:
            # Others write records, and clouds name addresses.
            raise exceptions.LaunchNetworkException(
                f"{self.ip} port {self.node.connection_port} cannot be an address: {error}"
            ) from error
        except socket.gaierror:
            pass  # a name
        lane = threads.shared().lane(f"keyscan-resolve {self.ip}", 1)
        ended = NodescanEvent(self.worker, self)
        while True:
            call = lane.submit(self._addresses)
            call.add_done_callback(lambda _call: ended.set())
            while not call.done():
                yield math.inf
            try:
                return call.result()
            except (OSError, ValueError) as error:
                yield from self._pause(error)

    def _addresses(self, flags: int = 0) -> list[Address]:
        port = int(self.node.connection_port)
        if not 0 <= port < 1 << 16:  # an error of the name service since Python 3.13
            raise ValueError("ports end at 65535")
        found = socket.getaddrinfo(self.ip, port, 0, socket.SOCK_STREAM, 0, flags)
        return [(family, sockaddr) for family, _type, _proto, _name, sockaddr in found]

    def _read_key(self, kind: str, address: Address, algorithms: list[str]) -> Steps[None]:
        """Read a key of this type, if the host has one."""
        for left in reversed(range(KEY_ATTEMPTS)):
            try:
                yield from self._attempt(address, algorithms)
                return
            except Exception as error:
                if ssh.is_no_common_algorithm(error):
                    return
                if left:
                    yield from self._pause(error)
                    continue
                self.last_error = error
                self.log.warning("No key of type %s from %s: %s", kind, self.ip, error)

    def _attempt(
        self, address: Address, algorithms: list[str] | None = None
    ) -> Steps[ssh.Negotiation | None]:
        """Connect; for SSH, negotiate and store the key.

        :raises Exception: what went wrong.
        """
        suffix = "" if algorithms is None else " key"
        self.state = "connecting" + suffix
        family, sockaddr = address
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            yield from self._connect(sock, sockaddr)
            if not self.gather_keys:
                return None
            self.state = "negotiating" + suffix
            ended = NodescanEvent(self.worker, self)
            with contextlib.closing(
                ssh.Negotiation(sock, ended, f"keyscan-ssh {self.ip}", algorithms)
            ) as negotiation:
                while not ended.is_set():
                    yield math.inf
                name, key = negotiation.key()
                self.keys.setdefault(ssh.key_type(name), key)
                return negotiation

    def _connect(self, sock: socket.socket, sockaddr: tuple[Any, ...]) -> Steps[None]:
        until = self.clock() + CONNECT_TIMEOUT
        try:
            while True:
                try:
                    # The first call starts the connection; later calls return its result.
                    return sock.connect(sockaddr)
                except BlockingIOError:
                    if self.clock() >= until:
                        raise TimeoutError(
                            f"no answer within {CONNECT_TIMEOUT:g} seconds"
                        ) from None
                if self.worker is not None:
                    self.worker.registerDescriptor(sock.fileno(), self)
                yield until
        finally:
            if self.worker is not None:
                with contextlib.suppress(Exception):
                    self.worker.unRegisterDescriptor(sock.fileno())

    def _pause(self, error: BaseException) -> Steps[None]:
        """Wait before the next attempt, because one has failed."""
        self.last_error = error
        self.state = self.state.replace("negotiating", "connecting")
        delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
        self._failures += 1
        self.log.debug("Scan of %s: %s; retrying in %s s", self.ip, error, delay)
        until = self.clock() + delay
        while self.clock() < until:
            yield until
