"""Demonstration of the original's ticket server: records to tickets (NM-A.12, NM-C.6).

It listens on a loopback address only and answers only the user who started it, and root.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.api.identity import Identity
from nodepool.nodemanager.sources.tickets import MAX_SIZE, TicketError

#: Timeout in seconds for a client's request and for its reading of the answer.
TIMEOUT = 10.0

Sign = Callable[[list[Any]], str]


def listen(address: str, port: int) -> socket.socket:
    """Return a listener at an IPv4 loopback address, where the kernel identifies clients.

    :raises ConfigurationError: it is not a loopback address, or cannot be used.
    """
    try:
        loopback = ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigurationError(
            f"--address: the ticket server is for demonstrations, on a loopback address such as 127.0.0.1, not {address}"
        )
    if not 0 <= port < 65536:
        raise ConfigurationError(f"--port: {port} is not a valid port; choose another port")
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise ConfigurationError(f"--port: cannot listen on {address} port {port}: {error}; choose another port") from error


def serve(listener: socket.socket, sign: Sign) -> None:
    """Answer one client after the other, until the process is ended."""
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            uid = Identity.tcp_uid(connection)
            if uid not in (0, os.geteuid()):
                print(f"refused: {'an unknown user' if uid is None else _account(uid)}", file=sys.stderr, flush=True)
                continue
            answer(connection, sign)


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def answer(connection: socket.socket, sign: Sign) -> None:
    """Read to the end of the stream; send a ticket, or a line that starts with "error:".

    :raises OSError: the client has closed the connection, or is too slow.
    """
    deadline = time.monotonic() + TIMEOUT
    text = bytearray()
    while len(text) <= MAX_SIZE:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(1 << 16)
        if not piece:
            break
        text += piece
    connection.settimeout(TIMEOUT)
    connection.sendall(_ticket(bytes(text), sign).encode() + b"\n")


def _ticket(text: bytes, sign: Sign) -> str:
    if len(text) > MAX_SIZE:
        return f"error: more than {MAX_SIZE} bytes"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"error: must be a sliver's record, or a list of them, in JSON: {error}"
    records = given if isinstance(given, list) else [given]
    if not records or not all(isinstance(record, dict) for record in records):
        return "error: must be a sliver's record, or a list of them"
    try:
        return sign(records)
    except TicketError as error:
        return f"error: {error}"
