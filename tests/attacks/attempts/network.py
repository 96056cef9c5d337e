"""What the sliver's network shows of the host and of others. Runs inside; standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from tests.attacks.library import Escape, all_tried, attempt, call, others


@attempt("21 abstract Unix sockets of the host", {"refused"})
def abstract_sockets() -> str:
    def connect(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect("\0" + name)

    return all_tried(
        [
            (name, lambda name=name: connect(name))
            for name in (
                "/tmp/.X11-unix/X0",
                "/org/kernel/udev/udevd",
                "ISCSIADM_ABSTRACT_NAMESPACE",
                "nodepool-attack",
            )
        ],
        ("ECONNREFUSED", "ENOENT"),
    )


@attempt("22 ports of the host, its metadata service, its neighbours", {"none"})
def ports_of_the_host() -> str:
    for address, port in [
        ("127.0.0.1", port) for port in (22, 111, 2181, 2281, 8005, 8120, 22000)
    ] + [
        ("169.254.169.254", 80),
        ("168.63.129.16", 80),
        ("100.100.100.200", 80),
        ("192.0.2.1", 80),
    ]:
        with socket.socket() as end:
            end.settimeout(1)
            if end.connect_ex((address, port)) == 0:
                raise Escape(f"{address} port {port} answers")
    return "none"


@attempt(
    "interfaces, addresses, neighbours, connections and sockets of the host by /proc, /sys and "
    "netlink",
    {"none"},
)
def sights_of_the_host() -> str:
    names = {name for _, name in socket.if_nameindex()}
    if names - {
        "lo",
        "eth0",
        "sit0",
        "ip6tnl0",
        "tunl0",
        "gre0",
        "gretap0",
        "erspan0",
        "ip_vti0",
        "ip6_vti0",
        "ip6gre0",
        "dummy0",
        "bond0",
        "teql0",
        "ifb0",
        "ifb1",
    }:
        raise Escape(f"interfaces {names}")
    if set(os.listdir("/sys/class/net")) - names - {"bonding_masters"}:
        raise Escape(f"interfaces in /sys: {os.listdir('/sys/class/net')}")
    with open("/proc/net/tcp") as file:
        # Closed connections to the sliver's own port of the API stay for a minute, at the end that
        # was closed first.
        ports = [
            (line, {end.split(":")[1] for end in line.split()[1:3]})
            for line in file.read().splitlines()[1:]
        ]
    lines = [line for line, ends in ports if f"{812:04X}" not in ends]
    if lines:
        raise Escape(f"connections: {lines[:3]}")
    with open("/proc/net/unix") as file:
        paths = [line.split()[7] for line in file.read().splitlines()[1:] if len(line.split()) > 7]
    if [path for path in paths if "zookeeper" in path or "dbus" in path or "containerd" in path]:
        raise Escape(f"Unix sockets: {paths}")
    return "none"


@attempt("listening on ports of the host", {"none"})
def listen_for_the_host() -> str:
    # In the sliver's own network all of them are free; whether the host sees one, the test looks
    # from outside.
    with contextlib.ExitStack() as held:
        for port in (80, 443, 2181):
            end = held.enter_context(socket.socket())
            end.bind(("0.0.0.0", port))
            end.listen()
    return "none"


@attempt("a Unix socket takes descriptors along through the API's socket", {"none"})
def descriptors_to_the_daemon() -> str:
    if not os.path.exists("/run/nodepool/nodemanager.api"):
        return "none"
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect("/run/nodepool/nodemanager.api")
            with contextlib.suppress(OSError):
                socket.send_fds(end, [b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc"], [0] * 50)
                end.settimeout(5)
                answer, descriptors, _, _ = socket.recv_fds(end, 65536, 16)
                if descriptors:
                    raise Escape(
                        f"the daemon sent {len(descriptors)} descriptors with {answer[:40]!r}"
                    )
    return "none"


@attempt("forged credentials on a Unix socket", {"EPERM", "none"})
def forged_credentials() -> str:
    ours, _theirs = socket.socketpair()
    for credentials in ((1, 65536, 0), (1, 2_000_000, 0), (99999, 0, 0)):
        try:
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, struct.pack("3i", *credentials))])
        except OSError:
            continue
        raise Escape(f"credentials {credentials} were accepted")
    return "none"


@attempt("network namespaces of others, by their numbers and by files", {"refused"})
def network_namespaces() -> str:
    found = []
    for pid in others():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
                found.append(pid)
    if found:
        raise Escape(f"processes {found} are in another network")
    return all_tried(
        [
            (path, lambda path=path: os.open(path, os.O_RDONLY))
            for path in ("/run/netns/host", "/var/run/docker/netns/default", "/proc/4000000/ns/net")
        ],
        ("ENOENT",),
    )


@attempt(
    "BPF on a socket of our own (classic filters are allowed, extended programs not)", {"EPERM"}
)
def socket_programs() -> str:
    with socket.socket() as end:
        result = call(54, end.fileno(), 1, 50, struct.pack("i", 3), 4)  # SO_ATTACH_BPF
    return "EPERM" if result < 0 else "done"
