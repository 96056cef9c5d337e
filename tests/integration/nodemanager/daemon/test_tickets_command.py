"""``nodepool-nm ticket`` and ``import-pickle`` (NM-C.1, NM-C.5, NM-C.6)."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodepool.cmd import nm as program
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.sources import ticket_server
from nodepool.nodemanager.sources.tickets import TicketError, verify
from tests.support.nodemanager.scene import NmDaemon, make_daemon


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path, tickets={"keys": [str(tmp_path / "key.pub")], "issuers": ["authority"]})


@pytest.fixture
def key(tmp_path: pathlib.Path) -> pathlib.Path:
    for command in (["genpkey", "-algorithm", "ed25519", "-out", "key"], ["pkey", "-in", "key", "-pubout", "-out", "key.pub"]):
        subprocess.run(["openssl", *command], cwd=tmp_path, check=True, capture_output=True, timeout=30)
    return tmp_path / "key"


@pytest.mark.spec("NM-C.6: tickets: signed slivers for one host, each good once")
def test_sign_verify_use(key: pathlib.Path, nm: NmDaemon, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(
        json.dumps(
            {
                "account_type": "sliver",
                "name": "guest",
                "rspec": {"nm_disk_quota": 102400},
                "ssh_keys": nm.key.with_suffix(".pub").read_text(),
            }
        )
    )
    ticket = tmp_path / "ticket"
    assert program.main(["ticket", "sign", str(record), "--key-file", str(key), "--issuer", "authority", "--host", "host0"]) == 0
    ticket.write_text(capsys.readouterr().out)
    verify = ["ticket", "verify", str(ticket), "--public-key", f"{key}.pub", "--host"]
    assert program.main([*verify, "host0"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "guest"
    with pytest.raises(TicketError):
        program.main([*verify, "another"])
    use = ["--url", nm.client.url, "ticket", "use", str(ticket)]
    assert program.main(use) == 0 and capsys.readouterr().out == "guest\n"
    nm.wait("guest")
    assert nm.ssh("guest", "echo in") == "in\n"
    with pytest.raises(Exception, match="used before"):
        program.main(use)


def test_command_imports_an_old_pickle(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.pickle"
    old.write_bytes(
        pickle.dumps(
            {
                "sliver_princeton_sirius": {
                    "record_key": "sliver_princeton_sirius",
                    "account_type": "sliver",
                    "name": "princeton_sirius",
                    "timestamp": 5,
                    "rspec": {"nm_cpu_share": 64},
                    "ssh_keys": "",
                }
            },
            protocol=0,
        )
    )
    path = tmp_path / "new.sqlite"
    assert program.main(["import-pickle", str(old), "--database", str(path)]) == 0
    database = Database(str(path))
    database.open()
    record = database.get("sliver_princeton_sirius")
    database.close()
    assert record is not None and record.content["rspec"]["nm_cpu_share"] == 64


SERVE = ["ticket", "serve", "--issuer", "authority", "--host", "host0", "--key-file"]


@pytest.fixture
def ticket_port(key: pathlib.Path) -> Iterator[int]:
    """Of a ticket server."""
    program = str(pathlib.Path(sys.executable).with_name("nodepool-nm"))
    with subprocess.Popen([program, *SERVE, str(key), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("signing tickets for host0 on 127.0.0.1 port ")
        yield int(line.split()[-1])
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def send(port: int, data: bytes) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.mark.spec("NM-A.12, NM-C.6: the 1813 server as an explicit loopback demonstration")
def test_ticket_server_signs_on_loopback(ticket_port: int, key: pathlib.Path, nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    record = {"name": "guest", "rspec": {"nm_disk_quota": 102400}}
    for given, names in ((record, ["guest"]), ([record, {"name": "other"}], ["guest", "other"])):
        found = verify(send(ticket_port, json.dumps(given).encode()), {"keys": [f"{key}.pub"]}, "host0")
        assert [item["name"] for item in found.slivers] == names
    assert nm.client.call("Ticket", send(ticket_port, json.dumps(record).encode())) == ["guest"]
    for wrong, text in (
        (b"", "a sliver's record, or a list of them, in JSON"),
        (b"[1]", "a sliver's record"),
        (b"[]", "a sliver's record"),
        (b"[" * 50000, "a sliver's record, or a list of them, in JSON"),
        (b'{"name": "No Name"}', "No Name"),
    ):
        said = send(ticket_port, wrong)
        assert said.startswith("error: ") and text in said


@pytest.mark.spec("NM-A.12: it would sign anything for anybody [bug]")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_serve_refuses_others(ticket_port: int, tmp_path: pathlib.Path) -> None:
    code = (
        "import os, socket, sys; os.setuid(54321); s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)\n"
        'try:\n s.sendall(b\'{"name": "a"}\'); s.shutdown(socket.SHUT_WR); print(s.recv(1000))\n'
        "except OSError: print(b'')"
    )
    done = subprocess.run(["/usr/bin/python3", "-I", "-c", code, str(ticket_port)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "b''\n", done
    assert "." in send(ticket_port, b'{"name": "a"}'), "it goes on"


@pytest.mark.parametrize("address", ["0.0.0.0", "", "localhost", "10.0.0.1", "::", "::1", "::ffff:127.0.0.1", "127.0.0.1:1"])
def test_serve_on_loopback_only(key: pathlib.Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="loopback address such as"):
        program.main([*SERVE, str(key), "--port", "0", "--address", address])


def test_serve_port_in_use(key: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="choose another port"):
        program.main([*SERVE, str(key), "--port", str(taken.getsockname()[1])])
    with pytest.raises(ConfigurationError, match="choose another port"):
        program.main([*SERVE, str(key), "--port", "70000"])


def test_slow_client_of_the_ticket_server_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_server, "TIMEOUT", 0.2)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"{")
        with pytest.raises(TimeoutError):
            ticket_server.answer(here, lambda records: "never")
