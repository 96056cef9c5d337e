"""Certificates of leases: a real ssh-keygen, and a real sshd that the image element has
configured.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.client import NodepoolError, Pool
from nodepool.lease import Lease, LeaseError, LeaseState, Reason, Terms, certificates
from nodepool.zk.records import Node
from tests import REPOSITORY
from tests.integration.lease.conftest import Api
from tests.support.launcher import LauncherBench
from tests.support.ports import reserve

HOOK = REPOSITORY / "etc" / "elements" / "nodepool-ssh-ca" / "install.d" / "60-nodepool-ssh-ca"
#: A machine with its own host name and /etc/ssh: the element is installed, and sshd runs with the
#: files that it wrote.
MACHINE = """
set -eu
hostname elsewhere
mount -t tmpfs -o mode=0755 tmpfs /etc/ssh
mount -t tmpfs -o mode=0755 tmpfs /usr/libexec
cp {folder}/host_key /etc/ssh/host_key
chmod 600 /etc/ssh/host_key
DIB_NODEPOOL_SSH_CA="{public}" {hook}
DIB_NODEPOOL_SSH_CA="{public}" {hook}
cat >> /etc/ssh/sshd_config <<END
HostKey /etc/ssh/host_key
Port {port}
ListenAddress 127.0.0.1
PidFile none
PermitRootLogin yes
END
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e
"""


def keygen(path: pathlib.Path) -> str:
    """Create a key pair; return the public key without comment."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)],
        check=True,
        timeout=30,
    )
    return " ".join(pathlib.Path(f"{path}.pub").read_text().split()[:2])


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> tuple[str, str]:
    return str(tmp_path / "ca"), keygen(tmp_path / "ca")


def held(ends: float | None, *node_ids: str, owner: str = "alice") -> Lease:
    nodes = tuple(map(Node, node_ids))
    return Lease("200-0000000001", LeaseState.HELD, Terms(owner, "test"), ("x",), nodes, ends)


def test_certificate_names_the_nodes_and_ends_with_the_lease(
    ca: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    lease = held(time.time() + 3600, "0000000001", "0000000002", owner="acme/site -n evil")
    path = tmp_path / "id-cert.pub"
    path.write_text(certificates.sign(ca[0], keygen(tmp_path / "id"), lease, cluster="3f0c"))
    shown = subprocess.run(
        ["ssh-keygen", "-L", "-f", str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert 'Key ID: "lease 200-0000000001 acme/site?-n?evil cluster 3f0c"' in shown
    assert int(shown.partition("Serial:")[2].split()[0]) > 0
    principals = shown.partition("Principals:")[2].partition("Critical")[0].split()
    assert principals == ["np0000000001", "np0000000002"]
    end = time.mktime(
        time.strptime(shown.partition(" to ")[2].partition("\n")[0].strip(), "%Y-%m-%dT%H:%M:%S")
    )
    assert end == pytest.approx(lease.ends, abs=5)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "x",
        "ssh-ed25519",
        "ssh-ed25519 AAAA\nssh-rsa AAAA",
        "command=x ssh-ed25519 AAAA",
        "ssh-ed25519 AAAA\0",
        "ssh-ed25519 AAAA",
        "ssh-new AAAAC3NzaC1lZDI1NTE5AAAAIA==",
    ],
)
def test_text_that_is_not_a_key_is_refused(ca: tuple[str, str], key: str) -> None:
    with pytest.raises(LeaseError) as caught:
        certificates.sign(ca[0], key, held(time.time() + 60, "0000000001"))
    assert caught.value.reason is Reason.BAD_REQUEST


@pytest.mark.parametrize("text", ["{key}\n{key}", "no-pty {key}", "{key}\n# a line"])
def test_key_with_options_or_further_lines_is_refused(
    ca: tuple[str, str], tmp_path: pathlib.Path, text: str
) -> None:
    with pytest.raises(LeaseError, match="must be one line"):
        certificates.sign(
            ca[0], text.format(key=keygen(tmp_path / "id")), held(time.time() + 60, "0000000001")
        )


@pytest.mark.parametrize("ends", [None, 1.0])
def test_ended_lease_gets_no_certificate(
    ca: tuple[str, str], tmp_path: pathlib.Path, ends: float | None
) -> None:
    with pytest.raises(LeaseError, match="has ended"):
        certificates.sign(ca[0], keygen(tmp_path / "id"), held(ends, "0000000001"))


def test_ca_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError, match="cannot sign with /nowhere"):
        certificates.sign("/nowhere", keygen(tmp_path / "id"), held(time.time() + 60, "0000000001"))


class Machine:
    """A machine that the element has prepared."""

    def __init__(self, folder: pathlib.Path, public: str) -> None:
        self.port = reserve()
        keygen(folder / "host_key")
        script = MACHINE.format(folder=folder, public=public, hook=HOOK, port=self.port)
        self.log = (folder / "sshd.log").open("wb")
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "bash", "-c", script], stdout=self.log, stderr=self.log
        )

    def rename(self, name: str) -> None:
        subprocess.run(
            ["nsenter", "-t", str(self.process.pid), "-u", "hostname", name], check=True, timeout=30
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@pytest.fixture
def machine(tmp_path: pathlib.Path, ca: tuple[str, str]) -> Iterator[Machine]:
    if os.geteuid():
        pytest.skip("needs root, to have another host name")
    found = Machine(tmp_path, ca[1])
    yield found
    found.stop()


@pytest.fixture
def pool_with_ca(
    bench: LauncherBench, machine: Machine, ca: tuple[str, str], tmp_path: pathlib.Path
) -> Iterator[Pool]:
    node = {
        "name": "127.0.0.1",
        "labels": ["small"],
        "username": "root",
        "connection-port": machine.port,
        "host-key-checking": True,
    }
    entry = {"name": "hosts", "driver": "static", "pools": [{"name": "main", "nodes": [node]}]}
    config: dict[str, Any] = {
        "labels": [{"name": "small"}],
        "providers": [entry],
        "access": {"certificates": {"key": ca[0], "public": ca[1]}},
    }
    api = Api(bench, bench.start(config), tmp_path)
    try:
        yield Pool(api.url, api.token())
    finally:
        api.app.stop()


def test_certificate_opens_the_nodes_of_its_lease_and_no_other(
    pool_with_ca: Pool, machine: Machine
) -> None:
    with pool_with_ca.lease("small", wait="60s") as lease:
        machine.rename(f"np{lease.nodes[0].id}.example.org")
        assert lease.run("uname -n", check=True).stdout.startswith(
            f"np{lease.nodes[0].id}".encode()
        )
    with pool_with_ca.lease("small", wait="60s") as lease:
        machine.rename("np9999999999")
        with pytest.raises(NodepoolError, match="Permission denied"):
            lease.run("true")


def test_certificate_is_signed_again_before_it_ends(
    pool_with_ca: Pool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.client.lease.SOON", 1e9)
    calls: list[str] = []
    call = Pool.call

    def counted(self: Pool, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(path.rpartition("/")[2])
        return call(self, method, path, *args, **kwargs)

    monkeypatch.setattr(Pool, "call", counted)
    with pool_with_ca.lease("small", wait="60s") as lease:
        machine.rename(f"np{lease.nodes[0].id}")
        for _ in range(2):
            lease.run("true", check=True)
    assert calls.count("certificate") == 2


def test_launcher_without_a_ca_signs_nothing(api: Api) -> None:
    token = api.token()
    lease = api.call("POST", "/leases", {"labels": ["fake-label"], "wait": 30}, token).content
    path, body = f"/leases/{lease['id']}/certificate", {"public_key": "ssh-ed25519 AAAA"}
    answer = api.call("POST", path, body, token)
    assert (answer.status, answer.content["code"]) == (404, "no-certificates")
    assert api.call("POST", path, body, api.token("bob")).status == 403
    api.call("DELETE", f"/leases/{lease['id']}", token=token)
    assert api.call("POST", path, body, token).status == 410
