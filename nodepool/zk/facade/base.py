"""Shared parts of the ZooKeeper facade."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kazoo.exceptions import NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import Client
from nodepool.zk.writer import Writer

if TYPE_CHECKING:
    from nodepool.zk.components import ComponentTree
    from nodepool.zk.mirror.images import ImageTree
    from nodepool.zk.mirror.nodes import NodeTree
    from nodepool.zk.mirror.progress import ProgressTree
    from nodepool.zk.mirror.requests import RequestTree
    from nodepool.zk.mirror.reservations import Reservations
    from nodepool.zk.reports import ReportTree

T = TypeVar("T")

#: Seconds for one answer of the server.
READ_TIMEOUT = 30.0
#: Concurrent reads in bulk reading.
PIPELINE = 500


class FacadeBase:
    """Connection, cache and bulk reading."""

    log = logging.getLogger("nodepool.zk.ZooKeeper")
    client: ZooKeeperClient
    enable_cache: bool
    # Mirrors of the trees below; None for trees that are not mirrored: with `enable_cache` off, or in builders.
    node_tree: NodeTree
    request_tree: RequestTree
    image_tree: ImageTree
    component_tree: ComponentTree
    progress_tree: ProgressTree
    report_tree: ReportTree
    _writer: Writer | None
    reservations: Reservations

    @property
    def kazoo_client(self) -> Client:
        """Return kazoo's client object.

        :raises RuntimeError: not connected yet.
        """
        client = self.client.client
        if client is None:
            raise RuntimeError("not connected to ZooKeeper")
        return client

    @property
    def writer(self) -> Writer:
        """Return the writer of asynchronous transactions on the present client."""
        client = self.kazoo_client
        if self._writer is None or self._writer._client is not client:
            self._writer = Writer(client)
        return self._writer

    def _children(self, path: str) -> list[str]:
        try:
            return sorted(self.kazoo_client.get_children(path))
        except NoNodeError:
            return []

    def _get(self, path: str) -> tuple[bytes, ZnodeStat] | None:
        try:
            data, stat = self.kazoo_client.get(path)
        except NoNodeError:
            return None
        return data, stat

    def _get_many(self, wanted: Iterable[str]) -> Iterable[tuple[str, bytes, ZnodeStat]]:
        """Read many znodes, pipelined; deleted ones are omitted."""
        paths = list(wanted)
        for start in range(0, len(paths), PIPELINE):
            portion = paths[start : start + PIPELINE]
            for path, answer in [(path, self.kazoo_client.get_async(path)) for path in portion]:
                try:
                    data, stat = answer.get(timeout=READ_TIMEOUT)
                except NoNodeError:
                    continue
                yield path, data, stat

    def _children_many(self, wanted: Iterable[str]) -> Iterable[tuple[str, list[str], ZnodeStat]]:
        paths = list(wanted)
        for start in range(0, len(paths), PIPELINE):
            portion = paths[start : start + PIPELINE]
            for path, answer in [(path, self.kazoo_client.get_children_async(path, include_data=True)) for path in portion]:
                try:
                    names, stat = answer.get(timeout=READ_TIMEOUT)
                except NoNodeError:
                    continue
                yield path, sorted(names), stat

    def _parse(self, path: str, make: Callable[[], T | None]) -> T | None:
        """Return a record; None (and one log line) if the data cannot be used."""
        try:
            return make()
        except Exception as error:
            self.log.error("Ignoring %s: %s", path, error)
            return None


def newest_first(items: Iterable[Any], count: float = math.inf) -> list[Any]:
    ordered = sorted(items, key=lambda item: item.state_time or 0, reverse=True)
    return ordered if count == math.inf else ordered[: int(count)]
