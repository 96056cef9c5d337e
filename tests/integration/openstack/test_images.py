"""Images go up to a real glance and away again (OST-2.7, BLD-9 and BLD-10)."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.cmd import nodepoolcmd
from tests.conftest import wait_for
from tests.support.builder import BuilderBench
from tests.support.fault_proxy import html, lose_answer, reply
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import PROVIDER, is_call, label, manager, provider, start

pytestmark = pytest.mark.openstack
slow = pytest.mark.slow


def builder_config(
    builders: BuilderBench,
    cloud: OpenStackCloud,
    *images: str,
    formats: dict[str, str] | None = None,
) -> str:
    """A provider per format; ``images`` that are omitted are removed."""
    import yaml
    from openstack.config import loader

    clouds = {name: {**cloud.entry, "image_format": name} for name in formats or ("qcow2",)}
    pathlib.Path(loader.CONFIG_FILES[0]).write_text(yaml.safe_dump({"clouds": clouds}))
    providers = [
        {
            "name": f"cloud-{name}",
            "driver": "openstack",
            "cloud": name,
            "rate": 0,
            "pools": [],
            "diskimages": [
                {"name": image, "meta": {"own": "provider", "number": 7}} for image in images
            ],
        }
        for name in clouds
    ]
    entries = [builders.image("fake-image", metadata={"own": "top", "more": "top"})]
    return builders.config(entries, providers)


@pytest.mark.spec(
    "OST-3.25, BLD-9: metadata of both levels arrive; the upload is removed with its image"
)
@pytest.mark.core
def test_image_metadata_arrive_and_uploads_are_removed(
    builders: BuilderBench, openstack_cloud: OpenStackCloud
) -> None:
    builders.start(builder_config(builders, openstack_cloud, "fake-image"))
    upload = builders.wait_upload(provider="cloud-qcow2", timeout=60)
    (image,) = openstack_cloud.images()
    assert (image.id, image.name) == (upload.external_id, upload.external_name)
    assert (image.status, image.visibility) == ("active", "private")
    assert (image.disk_format, image.container_format) == ("qcow2", "bare")
    properties = {
        **image.properties,
        "owner": image.properties.get("owner_specified.openstack.md5"),
    }
    expected = {
        "own": "provider",
        "more": "top",
        "number": "7",
        "nodepool_build_id": upload.build_id,
        "nodepool_upload_id": upload.id,
        "nodepool_provider_name": "cloud-qcow2",
    }
    assert expected.items() <= properties.items()
    builder_config(builders, openstack_cloud)
    wait_for(lambda: not openstack_cloud.images(), 40, "the image is gone")


@slow
@pytest.mark.spec(
    "OST-3.23: vhd image format, two clouds with different formats each getting the right file"
)
def test_each_cloud_gets_its_image_format(
    builders: BuilderBench, openstack_cloud: OpenStackCloud
) -> None:
    config = builder_config(
        builders, openstack_cloud, "fake-image", formats={"qcow2": "", "vhd": "", "raw": ""}
    )
    builders.start(config)
    for kind in ("qcow2", "vhd", "raw"):
        builders.wait_upload(provider=f"cloud-{kind}", timeout=60)
    assert {image.disk_format for image in openstack_cloud.images()} == {"qcow2", "vhd", "raw"}


@pytest.fixture
def image_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "image.raw"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture
def adapter(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> Iterator[Any]:
    start(bench, openstack_cloud, provider(image_upload_timeout=30))
    return manager(bench).adapter


MARKS = {
    "nodepool_build_id": "0000000001",
    "nodepool_upload_id": "0000000001",
    "nodepool_provider_name": PROVIDER,
}


def upload(adapter: Any, path: pathlib.Path, md5: str | None = None, **meta: Any) -> str:
    data = path.read_bytes()
    return str(
        adapter.uploadImage(
            None,
            "image-1",
            str(path),
            image_format="raw",
            metadata={**meta, **MARKS},
            md5=md5 or hashlib.md5(data, usedforsecurity=False).hexdigest(),
            sha256=hashlib.sha256(data).hexdigest(),
        )
    )


@slow
def test_content_and_listing(
    adapter: Any, openstack_cloud: OpenStackCloud, image_file: pathlib.Path
) -> None:
    image_id = upload(adapter, image_file, min_disk="1", tags=["a", "b"])
    image = openstack_cloud.sdk.image.get_image(image_id)
    assert (image.size, image.min_disk, sorted(image.tags)) == (1 << 20, 1, ["a", "b"])
    assert image.checksum == hashlib.md5(image_file.read_bytes(), usedforsecurity=False).hexdigest()
    assert openstack_cloud.sdk.image.download_image(image).content == image_file.read_bytes()
    (listed,) = [item for item in adapter._listImages() if item["id"] == image_id]
    assert listed["properties"] == MARKS
    assert listed["name"] == "image-1"
    adapter.deleteImage(external_id=image_id)
    assert openstack_cloud.images() == []
    adapter.deleteImage(external_id=image_id)


@slow
@pytest.mark.spec("OST-2.6: images of ours without a READY record are listed by alien-image-list")
def test_alien_images_are_ours_without_a_record(
    builders: BuilderBench, openstack_cloud: OpenStackCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    config = builder_config(builders, openstack_cloud, "fake-image")
    builders.start(config)
    builders.wait_upload(provider="cloud-qcow2", timeout=60)
    create = openstack_cloud.sdk.image.create_image
    # Another Nodepool's, as far as these records show, and one that no Nodepool has brought.
    alien = create(
        name="alien",
        data=b"x",
        disk_format="raw",
        container_format="bare",
        nodepool_build_id="b",
        nodepool_provider_name="elsewhere",
        validate_checksum=False,
    )
    create(
        name="foreign",
        data=b"x",
        disk_format="raw",
        container_format="bare",
        validate_checksum=False,
    )
    capsys.readouterr()
    assert nodepoolcmd.main(["-c", config, "alien-image-list"]) == 0
    rows = [
        line.strip("| ").split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert [row for row in rows if row[0] != "Provider"] == [
        ["cloud-qcow2", "|", "alien", "|", alien.id]
    ]


@slow
@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("PUT /images/{id}/file", html(502)),
        ("PUT /images/{id}/file", lose_answer()),
        ("GET /images/{id}", html(400)),
        ("PUT /images/{id}/file", reply(413, "image quota exceeded", "text/plain")),
    ],
    ids=["gateway", "lost", "html", "quota"],
)
def test_failed_upload_leaves_nothing(
    adapter: Any, openstack_cloud: OpenStackCloud, image_file: pathlib.Path, call: str, fault: Any
) -> None:
    openstack_cloud.image.fail(is_call(call), fault)
    with pytest.raises(Exception, match=r"400|502|Connection|aborted|html|quota|HTTP|Remote"):
        upload(adapter, image_file)
    assert openstack_cloud.images() == []


@slow
def test_damaged_upload_is_deleted(
    adapter: Any, openstack_cloud: OpenStackCloud, image_file: pathlib.Path
) -> None:
    with pytest.raises(exceptions.BuilderError, match="arrived damaged"):
        upload(adapter, image_file, md5="0" * 32)
    assert openstack_cloud.images() == []


@slow
def test_upload_that_takes_too_long_is_deleted(
    adapter: Any, openstack_cloud: OpenStackCloud, image_file: pathlib.Path
) -> None:
    adapter.provider.image_upload_timeout = 2
    saving = reply(200, '{"id": "x", "status": "saving"}', "application/json")
    openstack_cloud.image.fail(is_call("GET /images/{id}"), saving, times=100)
    with pytest.raises(exceptions.ImageCreateException, match="still saving"):
        upload(adapter, image_file)
    assert openstack_cloud.images() == []


@slow
def test_protected_image_is_deleted_only_if_its_upload_failed(
    adapter: Any, openstack_cloud: OpenStackCloud, image_file: pathlib.Path
) -> None:
    image_id = upload(adapter, image_file, protected=True)
    assert openstack_cloud.sdk.image.get_image(image_id).is_protected
    with pytest.raises(exceptions.BuilderError, match="is protected and cannot be deleted"):
        adapter.deleteImage(external_id=image_id)
    # Of an upload that did not come to an end.
    adapter.discardImage(external_id=image_id)
    assert openstack_cloud.images() == []


@slow
def test_shared_image_of_another_project_is_found(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    """An image of another project that shares it with ours is a cloud image like others."""
    from tests.support.openstack.scene import one

    admin = openstack_cloud.admin.image
    image = admin.create_image(
        name="shared-image",
        data=b"x" * 100,
        disk_format="raw",
        container_format="bare",
        visibility="shared",
        validate_checksum=False,
    )
    try:
        project = openstack_cloud.sdk.session.get_project_id()
        admin.add_member(image, member_id=project)
        openstack_cloud.sdk.image.update_member(project, image, status="accepted")
        start(
            bench,
            openstack_cloud,
            provider(
                label(cloud_image="s"), cloud_images=[{"name": "s", "image-name": "shared-image"}]
            ),
        )
        _, node = one(bench)
        assert openstack_cloud.server(node.external_id)["image"]["id"] == image.id
    finally:
        admin.delete_image(image)
