"""What the search for leaks takes for leaked in an OpenStack, and what it leaves alone."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.builder import upload_journal
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
        managers=SimpleNamespace(use=lambda *_args: contextlib.nullcontext(manager)),
        zk=SimpleNamespace(getImageUpload=lambda *_key: None))
    lanes: Any = SimpleNamespace(submit=lambda _provider, _key, job: job())
    upload_journal.begin(str(tmp_path), KEY, "disk-1")
    upload_journal.StraySweeper(builder, lanes).sweep(SimpleNamespace(images_dir=str(tmp_path), provider_managers={"p": manager}))
    assert deleted == ["left"]
    assert upload_journal.notes(str(tmp_path)) == []
