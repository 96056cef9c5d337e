"""The node manager is a separate component: other parts import only its client, and it imports
only the common base.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.contract.test_import_graph import graph

NODE_MANAGER = "nodepool.nodemanager"
CLIENT = f"{NODE_MANAGER}.client"
#: The node manager's programs.
PROGRAMS = {"nodepool.cmd.nm", "nodepool.cmd.nodemanager"}
#: What the node manager and its client may import of the rest of the package.
COMMON = ("base", "process", "logconfig", "exceptions", "texts", "version")
#: Module outside the node manager -> modules inside, besides the client, that it imports. May only
#: become shorter.
INWARD = {
    # ``nodepool dev`` runs a node manager on this machine, and therefore has it installed.
    "nodepool.lab.dev.files": {"nodepool.nodemanager.rootfs.ssh_files"}
}
#: Module of the node manager -> modules of other parts that it imports, besides the common ones.
#: May only become shorter.
OUTWARD = {
    # The optional source ``zookeeper`` uses the ZooKeeper client of launchers.
    "nodepool.nodemanager.sources.zookeeper": {
        "nodepool.config.zookeeper",
        "nodepool.zk.connection.client",
        "nodepool.zk.connection.reply",
    }
}
#: Module of the client -> modules of the node manager that it imports. May only become shorter.
CLIENT_INWARD = {
    # Checks the configuration of a node manager that this launcher pushes to backing nodes, and
    # therefore has installed.
    "nodepool.nodemanager.client.daemon": {"nodepool.nodemanager.config"}
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def collected(pairs: Iterator[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, other in pairs:
        found.setdefault(name, set()).add(other)
    return found


def inside(name: str) -> bool:
    """Whether a module belongs to the daemon, which a launcher can do without."""
    return within(name, NODE_MANAGER) and name != NODE_MANAGER and not within(name, CLIENT)


def imports() -> Iterator[tuple[str, str]]:
    for name, found in graph().items():
        for other in found:
            yield name, other


def test_other_parts_import_only_the_client() -> None:
    outside = (
        (name, other)
        for name, other in imports()
        if not within(name, NODE_MANAGER) and name not in PROGRAMS
    )
    assert collected((name, other) for name, other in outside if inside(other)) == INWARD


def test_client_imports_nothing_of_the_daemon() -> None:
    assert (
        collected(
            (name, other) for name, other in imports() if within(name, CLIENT) and inside(other)
        )
        == CLIENT_INWARD
    )


def test_node_manager_imports_only_common_parts() -> None:
    allowed = [NODE_MANAGER, *(f"nodepool.{part}" for part in COMMON)]
    outward = (
        (name, other)
        for name, other in imports()
        if within(name, NODE_MANAGER) and not any(within(other, package) for package in allowed)
    )
    assert collected(outward) == OUTWARD


def test_only_sources_import_the_zookeeper_source() -> None:
    users = {name for name, other in imports() if other in OUTWARD}
    assert users == {"nodepool.nodemanager.sources.sources"}
