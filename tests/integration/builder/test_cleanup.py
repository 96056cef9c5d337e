"""What the cleanup worker removes, and when (BLD-10 to BLD-12, BLD-14, BLD-15, BLD-21)."""

from __future__ import annotations

import logging
import math
import pathlib
import threading
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionClosedError, ConnectionLoss, SessionExpiredError

from nodepool.base.problems import image_problems
from nodepool.builder.cleanup.records import RecordCleaner
from nodepool.builder.provider_queues import ProviderQueues
from nodepool.builder.retention import RemovalPlan, Snapshot
from nodepool.zk import paths
from nodepool.zk.facade.images import ImageMethods
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.mirror.progress import BuildProgress, UploadFailure
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    READY,
    UPLOADING,
    ImageBuild,
    ImageUpload,
)
from tests.conftest import wait_for
from tests.support.builder import BuilderBench
from tests.support.deadline import limit
from tests.support.launcher import StatsdReceiver
from tests.support.openstack.balky_cloud import DRIVERS, BalkyCloud

IMAGE = "fake-image"


def config(
    builders: BuilderBench,
    providers: list[dict[str, Any]],
    images: list[dict[str, Any]] | None = None,
    name: str = "nodepool.yaml",
    **top: Any,
) -> str:
    return builders.config(
        [builders.image()] if images is None else images,
        providers,
        name,
        **{"drivers-path": [DRIVERS], **top},
    )


def store_build(
    builders: BuilderBench,
    image: str = IMAGE,
    state: str = READY,
    age: float = 0.0,
    files: bool = True,
    build_id: str | None = None,
) -> str:
    """A build that somebody made: record and files; returns its id."""
    build = ImageBuild()
    build.state, build.formats, build.builder, build.builder_id = state, ["qcow2"], "host", "id"
    assert build.state_time is not None
    build.state_time -= age
    build_id = build_id or uuid.uuid4().hex
    builders.zk.kazoo_client.ensure_path(f"/nodepool/images/{image}/builds")
    builders.zk.storeBuild(image, build, build_id)
    if files:
        store_files(builders, image, build_id)
    return build_id


def store_files(builders: BuilderBench, image: str, build_id: str) -> None:
    base = builders.images_dir / f"{image}-{build_id}"
    for extension in ("qcow2", "qcow2.md5", "qcow2.sha256"):
        base.with_name(f"{base.name}.{extension}").write_text("x")
    base.with_name(f"{base.name}.d").mkdir()
    (base.with_name(f"{base.name}.d") / "manifest").write_text("x")


def store_upload(
    builders: BuilderBench,
    build_id: str,
    provider: str,
    state: str = READY,
    image: str = IMAGE,
    external_id: str | None = "there",
    age: float = 0.0,
) -> str:
    upload = ImageUpload()
    upload.state, upload.external_id, upload.external_name = (
        state,
        external_id,
        external_id and f"name-{external_id}",
    )
    upload.format = "qcow2"
    assert upload.state_time is not None
    upload.state_time -= age
    return str(builders.zk.storeImageUpload(image, build_id, provider, upload))


def paused(image: str = IMAGE) -> dict[str, Any]:
    """A provider's entry that gets no uploads."""
    return {"name": image, "pause": True}


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> BalkyCloud:
    return BalkyCloud(tmp_path)


# -- configuration


@pytest.mark.spec(
    "BLD-21: diskimages: [] for provider 2: its uploads vanish, provider 1's record stays unchanged"
)
def test_provider_without_images(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    one, two = BalkyCloud(tmp_path, "one"), BalkyCloud(tmp_path, "two")
    builders.start(config(builders, [one.provider(), two.provider()]))
    before, _ = builders.wait_upload(provider="one"), builders.wait_upload(provider="two")
    config(builders, [one.provider(), two.provider([])])
    wait_for(
        lambda: not builders.uploads(provider="two", state=None),
        what="uploads of provider two gone",
    )
    assert two.images() == [] and len(one.images()) == 1
    (after,) = builders.uploads(provider="one", state=None)
    assert after == before and after.stat.mzxid == before.stat.mzxid


@pytest.mark.spec(
    "BLD-21: Adding an image builds and uploads it; removing an image everywhere deletes upload, "
    "files and build record"
)
def test_image_added_and_removed(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builders.start(config(builders, [cloud.provider()]))
    builders.wait_upload(provider="balky")
    both = [builders.image(), builders.image("second")]
    config(builders, [cloud.provider([IMAGE, "second"])], both)
    second = builders.wait_upload("second", "balky")
    config(builders, [cloud.provider()])
    builders.wait_gone("second", second.build_id)
    assert len(cloud.images()) == 1
    assert len(builders.uploads(provider="balky")) == 1
    # Nothing at all is left of it.
    wait_for(lambda: builders.zk.getImageNames() == [IMAGE], what="image forgotten")
    wait_for(lambda: builders.progress(second.build_id) is None, what="progress forgotten")


@pytest.mark.spec("BLD-10: the image's znode and its pause stay when the image is configured")
def test_pause_of_a_configured_image_stays(builders: BuilderBench) -> None:
    builders.zk.kazoo_client.ensure_path("/nodepool/images/unknown/builds/lock")
    builders.zk.setImagePaused("forgotten", True)
    builders.zk.setImagePaused(IMAGE, True)
    builders.zk.submitBuildRequest("wanted")
    builders.start(config(builders, []))
    wait_for(
        lambda: "unknown" not in builders.zk.getImageNames(), what="image without anything gone"
    )
    assert sorted(builders.zk.getImageNames()) == [IMAGE, "forgotten", "wanted"]


# -- clouds


@pytest.mark.spec(
    "BLD-21: Cloud refuses to delete: files on disk vanish first, record in state deleting stays; "
    "when the "
    "cloud works again, upload and build records vanish"
)
@pytest.mark.spec(
    "BLD-21: Deletion of an upload is repeated (at least five times in the test) until it succeeds"
)
def test_refused_deletion_is_retried_until_it_succeeds(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    builders.start(config(builders, [cloud.provider()]))
    upload = builders.wait_upload(provider="balky")
    cloud.do("delete-fails")
    config(builders, [cloud.provider([])], [])
    wait_for(lambda: not builders.files(IMAGE, upload.build_id), what="files gone")
    wait_for(lambda: len(cloud.calls("delete")) >= 5, what="five attempts")
    assert builders.builds(state=DELETING) and builders.uploads(provider="balky", state=DELETING)
    cloud.stop_doing("delete-fails")
    builders.wait_gone(IMAGE, upload.build_id)
    assert cloud.images() == []


def test_hanging_cloud_stops_nothing(
    builders: BuilderBench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cloud hangs: other clouds, images and passes continue; its upload is not deleted twice at
    a time.
    """
    monkeypatch.setattr("nodepool.builder.cleanup.worker.CLOUD_WAIT", 0.3)
    slow, quick = BalkyCloud(tmp_path, "slow"), BalkyCloud(tmp_path, "quick")
    images = [builders.image("a"), builders.image("b")]
    names = ["a", "b"]
    builder = builders.start(
        config(builders, [slow.provider(names), quick.provider(names)], images)
    )
    found = {name: builders.wait_upload(name, "slow") for name in names}
    for name in names:
        builders.wait_upload(name, "quick")
    slow.do("delete-blocks")
    config(builders, [slow.provider([]), quick.provider([])], [])
    wait_for(lambda: not quick.images(), what="images of the quick cloud gone")
    wait_for(
        lambda: not any(builders.files(name, u.build_id) for name, u in found.items()),
        what="files gone",
    )
    wait_for(lambda: slow.calls("delete"), what="call to the slow cloud")
    started = time.monotonic()
    for _ in range(3):
        builder._janitor._cleanup()
    assert time.monotonic() - started < limit(2)
    assert len(slow.calls("delete")) == 1
    assert [t.name for t in threading.enumerate()].count("CleanupWorker.0-slow") == 1
    slow.stop_doing("delete-blocks")
    for name, upload in found.items():
        builders.wait_gone(name, upload.build_id)
    assert slow.images() == []
    assert len(slow.calls("delete")) == 2
    wait_for(
        lambda: not any(t.name == "CleanupWorker.0-slow" for t in threading.enumerate()),
        what="lane ended",
    )


def test_builder_stops_while_a_cloud_hangs(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builder = builders.start(config(builders, [cloud.provider()]))
    builders.wait_upload(provider="balky")
    cloud.do("delete-blocks")
    config(builders, [cloud.provider([])])
    wait_for(lambda: cloud.calls("delete"), what="call to the cloud")
    started = time.monotonic()
    builders.stop(builder)
    assert time.monotonic() - started < limit(5)
    cloud.stop_doing("delete-blocks")
    builders.start(config(builders, [cloud.provider([])]))
    wait_for(lambda: not builders.uploads(provider="balky", state=None), what="record gone")
    assert cloud.images() == []


@pytest.mark.spec(
    "BLD-10.D: deletion by external name and external id; no external id: nothing to delete in the "
    "cloud"
)
@pytest.mark.spec(
    "BLD-21: Upload record without external name and id: the build is still removed and rotation "
    "goes on"
)
def test_upload_without_external_id(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builds = [store_build(builders, age=100.0 - n) for n in range(3)]
    for build_id in builds:
        store_upload(builders, build_id, "balky", external_id=None)
    builders.start(config(builders, [cloud.provider([paused()])], [builders.image(pause=True)]))
    builders.wait_gone(IMAGE, builds[0])
    assert {b.id for b in builders.builds()} == set(builds[1:])
    assert cloud.calls("delete") == []


@pytest.mark.spec(
    "BLD-14: every builder cleans records and cloud images of all it knows, files only its own"
)
@pytest.mark.spec(
    "BLD-21: Builder 2, not serving builder 1's provider, does not delete builder 1's ready but "
    "not yet uploaded build"
)
def test_builder_deletes_only_its_own_files(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    one, two = BalkyCloud(tmp_path, "one"), BalkyCloud(tmp_path, "two")
    one.do("upload-fails")
    (tmp_path / "images2").mkdir()
    images = [builders.image(), builders.image("other")]
    builders.start(config(builders, [one.provider([IMAGE])], images[:1]))
    build = builders.wait_build()
    second = builders.start(
        config(
            builders,
            [two.provider(["other"])],
            [builders.image(), images[1]],
            "second.yaml",
            **{"images-dir": str(tmp_path / "images2")},
        )
    )
    builders.wait_upload("other", "two")
    for _ in range(2):
        second._janitor._cleanup()
    assert build.id in {b.id for b in builders.builds()}
    assert builders.formats(IMAGE, build.id) == {"qcow2"}
    one.stop_doing("upload-fails")
    builders.wait_upload(provider="one")


# -- records


@pytest.mark.spec(
    "BLD-21: A record uploading without lock, next to a good upload of a kept build, is dropped"
)
def test_abandoned_upload_of_a_kept_build_is_dropped(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    builder = builders.start(config(builders, [cloud.provider()]))
    good = builders.wait_upload(provider="balky")
    store_upload(builders, good.build_id, "balky", UPLOADING, external_id=None)
    with builders.zk.imageUploadLock(IMAGE, good.build_id, "balky"):
        builder._janitor._cleanup()
        assert builders.uploads(provider="balky", state=UPLOADING)
    wait_for(
        lambda: not builders.uploads(provider="balky", state=UPLOADING),
        what="abandoned record dropped",
    )
    assert [u.id for u in builders.uploads(provider="balky", state=None)] == [good.id]
    assert cloud.calls("delete") == []


@pytest.mark.spec(
    "BLD-11: Failed and abandoned builds disappear on the next pass; files of abandoned builds "
    "with them"
)
def test_abandoned_build_is_deleted_with_its_files(builders: BuilderBench) -> None:
    failed = store_build(builders, state=FAILED)
    abandoned = store_build(builders, state=BUILDING)
    running = store_build(builders, "other", BUILDING)
    with builders.zk.imageBuildLock("other"):
        builder = builders.start(
            config(builders, [], [builders.image(pause=True), builders.image("other", pause=True)])
        )
        builders.wait_gone(IMAGE, failed)
        builders.wait_gone(IMAGE, abandoned)
        builder._janitor._cleanup()
        assert [b.id for b in builders.builds("other", None)] == [running]
        assert builders.files("other", running)
    builders.wait_gone("other", running)


@pytest.mark.spec(
    "BLD-11: failed and abandoned records go with the next pass; what is marked deleting goes at "
    "once"
)
def test_events_do_not_hide_failures(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builder = builders.start(
        config(builders, [cloud.provider([paused()])], [builders.image(pause=True)]),
        cleanup_interval=3600,
    )
    wait_for(lambda: builder._janitor._next_whole > 0, what="first pass")
    kept = store_build(builders)
    failed = store_build(builders, state=FAILED)
    failed_upload = store_upload(builders, kept, "balky", FAILED, external_id=None)
    upload = store_upload(builders, kept, "balky", DELETING)
    build = store_build(builders, state=DELETING)
    started = time.monotonic()
    builders.wait_gone(IMAGE, build)
    wait_for(
        lambda: upload not in [u.id for u in builders.uploads(provider="balky", state=None)],
        what="upload gone",
    )
    assert time.monotonic() - started < limit(4)
    assert [b.id for b in builders.builds(state=FAILED)] == [failed]
    assert [u.id for u in builders.uploads(provider="balky", state=FAILED)] == [failed_upload]
    builder._janitor._cleanup()
    assert (
        builders.builds(state=FAILED) == [] and builders.uploads(provider="balky", state=None) == []
    )


@pytest.mark.spec(
    "BLD-1.2: others call _cleanup(), also of a stopped worker, and expect that it deletes in "
    "clouds"
)
def test_pass_of_a_stopped_worker_deletes_in_clouds(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    builder = builders.start(
        config(builders, [cloud.provider([paused()])], [builders.image(pause=True)]),
        cleanup_interval=3600,
    )
    builder._janitor.shutdown()
    builder._janitor.join()
    store_upload(builders, store_build(builders), "balky", DELETING)
    wait_for(lambda: builder.zk.image_tree.data().uploads, what="the mirror")
    builder._janitor._cleanup()
    assert builders.uploads(provider="balky", state=None) == []


@pytest.mark.spec("issue 3: one bad record stops nothing else; it and its files are never deleted")
def test_unreadable_record_blocks_nothing_else(
    builders: BuilderBench, cloud: BalkyCloud, caplog: pytest.LogCaptureFixture
) -> None:
    kazoo = builders.zk.kazoo_client
    bad = store_build(builders)
    kazoo.set(f"/nodepool/images/{IMAGE}/builds/{bad}", b"{no json")
    with_bad_upload = store_build(builders, age=900)
    number = store_upload(builders, with_bad_upload, "balky")
    kazoo.set(
        f"/nodepool/images/{IMAGE}/builds/{with_bad_upload}/providers/balky/images/{number}",
        b'{"state": 7}',
    )
    old = [store_build(builders, age=500.0 - n) for n in range(3)]
    builder = builders.start(
        config(builders, [cloud.provider([paused()])], [builders.image(pause=True)])
    )
    builders.wait_gone(IMAGE, old[0])
    for _ in range(2):
        builder._janitor._cleanup()
    assert kazoo.get(f"/nodepool/images/{IMAGE}/builds/{bad}")[0] == b"{no json"
    assert builders.files(IMAGE, bad)
    assert builders.zk.getImageUploadNumbers(IMAGE, with_bad_upload, "balky") == [number]
    assert {b.id for b in builders.builds()} >= set(old[1:])
    assert caplog.text.count(f"The record of build {IMAGE}-{bad} cannot be read") == 1
    kazoo.delete(f"/nodepool/images/{IMAGE}/builds/{bad}", recursive=True)
    builders.wait_gone(IMAGE, bad)


@pytest.mark.spec(
    "BLD-4: a record with no data must be treated as absent everywhere and be removed by cleanup"
)
def test_record_without_data_is_removed(builders: BuilderBench, cloud: BalkyCloud) -> None:
    kazoo = builders.zk.kazoo_client
    kept = store_build(builders)
    path = f"/nodepool/images/{IMAGE}/builds"
    kazoo.ensure_path(f"{path}/{'a' * 32}/lock")
    kazoo.ensure_path(f"{path}/{'b' * 32}/providers/balky/images/lock")
    kazoo.ensure_path(f"{path}/{kept}/providers/balky/images/0000000007/lock")
    held = "c" * 32
    with builders.zk.imageBuildIdLock(IMAGE, held):
        builder = builders.start(
            config(builders, [cloud.provider([paused()])], [builders.image(pause=True)])
        )
        wait_for(
            lambda: set(builders.zk.getBuildIds(IMAGE)) == {kept, held}, what="empty builds gone"
        )
        wait_for(
            lambda: builders.zk.getImageUploadNumbers(IMAGE, kept, "balky") == [],
            what="empty upload gone",
        )
        builder._janitor._cleanup()
        assert held in builders.zk.getBuildIds(IMAGE)
    wait_for(lambda: builders.zk.getBuildIds(IMAGE) == [kept], what="third empty build gone")


def test_upload_of_a_deleted_build(builders: BuilderBench, cloud: BalkyCloud) -> None:
    build_id = "d" * 32
    builders.zk.kazoo_client.ensure_path(f"/nodepool/images/{IMAGE}/builds")
    store_upload(builders, build_id, "balky")
    builders.start(config(builders, [cloud.provider([paused()])], [builders.image(pause=True)]))
    wait_for(lambda: builders.zk.getBuildIds(IMAGE) == [], what="everything gone")
    assert [call["id"] for call in cloud.calls("delete")] == ["there"]


# -- files


@pytest.mark.spec(
    "BLD-10.C, BLD-10.E: files without record, stray manifests and checksums go; others stay"
)
def test_files_without_record_are_deleted(builders: BuilderBench) -> None:
    kept = store_build(builders)
    store_files(builders, IMAGE, "e" * 32)
    store_files(builders, "some-other-image", "0000000012")
    (builders.images_dir / f"{IMAGE}-{'f' * 32}.d").mkdir()
    (builders.images_dir / f"{IMAGE}-{'9' * 32}.qcow2.md5").write_text("x")
    (builders.images_dir / "notes.txt").write_text("x")
    builders.start(config(builders, [], [builders.image(pause=True)]))
    wanted = {f"{kept}.{e}" for e in ("qcow2", "qcow2.md5", "qcow2.sha256", "d")}
    wait_for(lambda: builders.files() == wanted, what="orphans gone")
    wait_for(
        lambda: builders.files("some-other-image") == set(), what="files of an unknown image gone"
    )
    assert (builders.images_dir / "notes.txt").exists() and (
        builders.images_dir / "builder_id.txt"
    ).exists()


@pytest.mark.spec("BLD-21: dib-image-delete: record, files gone; works without manifest directory")
@pytest.mark.parametrize("manifest", [True, False])
def test_build_deleted_by_hand(builders: BuilderBench, cloud: BalkyCloud, manifest: bool) -> None:
    builders.start(config(builders, [cloud.provider()]), cleanup_interval=3600)
    upload = builders.wait_upload(provider="balky")
    builders.config([builders.image(pause=True)], [cloud.provider()], **{"drivers-path": [DRIVERS]})
    wait_for(lambda: builders.builders[0]._config.diskimages[IMAGE].pause, what="new configuration")
    if not manifest:
        directory = builders.images_dir / f"{IMAGE}-{upload.build_id}.d"
        (directory / "manifest").unlink()
        directory.rmdir()
    build = builders.zk.getBuild(IMAGE, upload.build_id)
    build.state = DELETING
    started = time.monotonic()
    builders.zk.storeBuild(IMAGE, build, build.id)
    builders.wait_gone(IMAGE, build.id)
    assert time.monotonic() - started < limit(4)
    assert cloud.images() == []


@pytest.mark.spec(
    "BLD-21: with the owning builder offline another builder removes the record and the owner "
    "removes the files after its restart"
)
def test_owner_is_offline(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    path = config(builders, [], [builders.image(formats=["tar"])])
    owner = builders.start(path)
    build = builders.wait_build()
    builders.stop(owner)
    (tmp_path / "images2").mkdir()
    images = [builders.image(formats=["tar"], pause=True)]
    other = builders.start(
        config(builders, [], images, "second.yaml", **{"images-dir": str(tmp_path / "images2")})
    )
    build.state = DELETING
    builders.zk.storeBuild(IMAGE, build, build.id)
    wait_for(lambda: build.id not in builders.zk.getBuildIds(IMAGE), what="record gone")
    assert builders.formats(IMAGE, build.id) == {"tar"}
    builders.stop(other)
    builders.start(config(builders, [], images))
    wait_for(lambda: not builders.files(IMAGE, build.id), what="files gone")


@pytest.mark.spec("BLD-21: image-delete: the upload record goes")
def test_upload_deleted_by_hand(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builders.start(config(builders, [cloud.provider()]), cleanup_interval=3600)
    upload = builders.wait_upload(provider="balky")
    upload.state = DELETING
    builders.zk.storeImageUpload(IMAGE, upload.build_id, "balky", upload, upload.id)
    wait_for(
        lambda: upload.id not in [u.id for u in builders.uploads(provider="balky", state=None)],
        5,
        "upload gone",
    )
    # Unless it is paused, the deleted image is uploaded again.
    again = builders.wait_upload(provider="balky")
    assert again.build_id == upload.build_id and again.external_id != upload.external_id
    assert [image["id"] for image in cloud.images()] == [again.external_id]


@pytest.mark.spec(
    "BLD-21: qcow2+raw+vhd with delete-after-upload and keep-formats: [qcow2], vhd provider "
    "failing: while "
    "building, a cleanup pass deletes nothing; afterwards qcow2 and vhd remain, raw is gone"
)
def test_delete_after_upload(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    block = tmp_path / "block"
    block.touch()
    vhd = BalkyCloud(tmp_path, "vhd")
    vhd.do("upload-fails")
    image = builders.image(**{"delete-after-upload": True, "keep-formats": ["qcow2"]})
    image["env-vars"]["CREATE_BLOCK"] = str(block)
    builder = builders.start(
        config(
            builders,
            [
                builders.provider("fake-q", cloud="fake-qcow2"),
                builders.provider("fake-r", cloud="fake-raw"),
                vhd.provider(cloud="fake-vhd"),
            ],
            [image],
        )
    )
    build = builders.wait_build(state=BUILDING)
    for extension in ("raw", "qcow2", "vhd"):
        (builders.images_dir / f"{IMAGE}-{build.id}.{extension}").write_text("half")
    builder._janitor._cleanup()
    assert builders.formats(IMAGE, build.id) == {"qcow2", "raw", "vhd"}
    block.unlink()
    builders.wait_upload(provider="fake-q")
    builders.wait_upload(provider="fake-r")
    wait_for(lambda: builders.formats(IMAGE, build.id) == {"qcow2", "vhd"}, what="raw gone")
    builder._janitor._cleanup()
    assert builders.files(IMAGE, build.id) == {
        f"{build.id}.{e}"
        for e in ("d", "qcow2", "qcow2.md5", "qcow2.sha256", "vhd", "vhd.md5", "vhd.sha256")
    }
    vhd.stop_doing("upload-fails")
    builders.wait_upload(provider="vhd")
    wait_for(lambda: builders.formats(IMAGE, build.id) == {"qcow2"}, what="vhd gone")
    assert f"{build.id}.d" in builders.files(IMAGE, build.id)


@pytest.mark.parametrize("kept", [[], ["raw"]], ids=["no file", "another format"])
@pytest.mark.spec("BLD-12.3: the missing file is reported, and its upload is not retried")
def test_upload_of_a_deleted_file_is_not_retried_and_gets_the_remedy(
    builders: BuilderBench, tmp_path: pathlib.Path, kept: list[str]
) -> None:
    cloud = BalkyCloud(tmp_path)
    image = builders.image(
        formats=["qcow2", *kept], **{"delete-after-upload": True, "keep-formats": kept}
    )
    builder = builders.start(config(builders, [cloud.provider()], [image]))
    upload = builders.wait_upload(provider="balky")
    wait_for(lambda: builders.formats(IMAGE, upload.build_id) == set(kept), what="file deleted")
    upload.state = DELETING
    builders.zk.storeImageUpload(IMAGE, upload.build_id, "balky", upload, upload.id)

    def problem() -> Any:
        return next(iter(image_problems(builders.zk.readProgress(cached=False))), None)

    wait_for(problem, what="the missing file in the list of problems")
    assert "delete-after-upload has deleted file" in problem().text
    assert problem().help == f"run `nodepool image-build {IMAGE}`"
    key = IMAGE, "balky"
    assert builders.zk.readProgress(cached=False).failures[key].next_try is None
    for worker in builder._upload_workers:
        assert worker.make_pass() in (None, math.inf)
    assert builders.zk.readProgress(cached=False).failures[key].attempts == 1
    builders.zk.submitBuildRequest(IMAGE)
    again = builders.wait_upload(provider="balky")
    assert again.build_id != upload.build_id
    wait_for(lambda: problem() is None, what="no problem")


@pytest.mark.spec("BLD-12: delete a format only after at least one upload of it")
def test_delete_after_upload_without_provider(builders: BuilderBench) -> None:
    builder = builders.start(
        config(builders, [], [builders.image(formats=["tar"], **{"delete-after-upload": True})])
    )
    build = builders.wait_build()
    builder._janitor._cleanup()
    assert builders.formats(IMAGE, build.id) == {"tar"}


# -- progress records


def test_obsolete_progress_records_are_deleted(
    builders: BuilderBench, tmp_path: pathlib.Path
) -> None:
    store = builders.zk.progress
    now = time.time()
    ids = {name: (name[0] * 32) for name in ("dead", "baked", "fresh-failure", "old-failure")}
    store.write(BuildProgress(IMAGE, ids["dead"], state=BUILDING, started=now - 10))
    store.write(BuildProgress(IMAGE, ids["baked"], state=READY, ended=now))
    store.write(BuildProgress(IMAGE, ids["fresh-failure"], state=FAILED, ended=now - 60))
    store.write(BuildProgress(IMAGE, ids["old-failure"], state=FAILED, ended=now - 30 * 86400))
    running = store_build(builders, "other", BUILDING)
    store.write(BuildProgress("other", running, state=BUILDING, started=now))
    finished = store_build(builders, "other", READY)
    store.write(UploadFailure(IMAGE, "fake-provider", time=now))
    store.write(UploadFailure("other", "fake-provider", time=now))
    store.write(UploadFailure("other", "theirs", time=now))
    store.write(UploadFailure("nowhere", "theirs", time=now))
    with builders.zk.imageBuildLock("other"):
        builder = builders.start(
            config(
                builders,
                [builders.provider(images=[paused()])],
                [builders.image(pause=True), builders.image("other", pause=True)],
            )
        )
        wait_for(
            lambda: (
                not {ids["baked"], ids["old-failure"]}
                & set(builders.zk.readProgress(cached=False).builds)
            ),
            what="old records gone",
        )
        wait_for(lambda: builders.progress(ids["dead"]).state == FAILED, what="dead build known")
        assert builders.progress(ids["dead"]).reason == "the builder stopped during the build"
        assert builders.progress(ids["fresh-failure"]).state == FAILED
        builder._janitor._cleanup()
        assert builders.progress(running).state == BUILDING
        assert finished in {b.id for b in builders.builds("other")}
    wait_for(
        lambda: builders.progress(running).state == FAILED, what="end of the other build noticed"
    )
    wait_for(
        lambda: (
            set(builders.zk.readProgress(cached=False).failures)
            == {(IMAGE, "fake-provider"), ("other", "theirs")}
        ),
        what="forgotten failures gone",
    )
    # A pair that was ours before.
    config(builders, [], [builders.image(pause=True), builders.image("other", pause=True)])
    wait_for(
        lambda: set(builders.zk.readProgress(cached=False).failures) == {("other", "theirs")},
        what="failure gone",
    )


# -- statistics, cost


@pytest.mark.spec("CLI-7.1: request, worker and state gauges after each pass")
def test_gauges_are_sent_after_each_pass(
    builders: BuilderBench, cloud: BalkyCloud, tmp_path: pathlib.Path, statsd: StatsdReceiver
) -> None:
    block = tmp_path / "block"
    cloud.do("upload-blocks")
    blocked = builders.image("blocked")
    blocked["env-vars"] = {**blocked["env-vars"], "CREATE_BLOCK": str(block)}
    images = [blocked, builders.image(), builders.image("asleep", pause=True)]
    builders.zk.submitBuildRequest("asleep")
    block.touch()
    builder = builders.start(
        config(builders, [cloud.provider([IMAGE, paused("blocked")])], images), num_builders=2
    )
    prefix = f"nodepool.builder.{builder.state.fqdn}"
    statsd.wait("nodepool.image_build_requests", "1|g")
    statsd.wait("nodepool.image.asleep.image_build_requests", "1|g")
    statsd.wait("nodepool.image.fake-image.image_build_requests", "0|g")
    statsd.wait(f"{prefix}.image.asleep.build.state", "3|g")
    statsd.wait(f"{prefix}.image.blocked.build.state", "1|g")
    statsd.wait(f"{prefix}.image.fake-image.provider.balky.upload.state", "2|g")
    statsd.wait(f"{prefix}.image.blocked.provider.balky.upload.state", "3|g")
    statsd.wait(f"{prefix}.current_builds", "1|g")
    statsd.wait(f"{prefix}.current_uploads", "1|g")
    statsd.wait(f"{prefix}.build_workers", "2|g")
    statsd.wait(f"{prefix}.upload_workers", "4|g")
    # A request that is being served is pending no more.
    builders.zk.submitBuildRequest("blocked")
    count = len(statsd.lines)
    builder._janitor._emitBuildRequestStats()
    statsd.wait("nodepool.image.blocked.image_build_requests", "0|g")
    assert "nodepool.image.blocked.image_build_requests:1|g" not in statsd.lines[count:]
    block.unlink()
    cloud.stop_doing("upload-blocks")
    builders.wait_upload(provider="balky")
    wait_for(
        lambda: statsd.last(f"{prefix}.image.fake-image.provider.balky.upload.state") == "0|g",
        what="idle again",
    )


def test_passes_at_rest_ask_nothing(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """With the mirror complete, a pass that has nothing to do makes no call to ZooKeeper."""
    builds = [store_build(builders, age=100.0 - n) for n in range(4)]
    # Old ones that stay for their uploads.
    for build_id in builds[:2]:
        store_upload(builders, build_id, "balky")
    builder = builders.start(
        config(builders, [cloud.provider([paused()])], [builders.image(pause=True)]),
        cleanup_interval=3600,
    )
    wait_for(lambda: builder._janitor._next_whole > 0, what="first pass")
    builder._janitor._cleanup()
    kazoo = builder.zk.kazoo_client
    before = kazoo._connection._xid
    for _ in range(5):
        builder._janitor._cleanup()
        builder._janitor._emitBuildRequestStats()
    pings = 3
    assert kazoo._connection._xid - before <= pings
    assert {b.id for b in builders.builds()} == set(builds)


@pytest.mark.spec(
    "issue 11, users 5: it is told that images go which this configuration does not name"
)
def test_images_of_another_configuration_are_reported(
    builders: BuilderBench, cloud: BalkyCloud, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        build = store_build(builders, "theirs")
        store_upload(builders, build, "balky", image="theirs", external_id=None)
    ours = store_build(builders)
    builders.start(config(builders, [cloud.provider([paused()])]))
    wait_for(lambda: not builders.builds("theirs", None), what="the builds of the image are gone")
    told = [
        r.getMessage()
        for r in caplog.records
        if "is not in the configuration of this builder" in r.getMessage()
    ]
    assert len(told) == 1 and told[0].startswith("Image theirs ") and "made by host" in told[0]
    assert [build.id for build in builders.builds()] == [ours]


@pytest.mark.spec(
    "issue 11, users 5: a session that expires during a pass is no error of the builder"
)
@pytest.mark.parametrize("error", [SessionExpiredError, ConnectionLoss, ConnectionClosedError])
@pytest.mark.parametrize("where", ["finish", "readImages"])
def test_a_broken_connection_is_one_line(
    builders: BuilderBench,
    cloud: BalkyCloud,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    where: str,
) -> None:
    owner = RecordCleaner if where == "finish" else ImageMethods
    real, failed = getattr(owner, where), []

    def breaks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not failed and threading.current_thread().name.startswith("CleanupWorker"):
            failed.append(1)
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, where, breaks)
    build = store_build(builders, "theirs")
    builders.start(config(builders, [cloud.provider([paused()])]))
    builders.wait_gone("theirs", build)
    assert failed
    lines = [r for r in caplog.records if "connection to ZooKeeper broke" in r.getMessage()]
    assert [(r.levelname, r.exc_info) for r in lines] == [("WARNING", None)]
    assert not [
        r
        for r in caplog.records
        if r.levelname == "ERROR" and r.name.startswith("nodepool.builder")
    ]


def test_record_that_changes_after_the_lock_was_lost_is_not_marked_for_deletion(
    builders: BuilderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another builder takes the lock of an expired session, and stores its result between our
    read and our write.
    """
    build_id = store_build(builders, state=BUILDING, files=False)
    number = store_upload(builders, build_id, "prov", state=UPLOADING, external_id=None)
    zk: Any = builders.zk
    state: Any = SimpleNamespace(zk=zk)
    cleaner = RecordCleaner(
        state, ProviderQueues("test", logging.getLogger(), lambda: True), logging.getLogger()
    )
    upload = zk.getImageUpload(IMAGE, build_id, "prov", number)

    read = ImageMethods.getImageUpload

    def read_before(self: Any, *key: Any) -> Any:
        found = read(self, *key)
        ready = ImageUpload()
        ready.state, ready.external_id = READY, "there"
        zk.storeImageUpload(IMAGE, build_id, "prov", ready, number)
        return found

    monkeypatch.setattr(ImageMethods, "getImageUpload", read_before)
    assert not cleaner.delete(upload)
    monkeypatch.undo()
    assert zk.getImageUpload(IMAGE, build_id, "prov", number).state == READY

    zk.deleteUpload(IMAGE, build_id, "prov", number)
    get = zk.kazoo_client.get

    def get_before(path: str) -> Any:
        found = get(path)
        if path == paths.build(IMAGE, build_id):
            store_build(builders, files=False, build_id=build_id)
        return found

    monkeypatch.setattr(zk.kazoo_client, "get", get_before)
    assert not cleaner.finish(
        RemovalPlan(IMAGE, build_id, BUILDING, remove=True), Snapshot(ImageData())
    )
    monkeypatch.undo()
    assert zk.getBuild(IMAGE, build_id).state == READY
