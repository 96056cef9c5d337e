"""Networks of this host that have addresses of slivers, too.

The route to a sliver is more specific than those of other networks: packets for a machine, or
for the sliver of another daemon, with the same address would go to the sliver.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator

from nodepool.nodemanager.network.tools import run

#: Lines of ``ip -o``: an address with its network or peer, and a route by a gateway.
_ADDRESS = re.compile(r"^\d+: (\S+) +inet (\S+)(?: peer (\S+))?", re.MULTILINE)
_GATEWAY = re.compile(r"^(?:unicast )?(\S+) via (\S+) dev (\S+)", re.MULTILINE)


def overlapping(subnet: str, ours: Collection[str]) -> str | None:
    """Return the network of another device that overlaps `subnet`; None: there is none.

    :param ours: devices that may have addresses of it.
    :raises NetworkError: the addresses cannot be read.
    """
    wanted = ipaddress.ip_network(subnet, strict=False)
    for device, *texts in _ADDRESS.findall(run("ip", ["-4", "-o", "address", "show"])):
        for text in filter(None, texts):
            network = ipaddress.ip_network(text, strict=False)
            if device not in ours and network.overlaps(wanted):
                return f"{network} of device {device}"
    return None


def in_use(subnet: str, ours: Collection[str]) -> str | None:
    """Return an address in `subnet` that this host has, or needs as a gateway; None: no such.

    :param ours: devices that may have addresses of it.
    :raises NetworkError: the addresses cannot be read.
    """
    wanted = ipaddress.ip_network(subnet, strict=False)
    lines = run("ip", ["-4", "-o", "-batch", "-"], "address show\nroute show\n")
    return next(
        (
            found
            for device, address, found in _uses(lines)
            if device not in ours and ipaddress.ip_address(address) in wanted
        ),
        None,
    )


def _uses(lines: str) -> Iterator[tuple[str, str, str]]:
    """Yield device, address and description."""
    for device, *texts in _ADDRESS.findall(lines):
        for text in filter(None, texts):
            address = text.partition("/")[0]
            yield device, address, f"{address} of device {device}"
    for target, address, device in _GATEWAY.findall(lines):
        yield device, address, f"{address}, the gateway to {target} of device {device}"
