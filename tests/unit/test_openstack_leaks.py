"""What the search for leaks takes for leaked in an OpenStack, and what it leaves alone."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.builder import upload_journal
from nodepool.driver.openstack.adapter import OpenStackAdapter
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.transport import Record
from nodepool.driver.statemachine import leaks

LOG = logging.getLogger("nodepool.test")
KEY = ("disk", "build-1", "p", "0000000001")
MARKS = {"nodepool_build_id": "build-1", "nodepool_upload_id": "0000000001", "nodepool_provider_name": "p"}

#: As nova makes them of a server; the last one of a server whose disk is a volume.
SNAPSHOTS = [
    {"image_type": "snapshot"}, {"image_type": "backup", "instance_uuid": "u"}, {"base_image_ref": "i"},
    {"base_image_ref": "", "bdm_v2": "True", "block_device_mapping": "[]"},
]  # fmt: skip


def image(image_id: str, **more: Any) -> Record:
    """As ``CloudApi.list_images`` has it."""
    return Record({"id": image_id, "name": image_id, "protected": False, **MARKS, **more, "properties": MARKS})


class Cloud:
    watches = True

    def __init__(self, *images: Record) -> None:
        self.images = list(images)
        self.deleted: list[str] = []

    def project(self) -> str:
        return "project"

    def list_images(self, **_filters: str) -> list[Record]:
        return self.images


def sweep(cloud: Cloud, resources: Any, **records: Any) -> None:
    """Two runs of the search for leaks."""
    zk = SimpleNamespace(
        getProviderNodes=lambda _name: list(records.values()), getProviderUploads=lambda _name: {}, getNode=records.get)
    provider = SimpleNamespace(
        provider=SimpleNamespace(name="p"), log=LOG, _zk=zk, possibly_leaked_nodes={}, possibly_leaked_uploads={},
        adapter=SimpleNamespace(listResources=resources, deleteResource=lambda item: cloud.deleted.append(item.id)))
    for _ in range(2):
        leaks.cleanup(provider)  # type: ignore[arg-type]


@pytest.mark.parametrize("marks", SNAPSHOTS, ids=lambda marks: ", ".join(marks))
def test_a_snapshot_of_a_node_is_no_leaked_image(marks: dict[str, str]) -> None:
    """It has the marks of the node's image, whose record vanishes some day."""
    cloud = Cloud(image("leaked"), image("snapshot", **marks))
    config: Any = SimpleNamespace(name="p", diskimages={"disk": 1}, pools={})
    cleaner = LeakCleaner(SimpleNamespace(_api=cloud), config, LOG)
    sweep(cloud, lambda: list(cleaner.resources()))
    assert cloud.deleted == ["leaked"]


@pytest.mark.parametrize("marks", SNAPSHOTS, ids=lambda marks: ", ".join(marks))
def test_a_snapshot_of_a_node_is_nothing_that_an_upload_has_left(marks: dict[str, str], tmp_path: pathlib.Path) -> None:
    deleted: list[str] = []
    images = [image("left"), image("snapshot", **marks), SimpleNamespace(id="object", properties={**MARKS, **marks})]
    manager = SimpleNamespace(
        listImages=lambda: images, deleteImage=lambda _name, external_id: deleted.append(external_id))
    builder: Any = SimpleNamespace(
        session_usable=SimpleNamespace(is_set=lambda: True), upload_claims=SimpleNamespace(running=set), config=None,
        managers=SimpleNamespace(use=lambda *_args: contextlib.nullcontext(manager)), owns_images_dir=True,
        zk=SimpleNamespace(getImageUpload=lambda *_key: None, kazoo_client=SimpleNamespace(get_children=lambda _path: [])))
    lanes: Any = SimpleNamespace(submit=lambda _provider, _key, job: job())
    upload_journal.begin(str(tmp_path), KEY, "disk-1")
    upload_journal.StraySweeper(builder, lanes).sweep(SimpleNamespace(images_dir=str(tmp_path), provider_managers={"p": manager}))
    assert deleted == ["left"]
    assert upload_journal.notes(str(tmp_path)) == []


NODE_MARKS = {"nodepool_provider_name": "p", "nodepool_node_id": "0000000007"}


class Adapter(OpenStackAdapter):
    """The adapter with a cloud that is a few lists."""

    def __init__(self, *servers: str, pools: bool = True) -> None:
        self.log = LOG
        self.provider = SimpleNamespace(
            pools={"main": SimpleNamespace(auto_floating_ip=pools, labels={})}, diskimages={}, clean_floating_ips=False,
            port_cleanup_interval=0)
        self._attached, self._attached_lock = {}, threading.Lock()
        self._servers = {key: {"id": key, "metadata": NODE_MARKS, "addresses": {}} for key in servers}
        self._floating: dict[str, dict[str, Any]] = {}
        self._client = self
        self.watches = True
        self.leaks = LeakCleaner(self, self.provider, LOG)

    def floating_ip(self, key: str, server: str | None = None, shown: bool = False, marks: dict[str, str] | None = None) -> None:
        words = " ".join(f"{name}={value}" for name, value in (marks or NODE_MARKS).items())
        self._floating[key] = {"id": key, "floating_ip_address": f"at-{key}", "description": f"nodepool: {words}",
                               "port_id": server and f"port-of-{server}"}
        if server and shown:
            self._servers[server]["addresses"] = {"net": [{"addr": f"at-{key}", "version": 4, "OS-EXT-IPS:type": "floating"}]}

    # -- of the cloud

    def _liveServers(self) -> list[Any]:
        return list(self._servers.values())

    def _has_floating_ips(self) -> bool:
        return True

    def get_server_by_id(self, server_id: str) -> Any:
        return self._servers.get(server_id)

    def list_floating_ips(self) -> list[Any]:
        return list(self._floating.values())

    def ports_of(self, server_id: str) -> list[Any]:
        return [{"id": f"port-of-{server_id}"}]

    def delete_server(self, server_id: str) -> bool:
        for address in self._floating.values():
            if address["port_id"] == f"port-of-{server_id}":
                address["port_id"] = None
        return self._servers.pop(server_id, None) is not None

    def delete_floating_ip(self, floating_ip_id: str, retry: int = 0) -> bool:
        return self._floating.pop(floating_ip_id, None) is not None


def find_leaks(adapter: Adapter, state: str, external_id: str | None) -> None:
    """Two runs of the search for leaks, while the node has this record."""
    node = SimpleNamespace(id=NODE_MARKS["nodepool_node_id"], state=state, external_id=external_id)
    provider: Any = SimpleNamespace(
        provider=SimpleNamespace(name="p"), log=LOG, adapter=adapter, possibly_leaked_nodes={}, possibly_leaked_uploads={},
        _zk=SimpleNamespace(getProviderNodes=lambda _name: [node], getProviderUploads=lambda _name: {}, getNode=lambda _id: node))
    for _ in range(2):
        leaks.cleanup(provider)


@pytest.mark.parametrize("state, external_id, left", [
    ("ready", "b", {"b"}), ("in-use", "b", {"b"}), ("building", "b", {"a", "b"}), ("ready", None, {"a", "b"})])
def test_a_second_server_of_a_node_is_leaked(state: str, external_id: str | None, left: set[str]) -> None:
    """A creation without an answer was taken for failed; the next attempt has made the node's server."""
    adapter = Adapter("a", "b")
    find_leaks(adapter, state, external_id)
    assert set(adapter._servers) == left


def test_the_second_server_of_a_node_leaves_its_floating_ips_alone() -> None:
    """They have the marks of the same node."""
    adapter = Adapter("a", "b")
    for key, server in (("of-a", "a"), ("of-b", "b"), ("loose", None)):
        adapter.floating_ip(key, server)
    find_leaks(adapter, "ready", "b")
    assert set(adapter._servers) == {"b"}
    assert set(adapter._floating) == {"of-b", "loose"}


def test_floating_ips_go_with_the_server() -> None:
    """Also those of an earlier launcher that the server does not show yet, and those that somebody has taken from it."""
    adapter = Adapter("b")
    adapter.floating_ip("shown", "b", shown=True)
    adapter.floating_ip("not shown", "b")
    adapter.floating_ip("loose")
    adapter.floating_ip("of another", marks={**NODE_MARKS, "nodepool_node_id": "0000000008"})
    adapter._deleteFloatingIpsOf("b")
    assert set(adapter._floating) == {"of another"}
