"""What the search for leaks takes for leaked in an OpenStack, and what it keeps."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.builder.upload import journal as upload_journal
from nodepool.driver.fake.adapter import Dummy, FakeAdapter, FakeOpenStackCloud
from nodepool.driver.statemachine.leaks import LeakSearch
from nodepool.zk.cluster import View
from tests.support.histories import SoundHistory
from tests.support.openstack.fake import LOG, advance

Over = Callable[[FakeOpenStackCloud], FakeAdapter]
KEY = ("disk", "build-1", "p", "0000000001")
MARKS = {
    "nodepool_build_id": "build-1",
    "nodepool_upload_id": "0000000001",
    "nodepool_provider_name": "p",
}

#: As nova makes them of a server; the last one of a server whose disk is a volume.
SNAPSHOTS = [
    {"image_type": "snapshot"},
    {"image_type": "backup", "instance_uuid": "u"},
    {"base_image_ref": "i"},
    {"base_image_ref": "", "bdm_v2": "True", "block_device_mapping": "[]"},
]


def image(image_id: str, **more: Any) -> dict[str, Any]:
    """As ``CloudApi.list_images`` has it."""
    return {
        "id": image_id,
        "name": image_id,
        "protected": False,
        **MARKS,
        **more,
        "properties": MARKS,
    }


def find_leaks(adapter: Any, node: Any = None, history: SoundHistory | None = None) -> None:
    """Two runs of the search for leaks, while there is this record, or none."""
    zk = SimpleNamespace(
        getProviderNodes=lambda _name: [node] if node else [],
        getProviderUploads=lambda _name: {},
        getNode=lambda _id: node,
        cluster=history or SoundHistory(),
    )
    search = LeakSearch("p", adapter, LOG)
    for _ in range(2):
        search.run(zk)


@pytest.mark.spec("LAU-13.3: the tree may be another one after a new connection")
def test_nothing_is_deleted_if_the_connection_was_lost_since_the_records_were_read(
    over: Over,
) -> None:
    class Lost(SoundHistory):
        def is_current(self, view: View) -> bool:
            return False

    cloud = Cloud("leaked")
    find_leaks(over(cloud), history=Lost())
    assert cloud.servers == {"leaked"}
    find_leaks(over(cloud))
    assert cloud.servers == set()


@pytest.mark.parametrize("marks", SNAPSHOTS, ids=lambda marks: ", ".join(marks))
def test_a_snapshot_of_a_node_is_no_leaked_image(over: Over, marks: dict[str, str]) -> None:
    """It has the marks of the node's image, whose record vanishes some day."""
    images = [
        Dummy(Dummy.IMAGE, **image("leaked")),
        Dummy(Dummy.IMAGE, **image("snapshot", **marks)),
    ]
    adapter = over(FakeOpenStackCloud(images))
    find_leaks(adapter)
    assert [left["id"] for left in adapter._listImages()] == ["snapshot"]


@pytest.mark.parametrize("marks", SNAPSHOTS, ids=lambda marks: ", ".join(marks))
def test_a_snapshot_of_a_node_is_nothing_that_an_upload_has_left(
    marks: dict[str, str], tmp_path: pathlib.Path
) -> None:
    deleted: list[str] = []
    images = [
        image("left"),
        image("snapshot", **marks),
        SimpleNamespace(id="object", properties={**MARKS, **marks}),
    ]
    manager = SimpleNamespace(
        listImages=lambda: images,
        discardImage=lambda _name, external_id: deleted.append(external_id),
        removeUnfinishedUpload=lambda _name, _since: None,
    )
    kazoo = SimpleNamespace(
        get_children_async=lambda _path: SimpleNamespace(get=lambda timeout: [])
    )
    builder: Any = SimpleNamespace(
        session_usable=SimpleNamespace(is_set=lambda: True),
        upload_claims=SimpleNamespace(running=set),
        config=None,
        managers=SimpleNamespace(use=lambda *_args: contextlib.nullcontext(manager)),
        images_lock=True,
        zk=SimpleNamespace(getImageUpload=lambda *_key: None, kazoo_client=kazoo),
    )
    lanes: Any = SimpleNamespace(submit=lambda _provider, _key, job: job())
    upload_journal.begin(str(tmp_path), KEY, "disk-1")
    upload_journal.CloudLeftoverSweeper(builder, lanes).sweep(
        SimpleNamespace(images_dir=str(tmp_path), provider_managers={"p": manager})
    )
    assert deleted == ["left"]
    assert upload_journal.notes(str(tmp_path)) == []


NODE_MARKS = {"nodepool_provider_name": "p", "nodepool_node_id": "0000000007"}


class Cloud(FakeOpenStackCloud):
    """Servers of one node, with floating IPs."""

    def __init__(self, *servers: str) -> None:
        super().__init__()
        for key in servers:
            self._server_list.append(
                Dummy(
                    Dummy.INSTANCE,
                    id=key,
                    name=key,
                    status="ACTIVE",
                    metadata=NODE_MARKS,
                    addresses={},
                )
            )

    @property
    def servers(self) -> set[str]:
        return {server.id for server in self._server_list}

    @property
    def addresses(self) -> set[str]:
        return {address["id"] for address in self._floating_ip_list}

    def floating_ip(
        self,
        key: str,
        server: str | None = None,
        shown: bool = False,
        marks: dict[str, str] | None = None,
    ) -> None:
        words = " ".join(f"{name}={value}" for name, value in (marks or NODE_MARKS).items())
        self._floating_ip_list.append(
            {
                "id": key,
                "floating_ip_address": f"at-{key}",
                "description": f"nodepool: {words}",
                "port_id": server and f"port-of-{server}",
            }
        )
        if server and shown:
            self._server_list.find(server)["addresses"] = {  # type: ignore[index]
                "net": [{"addr": f"at-{key}", "version": 4, "OS-EXT-IPS:type": "floating"}]
            }

    def _has_floating_ips(self) -> bool:
        return True

    def list_ports(self, filters: dict[str, Any] | None = None) -> list[Any]:
        return [{"id": f"port-of-{(filters or {}).get('device_id')}"}]

    def delete_server(self, name_or_id: str, **kwargs: Any) -> bool:
        for address in self._floating_ip_list:
            if address["port_id"] == f"port-of-{name_or_id}":
                address["port_id"] = None
        return super().delete_server(name_or_id, **kwargs)

    def delete_floating_ip(self, floating_ip_id: str, **kwargs: Any) -> bool:
        self._floating_ip_list = [
            address for address in self._floating_ip_list if address["id"] != floating_ip_id
        ]
        return True


@pytest.fixture
def floating(fake_provider: Any) -> None:
    """Only what nodepool knows to be its own is cleaned up."""
    fake_provider.clean_floating_ips, fake_provider.port_cleanup_interval = False, 0
    fake_provider.pools["main"].auto_floating_ip = True


@pytest.mark.parametrize(
    "state, external_id, left",
    [
        ("ready", "b", {"b"}),
        ("in-use", "b", {"b"}),
        ("building", "b", {"a", "b"}),
        ("ready", None, {"a", "b"}),
    ],
)
def test_a_second_server_of_a_node_is_leaked(
    over: Over, floating: None, state: str, external_id: str | None, left: set[str]
) -> None:
    """A creation without an answer was taken for failed; the next attempt has made the node's
    server.
    """
    cloud = Cloud("a", "b")
    find_leaks(over(cloud), record(state, external_id))
    assert cloud.servers == left


def record(state: str, external_id: str | None) -> Any:
    return SimpleNamespace(id=NODE_MARKS["nodepool_node_id"], state=state, external_id=external_id)


def test_the_second_server_of_a_node_leaves_its_floating_ips_alone(
    over: Over, floating: None
) -> None:
    """They have the marks of the same node."""
    cloud = Cloud("a", "b")
    for key, server in (("of-a", "a"), ("of-b", "b"), ("loose", None)):
        cloud.floating_ip(key, server)
    find_leaks(over(cloud), record("ready", "b"))
    assert cloud.servers == {"b"}
    assert cloud.addresses == {"of-b", "loose"}


def test_floating_ips_go_with_the_server(over: Over, floating: None) -> None:
    """Also those of an earlier launcher that the server does not show yet, and those that
    somebody has taken from it.
    """
    cloud = Cloud("b")
    cloud.floating_ip("shown", "b", shown=True)
    cloud.floating_ip("not shown", "b")
    cloud.floating_ip("loose")
    cloud.floating_ip("of another", marks={**NODE_MARKS, "nodepool_node_id": "0000000008"})
    advance(over(cloud).getDeleteStateMachine("b", LOG))
    assert cloud.addresses == {"of another"}
    assert cloud.servers == set()
