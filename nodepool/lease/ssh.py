"""SSH for the nodes of a lease: configuration, known hosts, Ansible inventory."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

from nodepool.base import unix_socket
from nodepool.base.files import replace_file
from nodepool.lease.record import Lease
from nodepool.zk.records import Node

#: What may stand in files of ssh without quotes: addresses and names of users come from clouds and records.
_PLAIN = re.compile(r"[A-Za-z0-9_.:%@\-]+\Z")
#: Bytes of the path of a Unix socket; ssh adds 17 to it while it connects.
LONGEST_SOCKET = unix_socket.LONGEST - 17
_KEY = re.compile(r"[a-z0-9@.\-]+ [A-Za-z0-9+/=]+\Z")


def names(nodes: Sequence[Node]) -> list[tuple[str, Node]]:
    """Return the nodes with their names ``n1``, ``n2`` and so on, by id."""
    return [(f"n{number}", node) for number, node in enumerate(sorted(nodes, key=lambda node: node.id or ""), 1)]


def unreachable(node: Node) -> str | None:
    """Return why ssh cannot reach a node; None: it can."""
    if node.connection_type not in (None, "ssh", "network_cli"):
        return f"node {node.id} is used by {node.connection_type}, not by SSH"
    if not node.interface_ip or not _PLAIN.match(node.interface_ip) or not _PLAIN.match(node.username or "-"):
        return f"node {node.id} has no usable address or user name"
    if not isinstance(node.connection_port, int):
        return f"node {node.id} has no SSH port"
    return None


def known_hosts(nodes: Sequence[Node]) -> str:
    """Return the host keys in the records, which the launcher has read."""
    lines = []
    for _name, node in names(nodes):
        if unreachable(node) is None:
            place = node.interface_ip if node.connection_port == 22 else f"[{node.interface_ip}]:{node.connection_port}"
            lines += [f"{place} {key}" for key in node.host_keys if isinstance(key, str) and _KEY.match(key)]
    return "".join(f"{line}\n" for line in lines)


def config(nodes: Sequence[Node], directory: str, insecure: bool = False) -> str:
    """Return the configuration: one master connection for each node is shared by all sessions.

    :param directory: of ``known_hosts`` and of the sockets.
    :param insecure: also connect to nodes without host keys.
    """
    parts = []
    for name, node in names(nodes):
        if unreachable(node) is not None:
            continue
        checked = "no" if insecure and not node.host_keys else "yes"
        user = f"    User {node.username}\n" if node.username else ""
        parts.append(
            f"Host {name} np{node.id}\n    HostName {node.interface_ip}\n    Port {node.connection_port}\n{user}"
            f"    UserKnownHostsFile {_quoted(f'{directory}/known_hosts')}\n    StrictHostKeyChecking {checked}\n"
            f"{_shared_connection(f'{directory}/{name}.sock')}"
        )
    return "\n".join(parts)


def _shared_connection(path: str) -> str:
    """Return the options for a connection that later sessions share, if its path is valid."""
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        return ""
    return f"    ControlMaster auto\n    ControlPath {_quoted(path)}\n    ControlPersist 60\n"


def _quoted(path: str) -> str:
    return f'"{path}"'


def directory_of(lease_id: str) -> str:
    """Return the directory of the files of a lease, which exists then."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = pathlib.Path(base, "nodepool", "leases", lease_id)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(directory)


def write(lease: Lease, directory: str, insecure: bool = False) -> str:
    """Write ``known_hosts`` and ``ssh_config``; return the path of the latter."""
    for name, text in (("known_hosts", known_hosts(lease.nodes)), ("ssh_config", config(lease.nodes, directory, insecure))):
        replace_file(os.path.join(directory, name), text.encode())
    return os.path.join(directory, "ssh_config")


def inventory(lease: Lease, directory: str | None = None) -> dict[str, Any]:
    """Return Ansible's inventory with a group for each label.

    :param directory: of ``known_hosts``: the result is for a file, which has another form than the output of a program.
    """
    hosts: dict[str, dict[str, Any]] = {}
    groups: dict[str, Any] = {}
    for name, node in names(lease.nodes):
        hosts[name] = {
            "ansible_host": node.interface_ip, "ansible_port": node.connection_port, "ansible_user": node.username,
            "ansible_connection": node.connection_type, "ansible_python_interpreter": node.python_path or "auto",
            "nodepool_id": node.id, "nodepool_label": ",".join(node.type), "nodepool_provider": node.provider,
        }  # fmt: skip
        for label in node.type:
            groups.setdefault(label, {"hosts": []})["hosts"].append(name)
    if directory is None:
        return {"_meta": {"hostvars": hosts}, **groups}
    checked = f"-o UserKnownHostsFile={shlex.quote(f'{directory}/known_hosts')} -o StrictHostKeyChecking=yes"
    return {
        label: {"hosts": {name: hosts[name] for name in group["hosts"]}, "vars": {"ansible_ssh_common_args": checked}}
        for label, group in groups.items()
    }
