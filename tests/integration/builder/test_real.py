"""A real Debian image by diskimage-builder: built in two formats, uploaded, rebuilt, rolled back
(some minutes).
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import sys
import time
from typing import Any

import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from nodepool.zk.mirror.progress import ProgressStore
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.builder import BuilderBench

sys.path.insert(0, str(REPOSITORY / "tools"))
from demo import image as demo_image

MINUTES = 60
IMAGE = "debian-flat"

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(25 * MINUTES)]


def expected_files(build_id: str) -> set[str]:
    files = {
        f"{build_id}.{fmt}{end}" for fmt in ("qcow2", "raw") for end in ("", ".md5", ".sha256")
    }
    return files | {f"{build_id}.d"}


def loop_devices(directory: pathlib.Path) -> list[str]:
    """Files below the directory that are loop devices."""
    found = []
    for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return [file for file in found if file.startswith(str(directory))]


@pytest.fixture
def images(tmp_path: pathlib.Path) -> list[dict[str, Any]]:
    """The image of the sample configuration and what it inherits, with the mirrors of this
    machine.
    """
    sample = yaml.safe_load((REPOSITORY / "etc" / "nodepool.yaml").read_text())
    images: list[dict[str, Any]] = sample["diskimages"]
    images[0]["env-vars"] |= demo_image.apt_mirrors(demo_image.read_apt_sources())
    images[0]["env-vars"]["DIB_IMAGE_CACHE"] = str(tmp_path / "cache")
    return images


@pytest.mark.core
def test_one_image_is_built_and_uploaded(
    builders: BuilderBench, images: list[dict[str, Any]]
) -> None:
    builder = builders.start(
        builders.config(images, [builders.provider("fake-raw", [IMAGE], cloud="fake-raw")])
    )
    upload = builders.wait_upload(IMAGE, "fake-raw", timeout=10 * MINUTES)
    (build,) = builders.builds(IMAGE)
    assert upload.build_id == build.id and builders.files(IMAGE) == expected_files(build.id)
    assert upload.external_id in {
        image.id for image in builders.cloud(builder, "fake-raw").list_images()
    }


def test_build_upload_rebuild_and_roll_back(
    builders: BuilderBench,
    images: list[dict[str, Any]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = demo_image.obstacle()
    assert problem is None, problem
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    config = builders.config(images, [builders.provider("fake-raw", [IMAGE], cloud="fake-raw")])
    builder = builders.start(config)

    # The first build comes automatically.
    upload = builders.wait_upload(IMAGE, "fake-raw", timeout=10 * MINUTES)
    (first,) = builders.builds(IMAGE)
    assert (
        first.formats == ["qcow2", "raw"] and upload.format == "raw" and upload.build_id == first.id
    )
    assert builders.files(IMAGE) == expected_files(first.id)
    base = builders.images_dir / f"{IMAGE}-{first.id}"
    with open(f"{base}.qcow2", "rb") as qcow2:
        assert qcow2.read(8) == b"QFI\xfb\x00\x00\x00\x02", "compat=0.10 is version 2"
    with open(f"{base}.raw", "rb") as raw:
        raw.seek(1024 + 56)
        assert raw.read(2) == b"\x53\xef", (
            "an ext4 file system begins at once, without a partition table"
        )
        raw.seek(0)
        checksum = hashlib.file_digest(raw, "sha256").hexdigest()
    assert pathlib.Path(f"{base}.raw.sha256").read_text().split()[0] == checksum
    assert builders.log_text(IMAGE, first.id).endswith("Exit code: 0\n")
    (stored,) = [
        i for i in builders.cloud(builder, "fake-raw").list_images() if i.id == upload.external_id
    ]
    assert stored.properties["nodepool_build_id"] == first.id
    progress = builders.progress(first.id)
    assert (
        progress.state == "ready" and progress.duration and set(progress.sizes) == {"qcow2", "raw"}
    )

    # A second one on request; its progress is shown meanwhile, with the time that the first took as
    # expectation.
    builders.zk.submitBuildRequest(IMAGE)
    second = builders.wait_build(IMAGE, besides=(first.id,), state="building")
    phases: list[str] = []
    store = ProgressStore(builders.zk.kazoo_client)
    deadline = time.monotonic() + 10 * MINUTES
    while (now := store.read_build(second.id)) is None or now.running:
        if now is not None and now.phase not in phases:
            phases.append(now.phase)
            assert now.expected == pytest.approx(progress.duration)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wanted = ["root", "pre-install", "install", "finalise"]
    assert [p for p in phases if p in wanted] == wanted
    builders.wait_upload(IMAGE, "fake-raw", build=second.id)
    assert {b.id for b in builders.builds(IMAGE)} == {first.id, second.id}
    assert builders.files(IMAGE) == expected_files(first.id) | expected_files(second.id)
    assert len(builders.uploads(IMAGE, "fake-raw", state=None)) == 2
    assert builder.zk.getMostRecentImageUpload(IMAGE, "fake-raw").build_id == second.id

    # Roll back.
    assert nodepoolcmd.main(["-c", config, "dib-image-delete", f"{IMAGE}-{second.id}"]) == 0
    builders.wait_gone(IMAGE, second.id)
    assert builders.files(IMAGE) == expected_files(first.id)
    assert [u.build_id for u in builders.uploads(IMAGE, "fake-raw", state=None)] == [first.id]
    assert builder.zk.getMostRecentImageUpload(IMAGE, "fake-raw").build_id == first.id
    ids = {i.id for i in builders.cloud(builder, "fake-raw").list_images()}
    assert (
        upload.external_id in ids and len(ids) == 2
    )  # with the one that the fake cloud always has
    assert {b.id for b in builders.builds(IMAGE, None)} == {first.id}, (
        "nothing is built in its place"
    )

    # Nothing else is left.
    wait_for(lambda: list(scratch.iterdir()) == [], what="temporary trees gone")
    assert loop_devices(tmp_path) == []
    assert not [
        line
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        if str(tmp_path) in line
    ]
