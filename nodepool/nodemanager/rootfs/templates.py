"""Templates of root trees, shared read-only by all slivers of an image (NM-C.2).

Layout below the state directory (0700, root):
  templates/<key>/         a finished template; <key>.new while it is being built, removed by the
                           next start
  templates/<key>/refs/    one empty file per sliver that uses it
  images/<name>.tar        uploaded by the driver
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nodepool.nodemanager.kernel.removal import remove_tree
from nodepool.nodemanager.outcomes import BackendError
from nodepool.nodemanager.rootfs import host_image, tar_image

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_NEEDED = ("bin/sh", "usr/bin/sh")


def check_sliver_name(name: str) -> str:
    """Return the name. Raises BackendError if it must not become a path."""
    if not NAME.match(name):
        raise BackendError(
            f"{name!r} is not a sliver name (a lower-case letter, then up to 62 of a-z, 0-9, '_' "
            "or '-')"
        )
    return name


@dataclass(frozen=True)
class RootTree:
    """Layers, topmost first, for "root" and for directories with their own overlay ("usr")."""

    key: str
    """Name of the template; "" when there is none to count references of."""
    layers: dict[str, list[str]]


class RootStore:
    """Finds and builds templates. Safe for threads and processes (one lock file each)."""

    def __init__(self, state_dir: str | os.PathLike[str], free_space: Callable[[], int]) -> None:
        """:param free_space: bytes that a new tree may use."""
        self.directory = Path(state_dir) / "templates"
        self.images = Path(state_dir) / "images"
        self.limits = tar_image.Limits()
        self._free_space = free_space

    def tree(self, image: str, sliver: str) -> RootTree:
        """Return the tree of an image, building it if needed, and count the sliver as user."""
        check_sliver_name(sliver)
        if image == "host":
            template = self._template(
                f"host-{host_image.digest()}", host_image.build, sliver, "image host"
            )
            layers = {"root": [str(template / "root")], "usr": [str(template / "mask"), "/usr"]}
            layers.update({name: [f"/{name}"] for name in host_image.overlaid() if name != "usr"})
            return RootTree(template.name, layers)
        kind, separator, rest = image.partition(":")
        if separator and kind == "dir":
            return RootTree("", {"root": [self._directory(rest)]})
        if separator and kind == "image":
            if not IMAGE_NAME.match(rest):
                raise BackendError(f"image {image!r}: {rest!r} is not a valid image name")
            return self._tar(self.images / f"{rest}.tar", sliver)
        if separator and kind == "tar":
            return self._tar(Path(rest), sliver)
        raise BackendError(
            f"unknown image {image!r}; there are: host, dir:/path, tar:/path, image:<name>"
        )

    @staticmethod
    def _directory(text: str) -> str:
        path = Path(text)
        if not path.is_absolute():
            raise BackendError(f"image dir:{text}: the path must be absolute")
        if not path.is_dir():
            raise BackendError(f"image dir:{text}: no such directory")
        if path.resolve() == Path("/"):
            raise BackendError("image dir:/ would show the whole host; use image host")
        _check_tree(path, f"image dir:{text}")
        return str(path.resolve())

    def _tar(self, path: Path, sliver: str) -> RootTree:
        if not path.is_absolute():
            raise BackendError(f"image tar:{path}: the path must be absolute")
        try:
            found = path.stat()
        except FileNotFoundError:
            raise BackendError(
                f"image {path}: no such file; upload it or correct the configuration"
            ) from None
        except OSError as error:
            raise BackendError(f"image {path}: {error.strerror}", retry=True) from error
        # Not the device, whose number may differ after a reboot.
        identity = f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
        key = f"tar-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]}"

        def build(target: Path) -> None:
            tree = target / "root"
            tree.mkdir(mode=0o755)
            limits = dataclasses.replace(
                self.limits, size=min(self.limits.size, max(0, self._free_space()))
            )
            tar_image.extract(path, tree, limits)
            _check_tree(tree, f"image {path}")
            os.sync()

        template = self._template(key, build, sliver, f"image {path}")
        return RootTree(key, {"root": [str(template / "root")]})

    @contextlib.contextmanager
    def _locked(self, key: str, shared: bool = False, wait: bool = True) -> Iterator[None]:
        """Hold a lock against other threads and processes; exclusive holders remove its file.

        Raises BlockingIOError: it is held, and this one does not `wait`.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.directory / f".{key}.lock"
        while True:
            with path.open("a") as lock:
                # The holder only builds a template, or adds a user; the lock ends with its process.
                fcntl.flock(
                    lock,
                    (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
                )
                try:
                    if os.stat(path).st_ino != os.fstat(lock.fileno()).st_ino:
                        continue
                except FileNotFoundError:  # removed by the one that had it before
                    continue
                try:
                    yield
                finally:
                    if not shared:
                        path.unlink(missing_ok=True)
                return

    def _template(self, key: str, build: Callable[[Path], None], sliver: str, what: str) -> Path:
        template = self.directory / key
        # An existing template only gets another user: no wait for builds of this or another image.
        with self._locked(key, shared=True):
            if template.is_dir():
                (template / "refs" / sliver).touch()
                return template
        with self._locked(key):
            if not template.is_dir():
                new = self.directory / f"{key}.new"
                _remove(new)
                try:
                    new.mkdir(mode=0o755)
                    (new / "refs").mkdir(mode=0o700)
                    build(new)
                    new.rename(template)
                except (OSError, tar_image.TarError, BackendError) as error:
                    _remove(new)
                    if isinstance(error, BackendError):
                        raise
                    raise BackendError(
                        f"{what} cannot be prepared: {error}", retry=isinstance(error, OSError)
                    ) from error
            (template / "refs" / sliver).touch()
        return template

    def made(self, key: str, build: Callable[[Path], None], sliver: str, what: str) -> RootTree:
        """Return the tree `root` of a template that a backend builds itself. BackendError."""
        template = self._template(key, build, check_sliver_name(sliver), what)
        _check_tree(template / "root", what)
        return RootTree(key, {"root": [str(template / "root")]})

    def release(self, sliver: str) -> None:
        """Record that the sliver is deleted; its templates stay until pruned, for later slivers."""
        check_sliver_name(sliver)
        for reference in self.directory.glob(f"*/refs/{sliver}"):
            reference.unlink(missing_ok=True)

    def prune(self, alive: set[str], idle: float = 0.0, asked: float = math.inf) -> list[str]:
        """Remove unfinished templates, and those unused for at least `idle` seconds.

        `alive`: names of all slivers, known at the time `asked`; references of others that are
        older are dropped. Returns the keys removed.
        """
        removed: list[str] = []
        if not self.directory.is_dir():
            return removed
        for template in sorted(self.directory.iterdir()):
            if not template.is_dir():
                continue
            gone = template
            if template.suffix == ".old":
                removed.append(template.name)
            else:
                try:
                    with self._locked(template.name.removesuffix(".new"), wait=False):
                        if not self._unused(template, alive, idle, asked):
                            continue
                        removed.append(template.name)
                        gone = template.rename(template.with_name(f"{template.name}.old"))
                except BlockingIOError:
                    continue  # it is built, or gets a user, at this moment
            _remove(gone)
        return removed

    @staticmethod
    def _unused(template: Path, alive: set[str], idle: float, asked: float) -> bool:
        references = template / "refs"
        if template.suffix == ".new" or not references.is_dir():
            return True
        for reference in references.iterdir():
            if reference.name not in alive and reference.stat().st_mtime < asked:
                reference.unlink(missing_ok=True)
        return not any(references.iterdir()) and time.time() - references.stat().st_mtime >= idle


def _check_tree(path: Path, what: str) -> None:
    """Check that it is a root tree with a shell and mount points. Raises BackendError."""
    for name in ("proc", "sys", "dev", "run"):
        if os.path.lexists(path / name) and (
            os.path.islink(path / name) or not os.path.isdir(path / name)
        ):
            raise BackendError(f"{what}: /{name} must be a directory")
    if not any(os.path.lexists(path / name) for name in _NEEDED):
        raise BackendError(f"{what}: not a root tree (there is no /bin/sh in it)")


def _remove(path: Path) -> None:
    """Remove a tree as far as possible; the rest is removed with the next one."""
    with contextlib.suppress(OSError):
        remove_tree(path)
