"""Numbers, strings, records and error codes of ZooKeeper's wire protocol."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_INT, _LONG = struct.Struct("!i"), struct.Struct("!q")
#: Length, xid, zxid and code of an answer, before its body.
_REPLY = struct.Struct("!iiqi")
#: Entries of a list in a request; more are refused before memory is allocated for them.
MOST_ENTRIES = 200_000


class Code(enum.IntEnum):
    OK = 0
    RUNTIME_INCONSISTENCY = -2
    MARSHALLING = -5
    UNIMPLEMENTED = -6
    BAD_ARGUMENTS = -8
    NO_NODE = -101
    NO_AUTH = -102
    BAD_VERSION = -103
    NO_CHILDREN_FOR_EPHEMERALS = -108
    NODE_EXISTS = -110
    NOT_EMPTY = -111
    INVALID_ACL = -114
    AUTH_FAILED = -115
    NO_WATCHER = -121


class Refused(Exception):
    """A request fails with this code."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class Reader:
    """Reads a request; whatever is missing or malformed raises `Refused` with ``MARSHALLING``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if count < 0 or self._at > len(self._data):
            raise Refused(Code.MARSHALLING)
        return self._data[start : self._at]

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def integer(self) -> int:
        value: int
        try:
            (value,) = _INT.unpack_from(self._data, self._at)
        except struct.error:
            raise Refused(Code.MARSHALLING) from None
        self._at += _INT.size
        return value

    def long(self) -> int:
        return int(_LONG.unpack(self._take(8))[0])

    def boolean(self) -> bool:
        return self._take(1) != b"\0"

    def buffer(self) -> bytes | None:
        length = self.integer()
        return None if length == -1 else self._take(length)

    def string(self) -> str:
        try:
            return (self.buffer() or b"").decode()
        except UnicodeDecodeError:
            raise Refused(Code.MARSHALLING) from None

    def entries(self, read: Callable[[], T]) -> list[T]:
        count = self.integer()
        if count > MOST_ENTRIES:
            raise Refused(Code.MARSHALLING)
        return [read() for _ in range(count)]

    def strings(self) -> list[str]:
        return self.entries(self.string)

    def acls(self) -> list[Acl]:
        return self.entries(lambda: Acl((self.integer(), self.string(), self.string())))


class Acl(tuple[int, str, str]):
    """Permissions, scheme and id of one entry of an access control list."""

    __slots__ = ()


def int_(value: int) -> bytes:
    return _INT.pack(value)


def long(value: int) -> bytes:
    return _LONG.pack(value)


def buffer(value: bytes | None) -> bytes:
    return int_(-1) if value is None else int_(len(value)) + value


def string(value: str) -> bytes:
    return buffer(value.encode())


def strings(values: Sequence[str]) -> bytes:
    return int_(len(values)) + b"".join(map(string, values))


def acls(values: Iterable[Acl]) -> bytes:
    parts = [int_(perms) + string(scheme) + string(name) for perms, scheme, name in values]
    return int_(len(parts)) + b"".join(parts)


def framed(payload: bytes) -> bytes:
    return int_(len(payload)) + payload


def reply(xid: int, zxid: int, code: int = 0, body: bytes = b"") -> bytes:
    return _REPLY.pack(_REPLY.size - _INT.size + len(body), xid, zxid, code) + body
