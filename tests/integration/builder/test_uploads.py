"""Uploads by whole builders (BLD-9, BLD-17, BLD-21)."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.exceptions import ConfigurationError
from nodepool.zk.records import DELETING, FAILED, READY, UPLOADING, ImageUpload
from nodepool.zk.rollback import Rollbacks, unverified
from tests.conftest import wait_for
from tests.support.builder import PERIOD, BuilderBench
from tests.support.deadline import limit
from tests.support.launcher import StatsdReceiver, expire_session
from tests.support.openstack.balky_cloud import DRIVERS, BalkyCloud

IMAGE = "fake-image"


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> BalkyCloud:
    return BalkyCloud(tmp_path)


def config(
    builders: BuilderBench,
    *providers: dict[str, Any],
    images: list[dict[str, Any]] | None = None,
    **top: Any,
) -> str:
    return builders.config(
        [builders.image()] if images is None else images,
        list(providers),
        **{"drivers-path": [DRIVERS], **top},
    )


def failure(builders: BuilderBench, provider: str, image: str = IMAGE) -> Any:
    return builders.zk.readProgress(cached=False).failures.get((image, provider))


def hook_script(tmp: pathlib.Path, text: str) -> str:
    path = tmp / "hook"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# -- what is uploaded, and how


@pytest.mark.spec(
    "BLD-9: external name from image_name_format; metadata; checksums; record ready with id, name, "
    "format, "
    "connection data; first number 0000000001"
)
def test_uploaded_image_has_name_metadata_and_checksums(
    builders: BuilderBench, cloud: BalkyCloud, statsd: StatsdReceiver
) -> None:
    image = builders.image(
        metadata={"key": "image", "own": "image"},
        username="ubuntu",
        **{"python-path": "/usr/bin/python3"},
    )
    provider = cloud.provider(
        [{"name": IMAGE, "meta": {"key": "provider"}}],
        **{"image-name-format": "{image_name}/{upload_id}/{timestamp}/{build_id}"},
    )
    builders.start(config(builders, provider, images=[image]))
    upload = builders.wait_upload(provider="balky")
    (there,) = cloud.images()
    name, number, timestamp, build_id = there["name"].split("/")
    assert (name, number, build_id) == (IMAGE, "0000000001", upload.build_id)
    assert abs(int(timestamp) - time.time()) < 30
    metadata = there["metadata"]
    assert metadata.pop("nodepool_cluster_id")
    assert metadata == {
        "key": "provider",
        "own": "image",
        "nodepool_build_id": build_id,
        "nodepool_upload_id": "0000000001",
        "nodepool_provider_name": "balky",
    }
    assert (len(there["md5"]), len(there["sha256"]), there["format"]) == (32, 64, "qcow2")
    assert there["file"] == f"{builders.images_dir}/{IMAGE}-{build_id}.qcow2"
    assert (upload.id, upload.external_id, upload.external_name, upload.format) == (
        number,
        there["id"],
        there["name"],
        "qcow2",
    )
    assert (upload.username, upload.python_path, upload.shell_type) == (
        "ubuntu",
        "/usr/bin/python3",
        None,
    )
    statsd.wait("nodepool.image_update.fake-image.balky", "1|c")
    statsd.wait_line(r"nodepool\.image_update\.fake-image\.balky:.*\|ms")


@pytest.mark.spec(
    "BLD-9: external name with timestamp; two providers that share a bucket do not share a name"
)
def test_names_of_the_same_second(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    clouds = [BalkyCloud(tmp_path, name) for name in ("one", "two", "three")]
    builders.start(config(builders, *(cloud.provider() for cloud in clouds)))
    for cloud in clouds:
        builders.wait_upload(provider=cloud.name)
    names = [image["name"] for cloud in clouds for image in cloud.images()]
    assert len(set(names)) == 3, names
    assert all(
        name.startswith(f"{IMAGE}-") and abs(int(name.rpartition("-")[2]) - time.time()) < 30
        for name in names
    )


@pytest.mark.spec(
    "BLD-9: record while uploading: external id and name and format null, connection data of the "
    "build"
)
def test_record_and_progress_while_uploading(builders: BuilderBench, cloud: BalkyCloud) -> None:
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()))
    wait_for(
        lambda: builders.uploads(provider="balky", state=UPLOADING),
        what="record of the running upload",
    )
    (upload,) = builders.uploads(provider="balky", state=None)
    assert (upload.state, upload.external_id, upload.external_name, upload.format) == (
        UPLOADING,
        None,
        None,
        None,
    )
    assert upload.username == "zuul"
    wait_for(lambda: builders.zk.readProgress(cached=False).uploads, what="progress of the upload")
    (progress,) = builders.zk.readProgress(cached=False).uploads.values()
    assert (progress.image, progress.build, progress.provider, progress.upload) == (
        IMAGE,
        upload.build_id,
        "balky",
        upload.id,
    )
    assert (
        progress.bytes_total
        == (builders.images_dir / f"{IMAGE}-{upload.build_id}.qcow2").stat().st_size
    )
    assert any(w.current == (IMAGE, "balky") for w in builder._upload_workers)
    # A cleaning pass leaves it alone.
    builder._janitor._cleanup()
    assert builders.uploads(provider="balky", state=UPLOADING)
    cloud.stop_doing("upload-blocks")
    builders.wait_upload(provider="balky")
    wait_for(lambda: not builders.zk.readProgress(cached=False).uploads, what="progress gone")
    assert len(builders.uploads(provider="balky", state=None)) == 1


@pytest.mark.spec("issue 3: an upload starts within 0.2 s after its build")
def test_upload_starts_immediately(builders: BuilderBench, cloud: BalkyCloud) -> None:
    builder = builders.make(config(builders, cloud.provider()))
    builder.upload_interval = 3600
    builder.start()
    build = builders.wait_build()
    builders.wait_upload(provider="balky")
    assert cloud.calls("upload")[0]["time"] - build.state_time < limit(2)


@pytest.mark.spec(
    "BLD-21: Adding a second provider to the running builder's file: the existing build is "
    "uploaded there"
)
def test_existing_build_is_uploaded_to_an_added_provider(builders: BuilderBench) -> None:
    builders.start(builders.config([builders.image()], [builders.provider("fake-one")]))
    upload = builders.wait_upload(provider="fake-one")
    builders.config(
        [builders.image()], [builders.provider("fake-one"), builders.provider("fake-two")]
    )
    assert builders.wait_upload(provider="fake-two").build_id == upload.build_id
    assert len(builders.builds(state=None)) == 1


@pytest.mark.spec(
    "BLD-21: Mixed drivers in one file: those without image management are skipped by the builder"
)
def test_drivers_without_images_are_skipped(builders: BuilderBench) -> None:
    static = {"name": "static", "driver": "static", "pools": []}
    builder = builders.start(builders.config([builders.image()], [static, builders.provider()]))
    builders.wait_upload()
    assert set(builder._config.provider_managers) == {"fake-provider"}


# -- failures


@pytest.mark.spec(
    "BLD-21: First upload to provider A fails once while B works: A ends with exactly one failed "
    "and one "
    "ready record (cleanup off), B with none failed; B became ready before A's retry"
)
def test_failed_upload_is_repeated_once_it_can_succeed(
    builders: BuilderBench, tmp_path: pathlib.Path
) -> None:
    bad, good = BalkyCloud(tmp_path, "bad"), BalkyCloud(tmp_path, "good")
    bad.do("upload-fails", 1)
    builders.start(
        config(builders, bad.provider(), good.provider()), cleanup_interval=0, num_uploaders=1
    )
    ready = builders.wait_upload(provider="bad")
    other = builders.wait_upload(provider="good")
    assert other.state_time < bad.calls("upload")[1]["time"]
    assert [u.state for u in builders.uploads(provider="good", state=None)] == [READY]
    (failed,) = builders.uploads(provider="bad", state=FAILED)
    assert len(builders.uploads(provider="bad", state=None)) == 2
    assert (failed.external_id, failed.external_name, failed.format, failed.username) == (
        None,
        None,
        None,
        None,
    )
    assert failed.id == "0000000001" and ready.id > failed.id
    wait_for(lambda: failure(builders, "bad") is None, what="failure forgotten")


@pytest.mark.spec(
    "BLD-9: growing delay per pair, forgotten on success, on a new build or on change of "
    "configuration"
)
def test_delay_of_a_failing_upload_grows_until_success(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    cloud.do("upload-fails")
    builder = builders.start(config(builders, cloud.provider()), cleanup_interval=0)
    wait_for(lambda: len(cloud.calls("upload")) >= 4, what="four attempts")
    times = [call["time"] for call in cloud.calls("upload")]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] >= PERIOD * 0.9 and gaps[2] > 2 * gaps[0]
    wait_for(
        lambda: (found := failure(builders, "balky")) is not None and found.attempts >= 3,
        what="failure shown",
    )
    shown = failure(builders, "balky")
    assert "the cloud refuses: upload-fails" in shown.reason and shown.next_try > shown.time
    builder.state.upload_backoff._backoff = Backoff(3600, 3600)
    wait_for(
        lambda: (
            (found := failure(builders, "balky")) is not None and found.next_try > found.time + 1000
        ),
        what="the last attempt for an hour",
    )
    # Changed configuration: immediately.
    count = len(cloud.calls("upload"))
    config(builders, cloud.provider(**{"image-name-format": "other-{upload_id}"}))
    wait_for(
        lambda: len(cloud.calls("upload")) > count, 5, what="attempt with the new configuration"
    )
    # A new build: immediately.
    count = len(cloud.calls("upload"))
    builders.zk.submitBuildRequest(IMAGE)
    wait_for(lambda: len(cloud.calls("upload")) > count, 10, what="attempt with the new build")
    cloud.stop_doing("upload-fails")
    builders.zk.submitBuildRequest(IMAGE)
    builders.wait_upload(provider="balky")


@pytest.mark.spec("BLD-9: no file of that format -> failed with that reason")
def test_file_is_missing(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    vhd, qcow2 = BalkyCloud(tmp_path, "vhd"), BalkyCloud(tmp_path, "qcow2")
    paused = [{"name": IMAGE, "pause": True}]
    builders.start(
        config(builders, vhd.provider(paused, "fake-vhd"), qcow2.provider(paused)),
        cleanup_interval=0,
    )
    build = builders.wait_build()
    (builders.images_dir / f"{IMAGE}-{build.id}.vhd").unlink()
    config(builders, vhd.provider(cloud="fake-vhd"), qcow2.provider())
    builders.wait_upload(provider="qcow2")
    wait_for(lambda: builders.uploads(provider="vhd", state=FAILED), what="failed record")
    wait_for(lambda: failure(builders, "vhd") is not None)
    assert (
        f"file {builders.images_dir}/{IMAGE}-{build.id}.vhd does not exist"
        in failure(builders, "vhd").reason
    )
    assert vhd.calls("upload") == []


def test_bad_name_format(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    bad, good = BalkyCloud(tmp_path, "bad"), BalkyCloud(tmp_path, "good")
    builders.start(
        config(builders, bad.provider(**{"image-name-format": "{image}"}), good.provider()),
        cleanup_interval=0,
    )
    builders.wait_upload(provider="good")
    wait_for(lambda: failure(builders, "bad") is not None, what="failure shown")
    reason = failure(builders, "bad").reason
    assert "image-name-format '{image}' of provider bad" in reason and "{image_name}" in reason


def notes(builders: BuilderBench) -> list[str]:
    return [path.name for path in (builders.images_dir / ".uploads").glob("*")]


def test_nothing_is_left_of_a_broken_upload(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """The call fails, and yet the cloud has an image: it is found by its metadata."""
    cloud.do("upload-breaks", 1)
    cloud.do("list-fails", 2)
    builder = builders.start(config(builders, cloud.provider()), cleanup_interval=0)
    upload = builders.wait_upload(provider="balky")
    assert len(cloud.images()) == 2
    wait_for(
        lambda: len(notes(builders)) == 1,
        what="note of the stored upload removed, that of the broken one kept",
    )
    builders.stop(builder)
    builders.start(config(builders, cloud.provider()))
    wait_for(lambda: len(cloud.images()) == 1, what="stray image gone")
    assert cloud.images()[0]["id"] == upload.external_id
    wait_for(lambda: notes(builders) == [], what="nothing noted")
    assert [u.id for u in builders.uploads(provider="balky")] == [upload.id]


def test_start_removes_files_that_a_killed_builder_was_writing(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    left = [
        builders.images_dir / directory / ".new-left" for directory in ("", ".builds", ".uploads")
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    builders.start(config(builders, cloud.provider()))
    assert [path for path in left if path.exists()] == []


def test_note_of_a_stored_upload(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """Killed between storing the result and forgetting the note: the image is kept."""
    from nodepool.builder.upload import journal as upload_journal

    builder = builders.start(config(builders, cloud.provider()))
    upload = builders.wait_upload(provider="balky")
    wait_for(
        lambda: notes(builders) == [] and not builder.state.upload_claims.running(),
        what="nothing noted",
    )
    upload_journal.begin(
        str(builders.images_dir), (IMAGE, upload.build_id, "balky", upload.id), upload.external_name
    )
    (builders.images_dir / ".uploads" / "broken.json").write_text("{")
    builder._janitor._cleanup()
    wait_for(lambda: notes(builders) == [], what="note gone")
    assert [image["id"] for image in cloud.images()] == [upload.external_id]
    assert (builders.images_dir / ".uploads").stat().st_mode & 0o777 == 0o700


SERVE = """
import signal, sys
from nodepool.builder import NodePoolBuilder
builder = NodePoolBuilder(sys.argv[1])
builder.upload_interval = builder.build_interval = 0.2
builder.start()
signal.pause()
"""


def test_killed_during_an_upload(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """The image that the cloud got is deleted by the next start, and the build is uploaded
    again.
    """
    cloud.do("upload-blocks")
    path = config(builders, cloud.provider(), **{"zookeeper-timeout": 2})
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, path],
        env={**os.environ, "OS_CLIENT_CONFIG_FILE": str(builders.tmp / "clouds.yaml")},
    )
    try:
        wait_for(cloud.images, 30, "image in the cloud")
    finally:
        process.kill()
        process.wait(10)
    cloud.stop_doing("upload-blocks")
    (left,) = cloud.images()
    (build,) = builders.builds()
    builders.start(path)
    upload = builders.wait_upload(provider="balky")
    assert upload.build_id == build.id
    wait_for(
        lambda: [image["id"] for image in cloud.images()] == [upload.external_id],
        what="stray image gone",
    )
    wait_for(
        lambda: len(builders.uploads(provider="balky", state=None)) == 1,
        what="abandoned record gone",
    )
    assert left["id"] != upload.external_id
    wait_for(lambda: notes(builders) == [], what="nothing noted")


@pytest.mark.spec(
    "issue 10, F10: another builder on the same images-dir leaves alone what the first one is "
    "uploading"
)
@pytest.mark.parametrize("owner", ["first", "second"])
def test_another_builder_on_the_same_directory(
    builders: BuilderBench, cloud: BalkyCloud, owner: str
) -> None:
    cloud.do("upload-blocks")
    first = builders.start(config(builders, cloud.provider()), cleanup_interval=0)
    wait_for(cloud.images, what="image in the cloud")
    if owner == "second":
        first._release_images_dir()
    second = builders.start(config(builders, cloud.provider()), cleanup_interval=3600)
    assert (first.state.images_lock is not None, second.state.images_lock is not None) == (
        owner == "first",
        owner == "second",
    )
    (note,) = notes(builders)
    second._janitor._cleanup()
    assert len(cloud.images()) == 1 and notes(builders) == [note]
    cloud.stop_doing("upload-blocks")
    upload = builders.wait_upload(provider="balky")
    assert [image["id"] for image in cloud.images()] == [upload.external_id]


@pytest.mark.spec(
    "issue 10, F10: a builder does not start on an images-dir that another process uses"
)
def test_a_directory_in_use_is_refused(builders: BuilderBench, cloud: BalkyCloud) -> None:
    cloud.do("upload-blocks")
    path = config(builders, cloud.provider())
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, path],
        env={**os.environ, "OS_CLIENT_CONFIG_FILE": str(builders.tmp / "clouds.yaml")},
    )
    try:
        wait_for(cloud.images, 30, "image in the cloud")
        builder = builders.make(path)
        builders.builders.clear()
        with pytest.raises(
            ConfigurationError,
            match=f"{builders.images_dir} is in use by builder process {process.pid}; every",
        ):
            builder.start()
        assert len(cloud.images()) == 1 and len(notes(builders)) == 1
    finally:
        process.kill()
        process.wait(10)


# -- hook


@pytest.mark.spec(
    "BLD-21: Upload hook runs with the local file name as third argument before the image counts "
    "as ready"
)
def test_upload_hook_runs_before_the_image_is_ready(
    builders: BuilderBench, cloud: BalkyCloud, tmp_path: pathlib.Path
) -> None:
    record, go = tmp_path / "record", tmp_path / "go"
    hook = hook_script(
        tmp_path,
        f'echo "$1 $2 $3" > {record}.new\nmv {record}.new {record}\nwhile ! [ -e {go} ]; do sleep '
        "0.02; done",
    )
    builders.start(config(builders, cloud.provider(**{"post-upload-hook": hook})))
    wait_for(record.exists, what="hook called")
    (upload,) = builders.uploads(provider="balky", state=None)
    assert upload.state == UPLOADING
    provider, external_id, path = record.read_text().split()
    assert provider == "balky"
    assert external_id == cloud.images()[0]["id"]
    assert path == f"{builders.images_dir}/{IMAGE}-{upload.build_id}.qcow2"
    go.touch()
    builders.wait_upload(provider="balky")


@pytest.mark.spec(
    "BLD-9: failing hook: log status and outputs, delete the image from the cloud, record failed"
)
@pytest.mark.parametrize("text", ["echo to-out; echo to-err >&2; exit 3", None])
def test_failing_hook_deletes_the_uploaded_image(
    builders: BuilderBench,
    cloud: BalkyCloud,
    tmp_path: pathlib.Path,
    text: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = "/does/not/exist" if text is None else hook_script(tmp_path, text)
    builders.start(
        config(builders, cloud.provider(**{"post-upload-hook": hook})), cleanup_interval=0
    )
    wait_for(lambda: builders.uploads(provider="balky", state=FAILED), what="failed record")
    wait_for(lambda: not cloud.images(), what="image deleted again")
    assert cloud.calls("delete")
    wait_for(lambda: failure(builders, "balky") is not None)
    expected = "cannot be started" if text is None else "ended with status 3"
    assert f"post-upload-hook {hook} {expected}" in failure(builders, "balky").reason
    if text is not None:
        assert "to-out" in caplog.text and "to-err" in caplog.text


def test_failing_hook_and_deletion(
    builders: BuilderBench, cloud: BalkyCloud, tmp_path: pathlib.Path
) -> None:
    """The record of the image that must go stays until the cloud has deleted it."""
    cloud.do("delete-fails")
    provider = cloud.provider(**{"post-upload-hook": hook_script(tmp_path, "exit 1")})
    builder = builders.start(config(builders, provider))
    builder.state.upload_backoff._backoff = Backoff(3600, 3600)
    wait_for(lambda: builders.uploads(provider="balky", state=DELETING), what="record deleting")
    (upload,) = builders.uploads(provider="balky", state=DELETING)
    assert (
        upload.external_id == cloud.images()[0]["id"]
        and upload.external_name == cloud.images()[0]["name"]
    )
    cloud.stop_doing("delete-fails")
    wait_for(lambda: not cloud.images(), what="image gone")
    wait_for(lambda: not builders.uploads(provider="balky", state=None), what="record gone")


# -- what happens meanwhile


def test_provider_vanishes_meanwhile(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    gone, other = BalkyCloud(tmp_path, "gone"), BalkyCloud(tmp_path, "other")
    gone.do("upload-blocks")
    builder = builders.start(config(builders, gone.provider(), other.provider()))
    builders.wait_upload(provider="other")
    wait_for(gone.images, what="image in the cloud")
    config(builders, other.provider())
    wait_for(lambda: "gone" not in builder._config.providers, what="new configuration")
    gone.stop_doing("upload-blocks")
    wait_for(lambda: not gone.images(), what="image deleted again")
    wait_for(lambda: not builders.uploads(provider="gone", state=None), what="record gone")
    wait_for(lambda: builder.state.upload_claims.running() == set(), what="end of the upload")


@pytest.mark.spec("BLD-25.1")
def test_no_upload_of_an_image_is_used_before_it_is_verified(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    image = builders.image(verify={"ssh-key": "/etc/nodepool/key"})
    builders.start(config(builders, cloud.provider(), images=[image]))
    first = builders.wait_upload(provider="balky")
    assert first.held_back and builders.zk.getMostRecentImageUpload(IMAGE, "balky") is None
    assert Rollbacks(builders.zk, time.time).verified(first, None)
    builders.zk.submitBuildRequest(IMAGE)
    second = wait_for(
        lambda: next(
            (
                each
                for each in builders.uploads(provider="balky")
                if each.build_id != first.build_id
            ),
            None,
        ),
        what="the second upload",
    )
    used = builders.zk.getMostRecentImageUpload(IMAGE, "balky")
    assert used.build_id == first.build_id and second.rolled_back.unverified
    (switch,) = unverified(builders.zk.readImages(cached=False))
    assert switch.replaced.build_id == second.build_id


@pytest.mark.spec(
    "BLD-9: An upload whose build is deleted meanwhile: stored all the same; cleanup deals with it"
)
def test_build_vanishes_meanwhile(builders: BuilderBench, cloud: BalkyCloud) -> None:
    cloud.do("upload-blocks")
    image = builders.image(**{"rebuild-age": 3600})
    builder = builders.start(config(builders, cloud.provider(), images=[image]), cleanup_interval=0)
    wait_for(cloud.images, what="image in the cloud")
    (build,) = builders.builds()
    config(
        builders,
        cloud.provider([{"name": IMAGE, "pause": True}]),
        images=[builders.image(pause=True)],
    )
    wait_for(lambda: builder._config.diskimages[IMAGE].pause, what="new configuration")
    builders.zk.kazoo_client.delete(f"/nodepool/images/{IMAGE}/builds/{build.id}", recursive=True)
    cloud.stop_doing("upload-blocks")
    upload = builders.wait_upload(provider="balky")
    assert (upload.build_id, upload.external_id) == (build.id, cloud.images()[0]["id"])
    builders.stop(builder)
    builders.start(
        config(
            builders,
            cloud.provider([{"name": IMAGE, "pause": True}]),
            images=[builders.image(pause=True)],
        )
    )
    wait_for(lambda: not cloud.images(), what="image gone")
    builders.wait_gone(IMAGE, build.id)


def test_image_vanishes_meanwhile(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """Not even the container of the builds is left: nothing to store the result in, so the cloud
    must not keep it.
    """
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()), cleanup_interval=0)
    wait_for(cloud.images, what="image in the cloud")
    config(builders, cloud.provider([]), images=[])
    wait_for(lambda: not builder._config.diskimages, what="new configuration")
    builders.zk.kazoo_client.delete(f"/nodepool/images/{IMAGE}", recursive=True)
    cloud.stop_doing("upload-blocks")
    wait_for(lambda: not cloud.images(), what="image deleted again")
    wait_for(
        lambda: not builder.state.upload_claims.running() and notes(builders) == [],
        what="end of the upload",
    )


@pytest.mark.spec(
    "BLD-17: a lost session does not lose the upload when the lock can be taken again"
)
def test_session_lost_meanwhile(builders: BuilderBench, cloud: BalkyCloud) -> None:
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()))
    wait_for(cloud.images, what="image in the cloud")
    (before,) = builders.uploads(provider="balky", state=UPLOADING)
    client = builder.state.zk.client
    session = client.session_id
    expire_session(builder)
    wait_for(
        lambda: client.session_id not in (None, session) and builder.session_usable.is_set(),
        30,
        "new session",
    )
    wait_for(
        lambda: builders.zk.readProgress(cached=False).uploads,
        what="the progress in the new session",
    )
    builder._janitor._cleanup()
    assert [u.id for u in builders.uploads(provider="balky", state=UPLOADING)] == [
        before.id
    ]  # it is ours
    cloud.stop_doing("upload-blocks")
    upload = builders.wait_upload(provider="balky")
    assert upload.id == before.id and upload.external_id == cloud.images()[0]["id"]
    assert len(cloud.calls("upload")) == 1
    wait_for(lambda: not builder.state.upload_claims.running(), what="end of the upload")
    with builders.zk.imageUploadLock(IMAGE, upload.build_id, "balky", blocking=False):
        pass


@pytest.mark.core
@pytest.mark.spec(
    "BLD-17: the record was dropped as abandoned, and the image may be deleted as leaked: both are "
    "made again"
)
def test_upload_whose_record_was_dropped_is_repeated(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()))
    wait_for(cloud.images, what="image in the cloud")
    (before,) = builders.uploads(provider="balky", state=UPLOADING)
    (image,) = cloud.images()
    client = builder.state.zk.client
    session = client.session_id
    expire_session(builder)
    wait_for(
        lambda: client.session_id not in (None, session) and builder.session_usable.is_set(),
        30,
        "new session",
    )
    builders.zk.deleteUpload(IMAGE, before.build_id, "balky", before.id)
    cloud.stop_doing("upload-blocks")
    upload = builders.wait_upload(provider="balky")
    assert upload.id != before.id and upload.external_id != image["id"]
    assert [image["id"] for image in cloud.images()] == [upload.external_id]


@pytest.mark.spec(
    "BLD-17: not taken again, because another builder is at it: the image is deleted again"
)
def test_lock_lost_meanwhile(builders: BuilderBench, cloud: BalkyCloud) -> None:
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()))
    wait_for(cloud.images, what="image in the cloud")
    (before,) = builders.uploads(provider="balky", state=UPLOADING)
    builder.state.upload_backoff._backoff = Backoff(3600, 3600)
    client = builder.state.zk.client
    session = client.session_id
    expire_session(builder)
    wait_for(
        lambda: client.session_id not in (None, session) and builder.session_usable.is_set(),
        30,
        "new session",
    )
    with builders.zk.imageUploadLock(IMAGE, before.build_id, "balky", timeout=10):
        cloud.stop_doing("upload-blocks")
        wait_for(lambda: not cloud.images(), what="image deleted again")
    wait_for(lambda: not builders.uploads(provider="balky", state=None), what="record dropped")
    wait_for(
        lambda: (
            "lock cannot be acquired again" in getattr(failure(builders, "balky"), "reason", "")
        ),
        what="reason shown",
    )


@pytest.mark.spec(
    "BLD-17: another builder has uploaded the build meanwhile: the image is deleted again"
)
def test_image_that_another_builder_has_uploaded_in_a_lost_session_is_not_stored_twice(
    builders: BuilderBench, cloud: BalkyCloud
) -> None:
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()), cleanup_interval=0)
    wait_for(cloud.images, what="image in the cloud")
    (before,) = builders.uploads(provider="balky", state=UPLOADING)
    client = builder.state.zk.client
    session = client.session_id
    expire_session(builder)
    wait_for(
        lambda: client.session_id not in (None, session) and builder.session_usable.is_set(),
        30,
        "new session",
    )
    theirs = ImageUpload(before.build_id, "balky", IMAGE)
    theirs.state, theirs.external_id = READY, "theirs"
    number = builders.zk.storeImageUpload(IMAGE, before.build_id, "balky", theirs)
    cloud.stop_doing("upload-blocks")
    wait_for(lambda: not cloud.images(), what="image deleted again")
    wait_for(
        lambda: "another builder" in getattr(failure(builders, "balky"), "reason", ""),
        what="reason shown",
    )
    assert [upload.id for upload in builders.uploads(provider="balky")] == [number]


@pytest.mark.spec(
    "BLD-14: Locks give each upload to one worker; only the builder with the files can upload a "
    "build"
)
def test_two_builders_upload_once(
    builders: BuilderBench, cloud: BalkyCloud, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "images2").mkdir()
    names = [f"image{n}" for n in range(5)]
    images = [builders.image(name) for name in names]
    first = builders.make(config(builders, cloud.provider(names), images=images))
    path = builders.config(
        images,
        [cloud.provider(names)],
        "second.yaml",
        **{"images-dir": str(tmp_path / "images2"), "drivers-path": [DRIVERS]},
    )
    second = builders.make(path)
    first.start()
    second.start()
    for name in names:
        builders.wait_upload(name, "balky")
    builders.stop(second)
    assert len(cloud.images()) == len(names)
    assert len(cloud.calls("upload")) == len(names)


def test_uploads_run_in_parallel(builders: BuilderBench, tmp_path: pathlib.Path) -> None:
    clouds = [BalkyCloud(tmp_path, f"c{n}") for n in range(3)]
    for cloud in clouds:
        cloud.do("upload-blocks")
    builder = builders.start(
        config(builders, *(cloud.provider() for cloud in clouds)), num_uploaders=3
    )
    wait_for(lambda: all(cloud.images() for cloud in clouds), what="three uploads at one time")
    assert len(builder.state.upload_claims.running()) == 3
    for cloud in clouds:
        cloud.stop_doing("upload-blocks")
    for cloud in clouds:
        builders.wait_upload(provider=cloud.name)


def test_no_upload_is_done_twice_concurrently(builders: BuilderBench, cloud: BalkyCloud) -> None:
    """The same image is not sent to a provider twice at the same time, not even of two builds."""
    cloud.do("upload-blocks")
    builder = builders.start(config(builders, cloud.provider()))
    wait_for(cloud.images, what="first upload")
    (first,) = builders.builds()
    builders.zk.submitBuildRequest(IMAGE)
    second = builders.wait_build(besides=(first.id,))
    for worker in builder._upload_workers:
        worker.wake()
    wait_for(
        lambda: not any(w._event.is_set() for w in builder._upload_workers if w.current is None),
        what="passes made",
    )
    assert len(cloud.calls("upload")) == 1
    cloud.stop_doing("upload-blocks")
    builders.wait_upload(provider="balky", build=second.id)
    assert len(cloud.calls("upload")) == 2


@pytest.mark.spec("CLI-7.1: periodic gauges are sent without a cleanup worker, too")
def test_gauges_without_cleanup_worker(builders: BuilderBench, statsd: StatsdReceiver) -> None:
    builder = builders.start(builders.config([builders.image(pause=True)], []), cleanup_interval=0)
    assert builder._janitor is None
    statsd.wait(f"nodepool.builder.{builder.state.fqdn}.upload_workers", "4|g")
