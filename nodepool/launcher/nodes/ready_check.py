"""Compares ready nodes with their cloud.

A node whose instance is deleted, stopped or reclaimed is not assigned any more. 11.0.0 does not check this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from nodepool.base.problems import error_line
from nodepool.exceptions import FOREIGN
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.state import LauncherState
from nodepool.zk import zookeeper as zk


class ReadyCheck:
    """Checks each provider in a separate thread, so that a slow cloud delays no other."""

    log = logging.getLogger("nodepool.CleanupWorker")

    def __init__(self, state: LauncherState, nodes: NodeReconciler) -> None:
        self._state = state
        self._nodes = nodes
        self._threads: dict[str, threading.Thread] = {}

    def run(self) -> None:
        """Start checks of the ready nodes of every provider that supports it."""
        ready: dict[str, list[zk.Node]] = {}
        tree = self._state.zk.node_tree
        with tree.lock:
            nodes_now = list(tree.nodes.values())
        for node in nodes_now:
            if node.state == zk.READY and node.allocated_to is None and node.external_id:
                ready.setdefault(str(node.provider), []).append(node)
        for name, nodes in ready.items():
            find = getattr(self._state.config.provider_managers.get(name), "findMissingNodes", None)
            running = self._threads.get(name)
            if find is None or (running is not None and running.is_alive()):
                continue
            self._threads[name] = threading.Thread(
                target=self._check, name=f"Thread-ready-{name}", daemon=True, args=(name, find, nodes)
            )
            self._threads[name].start()

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

    def join(self, timeout: float | None = None) -> None:
        for thread in self._threads.values():
            thread.join(timeout)
