"""Compares ready nodes with their cloud.

A node whose instance is deleted, stopped or reclaimed is not assigned any more. 11.0.0 does not
check this.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from nodepool.base.problems import error_line
from nodepool.exceptions import FOREIGN
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.state import LauncherState
from nodepool.zk import zookeeper as zk

#: Of the clean-up, whose part this is.
log = logging.getLogger("nodepool.CleanupWorker")


def checks(state: LauncherState, nodes: NodeReconciler) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each provider with ready nodes, and their check, if it supports that."""
    ready: dict[str, list[zk.Node]] = {}
    tree = state.zk.node_tree
    with tree.lock:
        nodes_now = list(tree.nodes.values())
    for node in nodes_now:
        if node.state == zk.READY and node.allocated_to is None and node.external_id:
            ready.setdefault(str(node.provider), []).append(node)
    for name, found in ready.items():
        find = getattr(state.config.provider_managers.get(name), "findMissingNodes", None)
        if find is not None:
            yield name, functools.partial(_check, name, find, found, nodes)


def _check(
    name: str, find: Callable[..., Any], ready: list[zk.Node], nodes: NodeReconciler
) -> None:
    # Separately, as drivers look ids up: an id of another driver that the provider had must not
    # block the others.
    texts = [node for node in ready if isinstance(node.external_id, str)]
    for some in (texts, [node for node in ready if not isinstance(node.external_id, str)]):
        try:
            missing = find(some) if some else []
        except FOREIGN as error:  # a driver may raise anything; the nodes stay as they are
            which = (
                ""
                if some is texts
                else f" with an odd external_id ({', '.join(sorted(str(n.id) for n in some))})"
            )
            log.warning(
                "Cannot compare ready nodes of provider %s%s with the cloud: %s",
                name,
                which,
                error_line(error),
            )
            continue
        for node in missing:
            nodes.discard(node, "its instance does not exist or does not run")
