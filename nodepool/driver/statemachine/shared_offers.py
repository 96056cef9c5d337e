"""The memory of sold-out offers that the launchers of a provider share (DRV-7.9).

Each launcher replaces the whole record with what it knows, unconditionally. A write that is lost,
also to another launcher, costs one more refused launch.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping

from kazoo.exceptions import NodeExistsError, NoNodeError

from nodepool.base.clock import Clock
from nodepool.zk.mirror import notes
from nodepool.zk.sold_out import SoldOutOffers
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper


class SharedOffers:
    """The record of a provider in ZooKeeper, read from the mirror and written without waiting."""

    log = logging.getLogger("nodepool.SharedOffers")

    def __init__(self, zk: ZooKeeper, provider: str, clock: Clock) -> None:
        self._zk = zk
        self._provider = provider
        self._clock = clock
        self._path = notes.path(SoldOutOffers(provider))
        #: `submit` may call back immediately.
        self._lock = threading.RLock()
        self._latest: tuple[SoldOutOffers, Callable[[], object]]

    def _stored(self) -> SoldOutOffers | None:
        return self._zk.note_tree.get(SoldOutOffers, self._provider)

    def left(self) -> Mapping[str, float]:
        """Return the seconds for which offers, by their descriptions, are sold out."""
        stored = self._stored()
        return stored.left(self._clock.time()) if stored is not None else {}

    def write(self, left: Mapping[str, float], written: Callable[[], object]) -> None:
        """Replace the record, or delete it without entries; ``written``: that has succeeded."""
        now = self._clock.time()
        until = {offer: now + seconds for offer, seconds in left.items()}
        with self._lock:
            self._latest = SoldOutOffers(self._provider, until), written
            self._send(self._stored() is None)

    def _send(self, create: bool, again: bool = True) -> None:
        """Send the latest record, also instead of an earlier one; with the lock."""
        (record, written), path = self._latest, self._path
        tree, data = self._zk.note_tree, json.dumps(record.values()).encode()
        txn = Txn(self._zk.kazoo_client)
        if not record.until:
            txn.delete(path)
        elif create:
            txn.create(path, data, tree=tree, record=record)
        else:
            txn.set(path, data, tree=tree, record=record)

        def answered(_results: object, error: BaseException | None) -> None:
            cause = error.cause if isinstance(error, TransactionFailed) else None
            if error is None or (not record.until and isinstance(cause, NoNodeError)):
                written()
            elif again and isinstance(cause, (NodeExistsError, NoNodeError)):
                # The mirror is late, or the record is damaged.
                with self._lock:
                    self._send(isinstance(cause, NoNodeError), again=False)
            else:
                self.log.warning(
                    "Sold-out offers of provider %s are not shared: %r", self._provider, error
                )

        try:
            self._zk.writer.submit(txn, answered)
        except RuntimeError as error:
            answered(None, error)
