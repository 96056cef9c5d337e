"""A real Debian image by diskimage-builder: built in two formats, uploaded, rebuilt, rolled back (some minutes)."""

from __future__ import annotations

import hashlib
import pathlib
import sys
import tarfile
import time
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.zk.progress import ProgressStore
from tests.conftest import REPOSITORY, wait_for
from tests.integration.builder_bench import BuilderBench

sys.path.insert(0, str(REPOSITORY / "tools"))
import demo_image  # noqa: E402

MINUTES = 60
#: A file system without partitions: for kernels without device-mapper.
BLOCK_DEVICE = """\
- local_loop:
    name: image0
- mkfs:
    name: mkfs_root
    base: image0
    type: ext4
    mount:
      mount_point: /
      fstab:
        options: "rw,relatime"
        fsck-passno: 1
"""

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(25 * MINUTES)]


def expected_files(build_id: str) -> set[str]:
    files = {f"{build_id}.{fmt}{end}" for fmt in ("raw", "tar") for end in ("", ".md5", ".sha256")}
    return files | {f"{build_id}.d"}


def loop_devices() -> list[str]:
    return [p.read_text() for p in pathlib.Path("/sys/block").glob("loop*/loop/backing_file")]


@pytest.fixture
def image(builders: BuilderBench, tmp_path: pathlib.Path) -> dict[str, Any]:
    return {
        "name": "debian", "elements": ["debian-minimal"], "release": "bookworm", "formats": ["tar"],
        "env-vars": {
            "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "0", "DIB_IMAGE_CACHE": str(tmp_path / "cache"),
            "DIB_BLOCK_DEVICE_CONFIG": BLOCK_DEVICE, **demo_image.apt_mirrors(demo_image.read_apt_sources())},
    }


def test_build_upload_rebuild_and_roll_back(
    builders: BuilderBench, image: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = demo_image.obstacle()
    assert problem is None, problem
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = loop_devices()
    config = builders.config([image], [builders.provider("fake-raw", ["debian"], cloud="fake-raw")])
    builder = builders.start(config)

    # The first build comes by itself.
    upload = builders.wait_upload("debian", "fake-raw", timeout=10 * MINUTES)
    (first,) = builders.builds("debian")
    assert first.formats == ["raw", "tar"] and upload.format == "raw" and upload.build_id == first.id
    assert builders.files("debian") == expected_files(first.id)
    base = builders.images_dir / f"debian-{first.id}"
    with tarfile.open(f"{base}.tar") as archive:
        assert {"./etc/debian_version", "etc/debian_version"} & set(archive.getnames())
    with open(f"{base}.raw", "rb") as raw:
        raw.seek(1024 + 56)
        assert raw.read(2) == b"\x53\xef", "an ext4 file system begins at once, without a partition table"
        raw.seek(0)
        checksum = hashlib.file_digest(raw, "sha256").hexdigest()
    assert pathlib.Path(f"{base}.raw.sha256").read_text().split()[0] == checksum
    assert builders.log_text("debian", first.id).endswith("Exit code: 0\n")
    (stored,) = [i for i in builders.cloud(builder, "fake-raw").list_images() if i.id == upload.external_id]
    assert stored.properties["nodepool_build_id"] == first.id
    progress = builders.progress(first.id)
    assert progress.state == "ready" and progress.duration and set(progress.sizes) == {"raw", "tar"}

    # A second one on request; its progress is told meanwhile, with the time that the first took as expectation.
    builders.zk.submitBuildRequest("debian")
    second = builders.wait_build("debian", besides=(first.id,), state="building")
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
    builders.wait_upload("debian", "fake-raw", build=second.id)
    assert {b.id for b in builders.builds("debian")} == {first.id, second.id}
    assert builders.files("debian") == expected_files(first.id) | expected_files(second.id)
    assert len(builders.uploads("debian", "fake-raw", state=None)) == 2
    assert builder.zk.getMostRecentImageUpload("debian", "fake-raw").build_id == second.id

    # Roll back.
    assert nodepoolcmd.main(["-c", config, "dib-image-delete", f"debian-{second.id}"]) == 0
    builders.wait_gone("debian", second.id)
    assert builders.files("debian") == expected_files(first.id)
    assert [u.build_id for u in builders.uploads("debian", "fake-raw", state=None)] == [first.id]
    assert builder.zk.getMostRecentImageUpload("debian", "fake-raw").build_id == first.id
    ids = {i.id for i in builders.cloud(builder, "fake-raw").list_images()}
    assert upload.external_id in ids and len(ids) == 2  # with the one that the fake cloud always has
    assert {b.id for b in builders.builds("debian", None)} == {first.id}, "nothing is built in its place"

    # Nothing else is left.
    wait_for(lambda: list(scratch.iterdir()) == [], what="temporary trees gone")
    assert loop_devices() == before
    assert not [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if str(tmp_path) in line]
