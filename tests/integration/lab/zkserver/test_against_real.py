"""Programs of two clients run on our server and on the real one: same answers, events and trees."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo.protocol.serialization import (
    Auth,
    CheckVersion,
    Close,
    Create,
    Create2,
    Delete,
    Exists,
    GetACL,
    GetChildren,
    GetChildren2,
    GetData,
    SetACL,
    SetData,
    Sync,
    Transaction,
    write_string,
)
from kazoo.security import ACL, Id

from nodepool.lab.zkserver.requests import StandaloneServer
from tests.conftest import zookeeper_server
from tests.support.zkclient import Ended, MemoryPipe, RawClient, SocketPipe

_INT, _LONG, _STAT = struct.Struct("!i"), struct.Struct("!q"), struct.Struct("!qqqqiiiqiiq")
#: Positions in a stat of what depends on the server: zxids, times and the session.
_ZXIDS, _TIMES, _OWNER = (0, 1, 10), (2, 3), 7

ACLS = {
    "open": [ACL(31, Id("world", "anyone"))],
    "read": [ACL(1, Id("world", "anyone"))],
    "mine": [ACL(31, Id("auth", ""))],
    "user": [
        ACL(31, Id("digest", "user:tpUq/4Pn5A64fVZyQ0gOJ8ZWqkY=")),
        ACL(1, Id("world", "anyone")),
    ],
    "twice": [ACL(31, Id("world", "anyone")), ACL(31, Id("world", "anyone"))],
    "none": [],
    "bad": [ACL(31, Id("digest", "no-colon"))],
    "unknown": [ACL(31, Id("planet", "anyone"))],
}
NAMES = ("a", "b")
PATHS = [
    "/" + "/".join(names) for depth in (1, 2, 3) for names in itertools.product(NAMES, repeat=depth)
]
CLIENTS = (0, 1)
#: Steps of a program, and programs: 2,100 steps in the short set, 100,800 with many examples.
STEPS, FEW, MANY = 84, 25, 1200
#: Programs in which a session expires, which takes the real server more than a second.
FEW_EXPIRED, MANY_EXPIRED = 2, 25
#: Timeout of a session that expires, in ms; the least that the real server grants.
SHORT_TIMEOUT = 1000

paths = st.sampled_from(PATHS)
versions = st.sampled_from((-1, -1, 0, 1, 7))
data = st.sampled_from((b"", b"x", b"\xff\x00", b"yyyyy"))
acls = st.sampled_from(sorted(ACLS))
flags = st.integers(0, 3)
watch = st.booleans()
part = st.one_of(
    st.tuples(st.just("create"), paths, data, acls, flags),
    st.tuples(st.just("create2"), paths, data, st.just("open"), flags),
    st.tuples(st.just("delete"), paths, versions),
    st.tuples(st.just("set"), paths, data, versions),
    st.tuples(st.just("check"), paths, versions),
)
step = st.one_of(
    st.tuples(st.just("create"), paths, data, acls, flags),
    st.tuples(st.just("create"), paths, data, st.just("open"), st.just(0)),
    st.tuples(st.just("create"), paths, data, st.just("open"), st.just(1)),
    st.tuples(st.just("create2"), paths, data, acls, flags),
    st.tuples(st.just("delete"), paths, versions),
    st.tuples(st.just("set"), paths, data, versions),
    st.tuples(st.just("set_acl"), paths, acls, versions),
    st.tuples(st.just("multi"), st.lists(part, max_size=4)),
    *(
        st.tuples(st.just(name), paths, watch)
        for name in ("get", "exists", "children", "children2")
    ),
    *(st.tuples(st.just(name), paths) for name in ("get_acl", "sync", "persistent", "recursive")),
    st.tuples(st.just("unwatch"), paths, st.integers(1, 3)),
    st.tuples(st.just("auth"), st.sampled_from(("digest", "ip", "planet"))),
    st.tuples(st.just("cut")),
    st.tuples(st.just("stranger")),
    st.tuples(st.just("close")),
)
#: A third session creates an ephemeral znode, and expires.
expiry = st.tuples(st.just("expire"), paths, st.sampled_from((1, 3)))
many = settings.default is not None and settings.default.max_examples > FEW
programs = st.lists(st.tuples(st.sampled_from(CLIENTS), step), min_size=STEPS, max_size=STEPS)


@dataclass(frozen=True)
class Raw:
    """A request that kazoo cannot encode."""

    type: int
    payload: bytes

    def serialize(self) -> bytes:
        return self.payload


def strings(values: list[str]) -> bytes:
    return _INT.pack(len(values)) + b"".join(bytes(write_string(value)) for value in values)


@dataclass
class Watching:
    """What a client watches, so that it can set the watches again after a cut."""

    data: set[str] = field(default_factory=set)
    exist: set[str] = field(default_factory=set)
    children: set[str] = field(default_factory=set)
    persistent: set[str] = field(default_factory=set)
    recursive: set[str] = field(default_factory=set)

    def lasting(self, path: str) -> bool:
        return path in self.persistent or path in self.recursive

    def once(self, path: str) -> bool:
        return path in self.data or path in self.exist or path in self.children

    def note(self, kind: int, path: str) -> None:
        if kind in (1, 2, 3):
            self.data.discard(path)
            self.exist.discard(path)
        if kind in (2, 4):
            self.children.discard(path)


class Bench:
    """Two clients of one server, in a separate part of the tree."""

    def __init__(
        self, open_pipe: Callable[[], Any], root: str, pass_time: Callable[[], None]
    ) -> None:
        self._open_pipe = open_pipe
        self._pass_time = pass_time
        self.root = root
        self.clients = [RawClient(open_pipe) for _ in CLIENTS]
        self.watching = [Watching() for _ in CLIENTS]
        self._zxids: dict[int, int] = {}
        self.call(0, Create(root, b"", ACLS["open"], 0))

    def call(self, number: int, request: Any) -> tuple[int, bytes]:
        return self.clients[number].call(request)

    def path(self, path: str) -> str:
        return self.root + path

    def run(self, number: int, step: tuple[Any, ...]) -> Any:
        """Do one step; return what can be compared: its answer, and the events of both clients."""
        name, *values = step
        answer = getattr(self, f"do_{name}")(number, *values)
        events = []
        for client, watching in zip(self.clients, self.watching, strict=True):
            found = client.flush()
            for kind, path in found:
                watching.note(kind, path)
            seen = [(kind, path.removeprefix(self.root)) for kind, path in found]
            # The real server removes the ephemeral znodes of a session in the order of a hash
            # table.
            events.append(sorted(seen) if name in ("close", "expire") else seen)
        return answer, events

    # -- reads and writes

    def request(self, step: tuple[Any, ...]) -> Any:
        name, path, *values = step
        path = self.path(path)
        if name in ("create", "create2"):
            content, acl, given_flags = values
            return (Create if name == "create" else Create2)(path, content, ACLS[acl], given_flags)
        return {"delete": Delete, "set": SetData, "check": CheckVersion}[name](path, *values)

    def simple(self, number: int, *step: Any) -> Any:
        code, body = self.call(number, self.request(step))
        return code, self.plain(step[0], body)

    def do_create(self, number: int, *values: Any) -> Any:
        return self.simple(number, "create", *values)

    def do_create2(self, number: int, *values: Any) -> Any:
        return self.simple(number, "create2", *values)

    def do_delete(self, number: int, *values: Any) -> Any:
        return self.simple(number, "delete", *values)

    def do_set(self, number: int, *values: Any) -> Any:
        return self.simple(number, "set", *values)

    def do_set_acl(self, number: int, path: str, acl: str, version: int) -> Any:
        code, body = self.call(number, SetACL(self.path(path), ACLS[acl], version))
        return code, self.plain("set", body)

    def do_multi(self, number: int, parts: list[tuple[Any, ...]]) -> Any:
        code, body = self.call(number, Transaction([self.request(each) for each in parts]))
        names = {1: "create", 15: "create2", 2: "delete", 5: "set", 13: "check"}
        found, at = [], 0
        while at < len(body):
            kind, done, error = struct.unpack_from("!iBi", body, at)
            at += 9
            if done:
                found.append(("done", kind, error))
                continue
            size = 4 if kind == -1 else self._size(names[kind], body[at:])
            found.append(
                (
                    kind,
                    error,
                    body[at : at + size]
                    if kind == -1
                    else self.plain(names[kind], body[at : at + size]),
                )
            )
            at += size
        return code, found

    @staticmethod
    def _size(name: str, body: bytes) -> int:
        if name in ("create", "create2"):
            return 4 + int(_INT.unpack_from(body)[0]) + (_STAT.size if name == "create2" else 0)
        return _STAT.size if name == "set" else 0

    def _read(self, number: int, kind: Any, path: str, watching: bool) -> tuple[int, bytes]:
        # Release 3.8 forgets a lasting watch when a one-shot one is set (ZOOKEEPER-4466).
        watching = watching and not self.watching[number].lasting(self.path(path))
        code, body = self.call(number, kind(self.path(path), watching or None))
        if watching:
            mine = self.watching[number]
            if kind is Exists:
                (mine.data if code == 0 else mine.exist).add(self.path(path))
            elif code == 0:
                (mine.data if kind is GetData else mine.children).add(self.path(path))
        return code, body

    def do_get(self, number: int, path: str, watching: bool) -> Any:
        code, body = self._read(number, GetData, path, watching)
        return code, body[: -_STAT.size], self.plain("set", body[-_STAT.size :])

    def do_exists(self, number: int, path: str, watching: bool) -> Any:
        code, body = self._read(number, Exists, path, watching)
        return code, self.plain("set", body)

    def do_children(self, number: int, path: str, watching: bool) -> Any:
        code, body = self._read(number, GetChildren, path, watching)
        return code, sorted(GetChildren.deserialize(body, 0)) if code == 0 else body

    def do_children2(self, number: int, path: str, watching: bool) -> Any:
        code, body = self._read(number, GetChildren2, path, watching)
        if code:
            return code, body
        return (
            code,
            sorted(GetChildren2.deserialize(body, 0)[0]),
            self.plain("set", body[-_STAT.size :]),
        )

    def do_get_acl(self, number: int, path: str) -> Any:
        code, body = self.call(number, GetACL(self.path(path)))
        return code, body[: -_STAT.size], self.plain("set", body[-_STAT.size :])

    def do_sync(self, number: int, path: str) -> Any:
        code, body = self.call(number, Sync(self.path(path)))
        return code, body.removeprefix(_INT.pack(len(self.path(path)))).decode().removeprefix(
            self.root
        )

    # -- watches, connections and sessions

    def _lasting(self, number: int, path: str, mode: int) -> Any:
        watching = self.watching[number]
        if watching.once(self.path(path)) or watching.lasting(self.path(path)):
            return None
        (watching.recursive if mode else watching.persistent).add(self.path(path))
        return self.call(number, Raw(106, bytes(write_string(self.path(path))) + _INT.pack(mode)))

    def do_persistent(self, number: int, path: str) -> Any:
        return self._lasting(number, path, 0)

    def do_recursive(self, number: int, path: str) -> Any:
        return self._lasting(number, path, 1)

    def do_unwatch(self, number: int, path: str, what: int) -> Any:
        watching, path = self.watching[number], self.path(path)
        if watching.lasting(path):
            what = 3
        if what in (2, 3):
            watching.data.discard(path)
            watching.exist.discard(path)
        if what in (1, 3):
            watching.children.discard(path)
        if what == 3:
            watching.persistent.discard(path)
            watching.recursive.discard(path)
        return self.call(number, Raw(18, bytes(write_string(path)) + _INT.pack(what)))

    def do_auth(self, number: int, scheme: str) -> Any:
        answer = self.call(number, Auth(0, scheme, "user:secret"))
        if scheme == "planet":
            self._reconnect(number)
        return answer

    def do_cut(self, number: int) -> Any:
        """The connection breaks; the session and its ephemeral znodes stay."""
        self.clients[number].cut()
        return self._reconnect(number)

    def _reconnect(self, number: int) -> Any:
        client, watching = self.clients[number], self.watching[number]
        seen = client.zxid
        same = client.connect()
        lists = (
            watching.data,
            watching.exist,
            watching.children,
            watching.persistent,
            watching.recursive,
        )
        answer = client.call(
            Raw(105, _LONG.pack(seen) + b"".join(strings(sorted(each)) for each in lists)), -8
        )
        # Watches that have fired while the client was away no longer exist.
        return same, answer

    def do_stranger(self, number: int) -> Any:
        """Somebody without the password wants the session."""
        client = self.clients[number]
        stranger = RawClient.__new__(RawClient)
        stranger.__dict__.update(client.__dict__, password=b"x" * 16, events=[], pipe=None)
        # The real server disconnects the owner before it checks the password.
        return stranger.connect(), self._reconnect(number)

    def do_close(self, number: int) -> Any:
        client = self.clients[number]
        answer = client.call(Close)
        client.cut()
        self.clients[number] = RawClient(self._open_pipe)
        self.watching[number] = Watching()
        return answer

    def do_expire(self, number: int, path: str, given_flags: int) -> Any:
        mortal = RawClient(self._open_pipe, SHORT_TIMEOUT)
        own = f"{self.root}/mortal"
        answers = [
            mortal.call(Create(each, b"", ACLS["open"], kind))
            for each, kind in ((own, 1), (self.path(path), given_flags))
        ]
        mortal.cut()
        # All that a session owns is deleted in one transaction.
        deadline = time.monotonic() + 30
        while self.call(number, Exists(own, None))[0] == 0:
            assert time.monotonic() < deadline, "the session does not expire"
            self._pass_time()
        return [(code, self.plain("create", body)) for code, body in answers], mortal.connect()

    # -- comparing

    def plain(self, name: str, body: bytes) -> Any:
        """Return an answer without what no two servers have in common."""
        if name in ("create", "create2") and body:
            (length,) = _INT.unpack_from(body)
            made = body[4 : 4 + length].decode().removeprefix(self.root)
            return (made, self.plain("set", body[4 + length :])) if name == "create2" else made
        if name == "set" and len(body) == _STAT.size:
            stat = list(_STAT.unpack(body))
            for position in _ZXIDS:
                stat[position] = self._zxids.setdefault(stat[position], len(self._zxids))
            for position in _TIMES:
                stat[position] = stat[position] > 0
            stat[_OWNER] = [0, *(client.session for client in self.clients)].index(stat[_OWNER])
            return tuple(stat)
        return body

    def dump(self, path: str = "") -> Any:
        """Return everything below the root as the first client sees it."""
        _code, content, stat = self.do_get(0, path, False)
        names = self.do_children(0, path, False)[1]
        below = (
            {name: self.dump(f"{path}/{name}") for name in names}
            if isinstance(names, list)
            else names
        )
        return content, stat, self.do_get_acl(0, path), below

    def close(self) -> None:
        for client in self.clients:
            # After a failed step, a client may have no connection any more.
            with contextlib.suppress(Ended, OSError, AssertionError):
                client.call(Close)
            client.cut()


@pytest.fixture(scope="module")
def real_address() -> tuple[str, int]:
    host, _, port = str(zookeeper_server()["plain"]).rpartition(":")
    return host, int(port)


@pytest.fixture
def benches(real_address: tuple[str, int]) -> Callable[[], list[Bench]]:
    def make() -> list[Bench]:
        root, passed = f"/compared-{uuid.uuid4().hex}", [0.0]
        server = StandaloneServer(clock=lambda: passed[0])

        def pass_time() -> None:
            passed[0] += SHORT_TIMEOUT / 1000
            server.tick()

        real = Bench(lambda: SocketPipe(real_address), root, lambda: time.sleep(0.05))
        return [real, Bench(lambda: MemoryPipe(server), root, pass_time)]

    return make


def compare(benches: list[Bench], program: list[tuple[int, tuple[Any, ...]]]) -> None:
    real, ours = benches
    try:
        for count, (number, action) in enumerate(program):
            expected, found = real.run(number, action), ours.run(number, action)
            assert found == expected, f"step {count} of client {number}: {action}"
        assert ours.dump() == real.dump()
    finally:
        real.close()


@pytest.mark.core
@pytest.mark.timeout(900)
# The same programs in each run: whether it passes must not depend on luck.
@settings(derandomize=True, max_examples=MANY if many else FEW)
@given(program=programs)
def test_two_clients_see_the_same_as_on_the_real_server(
    benches: Callable[[], list[Bench]], program: list[tuple[int, tuple[Any, ...]]]
) -> None:
    compare(benches(), program)


def test_event_of_an_unreadable_znode_is_not_sent(benches: Callable[[], list[Bench]]) -> None:
    created = ("create", "/a/b", b"", "mine", 0)
    watch = [
        (0, ("create", "/a", b"", "open", 0)),
        (0, ("recursive", "/a")),
        (1, ("auth", "digest")),
    ]
    compare(
        benches(),
        [
            *watch,
            (1, created),
            (1, ("delete", "/a/b", -1)),
            (1, ("create", "/a/a", b"", "open", 0)),
        ],
    )


@pytest.mark.timeout(900)
@settings(derandomize=True, max_examples=MANY_EXPIRED if many else FEW_EXPIRED)
@given(before=programs, expired=st.tuples(st.sampled_from(CLIENTS), expiry), after=programs)
def test_expired_session_is_seen_as_on_the_real_server(
    benches: Callable[[], list[Bench]], before: list[Any], expired: Any, after: list[Any]
) -> None:
    compare(benches(), [*before[: STEPS // 4], expired, *after[: STEPS // 4]])
