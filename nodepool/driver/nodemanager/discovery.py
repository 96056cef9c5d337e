"""Hosts that announce themselves in ZooKeeper (``/nodemanager/hosts``; NM-C.6, NM-C.8)."""

from __future__ import annotations

from typing import Any

from kazoo.protocol.states import ZnodeStat

from nodepool.driver.nodemanager.config import NodeManagerHost, NodeManagerProviderConfig
from nodepool.driver.nodemanager.hosts import Hosts
from nodepool.ssh import PLAIN
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import RecordError, parse_object

ROOT = "/nodemanager/hosts"


def parse(name: str, data: bytes | None, provider: NodeManagerProviderConfig) -> NodeManagerHost:
    """Return how to connect to an announced host.

    :raises RecordError: it cannot be reached; the text says why.
    """
    record = parse_object(data)
    if record is None:
        raise RecordError("the announcement is empty")
    url, address, group = (record.get(key) for key in ("api", "ssh_address", "group"))
    if not isinstance(url, str) or not url.startswith(("https://", "unix:/")):
        raise RecordError(f"api must be https://... or unix:/..., not {str(url)[:80]!r}")
    for value in (address, group):
        if value is not None and not isinstance(value, str):
            raise RecordError("ssh_address and group must be texts")
    if address and not PLAIN.match(address):
        raise RecordError(f"ssh_address must be a plain name or address, not {address[:80]!r}")
    options: dict[str, Any] = {
        "name": name,
        "url": url,
        "ssh-address": address or None,
        "group": group or None,
    }
    if url.startswith("https://"):
        if not provider.ca_cert:
            raise RecordError(
                f"{url} needs ca-cert, client-cert and client-key of provider {provider.name}"
            )
        options |= {
            "ca-cert": provider.ca_cert,
            "client-cert": provider.client_cert,
            "client-key": provider.client_key,
        }
    host = NodeManagerHost(options)
    host.expected_name = name
    return host


class HostTree(Tree[dict[str, Any]]):
    """Follows the ephemeral announcements of hosts; a host exists as long as its announcement."""

    def __init__(
        self, client: ZooKeeperClient, provider: NodeManagerProviderConfig, hosts: Hosts
    ) -> None:
        super().__init__(client, ROOT)
        self._provider = provider
        self._hosts = hosts
        self._names: set[str] = set()

    def known_paths(self) -> set[str]:
        return {f"{self.root}/{name}" for name in self._names}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        host = parse(parts[0], data, self._provider)
        self._names.add(parts[0])
        self._hosts.announced(host)

    def vanished(self, parts: list[str], path: str) -> None:
        if len(parts) == 1:
            self._names.discard(parts[0])
            self._hosts.vanished(parts[0])
