"""Connection strings of ZooKeeper."""

from __future__ import annotations

from nodepool.exceptions import ConfigurationError

TLS_REQUIRED = (
    "A TLS ZooKeeper connection is required; please supply the zookeeper-tls config values cert, "
    "key and ca (or set "
    "zookeeper-insecure: true to go without)"
)


def split_hosts(hosts: str) -> tuple[str, str]:
    """Return host list and chroot of a connection string; entries may repeat it (CFG-4.5).

    :raises ConfigurationError: entries have different chroots.
    """
    servers: list[str] = []
    chroots: set[str] = set()
    for entry in hosts.split(","):
        server, slash, chroot = entry.strip().partition("/")
        if server:
            servers.append(server)
            chroots.add((slash + chroot).rstrip("/"))
    chroots.discard("")
    if len(chroots) > 1:
        raise ConfigurationError(
            f"zookeeper-servers have different chroots {', '.join(sorted(chroots))}: specify one, "
            "on the last server"
        )
    return ",".join(servers), chroots.pop() if chroots else ""
