"""``ssh: {mode: sshd}``: a server inside each sliver, on the sliver's own address (NM-C.4)."""

from __future__ import annotations

import base64
import ipaddress
import os
import pathlib
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.kernel.commands import find
from nodepool.nodemanager.ssh.sshd import own_address
from tests.conftest import wait_for
from tests.support.nodemanager.scene import NmDaemon, run_daemon

pytestmark = [
    pytest.mark.usefixtures("host_network"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks need root"),
    pytest.mark.skipif(
        find("nft") is None or find("ip") is None, reason="network nat needs ip and nft"
    ),
]


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    subnet = f"10.{os.getpid() % 50 + 150}.0.0/16"
    daemon = NmDaemon(tmp_path, network={"default": "nat", "subnet": subnet})
    daemon.write_config(ssh={**daemon.options["ssh"], "mode": "sshd"})
    yield from run_daemon(daemon)


def sessions(nm: NmDaemon, name: str) -> int:
    return int(nm.client.call("GetRecord", name)["sessions"])


def server(nm: NmDaemon, name: str) -> int:
    """Its number inside."""
    return int(nm.ssh(name, "pgrep -o -x sshd"))


@pytest.mark.spec("NM-C.4: ssh-mode sshd runs a real sshd in the sliver on its own address")
def test_sliver_runs_its_own_sshd_on_its_address(nm: NmDaemon) -> None:
    found = nm.put("alpha", hostname="alpha")
    assert (found["ssh_address"], found["ssh_port"], found["own_ssh"]) == (
        found["address"],
        22,
        True,
    )
    # Immediately: a sliver is ready when its server listens.
    socket.create_connection((found["address"], 22), timeout=2).close()
    line = nm.ssh("alpha", "tr '\\0' ' ' < /proc/$(pgrep -o -x sshd)/cmdline ")
    assert "sshd -D -e" in line and nm.ssh("alpha", "hostname") == "alpha\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", nm.first_port), timeout=2)
    beta = nm.put("beta")
    assert beta["ssh_address"] != found["ssh_address"] and beta["host_keys"] != found["host_keys"]


@pytest.mark.spec(
    "NM-C.4: the sshd of a sliver is restarted when it ends, and started with the sliver"
)
def test_ended_ssh_server_is_restarted(nm: NmDaemon) -> None:
    nm.put("alpha")
    before = server(nm, "alpha")
    nm.ssh("alpha", f"kill -9 {before}", check=False)
    address = nm.client.call("GetRecord", "alpha")["address"]

    def answers() -> bool:
        try:
            with socket.create_connection((address, 22), timeout=2) as connection:
                return (
                    connection.recv(4) == b"SSH-"
                )  # some networks have proxies that take any connection
        except OSError:
            return False

    wait_for(answers, 20, "the server to run again")
    assert server(nm, "alpha") != before
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    assert not answers()
    nm.client.call("Start", "alpha")
    nm.wait("alpha")
    assert nm.ssh("alpha", "echo again") == "again\n"


@pytest.mark.spec("NM-C.7: a restart of the daemon finds the servers that run; sessions go on")
def test_restarted_daemon_finds_running_ssh_servers(nm: NmDaemon) -> None:
    nm.put("alpha")
    before = server(nm, "alpha")
    wait_for(lambda: sessions(nm, "alpha") == 0, what="the end of the first session to be counted")
    session = nm.session("alpha")
    assert sessions(nm, "alpha") == 1
    nm.stop(signal.SIGKILL)
    nm.start()
    wait_for(lambda: sessions(nm, "alpha") == 1, what="the server to be found")
    assert server(nm, "alpha") == before
    assert nm.ssh("alpha", "pgrep -c -f '[/]usr/sbin/sshd -D'") == "1\n"
    out, _ = session.communicate("hello\n", timeout=20)
    assert out == "got hello\n"
    wait_for(lambda: sessions(nm, "alpha") == 0, what="the end of the session to be counted")
    nm.ssh("alpha", f"kill -9 {before}", check=False)
    wait_for(
        lambda: nm.ssh("alpha", "echo yes", check=False) == "yes\n",
        20,
        "the adopted server to be replaced",
    )


@pytest.mark.spec("NM-C.4: a sliver without an address of its own is reached as by default")
def test_sliver_without_network_is_reached_through_the_host(nm: NmDaemon) -> None:
    found = nm.put("alpha", network="none")
    assert (
        found["ssh_address"] == "127.0.0.1"
        and found["ssh_port"] >= nm.first_port
        and not found["own_ssh"]
    )
    assert nm.ssh("alpha", "pgrep -f '[s]shd -D' || echo no server") == "no server\n"


@pytest.fixture
def bridge() -> Iterator[str]:
    name = f"brtest{os.getpid() % 100000}"
    if subprocess.run(
        ["ip", "link", "add", name, "type", "bridge"], capture_output=True, timeout=20, check=False
    ).returncode:
        pytest.skip("this kernel has no bridges")
    try:
        subprocess.run(["ip", "addr", "add", "198.18.77.1/24", "dev", name], timeout=20, check=True)
        subprocess.run(["ip", "link", "set", name, "up"], timeout=20, check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], timeout=20, check=True)


@pytest.mark.spec("NM-C.4: ssh-mode sshd on a bridge: the address that the sliver gives itself")
def test_bridged_slivers_own_address_is_found(bridge: str, nm: NmDaemon) -> None:
    # Users are not sent to an address of somewhere else.
    script = base64.b64encode(
        b"#!/bin/sh\nfor a in 192.0.2.9 198.18.77.2; do ip addr add $a/24 dev eth0; done\n"
    ).decode()
    nm.put("alpha", network=f"bridge:{bridge}", initscript=script, privileges=["network-admin"])
    wait_for(
        lambda: nm.client.call("GetRecord", "alpha")["ssh_address"] == "198.18.77.2",
        20,
        "the address to be known",
    )
    assert nm.client.call("GetRecord", "alpha")["ssh_port"] == 22
    wait_for(
        lambda: nm.ssh("alpha", "echo over the bridge", check=False) == "over the bridge\n",
        20,
        "the bridge to forward",
    )
    with socket.create_connection(("127.0.0.1", nm.first_port), timeout=5) as connection:
        assert connection.recv(4) == b"SSH-", "the port of the host works as well"


def test_addresses_of_a_namespace() -> None:
    child = subprocess.Popen(
        [
            "unshare",
            "-n",
            "sh",
            "-c",
            "ip link set lo up; ip addr add 192.0.2.7/24 dev lo; echo; exec sleep 60",
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        child.stdout.readline()
        assert own_address(child.pid) == "192.0.2.7"
        assert own_address(child.pid, [ipaddress.IPv4Network("192.0.2.0/24")]) == "192.0.2.7"
        assert own_address(child.pid, [ipaddress.IPv4Network("198.18.0.0/15")]) is None
        assert own_address(os.getpid(), [ipaddress.IPv4Network("0.0.0.0/0")]) is None, (
            "the host itself"
        )
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()
    assert own_address(child.pid) is None
