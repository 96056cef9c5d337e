"""Decline a request for all of our pools, because none can serve it (LAU-2.6)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kazoo.exceptions import KazooException

from nodepool.base.offered_labels import joined, why_not_offered
from nodepool.base.problems import one_line
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Declined, because
from nodepool.texts import printable
from nodepool.zk.records import FAILED, REQUESTED
from nodepool.zk.writer import TransactionFailed

log = logging.getLogger("nodepool.Assignment")


def decline_for_all(
    state: LauncherState,
    request_id: str,
    launcher_ids: tuple[str, ...],
    release: Callable[..., None],
) -> None:
    """Write that our pools decline the request; it fails if no registered pool is left.

    :param release: called with the result; with ``retry_after`` if the request has to be considered
        again.
    """
    zk = state.zk
    seen = zk.request_tree.get(request_id)
    if seen is None or seen.state != REQUESTED:
        release(request_id)
        return
    request = seen.copy()
    registered, workers = {pool.id: pool for pool in zk.getRegisteredPools()}, state.workers
    for launcher_id in launcher_ids:
        if launcher_id not in request.declined_by:
            request.declined_by.append(launcher_id)
            worker, pool = workers.get(launcher_id), registered.get(launcher_id)
            if worker is not None and pool is not None:
                missing = because(
                    Declined.NOT_OFFERED, labels=joined(set(request.node_types) - pool.labels)
                )
                state.declines.note(request, launcher_id, worker.label, [missing])
    request.state = (
        FAILED if registered.keys() | workers.keys() <= set(request.declined_by) else REQUESTED
    )

    def written(error: BaseException | None) -> None:
        if error is not None:
            if not isinstance(error, (TransactionFailed, KazooException)):
                log.warning("Cannot decline %s: %r", request_id, error)
            release(request_id, retry_after=0.1)
            return
        if request.state == FAILED:
            reason = why_not_offered(
                request.node_types, zk.getRegisteredPools()
            ) or state.declines.known(request)
            # Labels are chosen by clients.
            log.info("Failed request %s: %s", request_id, printable(one_line(reason)))
        release(request_id)

    zk.change_unlocked(seen, request, written)
