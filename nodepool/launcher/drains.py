"""Drains: which one applies to a pool or a node, and when it ends."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection
from typing import Any

from kazoo.exceptions import BadVersionError

from nodepool.base import hostnames
from nodepool.base.clock import Clock, ServerTime
from nodepool.config.model import Config, ConfigPool, disk_image
from nodepool.driver.provider import Provider
from nodepool.reasons import Code, Reason, because
from nodepool.zk.drains import Drain, covering, describe, names_of
from nodepool.zk.mirror import notes
from nodepool.zk.records import Node
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds between two attempts to end a drain.
TRY_AGAIN = 5.0


class Drains:
    """The drains in force: those in the mirror.

    A drain ends when its record is deleted, so that all launchers agree, whatever their clocks
    show.

    :param zk: returns the facade; None before the first connection.
    :param config: returns the configuration in force.
    """

    log = logging.getLogger("nodepool.Drains")

    def __init__(
        self,
        zk: Callable[[], ZooKeeper | None],
        config: Callable[[], Config],
        clock: Clock,
        server_time: ServerTime,
    ) -> None:
        self._zk, self._config = zk, config
        self._clock, self._server_time = clock, server_time
        #: When to try again (monotonic seconds): ZooKeeper may refuse, and the mirror may lag.
        self._try_again = -math.inf

    def all(self) -> list[Drain]:
        zk = self._zk()
        return zk.note_tree.of(Drain) if zk is not None and zk.note_tree.notes else []

    def of_pool(self, pool: ConfigPool, labels: Collection[str] = ()) -> Drain | None:
        """Return why the pool gets no new nodes of these labels."""
        drains = self.all()
        if not drains or pool.provider is None:
            return None
        names = {
            f"launcher {hostnames.short()}",
            f"launcher {hostnames.fqdn()}",
            f"provider {pool.provider.name}",
            f"pool {pool.provider.name}-{pool.name}",
        }
        for label in labels:
            names |= {f"label {label}", f"image {self._image(pool, label)}"}
        return next((drain for drain in drains if drain.name in names), None)

    def reason(self, pool: ConfigPool, labels: Collection[str], manager: Provider) -> Reason | None:
        """Return why the pool accepts no requests; also if all its hosts are drained."""
        if not self.all():
            return None
        drain = self.of_pool(pool, labels)
        if drain is None:
            hosts = [self._of_host(row) for row in manager.describeHosts()]
            drain = hosts[0] if hosts and all(hosts) else None
        if drain is None:
            return None
        return because(Code.DRAINED, what=drain.name, why=describe(drain))

    def _of_host(self, row: dict[str, Any]) -> Drain | None:
        return covering(self.all(), {f"host {row['name']}"})

    def show_hosts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return descriptions of hosts in which drained ones cannot be used."""
        return [
            row
            if (drain := self._of_host(row)) is None
            else {**row, "usable": False, "problem": f"{drain.name} is drained{describe(drain)}"}
            for row in rows
        ]

    def of_node(self, node: Node) -> Drain | None:
        """Return the drain that applies to an idle node.

        Nodes of a drained launcher are not affected, because other launchers assign them.
        """
        drains, zk = self.all(), self._zk()
        if not drains or zk is None:
            return None
        provider = self._config().providers.get(node.provider or "")
        pool = provider.pools.get(node.pool or "") if provider is not None else None
        names = names_of(node)
        if pool is not None:
            images = {self._image(pool, label) for label in node.type}
            names |= {f"image {image}" for image in images} if len(images) == 1 else set()
        found = covering(drains, names)
        place = node.driver_data
        if found is None and isinstance(place, dict) and "backing_node" in place:
            backing = zk.getCachedNode(str(place["backing_node"]))
            found = None if backing is None else covering(drains, names_of(backing))
        return found

    @staticmethod
    def _image(pool: ConfigPool, label: str) -> str | None:
        image = disk_image(pool.labels.get(label)) if isinstance(pool.labels, dict) else None
        return image.name if image is not None else None

    # -- the end

    def left(self) -> float:
        """Return the seconds until the next drain ends; infinite if none does."""
        ends = [drain.until - self._now() for drain in self.all() if drain.until is not None]
        return max(min(ends, default=math.inf), self._try_again - self._clock.monotonic(), 0.0)

    def _now(self) -> float:
        return self._clock.time() - self._server_time.ahead()

    def end(self) -> None:
        """Delete the drains whose time has come; several launchers may try to."""
        zk, now = self._zk(), self._now()
        self._try_again = self._clock.monotonic() + TRY_AGAIN
        for drain in self.all() if zk is not None else ():
            if zk is not None and drain.until is not None and drain.until <= now:
                with contextlib.suppress(BadVersionError):  # an operator has prolonged it
                    if notes.remove(zk.kazoo_client, drain, zk.note_tree.version(drain)):
                        self.log.info("The drain of %s has ended at its time", drain.name)
