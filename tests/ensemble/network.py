"""One network namespace per server behind a bridge, and partitions.

The whole run has separate network and mount namespaces (``unshare``), so names and addresses
are always the same, and everything disappears with its processes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

BRIDGE = "br0"
CLIENTS = "10.0.0.254"


def run(*command: str, text: str | None = None) -> None:
    """Run a command; :raises CalledProcessError: it failed."""
    subprocess.run(command, check=True, input=text, text=True, timeout=30)


def address(server: int) -> str:
    """Return the address of the server with this number, which begins with 1."""
    return f"10.0.0.{server}"


def namespace(server: int) -> str:
    return f"zk{server}"


def inside(server: int, *command: str) -> list[str]:
    """Return the command that runs a program in the namespace of a server."""
    return ["ip", "netns", "exec", namespace(server), *command]


def build(servers: Iterable[int]) -> None:
    """Create the bridge and the namespaces."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{CLIENTS}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for server in servers:
        name = namespace(server)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", name, "master", BRIDGE, "up")
        run("ip", "-n", name, "address", "add", f"{address(server)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", "eth0", "up")


def cut(server: int, others: Iterable[str], directions: Iterable[str]) -> None:
    """Drop all packets between a server and other addresses.

    :param directions: ``input`` (the server does not hear them), ``output`` (they do not hear it).
    """
    sides = {"input": "saddr", "output": "daddr"}
    chains = "\n".join(
        f"chain {way} {{ type filter hook {way} priority 0; "
        f"ip {sides[way]} {{ {', '.join(others)} }} drop; }}"
        for way in directions
    )
    run(*inside(server, "nft", "-f", "-"), text=f"table inet cut {{\n{chains}\n}}\n")


def heal(server: int) -> None:
    """End the partition of a server."""
    run(*inside(server, "nft", "delete", "table", "inet", "cut"))
