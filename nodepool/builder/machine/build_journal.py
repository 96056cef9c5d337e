"""Clean up after a killed builder: processes, mounts, loop devices, temporary trees.

Every build is recorded before it starts, in ``<images-dir>/.builds/<image>-<build id>.json``, with
all that is needed to find its leftovers. The next start of the builder reads these files and cleans
up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
import pathlib
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any

import voluptuous as v

from nodepool.base.boot import boot_id
from nodepool.base.files import lock_file, replace_file, sync_directory
from nodepool.builder.machine import mounts, processes
from nodepool.builder.machine.image_files import image_id
from nodepool.builder.machine.processes import MARKER_VARIABLE, Origin
from nodepool.exceptions import BuilderError, ConfigurationError

log = logging.getLogger("nodepool.builder.leftovers")

JOURNAL = ".builds"
LOCK = "lock"
LOCK_TIMEOUT = 1.0
#: Seconds for the leftovers of one build; an image tree has about 100,000 files.
CLEAN_TIMEOUT = 120.0

#: Names that diskimage-builder creates with ``mktemp``.
_TEMPORARY = re.compile(r"(?:dib_build|dib_image|profiledir)\.\w+")
_PRIVATE = re.compile(r"nodepool-build\.[0-9a-f]{16}")
_DIB_VARIABLES = (b"TMP_BUILD_DIR=", b"TMP_IMAGE_DIR=", b"PROFILE_DIR=")
_UNSAFE = re.compile(r"[^\w.+-]")

Logger = logging.Logger | logging.LoggerAdapter[Any]


@dataclass
class BuildEntry:
    image: str
    build_id: str
    images_dir: str
    #: Real path of the directory in which the tool creates its temporary trees.
    tmp_base: str
    #: The build's own directory below ``tmp_base``, its TMPDIR; None if the configuration names a
    #: TMPDIR.
    private_tmp: str | None
    marker: str
    boot_id: str
    pid: int | None = None
    #: Of the process, in clock ticks since boot.
    start_time: int | None = None
    #: Temporary trees that were in ``tmp_base`` before.
    existing: list[str] = field(default_factory=list)
    build_dirs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    @property
    def path(self) -> str:
        name = _UNSAFE.sub("_", image_id(self.image, self.build_id))
        return os.path.join(self.images_dir, JOURNAL, f"{name}.json")

    @property
    def environment(self) -> dict[str, str]:
        """Return variables for the command that override all others."""
        return {MARKER_VARIABLE: self.marker}

    def started(self, pid: int) -> None:
        process = processes.read_process(pid)
        with self._lock:
            self.pid = pid
            self.start_time = process.start_time if process else None
            self._update()

    def note_dir(self, path: str) -> bool:
        """Record a temporary tree of the build.

        Return False, and ignore the path, if the tool does not create such trees.
        """
        real = os.path.realpath(path)
        with self._lock:
            if self._ended or not self._acceptable(real):
                return False
            if real in self.build_dirs:
                return True
            self.build_dirs.append(real)
            self._update()
        return True

    def _acceptable(self, real: str) -> bool:
        """Return whether the path may be a tree of this build; output alone is not proof.

        It must have a name of the tool, be in the right directory, and must not have existed
        before.
        """
        parent, name = os.path.split(real)
        return (
            bool(_TEMPORARY.fullmatch(name))
            and parent in (self.tmp_base, self.private_tmp)
            and name not in self.existing
        )

    def origin(self) -> Origin:
        pid = self.pid if self.boot_id == boot_id() else None
        return Origin(self.marker, pid, self.start_time, tuple(self.directories()))

    def directories(self) -> list[str]:
        return [*self.build_dirs, *([self.private_tmp] if self.private_tmp else [])]

    def end(self, deadline: float | None = None) -> list[str]:
        """Clean up after the build; what fails remains recorded for the next start."""
        problems = clean(self, deadline)
        with self._lock:
            self._ended = True
            if not problems:
                pathlib.Path(self.path).unlink(missing_ok=True)
        return problems

    def _update(self) -> None:
        """Write the entry; errors are only logged.

        Even with a full disk the build continues: its marker alone finds most leftovers.
        """
        if self._ended:
            return
        try:
            self._save()
        except OSError as error:
            log.warning("Cannot write %s: %s", self.path, error.strerror)

    def _save(self) -> None:
        content = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name != "images_dir"
        }
        replace_file(self.path, json.dumps(content))


def begin(
    images_dir: str, image: str, build_id: str, tmp_base: str, private: bool = True
) -> BuildEntry:
    """Record a build that is about to start.

    *private*: create a separate temporary directory for it.

    :raises BuilderError: the journal or the directory cannot be created.
    """
    base = os.path.realpath(tmp_base)
    entry = BuildEntry(
        image=image,
        build_id=build_id,
        images_dir=os.path.realpath(images_dir),
        tmp_base=base,
        private_tmp=os.path.join(base, f"nodepool-build.{secrets.token_hex(8)}")
        if private
        else None,
        marker=f"{image_id(image, build_id)}/{secrets.token_hex(16)}",
        boot_id=boot_id(),
        existing=sorted(
            name for name in glob.glob("*", root_dir=base) if _TEMPORARY.fullmatch(name)
        ),
    )
    try:
        _make_directory(os.path.dirname(entry.path))
        entry._save()
    except OSError as error:
        raise BuilderError(
            f"cannot write {entry.path}: {error.strerror}; check free space and permissions of "
            "images-dir"
        ) from error
    if entry.private_tmp:
        try:
            os.mkdir(entry.private_tmp, 0o700)
        except OSError as error:
            os.unlink(entry.path)
            raise BuilderError(
                f"diskimage {image}: cannot create a temporary directory in {base}: "
                f"{error.strerror}; "
                "set TMPDIR in its env-vars, or for the builder, to one that can be written"
            ) from error
    return entry


def entries(images_dir: str, log: Logger = log) -> list[BuildEntry]:
    """Return the recorded builds, which run or were interrupted; invalid files are renamed."""
    images_dir = os.path.realpath(images_dir)
    directory = os.path.join(images_dir, JOURNAL)
    found = []
    for name in sorted(glob.glob("*.json", root_dir=directory, include_hidden=True)):
        path = os.path.join(directory, name)
        try:
            found.append(_load(path, images_dir))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, v.Invalid) as error:
            log.error(
                "Build journal %s is invalid (%s) and was renamed to %s.broken; check for "
                "leftovers of "
                "that build yourself: processes, mounts, /dev/loop*, dib_* in the temporary "
                "directory",
                path,
                error,
                name,
            )
            with contextlib.suppress(OSError):
                os.replace(path, f"{path}.broken")
    return found


def _make_directory(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        sync_directory(os.path.dirname(path))
    os.chmod(path, 0o700)


_CONTENT = v.Schema(
    {
        "image": str,
        "build_id": str,
        "tmp_base": str,
        "private_tmp": v.Any(str, None),
        "marker": v.All(str, v.Length(min=1)),
        "boot_id": str,
        "pid": v.Any(int, None),
        "start_time": v.Any(int, None),
        "existing": [str],
        "build_dirs": [str],
    },
    required=True,
    extra=v.REMOVE_EXTRA,
)


def _load(path: str, images_dir: str) -> BuildEntry:
    with open(path, encoding="utf-8") as file:
        content = _CONTENT(json.load(file))
    entry = BuildEntry(images_dir=images_dir, **content)
    # The paths to delete must be ones that we would have recorded.
    if entry.private_tmp and (
        os.path.dirname(entry.private_tmp) != entry.tmp_base
        or not _PRIVATE.fullmatch(os.path.basename(entry.private_tmp))
    ):
        raise ValueError(
            f"private_tmp {entry.private_tmp} is not a directory that a builder creates"
        )
    if not all(map(entry._acceptable, entry.build_dirs)):
        raise ValueError("build_dirs contains directories that no build creates")
    if entry.path != path:
        raise ValueError("its name is not that of its build")
    return entry


def clean(entry: BuildEntry, deadline: float | None = None) -> list[str]:
    """End the processes of a build, then unmount, detach and delete its leftovers.

    Return sentences about failures. May be repeated at any time.
    """
    problems: list[str] = []
    deadline = time.monotonic() + CLEAN_TIMEOUT if deadline is None else deadline
    _harvest(entry)
    # Part of the time is reserved for mounts and files.
    now = time.monotonic()
    if left := processes.end(entry.origin(), now + (deadline - now) * 0.6):
        problems.append(f"processes {', '.join(map(str, left))} do not end")
    _harvest(entry)
    directories = entry.directories()
    problems += mounts.unmount_below(directories, deadline)
    files = os.path.join(entry.images_dir, image_id(entry.image, entry.build_id)) + "."

    def wanted(backing: str) -> bool:
        return processes.below(backing, directories) or backing.startswith(files)

    problems += mounts.detach(wanted, deadline)
    for path in directories:
        if problem := mounts.remove_tree(path, deadline):
            problems.append(problem)
    return problems


def _harvest(entry: BuildEntry) -> None:
    """Find temporary trees in the environment of the build's processes.

    Also reads the tool's own parameter file.
    """
    for process in processes.find(entry.origin()):
        for item in processes.environment(process.pid):
            if item.startswith(_DIB_VARIABLES):
                entry.note_dir(os.fsdecode(item.partition(b"=")[2]))
    for directory in list(entry.build_dirs):
        with (
            contextlib.suppress(OSError),
            open(os.path.join(directory, "block-device", "params.yaml"), errors="replace") as file,
        ):
            for line in file.read(65536).splitlines():
                if line.startswith("image-dir: "):
                    entry.note_dir(line.partition(" ")[2].strip())


def clean_all(images_dir: str, log: Logger) -> list[tuple[str, str]]:
    """Clean up after all recorded builds; return (image, build id).

    The caller holds the directory and has not started a build yet. Failures are logged and remain
    recorded.
    """
    found = []
    for entry in entries(images_dir, log):
        found.append((entry.image, entry.build_id))
        log.warning("Build %s of %s was interrupted; cleaning up", entry.build_id, entry.image)
        for problem in entry.end():
            log.error(
                "Leftovers of build %s of %s remain: %s", entry.build_id, entry.image, problem
            )
    return found


# One builder per directory


class ImagesDirInUse(ConfigurationError):
    """Another builder holds the image directory."""

    def __init__(self, images_dir: str, holder: str) -> None:
        super().__init__(
            f"images-dir {images_dir} is in use by builder process {holder or '(unknown)'}; "
            "every builder needs a separate directory"
        )
        self.by_this_process = holder == str(os.getpid())


def acquire_images_dir(images_dir: str) -> IO[bytes]:
    """Lock the directory for this process until the returned file is closed.

    The kernel releases the lock in any case.

    :raises ImagesDirInUse: another builder has it.
    :raises ConfigurationError: it cannot be written, or its file system does not support locks.
    """
    directory = os.path.join(os.path.realpath(images_dir), JOURNAL)
    try:
        _make_directory(directory)
        fd = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"images-dir {images_dir} cannot be used: {error.filename}: {error.strerror}"
        ) from error
    try:
        lock_file(fd, LOCK_TIMEOUT)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise ConfigurationError(
                f"images-dir {images_dir} cannot be locked: {error.strerror}"
            ) from error
        raise ImagesDirInUse(images_dir, holder) from None
    return open(fd, "rb", buffering=0)
