"""Finding cloud resources whose records are gone (LAU-13)."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from nodepool import metrics
from nodepool.driver.statemachine.model import Adapter, Resource
from nodepool.zk.records import HOLD, IN_USE, READY, USED, Node
from nodepool.zk.zookeeper import ZooKeeper

#: States of a node whose machine will not be another any more.
SETTLED = (READY, IN_USE, USED, HOLD)


def _key(resource: Resource) -> Hashable:
    """What names the leaked thing in two successive lists."""
    metadata = resource.metadata
    return (
        resource.type,
        metadata.get("nodepool_node_id"),
        metadata.get("nodepool_build_id"),
        metadata.get("nodepool_upload_id"),
        str(getattr(resource, "id", "")),
    )


def _leaked(resource: Resource, node: Node | None) -> bool:
    """Whether the record does not account for a resource tagged with its id.

    A launch of which it never became clear whether it worked may have made another thing than the one that the node has.
    """
    if node is None:
        return True
    belongs = getattr(resource, "belongs_to", None)
    return bool(belongs is not None and node.state in SETTLED and node.external_id and not belongs(node.external_id))


class LeakSearch:
    """Deletes resources tagged with the name of a provider that no record knows, once they were seen so twice in a row."""

    def __init__(self, name: str, adapter: Adapter, log: logging.Logger) -> None:
        self._name = name
        self._adapter = adapter
        self._log = log
        #: Of the last run.
        self.nodes: dict[Hashable, Any] = {}
        self.uploads: dict[Hashable, Any] = {}

    def run(self, zk: ZooKeeper) -> None:
        name = self._name
        resources = list(self._adapter.listResources())
        # The records are read after the resources: what was recorded meanwhile is no leak.
        nodes = {node.id: node for node in zk.getProviderNodes(name)}
        uploads = {
            (build, upload.id)
            for builds in zk.getProviderUploads(name).values()
            for build, entries in builds.items()
            for upload in entries
        }
        nodes_before, uploads_before = self.nodes, self.uploads
        self.nodes, self.uploads = {}, {}
        for resource in resources:
            metadata = resource.metadata or {}
            if metadata.get("nodepool_provider_name") != name:
                continue
            node_id = metadata.get("nodepool_node_id")
            build, upload = metadata.get("nodepool_build_id"), metadata.get("nodepool_upload_id")
            if node_id is not None and _leaked(resource, nodes.get(node_id)):
                before, now = nodes_before, self.nodes
            elif build and upload and (build, upload) not in uploads:
                before, now = uploads_before, self.uploads
            else:
                continue
            key = _key(resource)
            now[key] = resource
            if key not in before:
                continue
            if node_id is not None and not _leaked(resource, zk.getNode(node_id)):
                continue  # the mirror may lag; the tree itself decides
            try:
                self._log.warning("Deleting leaked %s of provider %s: %s", resource.type, name, metadata)
                self._adapter.deleteResource(resource)
                metrics.shared().incr(metrics.LEAKED(name, resource.plural_metric_name))
            except Exception:
                self._log.exception("Unable to delete leaked %s:", resource.type)
