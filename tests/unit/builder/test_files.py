"""Files of a builder, on a real file system."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import stat
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.base.files import NEW
from nodepool.builder.machine import image_files
from nodepool.builder.machine.image_files import DibImageFile
from nodepool.builder.upload import journal as upload_journal
from nodepool.exceptions import ConfigurationError

log = logging.getLogger("test")

HEX = "0123456789abcdef0123456789abcdef"


def touch(directory: pathlib.Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"x")


def names(directory: pathlib.Path) -> set[str]:
    return set(os.listdir(directory))


def mode(path: pathlib.Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@contextlib.contextmanager
def immutable(path: pathlib.Path) -> Iterator[None]:
    """Not even root can remove it."""
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@pytest.mark.spec(
    "BLD: looking up id myid1234 with myid1234.qcow2 finds one file, with also .raw two"
)
def test_image_files_of_an_id(tmp_path: pathlib.Path) -> None:
    touch(tmp_path, "myid1234.qcow2")
    (found,) = DibImageFile.from_image_id(str(tmp_path), "myid1234")
    assert (found.image_id, found.extension) == ("myid1234", "qcow2")
    touch(
        tmp_path,
        "myid1234.raw",
        "myid1234.raw.md5",
        "myid1234.raw.sha256",
        "myid1234.qcow2-new",
        "other.raw",
        "myid12345.raw",
    )
    (tmp_path / "myid1234.d").mkdir()
    assert [file.extension for file in DibImageFile.from_image_id(str(tmp_path), "myid1234")] == [
        "qcow2",
        "raw",
    ]
    assert DibImageFile.from_image_id(str(tmp_path / "missing"), "myid1234") == []


@pytest.mark.spec("BLD: path building ignores a trailing slash")
def test_image_path_ignores_a_trailing_slash(tmp_path: pathlib.Path) -> None:
    image_file = DibImageFile("myid1234", ".qcow2")
    assert image_file.extension == "qcow2"
    assert (
        image_file.to_path(str(tmp_path))
        == image_file.to_path(f"{tmp_path}/")
        == f"{tmp_path}/myid1234.qcow2"
    )
    assert image_file.to_path("/imagedir/", with_extension=False) == "/imagedir/myid1234"
    with pytest.raises(ValueError, match="myid1234 has no format"):
        DibImageFile("myid1234").to_path(str(tmp_path))


@pytest.mark.spec(
    "BLD: only the first 32 / 64 characters of the checksum files count; either may be missing"
)
def test_checksum_files_are_read_if_they_exist(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "i-1.raw"
    path.write_bytes(b"image")
    image_file = DibImageFile("i-1", "raw")
    image_file.to_path(str(tmp_path))
    assert (image_file.md5, image_file.md5_file, image_file.sha256, image_file.sha256_file) == (
        None,
        None,
        None,
        None,
    )
    for tool in ("md5sum", "sha256sum"):
        output = subprocess.run([tool, str(path)], capture_output=True, check=True).stdout
        (tmp_path / f"i-1.raw.{tool.removesuffix('sum')}").write_bytes(output)
    image_file.to_path(str(tmp_path))
    assert image_file.md5 == hashlib.md5(b"image").hexdigest()
    assert image_file.sha256 == hashlib.sha256(b"image").hexdigest()
    assert (image_file.md5_file, image_file.sha256_file) == (f"{path}.md5", f"{path}.sha256")
    (tmp_path / "i-1.raw.md5").write_bytes(b"")  # the tool was killed
    image_file.to_path(str(tmp_path))
    assert (image_file.md5, image_file.md5_file) == (None, None)
    assert image_file.sha256


@pytest.mark.spec(
    "BLD: deleting local files: images, checksums, then the manifest directory in every case; "
    "idempotent"
)
def test_delete_local_build(tmp_path: pathlib.Path) -> None:
    mine = [
        f"i-{HEX}.{rest}"
        for rest in (
            "raw",
            "raw.md5",
            "raw.sha256",
            "qcow2-new",
            "vhd-intermediate",
            "vhd-intermediate.bak",
            "squash",
        )
    ]
    others = [f"i-{HEX}0.raw", f"my-i-{HEX}.raw", "i-1.raw", "builder_id.txt", f"i-{HEX}.x-12.raw"]
    touch(tmp_path, *mine, *others, f"i-{HEX}-boot.iso")
    manifest = tmp_path / f"i-{HEX}.d"
    (manifest / "inner").mkdir(parents=True)
    touch(manifest / "inner", "dib-manifest")
    assert image_files.delete_local_build(str(tmp_path), "i", HEX, log)
    assert names(tmp_path) == set(others)
    assert image_files.delete_local_build(str(tmp_path), "i", HEX, log)
    manifest.mkdir()  # alone, as after format pruning
    assert image_files.delete_local_build(str(tmp_path), "i", HEX, log)
    assert not manifest.exists()
    assert image_files.delete_local_build(str(tmp_path / "missing"), "i", HEX, log)


def test_what_cannot_be_deleted_is_named_and_the_rest_goes(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    touch(tmp_path, "i-1.raw", "i-1.qcow2")
    with immutable(tmp_path / "i-1.raw"):
        assert not image_files.delete_local_build(str(tmp_path), "i", "1", log)
        assert names(tmp_path) == {"i-1.raw"}
        assert f"Cannot remove {tmp_path}/i-1.raw: Operation not permitted" in caplog.text
    assert image_files.delete_local_build(str(tmp_path), "i", "1", log)


@pytest.mark.spec(
    "BLD-12: delete every other image file with its checksums; the manifest directory stays"
)
def test_delete_format_keeps_other_formats_and_the_manifest(tmp_path: pathlib.Path) -> None:
    touch(tmp_path, "i-1.raw", "i-1.raw.md5", "i-1.raw.sha256", "i-1.qcow2", "i-1.qcow2.md5")
    (tmp_path / "i-1.d").mkdir()
    for _ in range(2):
        image_files.delete_format(str(tmp_path), "i-1", "raw", log)
        assert names(tmp_path) == {"i-1.qcow2", "i-1.qcow2.md5", "i-1.d"}


@pytest.mark.spec("BLD: size gauge 4096 for a one-block file")
def test_sizes_are_those_on_disk(tmp_path: pathlib.Path) -> None:
    (tmp_path / "i-1.tar").write_bytes(b"x" * 100)
    with open(tmp_path / "i-1.raw", "wb") as sparse:
        sparse.truncate(1 << 30)
    touch(tmp_path, "i-1.tar.md5")
    assert image_files.sizes(str(tmp_path), "i-1") == {"tar": 4096, "raw": 0}


@pytest.mark.spec("BLD-20: images are not open to everybody")
def test_make_private_revokes_access_of_others(tmp_path: pathlib.Path) -> None:
    touch(tmp_path, "i-1.raw", "i-1.raw.md5", "i-2.raw")
    inner = tmp_path / "i-1.d" / "dib-manifests"
    inner.mkdir(parents=True)
    touch(inner, "dib_environment")
    (inner / "link").symlink_to("/etc/passwd")
    for path in (tmp_path / "i-1.raw", tmp_path / "i-2.raw", inner / "dib_environment"):
        path.chmod(0o666)
    before = mode("/etc/passwd")
    image_files.make_private(str(tmp_path), "i", "1")
    assert mode(tmp_path / "i-1.raw") == 0o660
    assert mode(inner / "dib_environment") == 0o660
    assert (
        mode(tmp_path / "i-1.raw.md5") & 0o007
        == mode(tmp_path / "i-1.d") & 0o007
        == mode(inner) & 0o007
        == 0
    )
    assert mode(tmp_path / "i-2.raw") == 0o666
    assert mode("/etc/passwd") == before
    image_files.make_private(str(tmp_path / "missing"), "i", "1")


@pytest.mark.spec(
    "issue 10, F11: a default access control list of the operator is kept but for its right of "
    "others"
)
def test_close_to_others(tmp_path: pathlib.Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    image_files.close_to_others(str(plain))
    image_files.close_to_others(str(plain))
    (plain / "file").touch()
    (plain / "directory").mkdir()
    assert (mode(plain / "file"), mode(plain / "directory")) == (0o640, 0o750)
    directory = tmp_path / "given"
    directory.mkdir()
    # user::rw, user:1234:r, group::-, mask::r, other::r
    entries = [
        (0x01, 6, 2**32 - 1),
        (0x02, 4, 1234),
        (0x04, 0, 2**32 - 1),
        (0x10, 4, 2**32 - 1),
        (0x20, 4, 2**32 - 1),
    ]
    name = "system.posix_acl_default"
    os.setxattr(
        directory,
        name,
        struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries),
    )
    image_files.close_to_others(str(directory))
    assert list(struct.iter_unpack("<HHI", os.getxattr(directory, name)[4:])) == [
        *entries[:-1],
        (0x20, 0, 2**32 - 1),
    ]
    with pytest.raises(OSError, match="not supported"):
        image_files.close_to_others("/proc/self")


# Logs


def aged_logs(directory: pathlib.Path, *logs: str) -> None:
    for age, name in enumerate(logs):
        touch(directory, name)
        os.utime(directory / name, (10**9 - age, 10**9 - age))


@pytest.mark.spec(
    "BLD-8: pruning selects exactly <image>-<id>.log; keep the newest max(retention, 1); negative: "
    "none"
)
def test_prune_logs_keeps_the_newest_logs_of_this_image(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = ["ubuntu-jammy-0000000001.log", "ubuntu-01.log.gz", "ubuntu.log", "my-ubuntu-01.log"]
    touch(tmp_path, *others)
    for retention, kept in ((-1, 3), (2, 2), (1, 1), (0, 1)):
        aged_logs(tmp_path, "ubuntu-0000000003.log", f"ubuntu-{HEX}.log", "ubuntu-0000000001.log")
        image_files.prune_logs(str(tmp_path), "ubuntu", retention, log)
        left = ["ubuntu-0000000003.log", f"ubuntu-{HEX}.log", "ubuntu-0000000001.log"][:kept]
        assert names(tmp_path) == {*others, *left}
    image_files.prune_logs(str(tmp_path / "missing"), "ubuntu", 1, log)
    assert not caplog.records


@pytest.mark.spec("BLD-8: a log file that cannot be deleted must not fail the build")
def test_log_that_stays(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    aged_logs(tmp_path, "i-03.log", "i-02.log", "i-01.log")
    (tmp_path / "i-02.log").unlink()
    (tmp_path / "i-02.log").mkdir()
    os.utime(tmp_path / "i-02.log", (10**9 - 1, 10**9 - 1))
    image_files.prune_logs(str(tmp_path), "i", 1, log)
    assert names(tmp_path) == {"i-03.log", "i-02.log"}
    assert f"Cannot remove old log {tmp_path}/i-02.log" in caplog.text


@pytest.mark.spec("BLD-8: <build-log-dir>/<image>-<build id>.log, directory created on demand")
def test_open_log_creates_the_directory(tmp_path: pathlib.Path) -> None:
    path = image_files.log_path(str(tmp_path / "a" / "b"), "ubuntu-jammy", HEX)
    assert path == f"{tmp_path}/a/b/ubuntu-jammy-{HEX}.log"
    old = os.umask(0)
    try:
        with image_files.open_log(path) as file:
            file.write(b"\xff line\n")
            assert pathlib.Path(path).read_bytes() == b"\xff line\n"  # nothing is kept back
    finally:
        os.umask(old)
    assert mode(path) == 0o640


# Builder id


@pytest.mark.spec(
    "BLD: builder_id.txt holds a canonical version-4 UUID, no newline; existing content is used, "
    "stripped"
)
def test_builder_id_is_created_once(tmp_path: pathlib.Path) -> None:
    first = image_files.builder_id(str(tmp_path))
    path = tmp_path / "builder_id.txt"
    assert path.read_text() == first == str(uuid.UUID(first))
    assert uuid.UUID(first).version == 4
    assert mode(path) == 0o644
    assert image_files.builder_id(str(tmp_path)) == first
    path.write_text(f"{first}\n")
    assert image_files.builder_id(str(tmp_path)) == first
    assert names(tmp_path) == {"builder_id.txt"}


def test_builder_id_that_is_none(tmp_path: pathlib.Path) -> None:
    for content in (b"", b"not an id", b"\xff\xfe"):
        (tmp_path / "builder_id.txt").write_bytes(content)
        with pytest.raises(
            ConfigurationError, match=r"builder_id.txt holds .* instead of a UUID; restore it"
        ):
            image_files.builder_id(str(tmp_path))


def test_images_dir_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing does not exist; create it"):
        image_files.builder_id(str(tmp_path / "missing"))
    touch(tmp_path, "file")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        image_files.builder_id(str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="is not writable"):
        image_files.builder_id("/proc")


def test_write_test_leaves_nothing_when_the_builder_is_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    create = tempfile.TemporaryFile

    def observed(**options: Any) -> Any:
        file = create(**options)
        seen.append(names(tmp_path))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", observed)
    image_files.check_images_dir(str(tmp_path))
    assert seen == [set()]


def test_note_of_an_upload_that_is_being_written_is_kept_whatever_the_clock(
    tmp_path: pathlib.Path,
) -> None:
    unfinished = tmp_path / upload_journal.DIRECTORY / f"{NEW}note"
    unfinished.parent.mkdir()
    touch(unfinished.parent, unfinished.name)
    os.utime(unfinished, (0, 0))
    assert upload_journal.notes(str(tmp_path)) == []
    assert unfinished.exists()


# Disk space


def test_expected_bytes_is_the_largest_earlier_build(tmp_path: pathlib.Path) -> None:
    assert image_files.expected_bytes(str(tmp_path), "i") == 0
    for name, blocks in (
        ("i-01.raw", 2),
        ("i-02.raw", 1),
        ("i-02.qcow2", 3),
        ("i-x-03.raw", 9),
        ("i-02.qcow2.md5", 1),
    ):
        (tmp_path / name).write_bytes(b"x" * 4096 * blocks)
    assert image_files.expected_bytes(str(tmp_path), "i") == 5 * 4096
    assert image_files.expected_bytes(str(tmp_path / "missing"), "i") == 0


@pytest.mark.spec("BLD-20: disk-space check before a build")
def test_check_space_reports_missing_disk_space(tmp_path: pathlib.Path) -> None:
    assert image_files.check_space(str(tmp_path), "/tmp", 1) is None
    state = os.statvfs(tmp_path)
    assert (
        0
        <= image_files.free_bytes(str(tmp_path / "not" / "there"))
        <= state.f_blocks * state.f_frsize
    )
    sentence = image_files.check_space(str(tmp_path), str(tmp_path / "tmp"), 1 << 60)
    assert sentence is not None
    assert sentence.startswith(f"images-dir {tmp_path} has ")
    assert f"the build needs about {1 << 40} MiB; free disk space there" in sentence


def test_check_space_of_another_file_system(tmp_path: pathlib.Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("mounting needs root")
    try:
        sentence = image_files.check_space(str(tmp_path), str(small), 2 << 20)
        assert sentence is not None
        assert sentence.startswith(
            f"temporary directory {small} has 1 MiB free, the build needs about 2 MiB"
        )
        assert "TMPDIR" in sentence
        assert image_files.check_space(str(tmp_path), str(small), 1 << 19) is None
    finally:
        subprocess.run(["umount", str(small)], check=True)
