"""``request accept`` and ``request return``: using the nodes of a fulfilled request.

``accept`` does what Zuul's executor does: it checks and locks the nodes, deletes the request, and marks them in use.
The locks live as long as the command (``-- COMMAND``, or ``--hold``). With ``--detach`` they are persistent, identified
by ``nodepool-cli:<request id>``, and remain until ``request return``.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from types import FrameType
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.commands.nodes import find_node
from nodepool.process.program import describe as describe_error
from nodepool.process.program import seconds
from nodepool.status import REDACTED
from nodepool.zk import paths
from nodepool.zk.records import FULFILLED, IN_USE, READY, USED, Node
from nodepool.zk.zookeeper import ZooKeeper

#: Zuul's executor waits the same time.
LOCK_TIMEOUT = 30
RETURN_LOCK_TIMEOUT = 5
IDENTIFIER = "nodepool-cli:"
#: Seconds; a signal just before the wait is noticed after this time.
SIGNAL_LATENCY = 0.5
ENVIRONMENT = "NODEPOOL_NODES_JSON"

INVENTORY_KEYS = (
    "hostname", "interface_ip", "public_ipv4", "private_ipv4", "public_ipv6", "connection_type", "connection_port",
    "username", "host_keys", "python_path", "shell_type", "cloud", "region", "az", "provider", "pool", "external_id",
    "host_id", "attributes", "resources", "slot", "node_properties", "state", "allocated_to",
)  # fmt: skip

log = logging.getLogger("nodepool.cmd.requests")


def register(commands: Subparsers) -> None:
    parser = add_command(commands, "accept", accept, "lock and use the nodes of a fulfilled request")
    parser.add_argument("id", metavar="ID", help="request id")
    parser.add_argument("--hold", metavar="SECONDS", type=seconds, help="return the nodes after SECONDS")
    parser.add_argument("--detach", action="store_true", help="keep the nodes until `request return`")
    parser.add_argument("--json", action="store_true", help="print the nodes as JSON, with connection data")
    parser.add_argument(
        "command", metavar="COMMAND", nargs="*",
        help=f"after --: run this command with the nodes in {ENVIRONMENT}, then return them",
    )  # fmt: skip
    parser = add_command(commands, "return", return_nodes, "return nodes that were accepted with --detach")
    parser.add_argument("ids", metavar="ID", nargs="+", help="node id, or request id for all its nodes")


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
    return {"id": node.id, "labels": list(node.type), **{key: getattr(node, key) for key in INVENTORY_KEYS}}


def describe(node: Node) -> str:
    """Return one line for users; connection data of container drivers are secret."""
    port = node.connection_port if isinstance(node.connection_port, int) else REDACTED
    address = node.interface_ip or node.hostname or "-"
    user = f"{node.username}@" if node.username else ""
    return f"{node.id}  {','.join(node.type)}  {node.state}  {user}{address} port {port}  ({node.provider})"


def _owner() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def accept(context: Context) -> int:
    args = context.args
    if args.command and args.detach:
        raise CommandError("--detach and a command exclude each other")
    with _Signals() as signals:
        nodes = _take(context, args.id, persistent=args.detach)
        try:
            for node in nodes:
                node.state = IN_USE
                node.user_data = {"accepted_by": _owner(), "request": args.id}
                context.zk.storeNode(node)
        except BaseException:
            _give_back(context, nodes)
            raise
        if args.detach:
            _print_nodes(context, nodes)
            return 0
        try:
            if args.command:
                return _run(args.command, nodes, signals)
            _print_nodes(context, nodes)
            signals.wait(args.hold)
            return 0
        finally:
            _give_back(context, nodes)


def _print_nodes(context: Context, nodes: list[Any]) -> None:
    if context.args.json:
        print(json.dumps([inventory(node) for node in nodes]), flush=True)
    else:
        for node in nodes:
            print(describe(node), flush=True)


def _take(context: Context, request_id: str, persistent: bool) -> list[Any]:
    """Lock all nodes of the request, and delete it in any case, as Zuul does.

    :raises CommandError: not fulfilled (nothing is changed), or a node is not available for us.
    """
    zk = context.zk
    request = find_request(zk, request_id)
    if request.state != FULFILLED:
        raise CommandError(f"Request {request_id} is {request.state}, not fulfilled; see `request wait {request_id}`")
    identifier = IDENTIFIER + request_id if persistent else None
    taken: list[Node] = []
    try:
        for node_id in request.nodes:
            node = zk.getNode(node_id)
            if node is None:
                raise CommandError(f"Node {node_id} of request {request_id} no longer exists")
            zk.lockNode(node, blocking=True, timeout=LOCK_TIMEOUT, ephemeral=not persistent, identifier=identifier)
            taken.append(node)
            if node.allocated_to != request_id or node.state != READY:
                raise CommandError(f"Node {node_id} is {node.state} and allocated to {node.allocated_to}, not to {request_id}")
    except BaseException:
        for node in taken:
            _unlock(zk, node, persistent)
        _delete_request(context, request_id)
        raise
    _delete_request(context, request_id)
    return taken


def _delete_request(context: Context, request_id: str) -> None:
    with contextlib.suppress(NoNodeError):
        context.kazoo.delete(paths.request(request_id))


def _unlock(zk: ZooKeeper, node: Node, persistent: bool) -> None:
    if persistent:
        zk.forceUnlockNode(node)
    else:
        zk.unlockNode(node)


def _give_back(context: Context, nodes: list[Any]) -> None:
    """Mark the nodes used and unlock them, each independently."""
    for node in nodes:
        try:
            node.state = USED
            context.zk.storeNode(node)
            _unlock(context.zk, node, context.args.detach)
        except Exception as error:
            log.error("Cannot return node %s: %s", node.id, describe_error(error))


def _run(command: list[str], nodes: list[Any], signals: _Signals) -> int:
    environment = {**os.environ, ENVIRONMENT: json.dumps([inventory(node) for node in nodes])}
    try:
        process = signals.process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error.strerror}") from error
    if signals.asked:
        process.terminate()
    status = process.wait()
    return status if status >= 0 else 128 - status


class _Signals:
    """Ends the use of the nodes on INT and TERM; a child gets TERM.

    This process continues, to return the nodes.
    """

    def __init__(self) -> None:
        self.asked = False
        # Not an event: the interrupted code may hold its lock.
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout: float | None) -> None:
        """Wait for a signal, at most ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.asked:
            left = SIGNAL_LATENCY if deadline is None else min(SIGNAL_LATENCY, deadline - time.monotonic())
            if left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=left)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._queue.put(number)
        # The terminal sends INT to the child directly.
        if self.process is not None and number == signal.SIGTERM:
            self.process.terminate()


def return_nodes(context: Context) -> None:
    for one in context.args.ids:
        if "-" in one:
            _return_request(context, one)
        else:
            _return_node(context, one)


def _return_request(context: Context, request_id: str) -> None:
    zk = context.zk
    nodes = [node for node in zk.readNodes(with_contenders=True) if node.allocated_to == request_id]
    mine = [node for node in nodes if _holder(zk, node) == IDENTIFIER + request_id]
    if not mine:
        raise CommandError(f"No node is held for request {request_id}")
    for node in mine:
        _return_held(zk, node)


def _return_node(context: Context, node_id: str) -> None:
    zk = context.zk
    node = find_node(zk, node_id)
    if node is None:
        raise CommandError(f"Node id {node_id} not found")
    holder = _holder(zk, node)
    if holder is not None and holder.startswith(IDENTIFIER):
        _return_held(zk, node)
        return
    if node.state != IN_USE:
        raise CommandError(f"Node {node_id} is {node.state}, not {IN_USE}: there is nothing to return")
    # Not locked by `accept --detach`: if it is locked, then by its user.
    zk.lockNode(node, blocking=True, timeout=RETURN_LOCK_TIMEOUT)
    try:
        node.state = USED
        zk.storeNode(node)
    finally:
        zk.unlockNode(node)


def _holder(zk: ZooKeeper, node: Node) -> str | None:
    """Return the identifier of the lock's holder; None if the node is not locked."""
    contenders = zk.getNodeLockContenders(node)
    return contenders[0] if contenders else None


def _return_held(zk: ZooKeeper, node: Node) -> None:
    node.state = USED
    zk.storeNode(node)
    zk.forceUnlockNode(node)
