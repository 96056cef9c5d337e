"""``list``, ``delete``, ``hold``."""

from __future__ import annotations

from typing import Any

from nodepool import status
from nodepool.cmd.commands.context import Context, Subparsers, add_listing
from nodepool.zk.records import DELETING, HOLD

LOCK_TIMEOUT = 5


def register(subparsers: Subparsers) -> None:
    parser = add_listing(subparsers, "list", list_nodes, "list nodes")
    parser.add_argument("--detail", action="store_true", help="show all columns")
    parser = add_listing(subparsers, "delete", delete, "delete a node")
    parser.add_argument("id", metavar="ID", help="node id")
    parser.add_argument("--now", action="store_true", help="delete through the provider here, and wait")
    parser = add_listing(subparsers, "hold", hold, "keep a node from being used or deleted")
    parser.add_argument("id", metavar="ID", help="node id")


def list_nodes(context: Context) -> None:
    context.show(status.node_list(context.zk, detail=context.args.detail))


def _show_node(context: Context, node_id: str) -> None:
    context.show(status.node_list(context.zk, node_id=node_id, detail=False))


def _locked(context: Context) -> Any:
    """The node, locked by us; None when there is none (said so).

    :raises TimeoutException: somebody holds the lock.
    """
    node_id = context.args.id
    node = context.zk.getNode(node_id)
    if node is None:
        print(f"Node id {node_id} not found")
        return None
    context.zk.lockNode(node, blocking=True, timeout=LOCK_TIMEOUT)
    return node


def delete(context: Context) -> None:
    if context.args.now:
        _delete_now(context)
        return
    node = _locked(context)
    if node is None:
        return
    try:
        node.state = DELETING
        context.zk.storeNode(node)
    finally:
        context.zk.unlockNode(node)
    _show_node(context, node.id)


def _delete_now(context: Context) -> None:
    zk = context.zk
    node = _locked(context)
    if node is None:
        return
    try:
        provider_config = context.config.providers.get(node.provider)
        if provider_config is None:
            print(f"Provider {node.provider} for node {node.id} not defined on this launcher")
            return
        _delete_through_provider(zk, node, provider_config)
    finally:
        # The deleter lets go of a node that it has deleted.
        if node.lock:
            zk.unlockNode(node)
    _show_node(context, node.id)


def _delete_through_provider(zk: Any, node: Any, provider_config: Any) -> None:
    from nodepool import provider_manager

    manager = provider_manager.get_provider(provider_config)
    manager.start(zk)
    try:
        node.state = DELETING
        zk.storeNode(node)
        manager.startNodeCleanup(node).join()
    finally:
        manager.stop()
        manager.join()


def hold(context: Context) -> None:
    node = _locked(context)
    if node is None:
        return
    try:
        node.state = HOLD
        context.zk.storeNode(node)
    finally:
        context.zk.unlockNode(node)
    _show_node(context, node.id)
