"""Each part of the package is a separate wheel: which parts and which packages it may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache

from nodepool.base import optional
from tests import REPOSITORY
from tests.conftest import load_tool
from tests.unit.contract.test_import_graph import edges_of, graph

WHEELS = load_tool("package").WHEELS
wheel_of = load_tool("package").wheel_of
#: Wheel -> those that it requires; their modules may be imported anywhere in its own.
REQUIRED = {
    "nodepool": (),
    "nodepool-nodemanager": ("nodepool",),
    "nodepool-adapters": ("nodepool",),
    "nodepool-lab": ("nodepool",),
}
#: Module -> modules of wheels that may be missing. It imports them in functions, after
#: `optional.require`, or runs with them only. May only become shorter.
LATE = {
    "nodepool.cmd.commands.advise": {
        f"nodepool.lab.whatif.{name}" for name in ("advise", "edit", "replay", "report")
    },
    "nodepool.cmd.commands.agents": {"nodepool.adapters.mcp", "nodepool.client"},
    "nodepool.cmd.commands.dev": {"nodepool.lab.dev.files", "nodepool.lab.dev.installation"},
    "nodepool.cmd.commands.simulate": {
        f"nodepool.lab.whatif.{name}" for name in ("assumptions", "demand", "replay", "report")
    },
    # ``nodepool dev`` runs a node manager on this machine.
    "nodepool.lab.dev.files": {"nodepool.nodemanager.rootfs.ssh_files"},
    "nodepool.nodemanager.client.daemon": {"nodepool.nodemanager.config"},
}
#: Package of others -> folders and modules below ``nodepool`` that import it.
PLACES = {
    "aiohttp": {"web"},
    "anyio": {"adapters"},
    "azure": {"driver.azure"},
    "boto3": {"driver.aws"},
    "botocore": {"driver.aws"},
    "buildbot": {"adapters"},
    "cachetools": {"driver.aws", "driver.openshift", "driver.openstack"},
    "cryptography": {"lab.dev", "nodemanager.rootfs", "nodemanager.sources", "zk.connection"},
    "google": {"driver.gce"},
    "greenlet": {"lab.simulation"},
    "ibm_boto3": {"driver.ibmvpc"},
    "ibm_botocore": {"driver.ibmvpc"},
    "ibm_cloud_sdk_core": {"driver.ibmvpc"},
    "inotify_simple": {"base"},
    "jwt": {"access", "adapters.github", "nodemanager.sources"},
    "keystoneauth1": {"driver.openstack"},
    "kubernetes": {"driver.kubernetes"},
    "lxml": {"nodemanager.sources"},
    "mcp": {"adapters"},
    "msgspec": {"web"},
    "objgraph": {"process"},
    "openstack": {"driver.fake", "driver.openstack"},
    "opentelemetry": {"metrics"},
    "paramiko": {"nodescan"},
    "prettytable": {"status"},
    "prometheus_client": {"adapters.runners", "metrics"},
    "requests": {"adapters", "answers", "cloud", "driver.azure", "driver.gce", "driver.openstack"},
    "rich": {"cmd"},
    "signxml": {"nodemanager.sources"},
    "statsd": {"metrics"},
    "twisted": {"adapters"},
    "urllib3": {"answers", "driver.kubernetes"},
    "yappi": {"process"},
}
#: ZooKeeper's client, and the two libraries of configurations, are part of every part.
EVERYWHERE = {"kazoo", "voluptuous", "yaml"}


def path_of(module: str) -> str:
    path = module.replace(".", "/")
    file = f"{path}.py"
    return file if (REPOSITORY / file).exists() else f"{path}/__init__.py"


def test_wheels_are_known_to_the_message_about_missing_ones() -> None:
    assert optional.WHEELS.keys() == WHEELS.keys() == REQUIRED.keys() - {"nodepool"}
    for wheel, module in optional.WHEELS.items():
        assert wheel_of(path_of(f"nodepool.{module}")) == wheel


def test_wheels_import_only_what_they_require() -> None:
    found: dict[str, set[str]] = {}
    for name, imported in graph().items():
        wheel = wheel_of(path_of(name))
        for other in imported:
            if wheel_of(path_of(other)) not in (wheel, *REQUIRED[wheel]):
                found.setdefault(name, set()).add(other)
    assert found == LATE


def test_what_may_be_missing_is_imported_in_functions() -> None:
    for name, modules in LATE.items():
        tree = ast.parse((REPOSITORY / path_of(name)).read_text())
        if wheel_of(path_of(name)) == "nodepool":
            for node in ast.walk(tree):
                # What only the checker of types reads.
                if isinstance(node, ast.FunctionDef) or (
                    isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
                ):
                    node.body = [ast.Pass()]
            assert not edges_of(name, ast.unparse(tree), modules), name


def _packages(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


@cache
def _places() -> dict[str, set[str]]:
    """Return package of others -> modules below ``nodepool`` that import it."""
    found: dict[str, set[str]] = {}
    for name in graph():
        for package in _packages((REPOSITORY / path_of(name)).read_text()):
            if package not in {"nodepool", *EVERYWHERE, *sys.stdlib_module_names}:
                found.setdefault(package, set()).add(name.removeprefix("nodepool."))
    return found


def test_packages_of_others_are_imported_where_they_belong() -> None:
    assert _places().keys() == PLACES.keys()
    for package, modules in _places().items():
        folders = PLACES[package]
        outside = {
            name
            for name in modules
            if not any(f"{name}.".startswith(f"{folder}.") for folder in folders)
        }
        assert not outside, f"{package} is not for {outside}"
        for folder in folders:
            assert any(f"{name}.".startswith(f"{folder}.") for name in modules), (package, folder)
