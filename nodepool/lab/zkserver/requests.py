"""Operations of the protocol: each reads its request and returns the body of the answer."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from nodepool.lab.zkserver import codec, watches
from nodepool.lab.zkserver.codec import Acl, Code, Reader, Refused
from nodepool.lab.zkserver.core import ServedConnection, Server
from nodepool.lab.zkserver.tree import ADMIN, CHANGED, CHILD, CREATED, DELETED, READ

Operation = Callable[[Server, ServedConnection, Reader], bytes]

_CREATE, _DELETE, _SET, _SET_ACL, _CHECK, _CREATE2, _ERROR = 1, 2, 5, 7, 13, 15, -1
_HEADER = struct.Struct("!i?i")
#: Flags of a creation that this server knows: ephemeral and sequential.
_FLAGS = 3
#: What a write contains.
_FIELDS: dict[int, tuple[Callable[[Reader], Any], ...]] = {
    _CREATE: (Reader.string, Reader.buffer, Reader.acls, Reader.integer),
    _CREATE2: (Reader.string, Reader.buffer, Reader.acls, Reader.integer),
    _DELETE: (Reader.string, Reader.integer),
    _SET: (Reader.string, Reader.buffer, Reader.integer),
    _SET_ACL: (Reader.string, Reader.acls, Reader.integer),
    _CHECK: (Reader.string, Reader.integer),
}


# -- writes


def _apply(
    server: Server, client: ServedConnection, kind: int, values: Sequence[Any], zxid: int, time: int
) -> tuple[bytes, list[Any]]:
    """Apply one write; return the body of its answer, and what the journal keeps."""
    tree, who, path = server.tree, client.identities, values[0]
    if kind in (_CREATE, _CREATE2):
        _path, data, acl, flags = values
        if flags & ~_FLAGS:
            raise Refused(Code.UNIMPLEMENTED)
        path = tree.create(path, data, acl, flags, server.session_of(client).id, who, zxid, time)
        node = tree.nodes[path]
        body = codec.string(path) + (node.stat() if kind == _CREATE2 else b"")
        return body, ["create", path, _text(data), node.acl, node.owner]
    if kind == _DELETE:
        tree.delete(path, values[1], who, zxid)
        return b"", ["delete", path]
    if kind == _SET:
        node = tree.set(path, values[1], values[2], who, zxid, time)
        return node.stat(), ["set", path, _text(node.data)]
    if kind == _SET_ACL:
        node = tree.set_acl(path, values[1], values[2], who)
        return node.stat(), ["acl", path, node.acl]
    tree.check(path, values[1], who)
    return b"", []


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("latin-1")


def _write(kind: int) -> Operation:
    def operation(server: Server, client: ServedConnection, reader: Reader) -> bytes:
        values = [read(reader) for read in _FIELDS[kind]]
        zxid, time = server.begin()
        with server.tree.transaction() as events:
            body, change = _apply(server, client, kind, values, zxid, time)
        server.commit([change], events, zxid, time)
        return body

    return operation


def _multi(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    parts = []
    while True:
        kind, done, _error = reader.integer(), reader.boolean(), reader.integer()
        if done:
            break
        if kind not in _FIELDS:
            raise Refused(Code.UNIMPLEMENTED)
        # The real server answers both creations alike here, and clients expect that.
        parts.append(
            (_CREATE if kind == _CREATE2 else kind, [read(reader) for read in _FIELDS[kind]])
        )
    zxid, time = server.begin()
    answers, changes = [], []
    try:
        with server.tree.transaction() as events:
            for kind, values in parts:
                body, change = _apply(server, client, kind, values, zxid, time)
                answers.append(_header(kind) + body)
                changes.append(change)
    except Refused as error:
        failed = len(answers)
        codes = (
            [Code.OK] * failed
            + [error.code]
            + [Code.RUNTIME_INCONSISTENCY] * (len(parts) - failed - 1)
        )
        answers = [_header(_ERROR, code) + codec.int_(code) for code in codes]
    else:
        server.commit(changes, events, zxid, time)
    return b"".join(answers) + _header(_ERROR, -1, done=True)


def _header(kind: int, code: int = 0, done: bool = False) -> bytes:
    return _HEADER.pack(kind, done, code)


# -- reads


def _exists(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    path, watch = reader.string(), reader.boolean()
    if watch:
        server.watches.add("data", path, client)
    return server.tree.get(path).stat()


def _get(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    path, watch = reader.string(), reader.boolean()
    node = server.tree.get_for(path, READ, client.identities)
    if watch:
        server.watches.add("data", path, client)
    return codec.buffer(node.data) + node.stat()


def _children(with_stat: bool) -> Operation:
    def operation(server: Server, client: ServedConnection, reader: Reader) -> bytes:
        path, watch = reader.string(), reader.boolean()
        node = server.tree.get_for(path, READ, client.identities)
        if watch:
            server.watches.add("children", path, client)
        return codec.strings(sorted(node.children)) + (node.stat() if with_stat else b"")

    return operation


def _get_acl(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    node = server.tree.get_for(reader.string(), READ | ADMIN, client.identities)
    return (
        codec.acls(
            node.acl if server.tree.may(node.acl, ADMIN, client.identities) else _masked(node.acl)
        )
        + node.stat()
    )


def _masked(acl: Iterable[Acl]) -> Iterator[Acl]:
    """Hide the digests of passwords from clients that may not change the list."""
    for perms, scheme, name in acl:
        yield Acl((perms, scheme, name.partition(":")[0] + ":x" if scheme == "digest" else name))


def _sync(_server: Server, _client: ServedConnection, reader: Reader) -> bytes:
    return codec.string(reader.string())


def _ping(_server: Server, _client: ServedConnection, _reader: Reader) -> bytes:
    return b""


# -- watches


def _add_watch(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    path, mode = reader.string(), reader.integer()
    if mode not in (watches.PERSISTENT, watches.RECURSIVE):
        raise Refused(Code.BAD_ARGUMENTS)
    server.watches.add("recursive" if mode == watches.RECURSIVE else "persistent", path, client)
    return codec.int_(0)


def _remove_watches(server: Server, client: ServedConnection, reader: Reader) -> bytes:
    if not server.watches.remove(reader.string(), client, reader.integer()):
        raise Refused(Code.NO_WATCHER)
    return b""


def _set_watches(with_persistent: bool) -> Operation:
    """Add watches of an earlier connection; report changes since then immediately."""

    def operation(server: Server, client: ServedConnection, reader: Reader) -> bytes:
        seen = reader.long()
        data, exist, children = (reader.strings() for _ in range(3))
        persistent, recursive = (
            (reader.strings() for _ in range(2)) if with_persistent else ([], [])
        )
        nodes = server.tree.nodes
        for path in data:
            node = nodes.get(path)
            if node is None or node.mzxid > seen:
                server.send_event(client, DELETED if node is None else CHANGED, path)
            else:
                server.watches.add("data", path, client)
        for path in exist:
            if path in nodes:
                server.send_event(client, CREATED, path)
            else:
                server.watches.add("data", path, client)
        for path in children:
            node = nodes.get(path)
            if node is None or node.pzxid > seen:
                server.send_event(client, DELETED if node is None else CHILD, path)
            else:
                server.watches.add("children", path, client)
        for kind, paths in (("persistent", persistent), ("recursive", recursive)):
            for path in paths:
                server.watches.add(kind, path, client)
        return b""

    return operation


# -- clients


def _auth(_server: Server, client: ServedConnection, reader: Reader) -> bytes:
    reader.integer()
    scheme, secret = reader.string(), reader.buffer() or b""
    if scheme == "digest":
        user = secret.partition(b":")[0].decode(errors="replace")
        # The scheme prescribes the algorithm.
        digest = base64.b64encode(hashlib.sha1(secret, usedforsecurity=False).digest()).decode()
        client.identities.add(("digest", f"{user}:{digest}"))
    elif scheme != "ip":
        raise Refused(Code.AUTH_FAILED)
    return b""


def _close(server: Server, client: ServedConnection, _reader: Reader) -> bytes:
    session = server.session_of(client)
    server.lost(client)
    server.end_session(session)
    return b""


class StandaloneServer(Server):
    """A server that knows all operations."""

    operations: ClassVar[Mapping[int, Operation]] = {
        **{kind: _write(kind) for kind in (_CREATE, _CREATE2, _DELETE, _SET, _SET_ACL)},
        3: _exists,
        4: _get,
        6: _get_acl,
        8: _children(with_stat=False),
        9: _sync,
        11: _ping,
        12: _children(with_stat=True),
        14: _multi,
        18: _remove_watches,
        100: _auth,
        101: _set_watches(with_persistent=False),
        105: _set_watches(with_persistent=True),
        106: _add_watch,
        -11: _close,
    }
