"""Compares ready nodes with their cloud.

A node whose instance is deleted, stopped or reclaimed is not assigned any more. 11.0.0 does not check this.
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


class ReadyCheck:
    """Finds ready nodes without an instance, for each provider separately."""

    log = logging.getLogger("nodepool.CleanupWorker")

    def __init__(self, state: LauncherState, nodes: NodeReconciler) -> None:
        self._state = state
        self._nodes = nodes

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield each provider with ready nodes, and their check, if it supports that."""
        ready: dict[str, list[zk.Node]] = {}
        tree = self._state.zk.node_tree
        with tree.lock:
            nodes_now = list(tree.nodes.values())
        for node in nodes_now:
            if node.state == zk.READY and node.allocated_to is None and node.external_id:
                ready.setdefault(str(node.provider), []).append(node)
        for name, nodes in ready.items():
            find = getattr(self._state.config.provider_managers.get(name), "findMissingNodes", None)
            if find is not None:
                yield name, functools.partial(self._check, name, find, nodes)

    def _check(self, name: str, find: Callable[..., Any], nodes: list[zk.Node]) -> None:
        # Separately, as drivers look ids up: an id of another driver that the provider had must not block the others.
        texts = [node for node in nodes if isinstance(node.external_id, str)]
        for some in (texts, [node for node in nodes if not isinstance(node.external_id, str)]):
            try:
                missing = find(some) if some else []
            except FOREIGN as error:  # a driver may raise anything; the nodes stay as they are
                which = "" if some is texts else f" with an odd external_id ({', '.join(sorted(str(n.id) for n in some))})"
                self.log.warning("Cannot compare ready nodes of provider %s%s with the cloud: %s", name, which, error_line(error))
                continue
            for node in missing:
                self._nodes.discard(node)
