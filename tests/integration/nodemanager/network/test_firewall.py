"""What slivers reach, and what the host becomes for others meanwhile: real devices, namespaces
and rules.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.config import parse
from nodepool.nodemanager.network.firewall import FORBIDDEN, resolv_conf, resolvers, ruleset
from nodepool.nodemanager.network.tools import batch, run
from nodepool.nodemanager.network.veth import Network
from tests.conftest import wait_for
from tests.integration.nodemanager.network.test_net import (
    OUTSIDE,
    OUTSIDE_EXEMPT,
    TRY,
    Bench,
    bench,
    pytestmark,
)
from tests.support.nodemanager.node import with_network
from tests.support.nodemanager.scene import NmDaemon

__all__ = ["bench", "pytestmark"]

FORWARD = pathlib.Path("/proc/sys/net/ipv4/ip_forward")
#: Opens connections until one fails; prints how many there are.
MANY = """
import socket, sys
kept = []
try:
    while len(kept) < 60: kept.append(socket.create_connection((sys.argv[1], 5001), timeout=1))
except OSError: pass
print(len(kept))
"""
#: Sends a datagram to each port; prints how many were sent.
FLOOD = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(10000, 10300): sender.sendto(b'x', (sys.argv[1], port))
"""
#: Asks who has addresses of other networks, as senders from there would.
ARP = """
import ipaddress, socket, struct, sys
target = ipaddress.ip_address(sys.argv[1]).packed
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
frames.bind(('eth0', 0))
own = frames.getsockname()[4]
for number in range(300):
    sender = ipaddress.ip_address('9.9.0.0') + number
    head = b'\\xff' * 6 + own + struct.pack('!HHHBBH', 0x806, 1, 0x800, 6, 4, 1)
    frames.send(head + own + sender.packed + bytes(6) + target)
"""


def with_options(bench: Bench, **options: Any) -> None:
    bench.network = Network(with_network(bench.config, **options))


def conntrack_entries(address: str) -> int:
    """Connections of a sliver that the host knows."""
    return sum(
        f"src={address} " in line
        for line in pathlib.Path("/proc/net/nf_conntrack").read_text().splitlines()
    )


@pytest.mark.spec(
    "issue 10, F15: slivers with nat reach no private network of the host unless it is named"
)
def test_networks_of_the_host(bench: Bench) -> None:
    with_options(bench, reach=())
    bench.outside()
    bench.sliver("alice", 1)
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "closed"
    with_options(bench, reach=(f"{OUTSIDE_EXEMPT}/32",))
    bench.sliver("bob", 2)
    assert bench.run("bob", TRY, OUTSIDE, 5001) == "closed"
    assert bench.run("bob", TRY, OUTSIDE_EXEMPT, 5001) == "open"
    # A network that is not private, behind the same neighbour: the rest of the world.
    world = "203.0.113.7"
    batch(
        "ip",
        [f"addr add {world}/32 dev lo"],
        inside=next(p.pid for p in bench.processes if p.pid not in bench.names.values()),
    )
    batch("ip", [f"route add {world}/32 via {OUTSIDE} dev {bench.link}"])
    assert bench.run("bob", TRY, world, 5001) == "open"


@pytest.mark.spec(
    "issue 10, F15: metadata addresses of clouds are refused even if everything may be reached"
)
def test_metadata_is_never_reached(bench: Bench) -> None:
    with_options(bench, reach=("0.0.0.0/0",))
    bench.outside()
    outside = next(p.pid for p in bench.processes if p.pid not in bench.names.values())
    bench.sliver("alice", 1)
    addresses = ["169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192"]
    batch("ip", [f"addr add {address}/32 dev lo" for address in addresses], inside=outside)
    batch("ip", [f"route add {address}/32 via {OUTSIDE} dev {bench.link}" for address in addresses])
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
    assert [bench.run("alice", TRY, address, 5001) for address in addresses] == ["closed"] * len(
        addresses
    )
    assert len(FORBIDDEN) == 6


@pytest.mark.spec(
    "issue 10, F15: the host's DNS servers, or those given, are reached wherever they are; nothing "
    "else there is"
)
def test_only_the_dns_servers_are_reachable(
    bench: Bench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("# local\nnameserver 127.0.0.53\noptions edns0\n")
    real.write_text(
        "nameserver 192.0.2.53\nnameserver fe80::1%eth0\nnameserver\nnameserver 2001:db8::1\n"
    )
    monkeypatch.setattr(
        "nodepool.nodemanager.network.firewall._RESOLVERS", (stub, real, tmp_path / "missing")
    )
    assert resolvers(()) == ["192.0.2.53"]
    assert resolvers(("198.51.100.1",)) == ["198.51.100.1"]
    with_options(bench, reach=(), dns=(OUTSIDE,))
    bench.outside()
    bench.sliver("alice", 1)
    assert bench.run("alice", TRY, OUTSIDE, 53) == "refused"
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "closed"
    assert bench.run("alice", TRY, OUTSIDE_EXEMPT, 53) == "closed"


@pytest.mark.spec(
    "issue 10, F15: connections of one sliver are limited, so that it cannot fill the table of the "
    "host"
)
def test_connections_are_limited(bench: Bench) -> None:
    with_options(bench, connections=40)
    bench.outside()
    alice, _bob = bench.sliver("alice", 1), bench.sliver("bob", 2)
    assert int(bench.run("alice", MANY, OUTSIDE)) == 40
    # Those are over, and yet in the table.
    bench.run("alice", FLOOD, OUTSIDE_EXEMPT)
    if os.path.exists("/proc/net/nf_conntrack"):
        assert conntrack_entries(alice.address) < 80
    assert bench.run("bob", TRY, OUTSIDE, 5001) == "open"


@pytest.mark.spec(
    "issue 10, F15: slivers on a bridge reach neither each other nor services of the host"
)
def test_bridge_keeps_slivers_apart(bench: Bench) -> None:
    name = f"b{uuid.uuid4().hex[:8]}"
    neighbour = bench.bridge(name)
    try:
        for number, sliver in enumerate(("alice", "bob"), 2):
            bench.sliver(sliver, number, mode=f"bridge:{name}")
            batch("ip", [f"addr add 10.223.0.{number}/24 dev eth0"], inside=bench.names[sliver])
            bench.serve(bench.names[sliver], "0.0.0.0")
        bench.serve(None, "10.223.0.1")
        bench.serve(neighbour, "0.0.0.0")
        bench.names["neighbour"] = neighbour
        assert bench.run("alice", TRY, "10.223.0.9", 5001) == "open"
        assert bench.run("neighbour", TRY, "10.223.0.2", 5001) == "open"
        assert bench.run("neighbour", TRY, "10.223.0.1", 5001) == "open"
        assert bench.run("alice", TRY, "10.223.0.3", 5001) == "closed"
        assert bench.run("alice", TRY, "10.223.0.1", 5001) == "closed"
        # Nobody listens there, but the packets come through.
        assert bench.run("alice", TRY, "10.223.0.1", 53) == "refused"
        assert bench.run("alice", TRY, "10.223.0.1", 812) == "refused"
        del bench.names["neighbour"]
    finally:
        batch("ip", [f"link del {name}"], force=True)


@pytest.mark.spec(
    "issue 10, F16: forged senders make no neighbours on the host; those of slivers are not counted"
)
def test_forged_senders_add_no_neighbors(bench: Bench) -> None:
    bench.outside()
    alice = bench.sliver("alice", 1)
    bench.run("alice", ARP, alice.gateway)
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
    (line,) = run("ip", ["neigh", "show", "dev", alice.veth]).splitlines()
    assert line.split()[0] == alice.address and line.split()[-1] == "PERMANENT"
    assert (
        run("ip", ["neigh", "show", "dev", "eth0"], inside=bench.names["alice"])
        .strip()
        .endswith("PERMANENT")
    )
    # Neighbours are found without them, too.
    batch(
        "ip",
        ["neigh flush all nud permanent", f"neigh del {alice.gateway} dev eth0"],
        inside=bench.names["alice"],
        force=True,
    )
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
    assert "inet6" not in run("ip", ["addr", "show", "dev", "eth0"], inside=bench.names["alice"])


class TestRouting:
    """Two networks of the host, which did not route between them before."""

    @pytest.fixture
    def neighbour(self, bench: Bench) -> Iterator[str]:
        FORWARD.write_text("0")
        bench.outside()
        process = bench.namespace()
        link = f"p{uuid.uuid4().hex[:8]}"
        batch(
            "ip",
            [
                f"link add {link} type veth peer name eth0 netns {process.pid}",
                f"addr add 10.224.7.1/24 dev {link}",
                f"link set {link} up",
            ],
        )
        batch(
            "ip",
            [
                "link set lo up",
                "addr add 10.224.7.2/24 dev eth0",
                "link set eth0 up",
                "route add default via 10.224.7.1",
            ],
            inside=process.pid,
        )
        bench.names["neighbour"] = process.pid
        yield "neighbour"
        bench.names.pop("neighbour", None)
        batch("ip", [f"link del {link}"], force=True)

    @pytest.mark.spec(
        "issue 10, F15: a host that routes for slivers does not for its neighbours, and stops with "
        "the last one"
    )
    def test_host_becomes_no_router(self, bench: Bench, neighbour: str) -> None:
        bench.sliver("alice", 1)
        assert FORWARD.read_text() == "1\n"
        assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
        assert bench.run(neighbour, TRY, OUTSIDE, 5001) == "closed"
        bench.network.destroy("alice")
        wait_for(lambda: bench.network.tag not in run("nft", ["list", "tables"]), 20, "rules gone")
        assert FORWARD.read_text() == "0\n"
        bench.sliver("alice", 1)
        assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
        assert bench.run(neighbour, TRY, OUTSIDE, 5001) == "closed"

    @pytest.mark.spec("issue 10, F15: the former value survives a killed daemon")
    def test_another_daemon_restores_it(self, bench: Bench, neighbour: str) -> None:
        bench.sliver("alice", 1)
        other = bench.network = Network(bench.config)  # nothing is known from before
        other.prepare()
        assert bench.run(neighbour, TRY, OUTSIDE, 5001) == "closed"
        bench.sliver("bob", 2)
        other.destroy("bob")
        other.destroy("alice")
        wait_for(lambda: FORWARD.read_text() == "0\n", 20, "routing is off again")

    @pytest.mark.spec(
        "issue 10, F15: a daemon killed with its last sliver leaves a router until it starts anew, "
        "and no longer"
    )
    def test_start_without_slivers_restores_it(self, bench: Bench, neighbour: str) -> None:
        alice = bench.sliver("alice", 1)
        batch("ip", [f"link del {alice.veth}"])
        assert FORWARD.read_text() == "1\n"
        bench.network = Network(bench.config)
        bench.network.prepare()
        assert FORWARD.read_text() == "0\n"

    @pytest.mark.spec("issue 10, F15: two daemons on one host")
    def test_two_daemons_on_one_host_keep_their_rules_apart(
        self, bench: Bench, neighbour: str, tmp_path: pathlib.Path
    ) -> None:
        bench.sliver("alice", 1)
        first, bench.network = (
            bench.network,
            Network(with_network(bench.config, str(tmp_path / "other"), subnet="10.225.0.0/16")),
        )
        try:
            bench.sliver("bob", 1)
            first.destroy("alice")
            wait_for(lambda: first.tag not in run("nft", ["list", "tables"]), 20, "rules gone")
            assert FORWARD.read_text() == "1\n"
            assert bench.run("bob", TRY, OUTSIDE, 5001) == "open"
            assert bench.run(neighbour, TRY, OUTSIDE, 5001) == "closed"
            bench.network.destroy("bob")
            wait_for(lambda: FORWARD.read_text() == "0\n", 20, "routing is off again")
            bench.network.remove_shared()
        finally:
            bench.network = first

    @pytest.mark.spec("issue 10, F15: a host that was a router stays one")
    def test_a_router_stays_one(self, bench: Bench, neighbour: str) -> None:
        FORWARD.write_text("1")
        bench.sliver("alice", 1)
        assert bench.run(neighbour, TRY, OUTSIDE, 5001) == "open"
        bench.network.destroy("alice")
        wait_for(lambda: bench.network.tag not in run("nft", ["list", "tables"]), 20, "rules gone")
        assert FORWARD.read_text() == "1\n"


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    before = FORWARD.read_text()
    made = NmDaemon(
        tmp_path,
        network={
            "default": "nat",
            "subnet": "10.226.0.0/16",
            "dns": ["198.51.100.53", "198.51.100.54"],
        },
    )
    made.start()
    try:
        yield made
    finally:
        made.clean()
        FORWARD.write_text(before)
    wait_for(lambda: made.left() == [], 10, "all traces to go")


@pytest.mark.spec(
    "issue 10, F15: network.dns is what slivers with nat ask, also where the host asks a resolver "
    "of its own"
)
def test_slivers_ask_the_configured_resolvers(daemon: NmDaemon) -> None:
    daemon.put("alpha")
    inside = daemon.ssh("alpha", "cat /etc/resolv.conf").splitlines()
    assert inside[:2] == ["nameserver 198.51.100.53", "nameserver 198.51.100.54"]


def test_resolv_conf_of_the_host_may_separate_words_by_tabs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text(
        "nameserver\t192.0.2.53\n nameserver 192.0.2.54\nnameservers 192.0.2.55\n"
        "domain\texample.net\nsearch\texample.org  example.com\noptions\tndots:2\n"
        "sortlist 192.0.2.0\n"
    )
    monkeypatch.setattr("nodepool.nodemanager.network.firewall._RESOLVERS", (path,))
    assert resolvers(()) == ["192.0.2.53"]
    assert resolv_conf(()) == (
        b"nameserver 192.0.2.53\ndomain example.net\nsearch example.org example.com\n"
        b"options ndots:2\n"
    )


@pytest.mark.spec(
    "issue 10, F15: after kill -9 of the daemon the next one stops routing with the last sliver"
)
def test_next_daemon_stops_routing_after_a_kill(daemon: NmDaemon) -> None:
    FORWARD.write_text("0")
    daemon.put("alpha")
    assert FORWARD.read_text() == "1\n"
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert FORWARD.read_text() == "1\n"
    assert daemon.ssh("alpha", "ip route").startswith("default via 10.226.")
    daemon.delete("alpha")
    wait_for(lambda: FORWARD.read_text() == "0\n", 20, "routing is off again")


#: Chains of other firewalls: policy, and rules before and after what accepts other packets.
OTHERS = {
    "Docker": ("drop", ["jump DOCKER-USER"], []),
    "ufw": ("drop", [], []),
    "firewalld": ("accept", [], ["reject with icmpx admin-prohibited"]),
    "counter": ("accept", [], ["counter drop"]),
}


def other(table: str, policy: str, first: list[str], last: list[str]) -> str:
    """Return a table that drops forwarded packets of slivers, and no others."""
    rules = [*first, "ip saddr != 10.222.0.0/16 ip daddr != 10.222.0.0/16 accept", *last]
    hook = f"type filter hook forward priority filter; policy {policy};"
    forward = "\n".join(["chain FORWARD {", hook, *rules, "}"])
    users = "chain DOCKER-USER {\n}\n" if first else ""
    return f"table {table} {{\n{users}{forward}\n}}\n"


@pytest.mark.parametrize("kind", OTHERS)
def test_other_firewall_that_drops_packets_of_slivers_is_named_with_a_remedy_that_works(
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    bench.outside()
    bench.sliver("alice", 1)
    bench.network.tidy()
    assert (bench.run("alice", TRY, OUTSIDE, 5001), caplog.text) == ("open", "")
    table = f"inet t{uuid.uuid4().hex[:8]}"
    try:
        run("nft", ["-f", "-"], other(table, *OTHERS[kind]))
        assert bench.run("alice", TRY, OUTSIDE, 5001) == "closed"
        bench.network.tidy()
        bench.network.tidy()
        (record,) = caplog.records
        assert f"chain FORWARD of the nftables table {table} drops" in record.message
        assert [problem.feature for problem in bench.network.problems()] == ["network nat"]
        for command in record.message.rpartition(": ")[2].split("; "):
            subprocess.run(command, shell=True, check=True)
        assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
        bench.network.tidy()
        assert bench.network.problems() == []
    finally:
        run("nft", ["delete", "table", *table.split()])
    assert len(caplog.records) == 1


def test_other_firewall_that_accepts_the_subnet_of_slivers_is_no_problem(bench: Bench) -> None:
    bench.outside()
    bench.sliver("alice", 1)
    table, subnet = f"inet t{uuid.uuid4().hex[:8]}", bench.config.network.subnet
    try:
        run("nft", ["-f", "-"], other(table, *OTHERS["ufw"]))
        for side in ("saddr", "daddr"):
            run("nft", ["insert", "rule", *table.split(), "FORWARD", "ip", side, subnet, "accept"])
        assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
        assert bench.network.problems() == []
    finally:
        run("nft", ["delete", "table", *table.split()])


def test_rules_follow_the_configuration() -> None:
    config = parse(
        {"network": {"reach": ["10.0.0.0/8", "10.1.0.0/16", "192.168.7.9"], "connections": 7}},
        "test",
    )
    text = ruleset("nodemanager", config, False)
    assert (
        "set reach { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 192.168.7.9/32 }; }"
        in text
    )
    assert "ct count over 7 " in text
    assert "strangers" not in text
    assert parse({}, "test").network.default == "none"
