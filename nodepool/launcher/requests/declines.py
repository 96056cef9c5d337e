"""Publishes why our pools decline requests, see :mod:`nodepool.zk.declines`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kazoo.exceptions import NodeExistsError, NoNodeError

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.base.problems import one_line
from nodepool.reasons import Declined, Reason, render
from nodepool.zk import declines
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import NodeRequest
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper

#: Reasons that are published at a time: a server records the end of a session, with all it owns, in
#: one message.
MOST = 2000


class Declines:
    """Writes reasons and deletes those of deleted requests, without blocking or failing.

    ZooKeeper preserves the order of one session: a client that sees a decline finds its reason,
    which was sent before.
    """

    log = logging.getLogger("nodepool.Declines")

    def __init__(self, zk: Callable[[], ZooKeeper], statsd: metrics.Metrics) -> None:
        self._zk = zk
        self._statsd = statsd
        self._lock = threading.Lock()
        #: Request id -> launcher id -> ``pool: reason``.
        self._noted: dict[str, dict[str, str]] = {}
        self._published: set[str] = set()
        #: Label -> pool -> why it last declined to launch nodes for min-ready.
        self.min_ready: dict[str, dict[str, tuple[Reason, ...]]] = {}

    def note(
        self, request: NodeRequest, launcher_id: str, pool: str, reasons: list[Reason]
    ) -> None:
        """Publish the reasons; call it before the decline is written.

        Requests for ``min-ready`` are omitted: no user waits for them.
        """
        request_id = request.id or ""
        if request.requestor == MIN_READY:
            if telling := tuple(
                reason for reason in reasons if reason.code is not Declined.NOT_OFFERED
            ):
                for label in request.node_types:
                    self.min_ready.setdefault(label, {})[pool] = telling
            return
        for word in {reason.code.word for reason in reasons}:
            self._statsd.incr(metrics.REQUESTS_DECLINED(hostnames.short(), word))
        path = declines.path(request_id, launcher_id)
        with self._lock:
            self._noted.setdefault(request_id, {})[launcher_id] = one_line(
                f"{pool}: {render(reasons)}"
            )
            publish = len(self._published) < MOST
            if publish:
                self._published.add(path)
        try:
            txn = Txn(self._zk().kazoo_client)
            txn.create(path, declines.serialize(pool, reasons), ephemeral=True)
            if publish:
                self._zk().writer.submit(txn, self._written)
        except Exception as error:  # the decline itself matters
            self.log.debug("Cannot publish why request %s was declined: %r", request_id, error)
        if self._zk().request_tree.get(request_id) is None:
            self._forget(request_id)  # it was deleted in the meantime

    def known(self, request: NodeRequest) -> str:
        """Return the reasons of our pools in one line for the log."""
        with self._lock:
            noted = dict(self._noted.get(request.id or "", {}))
        return "; ".join(
            noted.get(one) or f"{declines.pool_of(one)}: declined" for one in request.declined_by
        )

    # -- the end of a request

    def request_changed(
        self, request_id: str, _old: NodeRequest | None, new: NodeRequest | None
    ) -> None:
        """Listen to the mirror; on the connection thread."""
        if new is None and request_id in self._noted:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            paths = {
                declines.path(request_id, one) for one in self._noted.pop(request_id, {})
            } & self._published
            self._published -= paths
        for path in paths:
            try:
                txn = Txn(self._zk().kazoo_client)
                txn.delete(path)
                self._zk().writer.submit(txn, self._written)
            except Exception as error:  # it ends with the session
                self.log.debug(
                    "Cannot delete the decline reasons of request %s now: %r", request_id, error
                )

    def _written(self, _results: object, error: BaseException | None) -> None:
        cause = error.cause if isinstance(error, TransactionFailed) else error
        if cause is not None and not isinstance(
            cause, (NodeExistsError, NoNodeError)
        ):  # it was written, or deleted
            self.log.debug("Cannot write a decline reason: %r", cause)
