"""Roles of a cloud's networks, and a server's addresses (OST-2.3).

The choice is that of the SDK's ``add_server_interfaces``, with two differences: it makes no calls,
and of several public addresses it uses the floating one, without a test of port 22.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openstack.connection import Connection

FLOATING = "floating"
FIXED = "fixed"


@dataclass(frozen=True)
class Rules:
    """The network settings in clouds.yaml; each name may be an id."""

    external: tuple[str, ...] = ()
    internal: tuple[str, ...] = ()
    default: str | None = None
    nat_source: str | None = None
    nat_destination: str | None = None
    use_external: bool = True
    use_internal: bool = True
    private: bool = False
    ipv6: bool = False

    @classmethod
    def of(cls, client: Connection) -> Rules:
        """Return the rules from the SDK's connection."""
        config = client.config
        return cls(
            tuple(config.get_external_ipv4_networks()),
            tuple(config.get_internal_ipv4_networks()),
            config.get_default_network(),
            config.get_nat_source(),
            config.get_nat_destination(),
            bool(client.use_external_network()),
            bool(client.use_internal_network()),
            bool(client.private),
            bool(client._local_ipv6) and not client.force_ipv4,
        )


@dataclass(frozen=True)
class Networks:
    """The networks of a cloud, classified."""

    rules: Rules
    all: list[dict[str, Any]] = field(default_factory=list)

    def find(self, name: str | None) -> dict[str, Any] | None:
        """Return the network by id, or by name."""
        if not name:
            return None
        return next((net for net in self.all if net["id"] == name), None) or next(
            (net for net in self.all if net.get("name") == name), None
        )

    @property
    def external(self) -> list[dict[str, Any]]:
        return [
            net
            for net in self.all
            if _named(net, self.rules.external)
            or (
                (net.get("router:external") or net.get("provider:physical_network"))
                and not _named(net, self.rules.internal)
            )
        ]

    @property
    def internal(self) -> list[dict[str, Any]]:
        return [
            net
            for net in self.all
            if _named(net, self.rules.internal)
            or not (
                net.get("router:external")
                or net.get("provider:physical_network")
                or _named(net, self.rules.external)
            )
        ]

    @property
    def floating(self) -> dict[str, Any] | None:
        """Return the network of floating IPs."""
        if self.rules.nat_source:
            return self.find(self.rules.nat_source)
        return next((net for net in self.all if net.get("router:external")), None)

    @property
    def default(self) -> dict[str, Any] | None:
        return self.find(self.rules.default)


def _named(network: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return network.get("name") in names or network["id"] in names


def addresses(
    server: Mapping[str, Any], network: str | None = None, kind: str | None = None, version: int = 4
) -> list[str]:
    """Return addresses of the server on a network (by name) and of a type, floating first."""
    found: list[tuple[bool, str]] = []
    for name, interfaces in (server.get("addresses") or {}).items():
        if network is not None and name != network:
            continue
        for interface in interfaces:
            tag = interface.get("OS-EXT-IPS:type")
            if interface.get("version") == version and (kind is None or tag == kind):
                found.append((tag != FLOATING, interface["addr"]))
    return [address for _, address in sorted(found, key=lambda item: item[0])]


def has_floating(server: Mapping[str, Any]) -> bool:
    return bool(addresses(server, kind=FLOATING))


def fill_in(server: dict[str, Any], networks: Networks) -> dict[str, Any]:
    """Set ``public_v4``, ``public_v6``, ``private_v4``, ``interface_ip`` (empty: none)."""
    rules = networks.rules
    private = _private(server, networks) if rules.use_internal else None
    public = _public(server, networks) if rules.use_external else None
    public6 = server.get("accessIPv6") or next(iter(addresses(server, version=6)), None)
    server["private_v4"], server["public_v4"], server["public_v6"] = (
        private or "",
        public or "",
        public6 or "",
    )
    server["interface_ip"] = _interface(server, networks) or ""
    if not server.get("accessIPv4"):
        server["accessIPv4"] = private if rules.private and private else public or ""
    server["accessIPv6"] = server["public_v6"]
    return server


def _private(server: Mapping[str, Any], networks: Networks) -> str | None:
    # Of several networks: the one of the port with the floating IP.
    mac = next(
        (
            interface.get("OS-EXT-IPS-MAC:mac_addr")
            for interfaces in (server.get("addresses") or {}).values()
            for interface in interfaces
            if interface.get("OS-EXT-IPS:type") == FLOATING
        ),
        None,
    )
    if mac is not None:
        server = {
            **server,
            "addresses": {
                name: [
                    interface
                    for interface in interfaces
                    if interface.get("OS-EXT-IPS-MAC:mac_addr") == mac
                ]
                for name, interfaces in server["addresses"].items()
            },
        }
    names = [net.get("name") for net in networks.internal]
    for kind in (FIXED, None):
        for name in [*names, "private"]:
            if found := addresses(server, name, kind):
                return found[-1]
    return None


def _public(server: Mapping[str, Any], networks: Networks) -> str | None:
    if server.get("accessIPv4"):
        return str(server["accessIPv4"])
    for net in networks.external:
        if found := addresses(server, net.get("name")):
            return found[0]
    found = addresses(server, kind=FLOATING) or addresses(server, "public")
    if found:
        return found[0]
    return next((address for address in addresses(server) if _is_global(address)), None)


def _is_global(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_private
    except ValueError:
        return False


def _interface(server: Mapping[str, Any], networks: Networks) -> str | None:
    rules, default = networks.rules, networks.default
    if default is not None:
        for version in (6, 4) if rules.ipv6 else (4,):
            if found := addresses(server, default.get("name"), version=version):
                return found[0]
    if rules.private and server["private_v4"]:
        return str(server["private_v4"])
    public = server["public_v6"] if rules.ipv6 and server["public_v6"] else server["public_v4"]
    # A server without a public address is reached by its private one, or not at all.
    return str(public or server["private_v4"] or server["public_v6"])
