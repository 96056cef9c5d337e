"""SSH for the nodes of a lease: configuration, known hosts, Ansible inventory."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from typing import Any

from nodepool import ssh
from nodepool.lease.leases import Leases
from nodepool.lease.record import Lease
from nodepool.zk.records import Node

#: Seconds that the files of a lease are kept after its end, unless this user returns it; and of one
#: without an end.
KEPT, FOREVER = 86400.0, 10 * 365 * 86400.0


def names(nodes: Sequence[Node]) -> list[tuple[str, Node]]:
    """Return the nodes with their names ``n1``, ``n2`` and so on, by id."""
    return [
        (f"n{number}", node)
        for number, node in enumerate(sorted(nodes, key=lambda node: node.id or ""), 1)
    ]


def machine(node: Node) -> ssh.Node:
    """Return what is needed to connect to a node."""
    return ssh.Node(
        node.id or "",
        address=node.interface_ip,
        port=node.connection_port,
        username=node.username,
        host_keys=list(node.host_keys),
        connection_type=node.connection_type,
        shell_type=node.shell_type,
    )


def machines(nodes: Sequence[Node]) -> list[ssh.Node]:
    return [machine(node) for _name, node in names(nodes)]


def unreachable(node: Node) -> str | None:
    """Return why ssh cannot reach a node; None: it can."""
    return ssh.unreachable(machine(node))


def known_hosts(nodes: Sequence[Node]) -> str:
    """Return the host keys in the records, which the launcher has read."""
    return ssh.known_hosts(machines(nodes))


def directory_of(lease_id: str = "") -> str:
    """Return the directory of the files of a lease."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "nodepool", "leases", lease_id)


def write(leases: Leases, lease: Lease, insecure: bool = False) -> str:
    """Write the files of a lease for this user; return the path of ``ssh_config``."""
    path = ssh.write(machines(lease.nodes), directory_of(lease.id), insecure)
    # Files of leases of other clusters, which are not found here, are kept until their end.
    end = time.time() + FOREVER if lease.ends is None else lease.ends
    os.utime(os.path.dirname(path), (end, end))
    with os.scandir(directory_of()) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another command has removed it
                if entry.stat().st_mtime + KEPT < time.time() and leases.get(entry.name) is None:
                    remove(entry.name)
    return path


def remove(lease_id: str) -> None:
    """Remove the files of a lease that has ended."""
    shutil.rmtree(directory_of(lease_id), ignore_errors=True)


def inventory(lease: Lease, directory: str | None = None) -> dict[str, Any]:
    """Return Ansible's inventory with a group for each label.

    Nodes whose data contain templates are not in it.

    :param directory: of ``known_hosts``: the result is for a file, which has another form than the
        output of a program.
    """
    hosts: dict[str, dict[str, Any]] = {}
    groups: dict[str, Any] = {}
    for name, node in names(lease.nodes):
        found = {
            "ansible_host": node.interface_ip,
            "ansible_port": node.connection_port,
            "ansible_user": node.username,
            "ansible_connection": node.connection_type,
            "ansible_python_interpreter": node.python_path or "auto",
            "nodepool_id": node.id,
            "nodepool_label": ",".join(node.type),
            "nodepool_provider": node.provider,
        }
        if any("{" in str(value) for value in found.values()):
            continue  # Ansible would run a template
        hosts[name] = found
        for label in node.type:
            # Ansible would give the host of that name its variables to all hosts of the group, and
            # the other way round.
            group = f"label-{label}" if re.fullmatch(r"n\d+|all|ungrouped|_meta", label) else label
            groups.setdefault(group, {"hosts": []})["hosts"].append(name)
    if directory is None:
        return {"_meta": {"hostvars": hosts}, **groups}
    known = shlex.quote(f"UserKnownHostsFile={ssh.quoted(f'{directory}/known_hosts')}")
    checked = f"-o {known} -o StrictHostKeyChecking=yes"
    return {
        label: {
            "hosts": {name: hosts[name] for name in group["hosts"]},
            "vars": {"ansible_ssh_common_args": checked},
        }
        for label, group in groups.items()
    }
