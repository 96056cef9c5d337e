"""Networks of slivers: real devices, namespaces and transfers.

"outside" is a network namespace behind the host, as the rest of the world is for a sliver.
"""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.config import parse
from nodepool.nodemanager.network import firewall, veth
from nodepool.nodemanager.network.tools import batch, run
from nodepool.nodemanager.network.veth import Network, NetworkError
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager.node import with_network

SUBNET = "10.222.0.0/16"
OUTSIDE, OUTSIDE_EXEMPT, HOST_SIDE = "10.221.7.2", "10.221.7.3", "10.221.7.1"


def _lacking() -> str:
    if os.geteuid() != 0:
        return "networks of slivers need root"
    return "; ".join(
        f"{problem.feature}: {problem.remedy}" for problem in Network(parse({}, "test")).problems()
    )


pytestmark = [
    pytest.mark.usefixtures("host_network"),
    pytest.mark.skipif(bool(_lacking()), reason=_lacking() or "-"),
]

SERVER = """
import socket, sys, threading
def serve(connection):
    with connection:
        total = 0
        kind = connection.recv(1)
        if kind == b's':
            try:
                while True: connection.sendall(b'x' * 65536)
            except OSError: return
        while data := connection.recv(1 << 20): total += len(data)
        connection.sendall(b'%d' % total)
listener = socket.create_server((sys.argv[1], 5001))
print('ready', flush=True)
while True: threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
"""
#: Sends or receives for some seconds; prints bytes per second as seen by the receiver.
CLIENT = """
import socket, sys, time
address, kind, seconds, source = sys.argv[1], sys.argv[2].encode(), float(sys.argv[3]), sys.argv[4:]
bound = (source[0], 0) if source else None
connection = socket.create_connection((address, 5001), timeout=10, source_address=bound)
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 262144)
connection.sendall(kind)
if kind == b's':
    # What the bucket and the queue let through at once is not the rate.
    end = time.monotonic() + 0.5
    while time.monotonic() < end: connection.recv(1 << 20)
    begin, total = time.monotonic(), 0
    while time.monotonic() < begin + seconds: total += len(connection.recv(1 << 20))
    print(total / (time.monotonic() - begin))
else:
    begin, total = time.monotonic(), 0
    while time.monotonic() < begin + seconds: connection.sendall(b'x' * 16384)
    connection.shutdown(socket.SHUT_WR)
    print(int(connection.recv(100)) / (time.monotonic() - begin))
"""
TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
    print('open')
except ConnectionRefusedError: print('refused')
except OSError: print('closed')
"""
#: Payload of a full segment with timestamps, and the frame it is in.
PAYLOAD = 1448 / 1514


class Bench:
    def __init__(self, state: pathlib.Path) -> None:
        self.config = parse(
            {
                "state-dir": str(state),
                "network": {
                    "subnet": SUBNET,
                    "cap": 1_000_000_000,
                    "exempt-ips": [OUTSIDE_EXEMPT],
                    "reach": [f"{OUTSIDE}/31"],
                },
            },
            "test",
        )
        self.network = Network(self.config)
        self.network.prepare()
        self.processes: list[subprocess.Popen[str]] = []
        self.names: dict[str, int] = {}
        self._outside: subprocess.Popen[str] | None = None
        self.link = f"o{uuid.uuid4().hex[:8]}"

    def namespace(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 600"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def sliver(
        self, name: str, index: int, rspec: dict[str, Any] | None = None, mode: str = "nat"
    ) -> Any:
        process = self.namespace()
        self.names[name] = process.pid
        return self.network.create(name, index, process.pid, mode, rspec or {})

    def outside(self) -> None:
        process = self.namespace()
        batch(
            "ip",
            [
                f"link add {self.link} type veth peer name eth0 netns {process.pid}",
                f"addr add {HOST_SIDE}/24 dev {self.link}",
                f"link set {self.link} up",
            ],
        )
        batch(
            "ip",
            [
                "link set lo up",
                f"addr add {OUTSIDE}/24 dev eth0",
                f"addr add {OUTSIDE_EXEMPT}/24 dev eth0",
                "link set eth0 up",
                f"route add default via {HOST_SIDE}",
            ],
            inside=process.pid,
        )
        self.serve(process.pid, "0.0.0.0")

    def bridge(self, name: str) -> int:
        """A bridge with an address of the host; process in the namespace of a neighbour with
        address 10.223.0.9 at a port.
        """
        process = self.namespace()
        batch(
            "ip",
            [
                f"link add {name} type bridge",
                f"addr add 10.223.0.1/24 dev {name}",
                f"link set {name} up",
                f"link add {name}n type veth peer name eth0 netns {process.pid}",
                f"link set {name}n master {name} up",
            ],
        )
        batch(
            "ip",
            ["link set lo up", "addr add 10.223.0.9/24 dev eth0", "link set eth0 up"],
            inside=process.pid,
        )
        return process.pid

    def serve(self, pid: int | None, address: str) -> None:
        server = subprocess.Popen(
            [*self.enter(pid), sys.executable, "-c", SERVER, address],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

    @staticmethod
    def enter(pid: int | None) -> list[str]:
        return ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid is not None else []

    def start(self, name: str, code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.enter(self.names[name]), sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, name: str, code: str, *arguments: object) -> str:
        return self.start(name, code, *arguments).communicate(timeout=60)[0].strip()

    def rate(self, name: str, address: str, kind: str = "r", seconds: float = 4) -> float:
        """Bit/s with headers."""
        return float(self.run(name, CLIENT, address, kind, seconds)) * 8 / PAYLOAD

    def check_rate(
        self, name: str, address: str, cap: float, kind: str = "r", within: float = 0.05
    ) -> float:
        """The cap is kept by each try, and reached by one: other work on this machine can make a
        sliver slower, never faster.
        """
        for _ in range(3):
            rate = self.rate(name, address, kind, 3)
            assert rate < (1 + within) * cap
            if rate > (1 - within) * cap:
                return rate
        raise AssertionError(f"{rate / 1e6:.2f} of {cap / 1e6:g} Mbit/s")

    def close(self) -> None:
        for name in self.names:
            self.network.destroy(name)
        for process in self.processes:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
        self.network.stop()
        self.network.remove_shared()
        batch("ip", [f"link del {self.link}"], force=True)


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    forward = pathlib.Path("/proc/sys/net/ipv4/ip_forward")
    before, forwarding = set(os.listdir("/sys/class/net")), forward.read_text()
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()
        forward.write_text(forwarding)
        ours = made.network.tag
        assert made.network.found() == []
        assert made.network.shaper.device not in os.listdir("/sys/class/net")
        wait_for(lambda: made.link not in os.listdir("/sys/class/net"), 10, "link gone")
        assert ours not in run("nft", ["list", "tables"])
        assert before - set(os.listdir("/sys/class/net")) <= before


#: Receives 3 MB, and shows what it can send without being fragmented.
FETCH = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[2]))
connection.sendall(b's')
total = 0
while total < 3_000_000: total += len(connection.recv(1 << 20))
print('received', connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= int(sys.argv[3]))
"""


@pytest.mark.core
@pytest.mark.parametrize("restored", ["each minute", "by the next sliver"])
@pytest.mark.parametrize("family", firewall.FAMILIES)
def test_rules_that_others_remove_are_restored(bench: Bench, family: str, restored: str) -> None:
    """A reload of nftables.service removes all tables of the host."""
    bench.sliver("alice", 1)
    tables = [
        line for line in run("nft", ["list", "tables"]).splitlines() if bench.network.tag in line
    ]
    rules = run("nft", ["list", "ruleset"])
    run("nft", ["delete", "table", family, bench.network._firewall._table])
    if restored == "each minute":
        bench.network.tidy()
    else:
        bench.sliver("bob", 2)
    assert sorted(tables) == sorted(
        line for line in run("nft", ["list", "tables"]).splitlines() if bench.network.tag in line
    )
    assert "chain strangers" in run("nft", ["list", "ruleset"]) or "chain strangers" not in rules


@pytest.mark.core
@pytest.mark.parametrize("when", ["before", "after"])
def test_transfers_fit_an_uplink_whose_mtu_is_smaller_than_that_of_the_peer(
    bench: Bench, when: str
) -> None:
    """As behind an overlay network or a tunnel; the MTU may change while the sliver runs."""
    bench.outside()
    smaller = [f"link set {bench.link} mtu 1400"]
    if when == "before":
        batch("ip", smaller)
    bench.sliver("alice", 1)
    batch("ip", smaller)
    assert bench.run("alice", FETCH, OUTSIDE, limit(20), 1360) == "received True"


def test_devices_of_slivers_have_the_mtu_of_the_uplink_or_bridge(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.outside()
    batch("ip", [f"link set {bench.link} mtu 1442"])
    monkeypatch.setattr(veth, "uplink", lambda: bench.link)
    name = f"b{uuid.uuid4().hex[:8]}"
    try:
        bench.bridge(name)
        batch("ip", [f"link set {name} mtu 1400"])
        nat = bench.sliver("alice", 1)
        bridged = bench.sliver("bob", 2, mode=f"bridge:{name}")
        for sliver, info, mtu in (("alice", nat, "1442"), ("bob", bridged, "1400")):
            inside = [
                "nsenter",
                f"--net=/proc/{bench.names[sliver]}/ns/net",
                "ip",
                "-o",
                "link",
                "show",
                "eth0",
            ]
            assert (
                f"mtu {mtu} "
                in subprocess.run(
                    inside, capture_output=True, text=True, check=True, timeout=20
                ).stdout
            )
            assert pathlib.Path(f"/sys/class/net/{info.veth}/mtu").read_text().strip() == mtu
        assert pathlib.Path(f"/sys/class/net/{name}/mtu").read_text().strip() == "1400"
    finally:
        batch("ip", [f"link del {name}"], force=True)


def test_uplink_is_the_device_of_the_default_route_with_the_lowest_metric(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "route"
    monkeypatch.setattr(firewall, "_ROUTES", routes)
    assert firewall.uplink() is None
    line = "{}\t00000000\t0102A8C0\t0003\t0\t0\t{}\t00000000\t0\t0\t0\n"
    near = "lan0\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    routes.write_text(
        "Iface\tDestination ...\n" + near + line.format("wlan0", 600) + line.format("eth1", 100)
    )
    assert firewall.uplink() == "eth1"
    assert firewall.connected() == ["192.168.2.0/24"]


@pytest.mark.slow
@pytest.mark.spec("NM-C.9: bandwidth within 5 % of the cap after headers")
@pytest.mark.parametrize("kind", ["r", "s"], ids=["sent", "received"])
def test_rate_is_within_5_percent_of_the_cap(bench: Bench, kind: str) -> None:
    bench.outside()
    bench.sliver("alice", 1, {"nm_net_max_rate": 40_000_000})
    rate = bench.check_rate("alice", OUTSIDE, 40e6, kind)
    print(f"cap of 40 Mbit/s, {'sent' if kind == 'r' else 'received'}: {rate / 1e6:.2f}")


@pytest.mark.slow
@pytest.mark.spec("NM-C.3: a loan of nm_net_max_rate is in force at once")
def test_rate_changes_immediately(bench: Bench) -> None:
    bench.outside()
    bench.sliver("alice", 1, {"nm_net_max_rate": 20_000_000})
    bench.network.apply("alice", {"nm_net_max_rate": 60_000_000})
    bench.check_rate("alice", OUTSIDE, 60e6)
    # Another daemon that succeeds it can do it, too.
    other = Network(bench.config)
    other.prepare()
    other.apply("alice", {"nm_net_max_rate": 10_000_000})
    bench.check_rate("alice", OUTSIDE, 10e6)


@pytest.mark.slow
@pytest.mark.spec(
    "NM-C.3: root class = node cap; shares by quantum; exempt destinations have a class of their "
    "own"
)
def test_node_cap_shares_and_exempt_destinations(bench: Bench) -> None:
    bench.network.node_cap(60_000_000, [OUTSIDE_EXEMPT])
    bench.outside()
    bench.sliver("alice", 1, {"nm_net_share": 1})
    bench.sliver("bob", 2, {"nm_net_share": 3})
    for _ in range(3):  # other work on this machine can make both slower
        clients = [bench.start(name, CLIENT, OUTSIDE, "r", 5) for name in ("alice", "bob")]
        alice, bob = (float(client.communicate(timeout=60)[0]) * 8 / PAYLOAD for client in clients)
        assert alice + bob < 63e6
        if alice + bob > 57e6:
            break
    exempt = bench.rate("alice", OUTSIDE_EXEMPT, seconds=1)
    print(f"node cap 60: {alice / 1e6:.1f} + {bob / 1e6:.1f}; exempt {exempt / 1e6:.0f} Mbit/s")
    assert alice + bob == pytest.approx(60e6, rel=0.05)
    assert bob / alice == pytest.approx(3, rel=0.25)
    assert exempt > 100e6
    counters = bench.network.counters()
    assert counters["bob"][1] == 0
    assert counters["alice"][1] > 10_000_000
    bench.network.node_cap(20_000_000, [])
    bench.check_rate("alice", OUTSIDE_EXEMPT, 20e6, within=0.06)


@pytest.mark.spec(
    "NM-C.4: nat: no sliver-to-sliver, no sliver-to-host except port 812 and DNS, source address "
    "check"
)
def test_nat_separates_slivers_from_each_other_and_the_host(bench: Bench) -> None:
    bench.outside()
    alice, bob = bench.sliver("alice", 1), bench.sliver("bob", 2)
    bench.serve(bench.names["bob"], "0.0.0.0")
    bench.serve(None, HOST_SIDE)
    assert bench.run("alice", TRY, OUTSIDE, 5001) == "open"
    assert bench.run("alice", TRY, bob.address, 5001) == "closed"
    assert bench.run("alice", TRY, bob.gateway, 5001) == "closed"
    assert bench.run("alice", TRY, HOST_SIDE, 5001) == "closed"
    assert bench.run("alice", TRY, "169.254.169.254", 80) == "closed"
    # Nobody listens there, but the packets come through.
    assert bench.run("alice", TRY, alice.gateway, 812) == "refused"
    # Another one's address gets nothing, from nobody.
    batch("ip", [f"addr add {bob.address}/32 dev eth0"], inside=bench.names["alice"])
    assert (
        bench.start(
            "alice", CLIENT.replace("timeout=10", "timeout=1"), OUTSIDE, "r", 1, bob.address
        ).communicate(timeout=30)[0]
        == ""
    )
    # What the sliver sets up inside does not touch its limits: they are on the host's end.
    assert "htb" not in run("tc", ["qdisc", "show"], inside=bench.names["alice"])


@pytest.mark.spec("NM-C.4: bridge")
def test_bridged_sliver_is_reachable_in_its_network(bench: Bench) -> None:
    name = f"b{uuid.uuid4().hex[:8]}"
    with pytest.raises(NetworkError, match="no bridge of that name"):
        bench.sliver("alice", 1, mode=f"bridge:{name}")
    neighbour = bench.bridge(name)
    try:
        info = bench.sliver("alice", 1, {"nm_net_max_rate": 30_000_000}, mode=f"bridge:{name}")
        assert info.address == ""
        batch("ip", ["addr add 10.223.0.2/24 dev eth0"], inside=bench.names["alice"])
        bench.serve(neighbour, "0.0.0.0")
        bench.check_rate("alice", "10.223.0.9", 30e6, within=0.06)
    finally:
        batch("ip", [f"link del {name}"], force=True)


#: Sends UDP datagrams as raw frames: forged hardware addresses and sources, as root of a sliver
#: can.
FORGE = """
import ipaddress, socket, struct, sys
destination, mac_of, to_mac, *sources = sys.argv[1:]
def checksum(data):
    total = sum(struct.unpack('!%dH' % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
frames.bind(('eth0', 0))
own = frames.getsockname()[4]
for source in sources:
    text = source.encode()
    def header(check):
        ends = [ipaddress.ip_address(end).packed for end in (source, destination)]
        return struct.pack('!BBHHHBBH4s4s', 0x45, 0, 28 + len(text), 1, 0, 64, 17, check, *ends)
    packet = header(checksum(header(0))) + struct.pack('!HHHH', 5002, 5002, 8 + len(text), 0) + text
    mac = own if mac_of == 'own' else bytes.fromhex(mac_of.replace(':', ''))
    frames.send(bytes.fromhex(to_mac.replace(':', '')) + mac + b'\\x08\\x00' + packet)
"""
#: Prints what datagrams say, up to the one that says that it is the last.
HEAR = """
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(('0.0.0.0', 5002))
print('ready', flush=True)
heard = []
while not heard or heard[-1] != 'last': heard.append(receiver.recv(100).decode())
print(','.join(heard))
"""
LAST = (
    "import socket, sys\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'last', "
    "(sys.argv[1], 5002))"
)


def mac_in(pid: int, device: str = "eth0") -> str:
    return run("ip", ["-o", "link", "show", device], inside=pid).split("link/ether ")[1].split()[0]


@pytest.mark.spec("NM-C.4: nat: source address check, against raw frames too; no IPv6 around it")
def test_forged_source_addresses_are_dropped(bench: Bench) -> None:
    bench.outside()
    alice, bob = bench.sliver("alice", 1), bench.sliver("bob", 2)
    assert alice.veth not in pathlib.Path("/proc/net/if_inet6").read_text()
    bench.names["outside"] = next(
        p.pid for p in bench.processes if p.pid not in bench.names.values()
    )
    hearer = bench.start("outside", HEAR)
    assert hearer.stdout is not None
    assert hearer.stdout.readline() == "ready\n"
    veth = (pathlib.Path("/sys/class/net") / alice.veth / "address").read_text().strip()
    others = [
        bob.address,
        alice.gateway,
        HOST_SIDE,
        OUTSIDE,
        "127.0.0.1",
        "8.8.8.8",
        "169.254.169.254",
    ]
    bench.run("alice", FORGE, OUTSIDE, "own", veth, *others)
    # The hardware address is only between the two ends of the pair; with its own source the frame
    # comes through.
    bench.run("alice", FORGE, OUTSIDE, mac_in(bench.names["bob"]), veth, bob.address, alice.address)
    bench.run("alice", LAST, OUTSIDE)
    assert hearer.communicate(timeout=20)[0].strip() == f"{alice.address},last"
    del bench.names["outside"]


@pytest.mark.spec(
    "NM-C.4: bridge: no sliver sends with the hardware address of another or of the gateway"
)
def test_forged_hardware_addresses_on_a_bridge(bench: Bench) -> None:
    name = f"b{uuid.uuid4().hex[:8]}"
    bench.network = Network(with_network(bench.config, isolated=False))
    neighbour = bench.bridge(name)
    try:
        for number, sliver in enumerate(("alice", "bob"), 2):
            bench.sliver(sliver, number, mode=f"bridge:{name}")
            batch("ip", [f"addr add 10.223.0.{number}/24 dev eth0"], inside=bench.names[sliver])
        gateway, bob = mac_in(neighbour), mac_in(bench.names["bob"])
        with subprocess.Popen(
            [*bench.enter(neighbour), sys.executable, "-c", HEAR], stdout=subprocess.PIPE, text=True
        ) as hearer:
            assert hearer.stdout is not None
            assert hearer.stdout.readline() == "ready\n"
            for forged in (bob, gateway, "02:00:00:00:00:77"):
                bench.run("alice", FORGE, "10.223.0.9", forged, gateway, "10.223.0.2")
            bench.run("alice", FORGE, "10.223.0.9", "own", gateway, "10.223.0.2")
            bench.run("alice", LAST, "10.223.0.9")
            # Bob is still where he is, whatever alice has sent in his name; the slivers reach each
            # other, as they may here.
            bench.serve(bench.names["bob"], "0.0.0.0")
            assert bench.run("alice", TRY, "10.223.0.3", 5001) == "open"
            assert hearer.communicate(timeout=20)[0].strip() == "10.223.0.2,last"
        # Nor with an address that it gives its device.
        batch(
            "ip",
            ["link set eth0 down", "link set eth0 address 02:00:00:00:00:77", "link set eth0 up"],
            inside=bench.names["alice"],
        )
        assert bench.run("alice", TRY, "10.223.0.3", 5001) == "closed"
    finally:
        batch("ip", [f"link del {name}"], force=True)


def test_none_needs_nothing(bench: Bench) -> None:
    assert bench.sliver("alice", 1, mode="none").veth == ""
    assert bench.network.usage("alice") == {}
    bench.network.apply("alice", {"nm_net_max_rate": 1000})
    bench.network.destroy("alice")
    assert not pathlib.Path("/sys/class/net", bench.network.shaper.device).exists()


@pytest.mark.parametrize("mode", ["", "nat2", "bridge:", "bridge:../x", "bridge:a b"])
def test_unknown_modes_are_refused(bench: Bench, mode: str) -> None:
    with pytest.raises(NetworkError, match="network"):
        bench.sliver("alice", 1, mode=mode)


def test_sliver_gets_no_address_that_this_host_uses(bench: Bench) -> None:
    bench.outside()
    owner = bench.namespace()
    batch("ip", [f"link add {bench.link}b type bridge", f"link set {bench.link}b up"])
    try:
        batch("ip", [f"addr add 10.222.0.129/25 dev {bench.link}b"])
        batch("ip", [f"route add 10.224.9.0/24 via 10.222.0.141 dev {bench.link}b"])
        # The networks of indexes 32 and 35.
        for index, used in (
            (32, f"10.222.0.129 of device {bench.link}b"),
            (35, f"10.222.0.141, the gateway to 10.224.9.0/24 of device {bench.link}b"),
        ):
            with pytest.raises(NetworkError) as caught:
                bench.network.create("alice", index, owner.pid, "nat", {})
            assert str(caught.value) == (
                f"network.subnet {SUBNET}: {veth.addresses(SUBNET, index)[0]}/30 of this sliver "
                f"contains {used}; configure another subnet"
            )
            assert bench.network.found() == []
        (problem,) = (p for p in bench.network.problems() if "overlaps" in p.remedy)
        assert f"{SUBNET} overlaps 10.222.0.128/25 of device {bench.link}b" in problem.remedy
        bench.sliver("bob", 34)
        assert bench.run("bob", TRY, OUTSIDE, 5001) == "open"
    finally:
        batch("ip", [f"link del {bench.link}b"])
    assert not [p for p in bench.network.problems() if "overlaps" in p.remedy]


def test_two_daemons_give_no_address_twice(bench: Bench, tmp_path: pathlib.Path) -> None:
    info = bench.sliver("alice", 5)
    other = Network(with_network(bench.config, str(tmp_path / "other")))
    other.prepare()
    try:
        with pytest.raises(NetworkError, match=f"{info.gateway} of device {info.veth}; configure"):
            other.create("alice", 5, bench.namespace().pid, "nat", {})
        assert other.found() == [] and bench.network.found() == ["alice"]
    finally:
        other.stop()


@pytest.mark.spec("NM-C.7: nothing lives only in memory; deletion is idempotent")
def test_another_daemon_finds_and_removes(bench: Bench) -> None:
    info = bench.sliver("alice", 7)
    bench.outside()
    bench.rate("alice", OUTSIDE, seconds=0.2)
    other = Network(bench.config)
    other.prepare()
    assert other.found() == ["alice"]
    assert other.usage("alice")["net_tx_bytes"] > 10_000
    assert other.counters()["alice"][0] > 10_000
    bench.sliver("bob", 8)
    other.destroy("alice")
    assert other.found() == ["bob"]
    other.stop()
    assert info.veth not in os.listdir("/sys/class/net")
    assert set(other.shaper.counters()) == {8}
    assert "nm7-" not in run("tc", ["filter", "show", "dev", other.shaper.device])
    other.destroy("alice")
    other.stop()


@pytest.mark.spec("NM-C.7: a crash at any point resumes")
def test_classes_without_a_sliver_are_removed(bench: Bench) -> None:
    info = bench.sliver("alice", 3)
    batch("ip", [f"link del {info.veth}"])
    other = Network(bench.config)
    other.prepare()
    assert other.shaper.counters() == {}


@pytest.mark.spec("NM-C.4: veth names are never reused; removal is off the critical path")
def test_the_same_place_is_used_again_immediately(bench: Bench) -> None:
    bench.outside()
    first = bench.sliver("alice", 5)
    begin = time.perf_counter()
    bench.network.destroy("alice")
    assert time.perf_counter() - begin < limit(0.05)
    second = bench.sliver("bob", 5, {"nm_net_max_rate": 20_000_000})
    assert second.veth != first.veth
    assert second.address == first.address
    wait_for(lambda: first.veth not in os.listdir("/sys/class/net"), 10, "first device gone")
    assert bench.network.found() == ["bob"]
    bench.check_rate("bob", OUTSIDE, 20e6, within=0.06)


@pytest.mark.spec(
    "issue 10, point 5: deletion that failed for a while is finished by the running daemon"
)
def test_removal_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next with this number would count what the last has sent as its own."""
    first, second = bench.sliver("alice", 5), bench.sliver("bob", 6)

    def removed() -> None:
        wait_for(lambda: not bench.network._removals, 10, "the attempt")

    with monkeypatch.context() as patch:

        def full(*_arguments: Any, **_options: Any) -> Any:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        patch.setattr(subprocess, "run", full)
        bench.network.destroy("alice")
        bench.network.destroy("bob")
        removed()
        bench.network.tidy()
        removed()
        assert bench.network.found() == []
        with pytest.raises(NetworkError, match="temporarily unavailable") as caught:
            bench.network.create("carol", 5, os.getpid(), "nat", {})
        assert caught.value.retry
        removed()
    assert set(bench.network.shaper.counters()) == {5, 6}
    bench.sliver("carol", 5)
    assert bench.network.found() == ["carol"]
    bench.network.tidy()
    removed()
    assert set(bench.network.shaper.counters()) == {5}
    assert {first.veth, second.veth}.isdisjoint(os.listdir("/sys/class/net"))


@pytest.mark.slow
@pytest.mark.spec("issue 4: native create <= 60 ms with veth: 35 ms are the network's")
def test_creation_with_network_takes_at_most_60_ms(bench: Bench) -> None:
    bench.sliver("first", 1)
    times = []
    # What else runs on the machine must not decide: the benchmark measures medians, here the
    # shortest of some counts.
    for index in range(2, 62):
        if len(times) >= 5 and min(times) <= 35:
            break
        process = bench.namespace()
        bench.names[f"s{index}"] = process.pid
        begin = time.perf_counter()
        bench.network.create(f"s{index}", index, process.pid, "nat", {})
        times.append((time.perf_counter() - begin) * 1000)
    print(f"network nat: {[round(each, 1) for each in times]} ms")
    assert min(times) <= limit(35)


def test_a_failure_leaves_nothing(bench: Bench) -> None:
    process = bench.namespace()
    process.kill()
    process.wait(10)
    with pytest.raises(NetworkError):
        bench.network.create("alice", 1, process.pid, "nat", {})
    assert bench.network.found() == []
    assert bench.network.shaper.counters() == {}
