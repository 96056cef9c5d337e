"""Uploads of the drivers gce, azure and ibmvpc: what arrives, what is left when something fails."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from ibm_botocore.credentials import DefaultTokenManager

from nodepool import exceptions
from nodepool.driver.provider import Driver
from nodepool.zk.zookeeper import READY
from tests.conftest import wait_for
from tests.support.builder import BuilderBench
from tests.support.clouds.scene import Azure, CloudScene, Google, Ibm, launcher, opened, scene  # noqa: F401
from tests.support.fault_proxy import cut_off, drop, html, lose_answer
from tests.support.launcher import LauncherBench

BUILD, UPLOAD = "0123456789abcdef0123456789abcdef", "0000000007"
SIZE = 10 << 20


class Uploader:
    """An adapter of a builder, and an image with holes."""

    def __init__(self, scene: CloudScene, tmp: pathlib.Path) -> None:
        from nodepool.config.diskimages import DiskImage
        from nodepool.driver.registry import Drivers

        self.scene = scene
        driver: Any = Drivers.get(scene.driver)
        assert isinstance(driver, Driver)
        options = scene.provider(scene.label(), diskimages=[scene.diskimage()])
        self.config = driver.getProviderConfig(options)
        image = DiskImage("fake-image")
        content: Any = type(
            "Config",
            (),
            {
                "labels": {"small": type("L", (), {"pools": []})()},
                "diskimages": {"fake-image": image},
            },
        )()
        self.config.load(content)
        self.adapter = driver.getAdapter(self.config)
        self.adapter.IMAGE_UPLOAD_SLEEP = 0.05
        self.path = tmp / f"image.{scene.image_format}"
        self.content = bytearray(SIZE)
        self.content[: 1 << 20] = os.urandom(1 << 20)
        self.content[9 << 20 : (9 << 20) + 4096] = os.urandom(4096)
        self.path.write_bytes(self.content)

    def upload(self) -> str:
        metadata = {
            "nodepool_build_id": BUILD,
            "nodepool_upload_id": UPLOAD,
            "nodepool_provider_name": self.scene.name,
        }
        entry = self.config.diskimages["fake-image"]
        return str(
            self.adapter.uploadImage(
                entry, "fake-image-1", str(self.path), self.scene.image_format, metadata
            )
        )

    def check(self, external_id: str) -> None:
        found = self.scene.image_of(external_id)
        assert found is not None and found.rstrip(b"\0") == bytes(self.content).rstrip(b"\0")


@pytest.fixture
def uploader(scene: CloudScene, tmp_path: pathlib.Path) -> Iterator[Uploader]:
    if isinstance(scene, Ibm):
        scene.cloud.make_bucket()
    made = Uploader(scene, tmp_path)
    try:
        yield made
    finally:
        made.adapter.stop()


@pytest.mark.spec(
    "AZU-11: GCE-9: IBM-12: what is uploaded is what arrives; nothing else stays; deletion takes "
    "it away"
)
def test_uploaded_image_arrives_unchanged_and_is_deleted(uploader: Uploader) -> None:
    external_id = uploader.upload()
    uploader.check(external_id)
    left = uploader.scene.leftovers()
    assert len(left) == 1 and left[0].startswith("image")
    (found,) = [each for each in uploader.adapter.listResources() if each.type == "image"]
    metadata = {
        "nodepool_build_id": BUILD,
        "nodepool_upload_id": UPLOAD,
        "nodepool_provider_name": uploader.scene.name,
    }
    assert metadata.items() <= found.metadata.items()
    uploader.adapter.deleteImage(external_id)
    uploader.adapter.deleteImage(external_id)
    assert uploader.scene.leftovers() == []


@pytest.mark.spec("AZU-11: holes are not sent")
def test_holes_are_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for azure in opened(Azure, monkeypatch, tmp_path):
        made = Uploader(azure, tmp_path)
        made.check(made.upload())
        # 1 MiB at the start and 4 KiB in the third piece.
        assert azure.cloud.pages_written == 2
        made.path.write_bytes(b"x" * 1000)
        with pytest.raises(exceptions.ImageCreateException, match="multiples of 512"):
            made.upload()
        made.adapter.stop()


@pytest.mark.spec("issue: uploads survive lost and cut answers")
@pytest.mark.parametrize("what", ["html", "drop", "cut", "lost"])
def test_uploads_survive_lost_answers(
    uploader: Uploader, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.gce.images.PIECE", 1 << 20)
    scene = uploader.scene
    action = {"html": html(502), "drop": drop(), "cut": cut_off(), "lost": lose_answer()}[what]
    data = {"gce": r"PUT /upload", "azure": r"PUT /blob", "ibmvpc": r"PUT /cos/"}[scene.driver]
    fault = scene.proxy.fail(scene.matches(data), action, 2)
    uploader.check(uploader.upload())
    assert fault.used == 2


def test_login_to_object_storage_has_the_deadline_of_its_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for ibm in opened(Ibm, monkeypatch, tmp_path):
        Uploader(ibm, tmp_path).adapter.images.storage()
        assert DefaultTokenManager.get_default_auth_function_timeout() == 60


@pytest.mark.spec(
    "IBM-13: issue: parts that a killed builder has sent are found; those of others stay"
)
def test_parts_of_a_killed_builder_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for ibm in opened(Ibm, monkeypatch, tmp_path):
        ibm.cloud.make_bucket()
        adapter = Uploader(ibm, tmp_path).adapter
        storage: Any = adapter.images.storage()
        own, others = (
            f"npimages_{ibm.name}/npimage{BUILD}-{UPLOAD}.qcow2",
            ["backup", "npimages_other/npimage-1.qcow2"],
        )
        for key in (own, *others):
            storage.create_multipart_upload(Bucket=ibm.cloud.bucket, Key=key)
        assert len(ibm.leftovers()) == 3
        (found,) = [
            each
            for each in adapter.listResources()
            if each.metadata.get("nodepool_provider_name") == ibm.name
        ]
        assert found.type == "parts"
        assert (
            found.metadata["nodepool_build_id"] == BUILD
            and found.metadata["nodepool_upload_id"] == UPLOAD
        )
        adapter.deleteResource(found)
        adapter.deleteResource(found)
        assert sorted(ibm.leftovers()) == [f"parts {key}" for key in others]
        adapter.stop()


@pytest.mark.spec(
    "AZU-11: IBM-12: a failed import is a failed upload, with the cloud's reason, and leaves "
    "nothing"
)
def test_failed_import_reports_the_reason_and_leaves_nothing(uploader: Uploader) -> None:
    uploader.scene.fail_import()
    with pytest.raises(Exception, match=r"damaged|no VHD|no partition table"):
        uploader.upload()
    assert uploader.scene.leftovers() == []


@pytest.mark.spec(
    "AZU-15.3: IBM-16.4: the builder uploads, the record has the diskimage's username, and a node "
    "is made of it"
)
def test_builder_and_node(
    scene: CloudScene, builders: BuilderBench, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(scene, Ibm):
        scene.cloud.make_bucket()
    monkeypatch.setattr("nodepool.driver.common.adapter.MachineAdapter.IMAGE_UPLOAD_SLEEP", 0.1)
    more = {} if isinstance(scene, Ibm) else {"tags": {"provider_metadata": "provider"}}
    label = scene.label(image="fake-image")
    provider = scene.provider(label, diskimages=[scene.diskimage(**more)])
    image = builders.image(
        username="zuul",
        **{"env-vars": {"CREATE_SIZE": str(1 << 20)}},
        metadata={"diskimage_metadata": "diskimage"},
    )
    config = builders.config([image], [provider], labels=[{"name": "small"}])
    builders.start(config)
    (upload,) = wait_for(lambda: builders.uploads(provider=scene.name), 60, "an upload")
    assert (upload.state, upload.username) == (READY, "zuul")
    assert scene.image_of(upload.external_id) is not None
    if isinstance(scene, Google):
        labels = scene.cloud.images[upload.external_id]["labels"]
        assert (
            labels["provider_metadata"] == "provider"
            and labels["diskimage_metadata"] == "diskimage"
        )
    if isinstance(scene, Azure):
        tags = scene.cloud.things["images", upload.external_id]["tags"]
        assert tags["provider_metadata"] == "provider" and tags["diskimage_metadata"] == "diskimage"
    pool = launcher(bench, config, 600)
    pool.start()
    bench.wait_ready(pool)
    _, (node,) = bench.fulfilled("small")
    assert (node.state, node.connection_type, node.shell_type, node.username) == (
        "ready",
        "ssh",
        None,
        "zuul",
    )
    pool.getProviderManager(scene.name).cleanupLeakedResources()
    pool.getProviderManager(scene.name).cleanupLeakedResources()
    assert scene.image_of(upload.external_id) is not None, "an image in use is no leak"
