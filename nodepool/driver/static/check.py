"""Checks of a static host before its node is ready (STA-3)."""

from __future__ import annotations

from typing import Any

from nodepool import exceptions, nodeutils, ssh
from nodepool.lease.ssh import machine
from nodepool.logconfig import Log
from nodepool.nodescan import command
from nodepool.texts import one_line
from nodepool.zk.records import Node

SSH_TYPES = ("ssh", "network_cli")


class StaticNodeError(Exception):
    """The host cannot be used now: unreachable, or host keys differ from the configured ones."""


def host_keys(static_node: dict[str, Any]) -> list[str]:
    """Connect to the host; return its host keys, or those configured if none are checked.

    :raises StaticNodeError: unreachable, or not the configured host.
    """
    gather = static_node["connection-type"] in SSH_TYPES
    if gather and not static_node["host-key-checking"]:
        return list(static_node["host-key"])
    name = static_node["name"]
    try:
        keys = nodeutils.nodescan(
            name,
            port=static_node["connection-port"],
            timeout=static_node["timeout"],
            gather_hostkeys=gather,
        )
    except exceptions.ConnectionTimeoutException as error:
        raise StaticNodeError(f"{name}: connection timeout: {error}") from error
    except (OSError, exceptions.LaunchKeyscanException) as error:
        raise StaticNodeError(f"{name}: {error}") from error
    if not gather:
        return []
    missing = [key for key in static_node["host-key"] if key not in keys]
    if missing:
        raise StaticNodeError(
            f"{name}: the host does not have the configured host key {missing[0]!r}; it offers "
            f"{keys}"
        )
    return list(keys)


def command_failure(
    node: Node, static_node: dict[str, Any], running: set[Any], log: Log
) -> str | None:
    """Run the command that probes idle nodes of the host, if its labels have one.

    :param running: gets the local program.
    :return: why the host cannot be used; None: it can, or this launcher cannot find out.
    """
    probing, checked = static_node["probe"], static_node["host-key-checking"]
    if probing is None or probing.method != "command" or not (checked and node.host_keys):
        return None
    if "fake" in str(node.hostname):
        return None
    target = machine(node)
    try:
        return ssh.unreachable(target) or command.failure(target, probing, running)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        log.warning(
            "Cannot probe static host %s, which is used all the same: %s", node.hostname, reason
        )
        return None
