"""Where and how a node manager is pushed to a backing node (NM-C.8)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from nodepool.driver.nodemanager.config import NodeManagerProviderConfig
from nodepool.zk.zookeeper import Node

#: First user id of slivers, and the number of id ranges among backing nodes, which may be on one
#: machine.
ID_BASE, ID_RANGES = 2_000_000, 50


@dataclass(frozen=True)
class Target:
    """Target of a push.

    :param owner: the backing node's id.
    :param since: creation time of that (seconds since 1970): of two that claim the machine the
        younger one has it.
    :param place: identifies the machine, also for its next user, who finds the remains of the last
        one by it.
    """

    owner: str
    place: str
    address: str
    port: int
    username: str
    host_keys: tuple[str, ...]
    python: str
    key_file: str
    since: float = 0.0
    config: dict[str, Any] = field(default_factory=dict, compare=False)
    base: str | None = None
    idle: int = 86400
    #: Why it can never be used; empty if it can.
    unfit: str = ""

    def job(self, action: str) -> dict[str, Any]:
        return {
            "action": action,
            "owner": self.owner,
            "since": self.since,
            "place": self.place,
            "address": self.address,
            "config": self.config,
            "idle": self.idle,
        }


def target_of(node: Node, provider: NodeManagerProviderConfig) -> Target:
    """Return the target for a backing node of this provider."""
    options = provider.backing
    assert options is not None
    address, port = str(node.interface_ip or ""), int(node.connection_port or 22)
    text = "\n".join(
        map(str, (provider.name, node.provider, address, port, node.username, node.slot))
    )
    place = hashlib.sha256(text.encode()).hexdigest()[:12]
    config = dict(options.config)
    if "id-base" not in config:
        span = (options.max_slivers + 1) * 65536
        config["id-base"] = (
            ID_BASE + int(place, 16) % max(1, min(ID_RANGES, (2**32 - ID_BASE) // span)) * span
        )
    unfit = ""
    if node.connection_type not in (None, "", "ssh"):
        unfit = f"its connection-type is {node.connection_type}, and a node manager needs ssh"
    elif not address or not node.username:
        unfit = "its record has no address or no username"
    elif not node.host_keys:
        unfit = (
            "its record has no host keys, so that it is not known to be the right machine; its "
            "provider must "
            "find them (host-key-checking)"
        )
    python = str(node.python_path or "")
    return Target(
        owner=str(node.id),
        place=place,
        address=address,
        port=port,
        username=str(node.username),
        host_keys=tuple(node.host_keys or ()),
        python=python if python.startswith("/") else "python3",
        key_file=options.ssh_key,
        since=float(node.created_time or 0),
        config=config,
        base=options.directory,
        idle=provider.lease_time,
        unfit=unfit,
    )
