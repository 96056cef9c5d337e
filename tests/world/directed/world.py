"""What a directed test finds in its simulation."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

from nodepool.lab.simulation.kernel import Kernel
from nodepool.lab.simulation.zookeeper import ADDRESS, ZooKeeper
from tests.conftest import Chroot
from tests.support.launcher import LauncherBench
from tests.world.faulty import FaultyNetwork


@dataclass
class World:
    kernel: Kernel
    network: FaultyNetwork
    zookeeper: ZooKeeper


#: Of the test that runs.
current: World


class WorldChroot(Chroot):
    """The whole tree of the simulated ZooKeeper, without TLS."""

    def __init__(self, tmp: pathlib.Path) -> None:
        super().__init__(f"{ADDRESS[0]}:{ADDRESS[1]}", "", "", "", "", tmp)

    def connect(self, timeout: float = 10.0, hosts: str | None = None) -> Any:
        from nodepool.zk import ZooKeeperClient

        client = ZooKeeperClient(hosts or self.hosts, timeout=timeout, insecure=True)
        client.connect(timeout=20)
        self.clients.append(client)
        return client

    def options(self, hosts: str) -> dict[str, Any]:
        host, port = hosts.rsplit(":", 1)
        return {
            "zookeeper-servers": [{"host": host, "port": int(port)}],
            "zookeeper-insecure": True,
        }


class WorldBench(LauncherBench):
    """A bench whose launchers have the intervals of the product."""

    def make(
        self,
        config: str | dict[str, Any],
        secure: str | None = None,
        name: str = "nodepool.yaml",
        cleanup_interval: float | None = None,
        delete_interval: float | None = None,
    ) -> Any:
        return super().make(config, secure, name, cleanup_interval, delete_interval)
