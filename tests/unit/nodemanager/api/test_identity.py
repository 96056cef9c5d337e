"""Callers as the kernel and certificates identify them."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodepool.base import unix_socket
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.api import identity as module
from nodepool.nodemanager.api.identity import Identity, socket_owner
from nodepool.nodemanager.api.methods import (
    CERTIFICATE,
    CONTROLLER,
    DELEGATE,
    OTHER,
    ROOT,
    SLIVER,
    Caller,
)
from nodepool.nodemanager.config import parse

WHO = Identity({3_000_000: "a"}.get, {"nobody": ["GetUsage"], "del_snoop": []}.get)


def of_tcp(connection: socket.socket) -> Caller | None:
    """The caller at the other end, never as root or controller: their sockets may be in other
    hands.
    """
    uid = WHO.tcp_uid(connection)
    return None if uid is None else WHO.of_uid(uid, trust=False)


@pytest.mark.spec(
    "NM-A.8, NM-C.5: uid -> root, sliver by range, delegate, other; unknown uid is a clean refusal"
)
def test_callers_are_identified_by_uid() -> None:
    assert WHO.of_uid(0).kind == ROOT
    assert WHO.of_uid(3_000_000) == Caller(SLIVER, "a")
    assert WHO.of_uid(pwd.getpwnam("nobody").pw_uid) == Caller(OTHER, "nobody"), (
        "delegates share one account"
    )
    assert WHO.of_uid(pwd.getpwnam("daemon").pw_uid) == Caller(OTHER, "daemon")
    assert WHO.of_uid(4_123_456_789).kind == OTHER
    assert Identity({}.get, {}.get, own_uid=1234).of_uid(1234).kind == ROOT


@pytest.mark.spec("issue 10, F15: nobody is root, or a controller, by TCP; a sliver is who it is")
def test_nobody_is_root_by_tcp() -> None:
    who = Identity({3_000_000: "a", 0: "evil"}.get, {}.get, own_uid=1, controllers=[2])
    for uid in (0, 1, 2):
        found = who.of_uid(uid, trust=False)
        assert found.kind == OTHER
        assert "Unix socket" in found.advice
    assert who.of_uid(3_000_000, trust=False) == Caller(SLIVER, "a")


@pytest.mark.spec(
    "issue 10, F16: an account of the host that is named like a delegate is not that delegate"
)
def test_accounts_of_delegates() -> None:
    nobody = pwd.getpwnam("nobody")
    for shell, kind in (
        (None, OTHER),
        ("/usr/bin/nodepool-nm-forward", OTHER),
        (nobody.pw_shell, DELEGATE),
    ):
        who = Identity({}.get, {"nobody": ["GetUsage"]}.get, delegate_shell=shell)
        assert who.of_uid(nobody.pw_uid).kind == kind


@pytest.mark.spec("NM-C.5: only root and the shared account may speak for a delegate")
def test_only_root_and_the_shared_account_speak_for_delegates() -> None:
    assert WHO.may_forward(Caller(ROOT, "root"))
    assert WHO.may_forward(Caller(OTHER, "nodepool-nm"))
    for kind in (SLIVER, DELEGATE, CONTROLLER, CERTIFICATE):
        assert not WHO.may_forward(Caller(kind, "nodepool-nm"))
    assert not WHO.may_forward(Caller(OTHER, "nobody"))
    assert WHO.forwarded("del_snoop") == Caller(DELEGATE, "del_snoop")
    assert WHO.forwarded("stranger") is None


@pytest.mark.spec("NM-C.5: subject -> role controller or named caller")
def test_certificate_subjects_become_controllers_or_named_callers() -> None:
    certificate = {
        "subject": ((("organizationName", "x"),), (("commonName", "nl01"),)),
        "subjectAltName": (("DNS", "nl01.example.com"), ("IP Address", "1.2.3.4")),
    }
    assert WHO.of_certificate(certificate, ()) == Caller(CERTIFICATE, "nl01")
    assert WHO.of_certificate(certificate, ("nl01.example.com",)) == Caller(
        CONTROLLER, "nl01.example.com"
    )
    assert WHO.of_certificate(certificate, ("nl02", "1.2.3.4")) == Caller(CERTIFICATE, "nl01")
    assert WHO.of_certificate({}, ()) is None
    assert WHO.of_certificate(None, ()) is None


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def connect_as(
    uid: int, listener: socket.socket, then: str = "sys.stdin.read()"
) -> subprocess.Popen[bytes]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # All imports before the change: another user may not read this Python's library.
    code = (
        f"import encodings.idna, os, socket, struct, sys\nos.setresuid({uid}, {uid}, {uid})\n"
        f"s = socket.create_connection({listener.getsockname()!r})\n"
        f"sys.stdout.write('x'); sys.stdout.flush()\n{then}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    return process


@pytest.mark.parametrize("how", ["asked", "table"])
@pytest.mark.spec("NM-C.5: 127.0.0.1:812, identity = owner uid of the peer socket")
def test_caller_on_loopback_is_the_owner_of_the_peer_socket(
    listener: socket.socket, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "table":

        def refuse(*_: object) -> None:
            raise OSError("no such protocol")

        monkeypatch.setattr(module, "_diagnose", refuse)
    for uid, expected in ((0, Caller(OTHER, "root")), (3_000_000, Caller(SLIVER, "a"))):
        with connect_as(uid, listener):
            connection, _ = listener.accept()
            with connection:
                assert of_tcp(connection) == expected


@pytest.mark.spec("NM-A.9: a client that has half-closed is still known")
def test_half_closed_client_is_identified(listener: socket.socket) -> None:
    code = "s.shutdown(socket.SHUT_WR)\nsys.stdout.write('y'); sys.stdout.flush()\nsys.stdin.read()"
    with connect_as(3_000_000, listener, code) as p:
        assert p.stdout is not None
        connection, _ = listener.accept()
        with connection:
            assert p.stdout.read(1) == b"y"
            assert of_tcp(connection) == Caller(SLIVER, "a")


@pytest.mark.spec("NM issue: forged identity by uid reuse: a client that has gone is nobody")
@pytest.mark.parametrize("how", ["asked", "table"])
def test_closed_client_has_no_identity(
    listener: socket.socket, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan socket is listed with uid 0, which must not make anybody root."""
    if how == "table":
        monkeypatch.setattr(module, "_diagnose", lambda *_: (_ for _ in ()).throw(OSError()))
    with connect_as(3_000_000, listener):
        connection, _ = listener.accept()
    with connection:
        assert of_tcp(connection) is None


@pytest.mark.spec(
    "NM issue: another connection from the port of one that was reset is not the old one"
)
def test_connection_from_a_reused_port_is_another_client(listener: socket.socket) -> None:
    code = "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\ns.close()"
    for _ in range(10):
        with connect_as(3_000_000, listener, code):
            connection, peer = listener.accept()
        with connection, socket.socket() as new:
            new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                new.bind(peer)
                new.connect(listener.getsockname())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # somebody else on this machine has got the port
            assert socket_owner(peer, listener.getsockname()) == os.geteuid(), (
                "the table has the new one"
            )
            try:
                assert of_tcp(connection) is None
            except OSError:
                pass  # not connected
            return
    raise AssertionError("the port was never free")


def test_no_such_socket() -> None:
    assert socket_owner(("127.0.0.1", 1), ("127.0.0.1", 2)) is None


@pytest.mark.spec("NM-C.5: SO_PEERCRED is of the moment of connecting")
def test_unix_socket_identity_is_that_of_the_connect(tmp_path: object) -> None:
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, 0o666)
        os.chmod(str(tmp_path), 0o755)
        server.listen()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert WHO.of_uid(unix_socket.peer_uid(theirs)).kind == ROOT
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            connection, _ = server.accept()
            with connection:
                assert WHO.of_uid(unix_socket.peer_uid(connection)).kind == ROOT


@pytest.mark.spec("issue 10, F15: controllers must be named")
@pytest.mark.parametrize("controllers", [None, []])
def test_controllers_are_named(controllers: list[str] | None) -> None:
    tls = {
        "cert": "c",
        "key": "k",
        "ca": "a",
        **({} if controllers is None else {"controllers": controllers}),
    }
    with pytest.raises(
        ConfigurationError,
        match=r"test: api\.tls\.controllers: missing or empty; list the names .* "
        r"\[launcher1\.example\.org\]",
    ):
        parse({"api": {"tls": tls}}, "test")
    assert parse({"api": {"tls": {**tls, "controllers": ["nl01"]}}}, "test").api.tls is not None
