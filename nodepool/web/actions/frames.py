"""Frames of the streams of a program.

Each is a byte with the type, four bytes with the length of the data (big endian), and the data.
"""

from __future__ import annotations

import struct

#: Types: nothing, to keep the connection open; outputs; the exit status as decimal text, which is
#: the last one.
NOTHING, STDOUT, STDERR, EXIT = range(4)
CONTENT_TYPE = "application/x-nodepool-frames"


def pack(kind: int, data: bytes) -> bytes:
    return struct.pack(">BI", kind, len(data)) + data
