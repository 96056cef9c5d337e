"""``nodepool-nm ticket`` and ``import-pickle`` (NM-C.1, NM-C.5, NM-C.6)."""

from __future__ import annotations

import json
import pathlib
import pickle
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.cmd import nm as program
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.sources.tickets import TicketError
from tests.support.nodemanager.scene import NmDaemon, make_daemon


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(
        tmp_path, tickets={"keys": [str(tmp_path / "key.pub")], "issuers": ["authority"]}
    )


@pytest.fixture
def key(tmp_path: pathlib.Path) -> pathlib.Path:
    for command in (
        ["genpkey", "-algorithm", "ed25519", "-out", "key"],
        ["pkey", "-in", "key", "-pubout", "-out", "key.pub"],
    ):
        subprocess.run(
            ["openssl", *command], cwd=tmp_path, check=True, capture_output=True, timeout=30
        )
    return tmp_path / "key"


@pytest.mark.spec("NM-C.6: tickets: signed slivers for one host, each good once")
def test_sign_verify_use(
    key: pathlib.Path, nm: NmDaemon, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
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
    assert (
        program.main(
            [
                "ticket",
                "sign",
                str(record),
                "--key-file",
                str(key),
                "--issuer",
                "authority",
                "--host",
                "host0",
            ]
        )
        == 0
    )
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


def test_command_imports_an_old_pickle(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
