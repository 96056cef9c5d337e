"""One SSH negotiation, up to the host key.

paramiko needs about 30 MB, so it is imported when the first SSH port answers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Sequence
from typing import Any

LOG_CHANNEL = "nodepool.nodescan.ssh"
# "No acceptable host key" is a normal answer; paramiko logs it as an error with traceback.
logging.getLogger(LOG_CHANNEL).addFilter(lambda record: record.levelno >= logging.CRITICAL)

# The KEXINIT of any server is much smaller.
_CAPTURE = 32768
_MSG_KEXINIT = 20


def key_type(algorithm: str) -> str:
    """Return the key type of a host key algorithm: one RSA key serves several algorithms."""
    return "ssh-rsa" if algorithm in ("ssh-rsa", "rsa-sha2-256", "rsa-sha2-512") else algorithm


def group_by_type(algorithms: Sequence[str]) -> dict[str, list[str]]:
    """Return algorithms by type of key, both in the given order."""
    groups: dict[str, list[str]] = {}
    for algorithm in algorithms:
        groups.setdefault(key_type(algorithm), []).append(algorithm)
    return groups


def offered_algorithms(received: bytes) -> list[str] | None:
    """Return the host key algorithms in the first data of a server; None if not found (yet)."""
    at = received.find(b"SSH-")
    while at > 0 and received[at - 1 : at] != b"\n":
        at = received.find(b"SSH-", at + 1)
    end = received.find(b"\n", at) if at >= 0 else -1
    if end < 0:
        return None
    packet = received[end + 1 :]
    try:
        length, padding, message = struct.unpack_from(">IBB", packet)
        payload = packet[5 : 4 + length - padding]
        if message != _MSG_KEXINIT or len(packet) < 4 + length:
            return None
        (kex_length,) = struct.unpack_from(">I", payload, 17)
        (size,) = struct.unpack_from(">I", payload, 21 + kex_length)
        names = payload[25 + kex_length : 25 + kex_length + size]
    except struct.error:
        return None
    if len(names) != size:
        return None
    return [name for name in names.decode("ascii", "replace").split(",") if name]


class _RecordingSocket:
    """A socket that stores the first bytes received, which are not encrypted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.received = b""

    def recv(self, size: int) -> bytes:
        data = self._sock.recv(size)
        if len(self.received) < _CAPTURE:
            self.received += data
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Negotiation:
    """A running negotiation on a connected socket.

    ``event.set()`` is called from its thread when it has ended.
    """

    def __init__(
        self, sock: socket.socket, event: Any, name: str, algorithms: Sequence[str] | None = None
    ) -> None:
        import paramiko

        self._sock = sock
        self._recorder = _RecordingSocket(sock)
        channel: Any = self._recorder
        # Looked up at each use: test suites replace it.
        self.transport: Any = paramiko.transport.Transport(channel)
        with contextlib.suppress(Exception):
            self.transport.name = name
            self.transport.set_log_channel(LOG_CHANNEL)
        options = self.transport.get_security_options()
        self.supported: list[str] = list(options.key_types)
        if algorithms is not None:
            options.key_types = list(algorithms)
        with contextlib.suppress(Exception):
            # Post-quantum and large-prime exchanges protect secrets; there are none here, and they
            # need ten times more CPU.
            cheap = [kex for kex in options.kex if kex.startswith(("curve25519", "ecdh"))]
            options.kex = cheap + [kex for kex in options.kex if kex not in cheap]
        self.transport.start_client(event=event)

    def key(self) -> tuple[str, str]:
        """Return (type, ``"<type> <base64>"``) of the host key.

        :raises Exception: why there is none.
        """
        if not self.transport.is_active():
            raise self.transport.get_exception() or ConnectionError(
                "the connection was closed during negotiation"
            )
        key = self.transport.get_remote_server_key()
        return key.get_name(), f"{key.get_name()} {key.get_base64()}"

    def offered(self) -> list[str] | None:
        """Return the host key algorithms that the server offers, None if unknown."""
        return offered_algorithms(self._recorder.received)

    def close(self) -> None:
        # Shutting the socket down ends the reading thread immediately; closing alone would not.
        with contextlib.suppress(Exception):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            self.transport.close()
            # Ends the thread of its timer, which would wait for 15 s.
            self.transport.packetizer.complete_handshake()
        with contextlib.suppress(Exception):
            self._sock.close()


def is_no_common_algorithm(error: BaseException) -> bool:
    """Return True if the server has no host key of the requested type."""
    import paramiko

    return isinstance(
        error, paramiko.ssh_exception.IncompatiblePeer
    ) or "no acceptable host key" in str(error)
