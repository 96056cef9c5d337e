"""Who has a node, how to log in to it, and where it runs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
from collections.abc import Iterator

from nodepool.lease import ssh
from nodepool.lease.record import KEY, Terms, end_of, id_of, of_nodes
from nodepool.status import port_of
from nodepool.status.known import nodes_of_request, nodes_on
from nodepool.status.once import Facade
from nodepool.status.results import format_duration
from nodepool.zk.mirror.feed import USER
from nodepool.zk.records import HOLD, IN_USE, READY, Node

LOGIN = "log in"
"""The fact whose value is a command."""
WORDS = {
    **USER,
    "tenant_name": "Zuul tenant",
    "pipeline_name": "pipeline",
    "zuul_system": "Zuul system",
}
"""Key of Zuul's data -> title of the fact."""
MOST_DATA = 12
"""Entries of user data that are shown."""
LONGEST = 300
"""Characters of the value of an entry."""


def facts_of(zk: Facade, node: Node, now: float) -> Iterator[tuple[str, str]]:
    """Yield titles and values; those without a value are omitted."""
    for title, value in (*_users(node, now), *_login(node), *_place(zk, node)):
        if value not in (None, ""):
            yield title, str(value)


def held_after(zk: Facade, request_id: str, now: float) -> str:
    """Return who has the nodes of a request that was accepted and deleted; empty: nobody."""
    nodes = sorted(nodes_of_request(zk, request_id), key=lambda node: str(node.id))
    what = (
        f"node{'s' * (len(nodes) > 1)} {', '.join(f'{node.id} ({node.state})' for node in nodes)}"
    )
    leased = [node for node in nodes if node.state == HOLD and id_of(node) == request_id]
    if not leased:
        return f"served and deleted; its requestor has {what}" if nodes else ""
    lease = of_nodes(request_id, leased)
    until = "it is returned" if lease.ends is None else moment(lease.ends, now)
    return f"leased by {lease.terms.owner} ({lease.terms.via}) until {until}: {what}"


def _users(node: Node, now: float) -> Iterator[tuple[str, object]]:
    terms = Terms.read(node.user_data)
    if terms is not None:
        yield "lease", id_of(node)
        yield "owner", f"{terms.owner} ({terms.via})"
        yield "purpose", terms.purpose
    yield "tenant", node.tenant_name
    yield "request", node.allocated_to
    yield "requestor", node.requestor
    yield "hold job", node.hold_job
    yield ("hold reason" if node.state == HOLD else "comment"), node.comment
    if node.state == HOLD:
        end = end_of(node)
        limit = f", by {terms.limit}" if terms is not None and terms.limit else ""
        yield "hold ends", "when the node is deleted" if end is None else moment(end, now) + limit
    yield from data_of(node.user_data)


def moment(seconds: float, now: float) -> str:
    """Return a time with its distance from now."""
    distance = (
        f"in {format_duration(seconds - now)}"
        if seconds >= now
        else f"{format_duration(now - seconds)} ago"
    )
    return f"{time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(seconds))} ({distance})"


def data_of(data: object, title: str = "user data") -> Iterator[tuple[str, str]]:
    """Yield the data of the requestor, such as Zuul's build, without the terms of a lease."""
    if not isinstance(data, dict):
        if data:
            yield title, json.dumps(data, default=str)[:LONGEST]
        return
    for key, value in list(data.items())[:MOST_DATA]:
        if key != KEY:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield WORDS.get(key) or f"{title} {str(key)[:40].replace('_', ' ')}", text[:LONGEST]


def _login(node: Node) -> Iterator[tuple[str, object]]:
    yield "address", node.interface_ip or node.public_ipv4 or node.private_ipv4 or node.public_ipv6
    if node.interface_ip:
        yield "port", port_of(node.connection_port)
        yield "user", node.username
    why = ssh.unreachable(node)
    if why is None and node.state in (READY, IN_USE, HOLD):
        user = f"{node.username}@" if node.username else ""
        port = "" if node.connection_port == 22 else f"-p {node.connection_port} "
        yield LOGIN, f"ssh {port}{user}{node.interface_ip}"
    elif why is not None and node.interface_ip:
        yield "no login with ssh", why
    yield (
        "host keys",
        ", ".join(
            filter(None, (fingerprint(key) for key in node.host_keys if isinstance(key, str)))
        ),
    )


def fingerprint(key: str) -> str:
    """Return a host key as ``ssh-keygen -l`` does; empty if it is not a key."""
    kind, _, data = key.partition(" ")
    try:
        digest = hashlib.sha256(base64.b64decode(data, validate=True)).digest()
    except (binascii.Error, ValueError):
        return ""
    return f"{kind} SHA256:{base64.b64encode(digest).decode().rstrip('=')}" if data else ""


def _place(zk: Facade, node: Node) -> Iterator[tuple[str, object]]:
    yield "provider", node.provider
    server = node.external_id if isinstance(node.external_id, str) else None
    data = node.driver_data if isinstance(node.driver_data, dict) else {}
    if isinstance(backing := data.get("backing_node"), str):
        yield "backing node", backing
    elif isinstance(node.external_id, dict):
        yield "host", node.external_id.get("host")
    else:
        yield "server", server
    yield "nodes on it", ", ".join(sorted(str(each.id) for each in nodes_on(zk, str(node.id))))
    yield from (
        ("host name", node.hostname),
        ("availability zone", node.az),
        ("launcher", node.launcher),
    )
