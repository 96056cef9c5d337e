"""Files of a builder: images, checksums, manifests, logs and the builder id.

Implements BLD-5, BLD-8, BLD-10.C, BLD-10.E and BLD-12.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import stat
import struct
import tempfile
import time
import uuid
from typing import Any, BinaryIO

from nodepool.base.files import replace_file
from nodepool.builder.machine.mounts import remove_tree
from nodepool.exceptions import ConfigurationError

log = logging.getLogger("nodepool.builder.files")

MIB = 1024 * 1024
#: Unit of ``st_blocks``, whatever the file system's block size is.
BLOCK = 512
LOG_MODE = 0o640
#: Suffix of a checksum file and the number of characters that count.
CHECKSUMS = {"md5": 32, "sha256": 64}

#: Seconds for a manifest directory.
_REMOVE_TIMEOUT = 60.0

# Intermediate files of disk-image-create with the final name as prefix: "-new" before the rename,
# two more for vhd.
_UNFINISHED = r"(?:\.(?:md5|sha256|tmp|part)|-new|-intermediate|\.bak)*"
_BUILD_FILE = re.compile(rf"(?P<image>.+)-(?P<build>[0-9a-f]+)\.\w+{_UNFINISHED}", re.ASCII)
_EXTENSION = re.compile(r"\w+", re.ASCII)


def image_id(image: str, build_id: str) -> str:
    """Return the base name of all files of a build."""
    return f"{image}-{build_id}"


class DibImageFile:
    """One image file in one format (BLD-5)."""

    def __init__(self, image_id: str, extension: str | None = None) -> None:
        self.image_id = image_id
        self.extension = extension.lstrip(".") if extension else extension
        self.md5: str | None = None
        self.md5_file: str | None = None
        self.sha256: str | None = None
        self.sha256_file: str | None = None

    @staticmethod
    def from_image_id(images_dir: str, image_id: str) -> list[DibImageFile]:
        """Return a build's image files, sorted by format; none if the directory is missing."""
        found = []
        for entry in _entries(images_dir):
            base, dot, extension = entry.name.rpartition(".")
            if (
                dot
                and base == image_id
                and _EXTENSION.fullmatch(extension)
                and os.path.isfile(entry.path)
            ):
                found.append(DibImageFile(image_id, extension))
        return sorted(found, key=lambda image_file: image_file.extension or "")

    def to_path(self, images_dir: str, with_extension: bool = True) -> str:
        """Return the file's path, and read its checksums.

        :raises ValueError: the path with extension is required, but the file has none.
        """
        path = os.path.join(images_dir, self.image_id)
        if not with_extension:
            return path
        if not self.extension:
            raise ValueError(
                f"image file {self.image_id} has no format; give DibImageFile an extension"
            )
        path = f"{path}.{self.extension}"
        self.md5, self.md5_file = _checksum(path, "md5")
        self.sha256, self.sha256_file = _checksum(path, "sha256")
        return path

    def __repr__(self) -> str:
        return f"<DibImageFile {self.image_id}.{self.extension}>"


def _checksum(path: str, kind: str) -> tuple[str | None, str | None]:
    """Return digest and file name; both None if the file is missing or empty."""
    name, length = f"{path}.{kind}", CHECKSUMS[kind]
    try:
        with open(name, "rb") as file:
            digest = file.read(length).decode("ascii", "replace")
    except OSError:
        return None, None
    return (digest, name) if digest.strip() else (None, None)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _owner(name: str) -> tuple[str, str] | None:
    match = _BUILD_FILE.fullmatch(name)
    return (match["image"], match["build"]) if match else None


def local_builds(images_dir: str) -> set[tuple[str, str]]:
    """Return every (image, build id) with files here, manifests and unfinished files included.

    :raises OSError: the directory cannot be read (a missing one counts as empty).
    """
    return {owner for entry in _entries(images_dir) if (owner := _owner(entry.name))}


def _names(images_dir: str, image: str, build_id: str) -> list[str]:
    """Return all file names of one build: images, checksums and the like, then the manifest."""
    base = image_id(image, build_id)
    names = []
    for entry in _entries(images_dir):
        mine = entry.name.startswith(f"{base}.") or entry.name == f"{base}-boot.iso"
        if mine and _owner(entry.name) in (None, (image, build_id)):
            names.append(entry.name)
    return sorted(
        names, key=lambda name: (name == f"{base}.d", name.removeprefix(base).count("."), name)
    )


def removeDibItem(filename: str, log: logging.Logger | logging.LoggerAdapter[Any]) -> bool:
    """Delete a file or directory of a build; log errors, and return False if it still exists."""
    try:
        if not stat.S_ISDIR(os.lstat(filename).st_mode):
            os.unlink(filename)
        elif problem := remove_tree(filename, time.monotonic() + _REMOVE_TIMEOUT):
            log.error("Cannot remove %s: %s; retrying later", filename, problem)
            return False
        log.info("Removed %s", filename)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.error("Cannot remove %s: %s; retrying later", filename, error.strerror)
        return False
    return True


def delete_local_build(
    images_dir: str, image: str, build_id: str, log: logging.Logger | logging.LoggerAdapter[Any]
) -> bool:
    """Delete all files of a build, the manifest last; return True if none are left.

    May be repeated at any time.
    """
    try:
        names = _names(images_dir, image, build_id)
    except OSError as error:
        log.error(
            "Cannot read images-dir %s: %s; build %s of %s is not deleted",
            images_dir,
            error.strerror,
            build_id,
            image,
        )
        return False
    left = [name for name in names if not removeDibItem(os.path.join(images_dir, name), log)]
    return not left


def delete_format(images_dir: str, image_id: str, extension: str, log: logging.Logger) -> None:
    """Delete one image file and its checksums, if they exist; log errors."""
    path = os.path.join(images_dir, f"{image_id}.{extension}")
    for name in (path, *(f"{path}.{kind}" for kind in CHECKSUMS)):
        removeDibItem(name, log)


def sizes(images_dir: str, image_id: str) -> dict[str, int]:
    """Return the disk usage per format in bytes (sparse files count their blocks)."""
    found: dict[str, int] = {}
    for image_file in DibImageFile.from_image_id(images_dir, image_id):
        extension = str(image_file.extension)
        with contextlib.suppress(FileNotFoundError):
            found[extension] = (
                os.stat(os.path.join(images_dir, f"{image_id}.{extension}")).st_blocks * BLOCK
            )
    return found


_DEFAULT_ACL = "system.posix_acl_default"
_ACL_VERSION, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_ACL_OTHER, _ACL_NO_ID = 0x20, 0xFFFFFFFF
#: Owner: all; group: read; others: none.
_ACL_PLAIN = ((0x01, 7), (0x04, 5), (_ACL_OTHER, 0))


def close_to_others(directory: str) -> None:
    """Deny others access to all files that are later created in a directory.

    The image-building command needs a umask that allows everyone to read, for the content of
    images; a default access control list overrides the umask in this directory only. An existing
    list is kept except for its "other" entry.

    :raises OSError: the directory is not ours, or its file system does not support such lists.
    """
    try:
        present = os.getxattr(directory, _DEFAULT_ACL)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        entries = [(tag, rights, _ACL_NO_ID) for tag, rights in _ACL_PLAIN]
    else:
        entries = [
            (tag, 0 if tag == _ACL_OTHER else rights, number)
            for tag, rights, number in _ACL_ENTRY.iter_unpack(present[_ACL_VERSION.size :])
        ]
    wanted = _ACL_VERSION.pack(2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
    os.setxattr(directory, _DEFAULT_ACL, wanted)


def make_private(images_dir: str, image: str, build_id: str) -> None:
    """Revoke others' access to the files of a build; images and manifests may hold secrets."""
    for name in _names(images_dir, image, build_id):
        path = os.path.join(images_dir, name)
        try:
            _forbid_others(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("Cannot restrict permissions of %s to the owner: %s", path, error.strerror)
        for directory, folders, plain in os.walk(path):
            for inner in (*folders, *plain):
                # The closed directory above them is decisive; the tool may be working on them.
                with contextlib.suppress(OSError):
                    _forbid_others(os.path.join(directory, inner))


def _forbid_others(path: str) -> None:
    mode = os.lstat(path).st_mode
    if not stat.S_ISLNK(mode) and mode & stat.S_IRWXO:
        os.chmod(path, stat.S_IMODE(mode) & ~stat.S_IRWXO)


# Log files


def log_path(log_dir: str, image: str, build_id: str) -> str:
    return os.path.join(log_dir, f"{image_id(image, build_id)}.log")


def prune_logs(
    log_dir: str, image: str, retention: int, log: logging.Logger | logging.LoggerAdapter[Any]
) -> None:
    """Delete old logs of this image before a new one is created (BLD-8).

    The newest max(retention, 1) are kept; all if negative.
    """
    if retention < 0:
        return
    pattern = re.compile(rf"{re.escape(image)}-[0-9a-f]+\.log")
    aged: list[tuple[float, str]] = []
    try:
        for entry in _entries(log_dir):
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    aged.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    except OSError as error:
        log.warning("Cannot list old logs of %s in %s: %s", image, log_dir, error.strerror)
        return
    for _, path in sorted(aged, reverse=True)[max(retention, 1) :]:
        try:
            pathlib.Path(path).unlink(missing_ok=True)
        except OSError as error:
            log.warning("Cannot remove old log %s: %s", path, error.strerror)


def open_log(path: str) -> BinaryIO:
    """Return an unbuffered log file, readable by owner and group; create directories.

    :raises OSError: it cannot be created.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    pathlib.Path(path).touch(LOG_MODE)
    os.chmod(path, LOG_MODE)
    return open(path, "ab", buffering=0)


# Builder id


def builder_id(images_dir: str) -> str:
    """Return the id that marks this builder's records; created on first use (BLD-2).

    :raises ConfigurationError: images-dir cannot be used, or the file contains something else.
    """
    check_images_dir(images_dir)
    path = os.path.join(images_dir, "builder_id.txt")
    try:
        if not os.path.exists(path):
            replace_file(path, str(uuid.uuid4()), 0o644)
        with open(path, "rb") as file:
            text = file.read(256).decode("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigurationError(
            f"images-dir: cannot read or write {path}: {error.strerror}; give user {os.geteuid()} "
            "access to it"
        ) from error
    try:
        uuid.UUID(text)
    except ValueError:
        raise ConfigurationError(
            f"{path} holds {text[:40]!r} instead of a UUID; restore it from a backup, or remove "
            "it: the builder then "
            "creates a new one, and earlier builds count as those of another builder"
        ) from None
    return text


def check_images_dir(images_dir: str) -> None:
    """Check by writing: permissions, read-only mounts and full disks only show then.

    :raises ConfigurationError: it cannot be written.
    """
    if not os.path.exists(images_dir):
        raise ConfigurationError(f"images-dir {images_dir} does not exist; create it")
    if not os.path.isdir(images_dir):
        raise ConfigurationError(f"images-dir {images_dir} is not a directory")
    try:
        # Without a name, so that a builder killed here leaves no file behind.
        with tempfile.TemporaryFile(dir=images_dir, prefix=".write-test-"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"images-dir {images_dir} is not writable for user {os.geteuid()}: {error.strerror}"
        ) from error


# Disk space


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def free_bytes(path: str) -> int:
    """Return the free bytes for this user at the path, or where it would be created."""
    state = os.statvfs(_existing(path))
    blocks = state.f_bfree if os.geteuid() == 0 else state.f_bavail
    return blocks * state.f_frsize


def expected_bytes(images_dir: str, image: str) -> int:
    """Return the disk usage of the largest earlier build of the image here; 0 if none."""
    totals: dict[str, int] = {}
    for entry in _entries(images_dir):
        owner = _owner(entry.name)
        if owner and owner[0] == image and os.path.isfile(entry.path):
            with contextlib.suppress(FileNotFoundError):
                totals[owner[1]] = totals.get(owner[1], 0) + entry.stat().st_blocks * BLOCK
    return max(totals.values(), default=0)


def check_space(images_dir: str, tmp_dir: str, needed_bytes: int) -> str | None:
    """Return None if there is enough free disk space, else a sentence for the operator.

    A file system that holds both directories is checked once.
    """
    seen: set[int] = set()
    for option, path in (("images-dir", images_dir), ("temporary directory", tmp_dir)):
        device = os.stat(_existing(path)).st_dev
        if device in seen:
            continue
        seen.add(device)
        free = free_bytes(path)
        if free < needed_bytes:
            remedy = (
                "or set TMPDIR in the image's env-vars to a larger one"
                if path == tmp_dir
                else "or set a larger images-dir"
            )
            return (
                f"{option} {path} has {free // MIB} MiB free, the build needs about "
                f"{-(-needed_bytes // MIB)} MiB; "
                f"free disk space there, {remedy}"
            )
    return None
