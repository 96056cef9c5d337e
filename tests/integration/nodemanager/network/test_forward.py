"""Delegates over a real sshd: forced command of a shared account, and separate Unix accounts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import sys
import threading
import xmlrpc.client
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.api import delegates, forward
from nodepool.nodemanager.api.delegates import AccountError, UnixAccounts, write_keys
from nodepool.nodemanager.client import xml_rpc
from tests.support.nodemanager import user as nm_user
from tests.support.nodemanager.node import KEY, Running, delegate, sliver
from tests.support.sshd import SSHServer, ssh_server

#: One that every account may run, unlike one in somebody's home directory.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


@pytest.fixture
def program(folder: pathlib.Path) -> str:
    """nodepool-nm-forward as a separate program, with the socket of the test as its default."""
    repository = nm_user.open_repository(folder)
    path = folder / "nodepool-nm-forward"
    path.write_text(
        f"#!{PYTHON} -I\nimport sys\nsys.path.insert(0, "
        f"{str(repository)!r})\nsys.dont_write_bytecode = True\n"
        "from nodepool.nodemanager.api import forward\n"
        f"forward.SOCKET = {str(folder / 'api.sock')!r}\nsys.exit(forward.main())\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def running(folder: pathlib.Path) -> Iterator[Running]:
    with Running(folder) as found:
        found.add(
            sliver("a", rspec={"nm_cpu_share": 7}, delegations=[["del_snoop", "GetRSpec"]]),
            sliver("b"),
        )
        yield found


def call(server: SSHServer, request: bytes, user: str = "root", *command: str) -> tuple[int, bytes]:
    """Exit status and output of ssh."""
    result = subprocess.run(
        [
            "ssh",
            "-F",
            "none",
            "-i",
            str(server.client_key),
            "-p",
            str(server.port),
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "BatchMode=yes",
            "-o",
            "IdentitiesOnly=yes",
            "-T",
            f"{user}@127.0.0.1",
            *command,
        ],
        input=request,
        capture_output=True,
        timeout=60,
    )
    return result.returncode, result.stdout


def answer(output: bytes) -> Any:
    return xmlrpc.client.loads(output)[0][0]


def fault(output: bytes) -> xmlrpc.client.Fault:
    with pytest.raises(xmlrpc.client.Fault) as caught:
        xmlrpc.client.loads(output)
    return caught.value


@pytest.mark.spec("NM-C.9.1: del_snoop over SSH may GetRSpec and nothing else")
def test_delegate_may_call_what_it_is_allowed_over_ssh(
    running: Running, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssh_server(kinds=["ed25519"]) as server:
        public = (server.folder / "authorized_keys").read_text().strip()
        running.add(delegate("del_snoop", ssh_keys=public))
        monkeypatch.setattr(delegates, "forward_program", lambda: program)
        delegates.update(
            running.config, {"del_snoop": running.node.database.get("delegate_del_snoop").content}
        )  # type: ignore[union-attr]
        keys = pathlib.Path(running.config.run_dir, "delegates.keys")
        assert keys.stat().st_mode & 0o777 == 0o644
        assert f"--socket {running.socket} --as del_snoop" in keys.read_text()
        shutil.copy(keys, server.folder / "authorized_keys")
        status, output = call(server, xml_rpc.call("GetRSpec", ["a"]))
        assert (status, answer(output)["nm_cpu_share"]) == (0, 7)
        for method, arguments in (
            ("GetRSpec", ["b"]),
            ("Stop", ["a"]),
            ("DumpDatabase", []),
            ("SetLoans", ["a", []]),
        ):
            status, output = call(server, xml_rpc.call(method, arguments))
            assert (status, fault(output).faultCode) == (0, 108)
        # Whatever the client asks to be run is ignored.
        assert (
            answer(call(server, xml_rpc.call("GetRSpec", ["a"]), "root", "cat", "/etc/passwd")[1])[
                "nm_cpu_share"
            ]
            == 7
        )
        # With the delegate its right to speak ends.
        running.node.database.delete("delegate_del_snoop")
        assert (
            "no such delegate"
            in fault(call(server, xml_rpc.call("GetRSpec", ["a"]))[1]).faultString
        )
        delegates.update(running.config, {})
        assert keys.read_text() == ""


def test_keys_that_are_none_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    found = {
        "good": {"ssh_keys": KEY},
        "bad": {"ssh_keys": 'x" ssh-rsa AAAA'},
        "a b": {"ssh_keys": KEY},
    }
    assert list(delegates.authorized_keys(found, "/f")) == [
        f'restrict,command="/f --as good" {KEY}'
    ]
    assert "Delegate bad" in caplog.text


@contextlib.contextmanager
def account(accounts: UnixAccounts, name: str) -> Iterator[None]:
    try:
        yield
    finally:
        accounts.destroy(name)


@pytest.mark.spec(
    "NM-A.4: delegate accounts: useradd, shell in /etc/shells, keys 0600 in 0700, userdel -r"
)
def test_delegate_accounts_are_created_and_deleted(
    running: Running, program: str, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"nmt{os.getpid()}"
    shells = folder / "shells"
    shells.write_text("/bin/sh")
    # sshd asks /etc/shells itself, through PAM only; this server has none.
    accounts = UnixAccounts(program, str(shells))
    running.servers.identity._delegate_shell = program  # delegate-accounts: unix
    with account(accounts, name), ssh_server(kinds=["ed25519"]) as server:
        public = (server.folder / "authorized_keys").read_text().strip()
        running.add(delegate(name, ssh_keys=public, methods=["GetUsage"]))
        accounts.update({name: {"ssh_keys": public}, "root": {"ssh_keys": public}, "a b": {}})
        assert "another account" in caplog.text, "root is not ours"
        assert shells.read_text() == f"/bin/sh\n{program}\n"
        entry = pwd.getpwnam(name)
        home = pathlib.Path(entry.pw_dir)
        keys = home / ".ssh" / "authorized_keys"
        assert [(p.stat().st_mode & 0o777, p.stat().st_uid) for p in (home / ".ssh", keys)] == [
            (0o700, entry.pw_uid),
            (0o600, entry.pw_uid),
        ]
        assert entry.pw_shell == program
        server.pause()
        config = server.config.read_text().replace(
            f"{server.folder}/authorized_keys", ".ssh/authorized_keys"
        )
        server.config.write_text(config)
        server.restart()
        # The identity that the server sees is the account's own uid.
        assert (
            answer(call(server, xml_rpc.call("GetUsage", ["a"]), name)[1])["memory_bytes"] == 2**40
        )
        assert (
            fault(
                call(server, xml_rpc.call("GetRSpec", ["a"]), name, "sh", "-c", "id")[1]
            ).faultCode
            == 108
        )
        assert (
            fault(
                call(server, xml_rpc.call("Stop", ["a"]), name, "--", "--as", "root")[1]
            ).faultCode
            == 108
        )
        assert (
            fault(call(server, xml_rpc.call("Help", ["x" * 500_000]), name)[1]).faultCode == 101
        ), "1 MiB, as other delegates"

        accounts.update({name: {"ssh_keys": KEY}})
        assert keys.read_text() == f"{KEY}\n"
        assert call(server, xml_rpc.call("GetUsage", ["a"]), name)[0] == 255, "the old key is gone"
        assert shells.read_text().count(program) == 1
        accounts.update({})
        assert name not in accounts.found()
        assert not home.exists()
        with pytest.raises(KeyError):
            pwd.getpwnam(name)
        accounts.destroy(name)


@pytest.mark.spec("NM-A.4: the writer must not follow links planted by the account owner")
def test_writer_of_keys_follows_no_planted_links(folder: pathlib.Path) -> None:
    nobody = pwd.getpwnam("nobody")
    entry = pwd.struct_passwd(
        ("x", "*", nobody.pw_uid, nobody.pw_gid, "", str(folder / "home"), "")
    )
    home, target = folder / "home", folder / "target"
    target.mkdir()
    (target / "authorized_keys").write_text("precious")
    home.mkdir()
    with pytest.raises(AccountError, match="does not belong"):
        write_keys(entry, KEY)
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    (home / ".ssh").symlink_to(target)
    with pytest.raises(AccountError, match="not a directory owned by the account"):
        write_keys(entry, KEY)
    (home / ".ssh").unlink()
    (home / ".ssh").write_text("a file")
    with pytest.raises(AccountError, match="not a directory owned by the account"):
        write_keys(entry, KEY)
    (home / ".ssh").unlink()
    (home / ".ssh").mkdir()
    with pytest.raises(AccountError, match="does not belong"):
        write_keys(entry, KEY)
    os.chown(home / ".ssh", nobody.pw_uid, nobody.pw_gid)
    for name in ("authorized_keys", ".authorized_keys.new"):
        (home / ".ssh" / name).symlink_to(target / "authorized_keys")
    write_keys(entry, KEY)
    assert (target / "authorized_keys").read_text() == "precious"
    assert not (home / ".ssh" / "authorized_keys").is_symlink()
    assert (home / ".ssh" / "authorized_keys").read_text() == f"{KEY}\n"
    (folder / "link").symlink_to(home)
    with pytest.raises(OSError):
        write_keys(
            pwd.struct_passwd(
                ("x", "*", nobody.pw_uid, nobody.pw_gid, "", str(folder / "link"), "")
            ),
            KEY,
        )


# -- the forwarder itself


def run(program: str, request: bytes, *arguments: str) -> tuple[int, bytes]:
    result = subprocess.run([program, *arguments], input=request, capture_output=True, timeout=60)
    assert result.stderr == b""
    return result.returncode, result.stdout


@contextlib.contextmanager
def fake_server(path: pathlib.Path, behave: Any) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(30)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.mark.spec(
    "NM-A.9: minimal HTTP/1.0 POST, half-closes, copies only the body; ignores its arguments"
)
def test_one_request_is_forwarded_and_its_body_returned(folder: pathlib.Path, program: str) -> None:
    seen: list[bytes] = []

    def behave(connection: socket.socket) -> None:
        seen.append(read_all(connection))  # ends, as it is half-closed
        connection.sendall(b"HTTP/1.0 200 OK\r\nX: y\r\n")
        connection.sendall(b"\r\nbo")
        connection.sendall(b"dy\r\n\r\nmore")

    with fake_server(folder / "api.sock", behave):
        assert run(program, b"<request/>", "-c", "ls") == (0, b"body\r\n\r\nmore")
    assert seen == [
        b"POST / HTTP/1.0\r\nContent-Type: text/xml\r\nContent-Length: 10\r\n\r\n<request/>"
    ]


@pytest.mark.spec("NM-A.9: connection reset after data is not an error")
def test_reset_after_data(folder: pathlib.Path, program: str) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(10)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nbody")
        # Closed with a request that was not read: the other end sees a reset.

    with fake_server(folder / "api.sock", behave):
        assert run(program, b"x" * 100_000) == (0, b"body")


@pytest.mark.spec(
    "NM-A.9: any system error becomes a fault, code 1, text <call>: <error>; exit status 1"
)
def test_system_errors_become_faults(folder: pathlib.Path, program: str, running: Running) -> None:
    running.servers.stop()
    status, output = run(program, b"x")
    assert (status, fault(output).faultCode, fault(output).faultString) == (
        1,
        1,
        "connect: No such file or directory",
    )
    with fake_server(folder / "api.sock", read_all):
        status, output = run(program, b"x")
    assert (status, fault(output).faultString) == (1, "recv: the node manager gave no answer")
    (folder / "api.sock").unlink()
    with fake_server(
        folder / "api.sock", lambda c: c.sendall(b"HTTP/1.0 413 Too Large\r\n\r\ntoo much")
    ):
        status, output = run(program, b"x")
    assert (status, "refused: too much" in fault(output).faultString) == (1, True)


@pytest.mark.spec("NM-A.9: a longer request is answered with a fault, 1 MiB")
def test_request_above_1_mib_is_answered_with_a_fault(program: str, running: Running) -> None:
    status, output = run(program, b"x" * (forward.MAX_REQUEST + 1))
    assert (status, f"more than {forward.MAX_REQUEST} bytes" in fault(output).faultString) == (
        1,
        True,
    )
    status, output = run(program, b"x" * forward.MAX_REQUEST)
    assert (status, fault(output).faultCode) == (0, 102)


def test_name_with_a_line_break_is_refused(program: str, running: Running) -> None:
    status, output = run(program, b"x", "--as", "a\r\nEvil: x")
    assert (status, fault(output).faultCode) == (1, 1)


@pytest.mark.spec("NM-A.9, NM-C.5: killed by its alarm after 120 s")
def test_forwarding_ends_after_120_s(folder: pathlib.Path, program: str) -> None:
    text = pathlib.Path(program).read_text()
    assert forward.TIME_LIMIT == 120
    pathlib.Path(program).write_text(text.replace("sys.exit(", "forward.TIME_LIMIT = 1\nsys.exit("))
    silent = threading.Event()
    with fake_server(folder / "api.sock", lambda connection: silent.wait(30)):
        status, output = run(program, b"x")
        silent.set()
    assert (status, "did not answer within 1 s" in fault(output).faultString) == (1, True)
