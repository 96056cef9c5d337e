"""Protocol of daemon, helper, workers and process 1: JSON and descriptors on sockets."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

MAX_MESSAGE = 64 * 1024 * 1024
MAX_DESCRIPTORS = 16


def send_frame(
    connection: socket.socket, value: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send a JSON object with its length; descriptors are sent with the first byte."""
    body = json.dumps(value).encode()
    data = struct.pack("=I", len(body)) + body
    sent = (
        socket.send_fds(connection, [data], list(descriptors))
        if descriptors
        else connection.send(data)
    )
    if sent < len(data):  # an empty send also fails if the other end has answered and closed
        connection.sendall(data[sent:])


def receive_frame(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next object, or None at the end of the stream. Raises OSError, ValueError."""
    head, descriptors, _flags, _address = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not head:
        return None
    while len(head) < 4:
        head += _some(connection, 4 - len(head))
    length = struct.unpack("=I", head)[0]
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes is too long (limit {MAX_MESSAGE})")
    body = bytearray()
    while len(body) < length:
        body += _some(connection, length - len(body))
    return json.loads(bytes(body)), descriptors


def _some(connection: socket.socket, limit: int) -> bytes:
    data = connection.recv(min(limit, 1 << 20))
    if not data:
        raise ConnectionResetError("the other end closed in the middle of a message")
    return data
