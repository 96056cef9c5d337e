"""Frames that carry the streams of a program on the connection of ``Exec`` (NM-C.5).

Each is a byte with the type, four bytes with the length of the data (big endian), and the data.
"""

from __future__ import annotations

import struct

#: From the caller: input, of which empty data is the end. To the caller: output, and finally the
#: exit status as decimal text (minus the number of the signal that ended the program; empty: not
#: known).
STDIN, STDOUT, STDERR, EXIT = range(4)
CONTENT_TYPE = "application/x-nodepool-frames"
#: Maximum bytes of data in a frame.
PIECE = 65536
_HEAD = struct.Struct(">BI")


def pack(kind: int, data: bytes) -> bytes:
    return _HEAD.pack(kind, len(data)) + data


def take(buffer: bytearray) -> tuple[int, bytes] | None:
    """Remove and return the first frame: type and data. None: it is incomplete.

    :raises ValueError: it is too long.
    """
    if len(buffer) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(buffer)
    if length > PIECE:
        raise ValueError(f"a frame of {length} bytes is too long (limit {PIECE})")
    end = _HEAD.size + length
    if len(buffer) < end:
        return None
    data = bytes(buffer[_HEAD.size : end])
    del buffer[:end]
    return kind, data
