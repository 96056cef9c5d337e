"""``request accept`` and ``request return``: using the nodes of a fulfilled request.

``accept`` does what Zuul's executor does: it checks and locks the nodes, deletes the request, and
marks them in use. The locks live as long as the command (``-- COMMAND``, or ``--hold``). With
``--detach`` the nodes become a lease.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from nodepool.cmd.commands.context import (
    CommandError,
    Context,
    Subparsers,
    add_command,
    add_json,
    note,
    user,
)
from nodepool.cmd.commands.foreground import Foreground, Kills
from nodepool.cmd.commands.nodes import find_node, limited
from nodepool.lease import Leases, Terms
from nodepool.process.program import describe as describe_error
from nodepool.process.program import duration, seconds
from nodepool.status import REDACTED
from nodepool.status.results import format_duration, to_json
from nodepool.texts import print_text
from nodepool.zk.records import FULFILLED, HOLD, IN_USE, READY, USED, Node
from nodepool.zk.zookeeper import ZooKeeper

#: Zuul's executor waits the same time.
LOCK_TIMEOUT = 30
RETURN_LOCK_TIMEOUT = 5
#: Seconds of a lease without ``--for``.
DETACHED = 86400.0
ENVIRONMENT = "NODEPOOL_NODES_JSON"
#: Names a file with the same content, for any number of nodes.
FILE = "NODEPOOL_NODES_JSON_FILE"

INVENTORY_KEYS = (
    "hostname",
    "interface_ip",
    "public_ipv4",
    "private_ipv4",
    "public_ipv6",
    "connection_type",
    "connection_port",
    "username",
    "host_keys",
    "python_path",
    "shell_type",
    "cloud",
    "region",
    "az",
    "provider",
    "pool",
    "external_id",
    "host_id",
    "attributes",
    "resources",
    "slot",
    "node_properties",
    "state",
    "allocated_to",
)

log = logging.getLogger("nodepool.cmd.requests")


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands, "accept", accept, "lock and use the nodes of a fulfilled request"
    )
    parser.add_argument("id", metavar="ID", help="request id")
    parser.add_argument(
        "--hold", metavar="SECONDS", type=seconds, help="return the nodes after SECONDS"
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="lease the nodes: keep them until they are returned, or for a time",
    )
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        type=duration,
        help="end of the lease, such as 90m, 4h or 2d from now (default: 1d)",
    )
    add_json(parser.add_argument, "print the nodes as JSON, with connection data")
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs="*",
        help=f"after --: run this command with the nodes in {ENVIRONMENT} and in the file {FILE}, "
        "then return them",
    )
    parser = add_command(commands, "return", return_nodes, "return the nodes of a lease")
    parser.add_argument(
        "ids", metavar="ID", nargs="+", help="node id, or request id for all its nodes"
    )


def find_request(zk: ZooKeeper, request_id: str) -> Any:
    """Return the request with this id.

    :raises CommandError: there is none.
    """
    request = None if "/" in request_id else zk.getNodeRequest(request_id)
    if request is None:
        raise CommandError(f"Request {request_id} not found")
    return request


def inventory(node: Node) -> dict[str, Any]:
    """Return what is needed to log in to a node."""
    return {
        "id": node.id,
        "labels": list(node.type),
        **{key: getattr(node, key) for key in INVENTORY_KEYS},
    }


def environment(nodes: Sequence[Node]) -> dict[str, str]:
    """Return the variable that gives the nodes to a program."""
    return {ENVIRONMENT: to_json([inventory(node) for node in nodes])}


def describe(node: Node) -> str:
    """Return one line for users; connection data of container drivers are secret."""
    port = node.connection_port if isinstance(node.connection_port, int) else REDACTED
    address = node.interface_ip or node.hostname or "-"
    user = f"{node.username}@" if node.username else ""
    return (
        f"{node.id}  {','.join(node.type)}  {node.state}  {user}{address} port {port}  "
        f"({node.provider})"
    )


def accept(context: Context) -> int:
    args = context.args
    if args.command and args.detach:
        raise CommandError("--detach and a command exclude each other")
    if args.time is not None and not args.detach:
        raise CommandError("--for needs --detach")
    if args.detach:
        _lease(context)
        return 0
    with Foreground(using=True) as foreground:
        nodes = _take(context, args.id)
        try:
            for node in nodes:
                node.state = IN_USE
                node.user_data = {"accepted_by": user(), "request": args.id}
                context.zk.storeNode(node)
        except BaseException:
            _give_back(context, nodes)
            raise
        try:
            if args.command:
                kills = Kills(context.kazoo, nodes)
                result = foreground.run(args.command, environment(nodes))
                kills.show(0 if foreground.ended else result)
                return result
            _print_nodes(context, nodes)
            foreground.wait(args.hold)
            return 0
        finally:
            _give_back(context, nodes)


def _lease(context: Context) -> None:
    """Turn the request into a lease that outlives this command."""
    args = context.args
    refused = context.config.why_not_leased(find_request(context.zk, args.id).node_types)
    if refused is not None:
        raise CommandError(refused)
    lasts = DETACHED if args.time is None else args.time
    most = context.config.max_hold_age
    lease = Leases(context.zk, most=most).hand_over(
        args.id, lasts, Terms(user(), f"unix:{os.getuid()}")
    )
    if lease.terms.limit:
        note(limited(lease))
    if not args.json:
        print_text(f"Lease {lease.id} for {format_duration(min(lasts, most))}")
    _print_nodes(context, lease.nodes)


def _print_nodes(context: Context, nodes: Sequence[Node]) -> None:
    if context.args.json:
        print(to_json([inventory(node) for node in nodes]), flush=True)
    else:
        for node in nodes:
            print_text(describe(node))


def _take(context: Context, request_id: str) -> list[Any]:
    """Lock all nodes of the request, and delete it in any case, as Zuul does.

    :raises CommandError: not fulfilled (nothing is changed), or a node is not available for us.
    """
    zk = context.zk
    request = find_request(zk, request_id)
    if request.state != FULFILLED:
        raise CommandError(
            f"Request {request_id} is {request.state}, not fulfilled; see `request wait "
            f"{request_id}`"
        )
    taken: list[Node] = []
    try:
        for node_id in request.nodes:
            node = zk.getNode(node_id)
            if node is None:
                raise CommandError(f"Node {node_id} of request {request_id} no longer exists")
            zk.lockNode(node, blocking=True, timeout=LOCK_TIMEOUT)
            taken.append(node)
            if node.allocated_to != request_id or node.state != READY:
                raise CommandError(
                    f"Node {node_id} is {node.state} and allocated to {node.allocated_to}, not to "
                    f"{request_id}"
                )
    except BaseException:
        for node in taken:
            zk.unlockNode(node)
        raise
    finally:
        zk.deleteNodeRequest(request)
    return taken


def _give_back(context: Context, nodes: list[Any]) -> None:
    """Mark the nodes used and unlock them, each independently."""
    for node in nodes:
        try:
            node.state = USED
            context.zk.storeNode(node)
            context.zk.unlockNode(node)
        except Exception as error:
            log.error("Cannot return node %s: %s", node.id, describe_error(error))


def return_nodes(context: Context) -> None:
    for one in context.args.ids:
        if "-" in one:
            _return_lease(context, one)
        else:
            _return_node(context, one)


def _return_lease(context: Context, lease_id: str) -> None:
    lease = Leases(context.zk).get(lease_id)
    if lease is None or not lease.nodes:
        raise CommandError(f"No node is held for request {lease_id}")
    Leases(context.zk).give_back(lease_id, lease)


def _return_node(context: Context, node_id: str) -> None:
    zk = context.zk
    node = find_node(zk, node_id)
    if node is None:
        raise CommandError(f"Node id {node_id} not found")
    # A locked node is returned by its user.
    zk.lockNode(node, blocking=True, timeout=RETURN_LOCK_TIMEOUT)
    try:
        if node.state not in (IN_USE, HOLD):
            raise CommandError(
                f"Node {node_id} is {node.state}, not {IN_USE}: there is nothing to return"
            )
        node.state = USED
        zk.storeNode(node)
    finally:
        zk.unlockNode(node)
