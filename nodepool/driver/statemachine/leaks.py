"""Finds cloud resources without records (LAU-13), unless ZooKeeper has lost the records."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from nodepool import metrics
from nodepool.base.problems import log_failure
from nodepool.driver.statemachine.model import Adapter, Resource
from nodepool.exceptions import NotFound
from nodepool.zk.cluster import NODE_ID, View, number_of
from nodepool.zk.records import HOLD, IN_USE, READY, USED, Node, RecordError
from nodepool.zk.zookeeper import ZooKeeper

#: Final states of a node, whose machine does not change any more.
SETTLED = (READY, IN_USE, USED, HOLD)
#: Maximum number of node ids that a leak search skips; `nodepool recover` skips more of them.
MOST_SKIPPED_IDS = 10_000


def _key(resource: Resource) -> Hashable:
    """Return the identity of the leaked resource in two successive lists."""
    metadata = resource.metadata
    return (
        resource.type,
        metadata.get("nodepool_node_id"),
        metadata.get("nodepool_build_id"),
        metadata.get("nodepool_upload_id"),
        str(resource.id),
    )


def _leaked(resource: Resource, node: Node | None) -> bool:
    """Return whether the record does not account for a resource tagged with its id.

    A launch with an unknown result may have created another resource than the one in the record.
    """
    if node is None:
        return True
    return bool(
        node.state in SETTLED and node.external_id and not resource.belongs_to(node.external_id)
    )


class LeakSearch:
    """Deletes tagged resources of a provider without a record, after two sightings in a row."""

    def __init__(self, name: str, adapter: Adapter, log: logging.Logger) -> None:
        self._name = name
        self._adapter = adapter
        self._log = log
        #: Of the last run.
        self.nodes: dict[Hashable, Any] = {}
        self.uploads: dict[Hashable, Any] = {}
        #: Why nothing is deleted at present; None if the search works.
        self.stopped: str | None = None

    def run(self, zk: ZooKeeper) -> None:
        name = self._name
        resources = list(self._adapter.listResources())
        # The records are read after the resources: what was recorded meanwhile is not a leak.
        nodes = {node.id: node for node in zk.getProviderNodes(name)}
        uploads = {
            (build, upload.id)
            for builds in zk.getProviderUploads(name).values()
            for build, entries in builds.items()
            for upload in entries
        }
        ours = [
            resource
            for resource in resources
            if (resource.metadata or {}).get("nodepool_provider_name") == name
        ]
        try:
            view = zk.cluster.view()
        except RecordError as error:
            self._report(f"leaked resources are not deleted: {error}")
            return
        nodes_before, uploads_before = self.nodes, self.uploads
        self.nodes, self.uploads = {}, {}
        if self._stop(view, zk, ours, nodes, uploads):
            return
        for resource in ours:
            metadata = resource.metadata
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
            if not zk.cluster.is_current(view):
                return  # the tree may be another one since
            try:
                self._log.warning(
                    "Deleting leaked %s of provider %s: %s", resource.type, name, metadata
                )
                self._adapter.deleteResource(resource)
                metrics.shared().incr(metrics.LEAKED(name, resource.plural_metric_name))
            except NotFound:
                self._log.info("The leaked %s %s no longer exists", resource.type, resource.id)
            except Exception as error:
                log_failure(self._log, error, "Unable to delete leaked %s", resource.type)

    def _stop(
        self,
        view: View,
        zk: ZooKeeper,
        resources: list[Resource],
        nodes: dict[str | None, Node],
        uploads: set[Any],
    ) -> bool:
        """Return whether to delete nothing: the tree lacks the history of some resources."""
        found = []
        for resource in resources:
            node_id = resource.metadata.get(NODE_ID)
            upload = (
                resource.metadata.get("nodepool_build_id"),
                resource.metadata.get("nodepool_upload_id"),
            )
            if node_id is None and upload in uploads:
                continue  # its record was imported into another cluster
            reason = view.foreign(resource.metadata, nodes.get(node_id))
            if reason is not None and number_of(node_id) is not None:
                # The mirror may lag, and has the time of our own clock for a record that we have
                # just created.
                reason = view.foreign(resource.metadata, zk.getNode(str(node_id)))
            if reason is not None:
                found.append((resource, reason))
        stopped = None
        if found:
            resource, reason = found[0]
            what = resource.metadata.get(NODE_ID) or resource.id or "unknown"
            stopped = (
                "leaked resources are not deleted, because ZooKeeper does not know the history of "
                f"{len(found)} resources, among them {resource.type} of {what}: {reason}; run "
                "`nodepool recover --dry-run`"
            )
            numbers = [number_of(resource.metadata.get(NODE_ID)) for resource, _reason in found]
            try:  # many clouds use the id in names
                zk.cluster.skip_to(
                    max((number for number in numbers if number is not None), default=-1),
                    MOST_SKIPPED_IDS,
                )
            except Exception as error:
                self._log.warning(
                    "New nodes of provider %s may get the ids of machines that exist: %s",
                    self._name,
                    error,
                )
        self._report(stopped)
        return self.stopped is not None

    def _report(self, reason: str | None) -> None:
        before, self.stopped = self.stopped, reason
        if self.stopped is not None and self.stopped != before:
            self._log.warning(
                "Stopped the leak search of provider %s: %s", self._name, self.stopped
            )
        elif self.stopped is None and before is not None:
            self._log.warning(
                "Resumed the leak search of provider %s: all resources are accounted for",
                self._name,
            )
