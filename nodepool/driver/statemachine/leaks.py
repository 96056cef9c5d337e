"""Finding cloud resources whose records are gone (launcher.md section 13)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from nodepool import metrics

if TYPE_CHECKING:
    from nodepool.driver.statemachine.provider import StateMachineProvider


def _key(resource: Any) -> Hashable:
    """What names the leaked thing in two successive lists."""
    metadata = resource.metadata
    return (resource.type, metadata.get("nodepool_node_id"), metadata.get("nodepool_build_id"),
            metadata.get("nodepool_upload_id"), str(getattr(resource, "id", "")))


def cleanup(provider: StateMachineProvider) -> None:
    """Delete resources tagged with our name that no record knows, once they were seen so twice in a row."""
    name = provider.provider.name
    resources = list(provider.adapter.listResources())
    # The records are read after the resources: what was recorded meanwhile is no leak.
    nodes = {node.id for node in provider._zk.getProviderNodes(name)}
    uploads = {
        (build, upload.id)
        for builds in provider._zk.getProviderUploads(name).values()
        for build, entries in builds.items() for upload in entries}
    nodes_before, uploads_before = provider.possibly_leaked_nodes, provider.possibly_leaked_uploads
    provider.possibly_leaked_nodes, provider.possibly_leaked_uploads = {}, {}
    statsd = metrics.shared()
    for resource in resources:
        metadata = resource.metadata or {}
        if metadata.get("nodepool_provider_name") != name:
            continue
        node_id = metadata.get("nodepool_node_id")
        build, upload = metadata.get("nodepool_build_id"), metadata.get("nodepool_upload_id")
        if node_id is not None and node_id not in nodes:
            before, now = nodes_before, provider.possibly_leaked_nodes
        elif build and upload and (build, upload) not in uploads:
            before, now = uploads_before, provider.possibly_leaked_uploads
        else:
            continue
        key = _key(resource)
        now[key] = resource
        if key not in before:
            continue
        if node_id is not None and provider._zk.getNode(node_id) is not None:
            continue  # the mirror may lag; the tree itself decides
        try:
            provider.log.warning("Deleting leaked %s of provider %s: %s", resource.type, name, metadata)
            provider.adapter.deleteResource(resource)
            statsd.incr(f"nodepool.provider.{name}.leaked.{resource.plural_metric_name}")
        except Exception:
            provider.log.exception("Unable to delete leaked %s:", resource.type)
