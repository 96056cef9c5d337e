"""A command on a static host, before its node is ready (STA-3.4)."""

from __future__ import annotations

from typing import Any

from nodepool import ssh
from nodepool.lease.ssh import machine
from nodepool.logconfig import Log
from nodepool.nodescan import command
from nodepool.texts import one_line
from nodepool.zk.records import Node


def failure(node: Node, static_node: dict[str, Any], running: set[Any], log: Log) -> str | None:
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
