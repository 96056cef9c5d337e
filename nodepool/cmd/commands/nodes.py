"""``list``, ``delete``, ``hold``."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from nodepool import status
from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_listing,
    add_table,
    note,
    running,
    user,
)
from nodepool.exceptions import TimeoutException
from nodepool.lease import Lease, Leases, Terms, record
from nodepool.process.program import duration
from nodepool.status.results import format_duration
from nodepool.zk.records import DELETING, HOLD, Node
from nodepool.zk.zookeeper import ZooKeeper

LOCK_TIMEOUT = 5


def register(subparsers: Subparsers) -> None:
    filters = {
        "state": "state",
        "label": "label",
        "provider": "provider",
        "pool": "pool",
        "allocated_to": "request",
    }
    add_table(
        subparsers, "list", status.node_list, "list nodes", filters, detail="show all columns"
    )
    parser = add_listing(subparsers, "delete", delete, "delete nodes")
    parser.add_argument("ids", metavar="ID", nargs="+", help="node id; leading zeros are optional")
    parser.add_argument(
        "--now", action="store_true", help="delete the node directly through its provider, and wait"
    )
    parser = add_listing(subparsers, "hold", hold, "keep nodes from being used or deleted")
    parser.add_argument("ids", metavar="ID", nargs="+", help="node id; leading zeros are optional")
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        type=duration,
        help="lease the nodes for a time such as 90m, 8h or 2d",
    )
    parser.add_argument("--purpose", help="shown to others; needs --for")


def find_node(zk: ZooKeeper, text: str) -> Any:
    """Return the node of this id, with or without leading zeros; None if there is none."""
    node = zk.getNode(text) if "/" not in text else None
    if node is None and text.isdecimal() and len(text) < 10:
        node = zk.getNode(text.zfill(10))
    return node


def _each(context: Context, change: Callable[[Context, Any], bool]) -> None:
    """Process every existing node under its lock, and show the processed ones.

    :raises TimeoutException: the lock of one is held; later nodes are skipped.
    """
    done = set()
    try:
        for text in context.args.ids:
            node = find_node(context.zk, text)
            if node is None:
                if not context.args.strict:  # the error message contains it
                    print(f"Node id {text} not found", flush=True)
                context.refuse(f"Node id {text} not found", said=True)
                continue
            _lock(context.zk, node)
            try:
                if change(context, node):
                    done.add(node.id)
            finally:
                # The deleter releases a node that it has deleted.
                if node.lock:
                    context.zk.unlockNode(node)
    finally:
        if done:
            found = status.node_list(context.zk, detail=False)
            context.show(
                status.Results([row for row in found.rows if row["id"] in done], found.columns)
            )


def _lock(zk: ZooKeeper, node: Node) -> None:
    try:
        zk.lockNode(node, blocking=True, timeout=LOCK_TIMEOUT)
    except TimeoutException as error:
        holder = next(iter(zk.getNodeLockContenders(node)), None)
        facts = [
            f"state {node.state}",
            f"request {node.allocated_to}" if node.allocated_to else "",
            f"locked by {holder}" if holder else "",
        ]
        raise TimeoutException(
            f"node {node.id} is in use ({', '.join(filter(None, facts))}): no lock within "
            f"{LOCK_TIMEOUT:g} s; "
            "see its user data in `nodepool list --detail`"
        ) from error


def delete(context: Context) -> None:
    remove = _delete_now if context.args.now else functools.partial(_mark, DELETING)

    def change(context: Context, node: Node) -> bool:
        terms = Terms.read(node.user_data) if node.state == HOLD else None
        if terms is not None:
            end = record.end_of(node)
            left = (
                "without an end"
                if end is None
                else f"for another {format_duration(end - time.time())}"
            )
            note(
                f"node {node.id} is deleted although {terms.owner} has leased it {left} (lease "
                f"{record.id_of(node)})"
            )
        return remove(context, node)

    _each(context, change)


def hold(context: Context) -> None:
    args = context.args
    if args.purpose is not None and args.time is None:
        raise CommandError("--purpose needs --for")
    _each(context, functools.partial(_mark, HOLD) if args.time is None else _lease)


def _lease(context: Context, node: Node) -> bool:
    job = node.hold_job
    terms = Terms(user(), f"unix:{os.getuid()}", context.args.purpose or "")
    lease = Leases(context.zk, most=context.config.max_hold_age).hold(
        node, terms, context.args.time
    )
    if lease.terms.limit:
        note(limited(lease))
    if job:
        note(f"node {node.id} was held by Zuul for {job}; Zuul may still end it with its autohold")
    return True


def limited(lease: Lease) -> str:
    """Return why the lease ends earlier than it was asked for."""
    left = "" if lease.ends is None else f" in {format_duration(lease.ends - time.time())}"
    return (
        f"lease {lease.id} ends{left}: the configuration ({lease.terms.limit}) permits no later end"
    )


def _mark(state: str, context: Context, node: Node) -> bool:
    node.state = state
    context.zk.storeNode(node)
    return True


def _delete_now(context: Context, node: Node) -> bool:
    from nodepool.driver import lifecycle

    provider_config = context.whole_config.providers.get(node.provider or "")
    if provider_config is None:
        text = f"Provider {node.provider} for node {node.id} not defined on this launcher"
        print(text, flush=True)
        why = context.whole_config.provider_errors.get(node.provider or "")
        context.refuse(why or text, said=why is None)
        return False
    manager = lifecycle.get_provider(provider_config)
    with running(manager, context.zk):
        _mark(DELETING, context, node)
        manager.startNodeCleanup(node).join()
    return True
