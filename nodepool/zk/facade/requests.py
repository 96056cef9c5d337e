"""Facade methods about node requests (PY-3)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from nodepool.zk import declines, paths
from nodepool.zk.components import ComponentTree, RegisteredPool
from nodepool.zk.facade.base import FacadeBase
from nodepool.zk.mirror.notes import N, NoteTree
from nodepool.zk.reading import remove
from nodepool.zk.records import NodeRequest, NodeRequestLockStats
from nodepool.zk.reports import ReportTree


class RequestMethods(FacadeBase):
    def getNodeRequests(self) -> list[str]:
        """Return the ids of all requests, sorted."""
        return self._children(paths.REQUESTS)

    def getNodeRequest(self, request: str, cached: bool = False) -> NodeRequest | None:
        if cached and self.request_tree is not None and self.request_tree.synced.is_set():
            return self.request_tree.get(request)
        return self._record(NodeRequest, paths.request(request), request)

    def getCachedRequest(self, request_id: str) -> NodeRequest | None:
        """Return the mirrored request in O(1); None without a mirror."""
        return self.request_tree.get(request_id) if self.request_tree is not None else None

    def nodeRequestIterator(
        self, cached: bool = True, cached_ids: bool = False
    ) -> Iterator[NodeRequest]:
        """Yield all requests; from a complete mirror, else read (pipelined)."""
        return self._records(NodeRequest, paths.REQUESTS, self.request_tree, cached, cached_ids)

    def readRequests(self) -> list[NodeRequest]:
        """Return all requests, sorted by id; write nothing."""
        return list(self.nodeRequestIterator())

    def readDeclines(self, requests: Iterable[NodeRequest]) -> dict[str, list[str]]:
        """Return request id -> published decline reasons; write nothing."""
        return declines.reasons(
            self.kazoo_client, [request for request in requests if request.declined_by]
        )

    def storeNodeRequest(self, request: NodeRequest, priority: str = "100") -> None:
        """Create the request (ephemeral; sets ``id``), or write it.

        :raises NoNodeError: a request that has an id no longer exists.
        """
        if request.id is None:
            if request.event_id is None:
                request.event_id = uuid.uuid4().hex
            path = self.kazoo_client.create(
                f"{paths.REQUESTS}/{priority}-",
                request.serialize(),
                makepath=True,
                ephemeral=True,
                sequence=True,
            )
            request.id = path.rsplit("/", 1)[1]
        else:
            request.stat = self.kazoo_client.set(paths.request(request.id), request.serialize())

    def deleteNodeRequest(self, request: NodeRequest) -> None:
        if request.id is not None:
            remove(self.kazoo_client, paths.request(request.id))

    def lockNodeRequest(
        self, request: NodeRequest, blocking: bool = True, timeout: float | None = None
    ) -> None:
        """Lock the request and read it again.

        :raises TimeoutException: not obtained within ``timeout`` seconds.
        :raises ZKLockException: held by another client (not blocking), or the request was deleted.
        """
        path, directory = paths.request(request.id or ""), paths.request_lock(request.id or "")
        self._lock(request, "request", path, directory, blocking, timeout)

    def unlockNodeRequest(self, request: NodeRequest) -> None:
        """Release the lock of the request.

        :raises ZKLockException: we do not hold the lock.
        """
        self._unlock(request, "request")

    # -- lock directories

    def _requestLockPath(self, request_id: str) -> str:
        return paths.request_lock(request_id)

    def getNodeRequestLockIDs(self) -> list[str]:
        return self._children(paths.REQUEST_LOCKS)

    def getNodeRequestLockStats(self, lock_id: str) -> NodeRequestLockStats | None:
        stat = self.kazoo_client.exists(paths.request_lock(lock_id))
        return None if stat is None else NodeRequestLockStats(lock_id, stat)

    def nodeRequestLockStatsIterator(self) -> Iterator[NodeRequestLockStats]:
        for path, (_data, stat) in self._get_many(
            map(paths.request_lock, self.getNodeRequestLockIDs())
        ):
            yield NodeRequestLockStats(path.rsplit("/", 1)[1], stat)

    def deleteNodeRequestLock(self, lock_id: str) -> None:
        """Delete a lock directory with everything below it."""
        self._delete(paths.request_lock(lock_id))

    # -- launchers

    def getRegisteredPools(self) -> list[RegisteredPool]:
        """Return the pools of all launchers.

        Objects have ``id name provider_name supported_labels priority paused``.
        """
        return self._complete(self.component_tree, ComponentTree).registered_pools()

    def getLaunchers(self) -> list[dict[str, Any]]:
        return self._complete(self.component_tree, ComponentTree).of_kind("launcher")

    def getBuilders(self) -> list[dict[str, Any]]:
        return self._complete(self.component_tree, ComponentTree).of_kind("builder")

    def readReports(self) -> list[dict[str, Any]]:
        """Return the reports of all launchers, see :mod:`nodepool.zk.reports`; write nothing."""
        return self._complete(self.report_tree, ReportTree).snapshot()

    def readNotes(self, kind: type[N]) -> list[N]:
        """Return the notes of a class, see :mod:`nodepool.zk.mirror.notes`; write nothing."""
        return self._complete(self.note_tree, NoteTree).of(kind)
