"""Drains: which one applies to a pool or a node, and when it ends."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kazoo.exceptions import BadVersionError

from nodepool.base import hostnames
from nodepool.base.clock import Clock, ServerTime
from nodepool.config.model import Config, ConfigPool, Label, disk_image
from nodepool.driver.provider import Provider
from nodepool.exceptions import FOREIGN
from nodepool.reasons import Code, Reason, because
from nodepool.zk.drains import Drain, covering, describe, host_names, of_node, shown
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
        """Return why the pool gets no new nodes of these labels.

        Slots of backing nodes wait if no pool may launch their backing nodes.
        """
        if not self.all():
            return None
        found = self._of_place(pool, labels)
        for label in labels if found is None else ():
            backing = getattr(self._entry(pool, label), "backing_label", None)
            known = self._config().labels.get(backing) if isinstance(backing, str) else None
            drains = [self._of_place(each, [known.name]) for each in known.pools] if known else []
            found = found or (drains[0] if drains and all(drains) else None)
        return found

    def _of_place(self, pool: ConfigPool, labels: Collection[str]) -> Drain | None:
        provider = pool.provider.name if pool.provider is not None else None
        names = {
            f"launcher {hostnames.short()}",
            f"launcher {hostnames.fqdn()}",
            f"provider {provider}",
            f"pool {provider}-{pool.name}",
        }
        for label in labels:
            image = disk_image(self._entry(pool, label))
            names |= {f"label {label}"} | ({f"image {image.name}"} if image is not None else set())
        return covering(self.all(), names)

    @staticmethod
    def _entry(pool: ConfigPool, label: str) -> object:
        return pool.labels.get(label) if isinstance(pool.labels, dict) else None

    def blocked(
        self, pool: ConfigPool, labels: Iterable[str], manager: Provider | None
    ) -> tuple[list[str], Reason] | None:
        """Return the labels of which the pool gets no new nodes, and why.

        These are all labels if all hosts of the provider are drained.
        """
        if not self.all():
            return None
        found = {label: self.of_pool(pool, [label]) for label in labels}
        if not any(found.values()):
            found = dict.fromkeys(found, self._of_all_hosts(pool, manager))
        short = [label for label, drain in found.items() if drain is not None]
        drain = found[short[0]] if short else None
        if drain is None:
            return None
        return short, because(Code.DRAINED, what=drain.name, why=describe(drain))

    def _of_all_hosts(self, pool: ConfigPool, manager: Provider | None) -> Drain | None:
        """Return a drain if all hosts are drained.

        Backing nodes of slots are not hosts, and only some of them are described.
        """
        entries = [self._entry(pool, label) for label in pool.labels]
        slots = any(getattr(entry, "backing_label", None) for entry in entries)
        if slots or manager is None or not any(drain.kind == "host" for drain in self.all()):
            return None
        try:
            drains = [self._of_host(row) for row in manager.describeHosts()]
        except FOREIGN:  # raised by a driver; its report shows the error
            return None
        return drains[0] if drains and all(drains) else None

    def _of_host(self, row: dict[str, Any]) -> Drain | None:
        return covering(self.all(), host_names(str(row.get("name"))))

    def show_hosts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return descriptions of hosts in which drained ones cannot be used."""
        return [
            row
            if (drain := self._of_host(row)) is None
            else {**row, "usable": False, "problem": shown(drain)}
            for row in rows
        ]

    def of_node(self, node: Node) -> Drain | None:
        """Return the drain that applies to an idle node.

        Nodes of a drained launcher are not affected, because other launchers assign them.
        """
        zk = self._zk()
        return None if zk is None else of_node(self.all(), node, zk.getCachedNode)

    def idle(self, label: Label) -> int:
        """Return the number of free nodes of a label that are not assigned because of drains."""
        zk = self._zk()
        if zk is None or not self.all():
            return 0
        nodes = (
            zk.node_tree.get(node_id)
            for pool in label.pools
            if pool.provider is not None
            for node_id in zk.node_tree.iter_free(pool.provider.name, pool.name, label.name)
        )
        return sum(node is not None and self.of_node(node) is not None for node in nodes)

    # -- the end

    def left(self) -> float:
        """Return the seconds until the next drain ends; infinite if none does."""
        now = self._server_time.now()
        ends = [drain.until - now for drain in self.all() if drain.until is not None]
        return max(min(ends, default=math.inf), self._try_again - self._clock.monotonic(), 0.0)

    def end(self) -> None:
        """Delete the drains whose time has come; several launchers may try to."""
        zk, now = self._zk(), self._server_time.now()
        self._try_again = self._clock.monotonic() + TRY_AGAIN
        for drain in self.all() if zk is not None else ():
            if zk is None or drain.until is None or drain.until > now:
                continue
            version = zk.note_tree.version(drain)
            with contextlib.suppress(BadVersionError):  # an operator has prolonged it
                if version >= 0 and notes.remove(zk.kazoo_client, drain, version):
                    self.log.info("The drain of %s has ended at its time", drain.name)
