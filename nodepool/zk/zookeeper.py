"""The ZooKeeper facade for drivers, tools and benches, with records and state names.

Names: DRV-8 and PY-2 and PY-3.
"""

from __future__ import annotations

from typing import Any

from nodepool.zk import paths
from nodepool.zk.cluster import ClusterHistory
from nodepool.zk.components import ComponentTree
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.facade.images import ImageMethods
from nodepool.zk.facade.nodes import NodeMethods
from nodepool.zk.facade.requests import RequestMethods
from nodepool.zk.mirror.feed import Feed
from nodepool.zk.mirror.images import ImageData, ImageTree
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.mirror.notes import NoteTree
from nodepool.zk.mirror.progress import ProgressTree
from nodepool.zk.mirror.requests import RequestTree
from nodepool.zk.mirror.reservations import Reservations
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import (
    ABORTED,
    BUILDING,
    DELETED,
    DELETING,
    FAILED,
    FULFILLED,
    HOLD,
    IN_USE,
    INIT,
    PENDING,
    READY,
    REQUESTED,
    TESTING,
    UPLOADING,
    USED,
    BaseModel,
    ImageBuild,
    ImageBuildRequest,
    ImageUpload,
    Node,
    NodeRequest,
    NodeRequestLockStats,
    RecordError,
)
from nodepool.zk.reports import ReportTree


class ZooKeeper(NodeMethods, RequestMethods, ImageMethods):
    """All ZooKeeper operations of Nodepool.

    :param client: connected, or connected later by its owner.
    :param enable_cache: keep a live mirror of nodes, requests, images and components.
    :param only_images: mirror only images and components, for builders, which do not use nodes and
        requests.
    """

    def __init__(
        self, client: ZooKeeperClient, enable_cache: bool = True, only_images: bool = False
    ) -> None:
        self.client = client
        self.enable_cache = enable_cache
        self._writer = None
        self.reservations = Reservations()
        self.cluster = ClusterHistory(client, lambda: self.kazoo_client)
        self.node_tree = self.request_tree = self.image_tree = self.component_tree = None  # type: ignore[assignment]
        self.progress_tree = self.report_tree = self.note_tree = None  # type: ignore[assignment]
        #: Events, if there are listeners.
        self.feed: Feed | None = None
        if enable_cache:
            self.image_tree = ImageTree(client)
            self.component_tree = ComponentTree(
                client
            )  # also for builders, whose own entry may be deleted
            if not only_images:
                self.node_tree = NodeTree(client)
                self.reservations = self.node_tree.reservations
                self.request_tree = RequestTree(client)
                self.report_tree = ReportTree(client)
                self.note_tree = NoteTree(client)
            self.progress_tree = ProgressTree(client)
        found: tuple[Tree[Any] | None, ...] = (
            self.component_tree,
            self.image_tree,
            self.node_tree,
            self.request_tree,
            self.progress_tree,
            self.report_tree,
            self.note_tree,
        )
        #: All that this facade has.
        self.trees = [tree for tree in found if tree is not None]
        if enable_cache:
            if client.client is not None:
                self.start()
            else:
                client.on_connect_listeners.append(self.start)

    def start(self) -> None:
        """Start to mirror; called automatically once connected."""
        if self.kazoo_client.chroot:
            self.kazoo_client.ensure_path("/")
        for path in paths.DIRECTORIES:
            self.kazoo_client.ensure_path(path)
        for tree in self.trees:
            tree.start()

    @property
    def synced(self) -> bool:
        """Return whether the mirror is complete; before, nothing is assigned or deleted."""
        return bool(self.trees) and all(tree.synced.is_set() for tree in self.trees)

    def wait_synced(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a complete mirror."""
        return all(tree.synced.wait(timeout) for tree in self.trees)

    @property
    def connected(self) -> bool:
        return self.client.connected

    @property
    def suspended(self) -> bool:
        return self.client.suspended

    @property
    def lost(self) -> bool:
        return self.client.lost

    def resetHosts(self, hosts: str) -> None:
        self.client.resetHosts(hosts)

    def disconnect(self) -> None:
        """Stop mirroring and end the session."""
        for tree in self.trees:
            tree.stop()
        self.client.disconnect()

    def _nodePath(self, node_id: str) -> str:
        return paths.node(node_id)


__all__ = [
    "ABORTED",
    "BUILDING",
    "DELETED",
    "DELETING",
    "FAILED",
    "FULFILLED",
    "HOLD",
    "INIT",
    "IN_USE",
    "PENDING",
    "READY",
    "REQUESTED",
    "TESTING",
    "UPLOADING",
    "USED",
    "BaseModel",
    "ImageBuild",
    "ImageBuildRequest",
    "ImageData",
    "ImageUpload",
    "Node",
    "NodeRequest",
    "NodeRequestLockStats",
    "RecordError",
    "ZooKeeper",
    "ZooKeeperClient",
]
