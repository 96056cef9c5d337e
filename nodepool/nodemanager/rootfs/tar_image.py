"""Root trees from untrusted tar files: nothing is written outside the target."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.descriptors import held

_IN_TREE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
_MAX_PATH = 4000
_MAX_ID = 65535
_CHUNK = 1 << 20
#: Maximum depth of directories.
_MAX_DEPTH = 128
#: Maximum bytes of headers per member (long names, attributes, sparse maps), and of shared headers.
_MAX_HEADER = 1 << 20
#: Disk space of a member in addition to its content.
_BLOCK = 4096
_COMPRESSED: dict[bytes, Callable[[BinaryIO], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x5d\0\0\x80": lzma.LZMAFile,
}


class TarError(ValueError):
    """The tar file is damaged or must not be used; text for humans."""


@dataclass(frozen=True)
class Limits:
    """Maximum size and number of files of a tree."""

    size: int = 64 << 30
    """Bytes of all files together, unpacked."""
    members: int = 4_000_000


def extract(source: Path, target: Path, limits: Limits | None = None) -> None:
    """Unpack into an empty directory; owners and modes are kept. Raises TarError, OSError.

    Links in the tree are followed only within it, as if it were the root directory already.
    """
    limits = limits or Limits()
    try:
        with (
            source.open("rb") as file,
            _decompressed(file) as stream,
            held(os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root,
        ):
            _Extraction(root, limits).run(_Budget(stream))
    except (tarfile.TarError, EOFError, RecursionError) as error:
        raise TarError(f"{source} is not a valid tar file: {error}") from error
    except TarError as error:
        raise TarError(f"{source}: {error}") from error


@contextlib.contextmanager
def _decompressed(file: BinaryIO) -> Iterator[IO[bytes]]:
    magic = file.read(8)
    file.seek(0)
    make = next((make for start, make in _COMPRESSED.items() if magic.startswith(start)), None)
    try:
        if make is None:
            yield file
        else:
            with make(file) as stream:
                yield stream
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise TarError(f"its compression is damaged: {error}") from error


class _Budget:
    """A stream with a limit on each read: tarfile reads headers of any size into memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self.left: int | None = _MAX_HEADER

    def read(self, size: int = -1) -> bytes:
        if self.left is not None:
            if not 0 <= size <= self.left:
                raise TarError(f"the headers of a member are larger than {_MAX_HEADER} bytes")
            self.left -= size
        return self._stream.read(size)


def parts_of(name: str) -> list[str]:
    """Return the components of a member's name. TarError: the name leads outside."""
    if "\0" in name or len(name) > _MAX_PATH:
        raise TarError(f"member {name[:80]!r}: impossible name")
    if name.startswith("/"):
        raise TarError(f"member {name[:200]!r}: absolute path")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TarError(f"member {name[:200]!r}: '..' in its path")
    if len(parts) > _MAX_DEPTH:
        raise TarError(f"member {name[:200]!r}: more than {_MAX_DEPTH} nested directories")
    return parts


def _content(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Return the parts of a file that are not holes, as offset and size."""
    if not member.issparse():
        return [(0, member.size)]
    # The type hints of Python are wrong here.
    found: list[tuple[int, int]] = list(cast(Any, member.sparse) or ())
    end = 0
    for offset, size in found:
        if not (end <= offset and size >= 0 and offset + size <= member.size):
            raise TarError(f"member {member.name!r}: its map of holes is damaged")
        end = offset + size
    return found


class _Extraction:
    def __init__(self, root: int, limits: Limits) -> None:
        self.root = root
        self.limits = limits
        self.size = 0
        self.keep_owner = os.geteuid() == 0

    def run(self, stream: _Budget) -> None:
        count = 0
        with tarfile.TarFile(fileobj=cast(IO[bytes], stream)) as archive:
            while (member := archive.next()) is not None:
                stream.left = None
                count += 1
                archive.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                if count > self.limits.members:
                    raise TarError(f"more than {self.limits.members} members")
                if (
                    sum(len(key) + len(value) for key, value in archive.pax_headers.items())
                    > _MAX_HEADER
                ):
                    raise TarError(f"its common headers are larger than {_MAX_HEADER} bytes")
                self._member(archive, member)
                stream.left = _MAX_HEADER
        if not count:
            raise TarError("empty")

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > self.limits.size:
            raise TarError(f"its files are larger than {self.limits.size} bytes together")

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = parts_of(member.name)
        if not parts:
            if member.isdir():
                os.chmod(f"/proc/self/fd/{self.root}", stat.S_IMODE(member.mode) & 0o1777 | 0o500)
            return
        if parts[0] == "dev" and (len(parts) > 1 and not member.isdir()):
            return  # slivers get their own /dev
        if member.ischr() or member.isblk():
            raise TarError(
                f"member {member.name!r}: device node (only allowed, and ignored, below dev/)"
            )
        if not (
            member.isreg() or member.isdir() or member.issym() or member.islnk() or member.isfifo()
        ):
            raise TarError(f"member {member.name!r}: unknown type {member.type!r}")
        if member.size < 0:
            raise TarError(f"member {member.name!r}: size {member.size}")
        self._count(_BLOCK)
        try:
            with held(self._directory(parts[:-1])) as parent:
                self._make(archive, member, parent, parts[-1])
        except TarError:
            raise
        except OSError as error:
            raise TarError(f"member {member.name!r}: {error.strerror or error}") from error
        except (ValueError, OverflowError) as error:  # an invalid time, owner or sparse map
            raise TarError(f"member {member.name!r}: {error}") from error

    def _directory(self, parts: list[str]) -> int:
        if not parts:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.root)
        path = "/".join(parts)
        with contextlib.suppress(FileNotFoundError):
            return syscalls.openat2(self.root, path, os.O_RDONLY | os.O_DIRECTORY, _IN_TREE)
        with held(self._directory(parts[:-1])) as above, contextlib.suppress(FileExistsError):
            os.mkdir(parts[-1], 0o755, dir_fd=above)
            self._count(_BLOCK)
        return syscalls.openat2(self.root, path, os.O_RDONLY | os.O_DIRECTORY, _IN_TREE)

    def _make(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str
    ) -> None:
        if member.isdir():
            self._make_directory(member, parent, name)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        if member.issym():
            if "\0" in member.linkname or len(member.linkname) > _MAX_PATH:
                raise TarError(f"member {member.name!r}: impossible target")
            os.symlink(member.linkname, name, dir_fd=parent)
            self._own(member, parent, name)
        elif member.islnk():
            self._hard_link(member, parent, name)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._own(member, parent, name)
        else:
            self._regular(archive, member, parent, name)

    def _make_directory(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                # bin -> usr/bin in one archive of the pair, bin/ in the other: the link stands
                return
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o700, dir_fd=parent)
        self._own(member, parent, name)

    def _hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        target = parts_of(member.linkname)
        if not target:
            raise TarError(f"member {member.name!r}: hard link to a missing file")
        with held(self._directory(target[:-1])) as source:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise TarError(
                    f"member {member.name!r}: hard link to {member.linkname!r}, which is not a "
                    "regular file"
                )
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def _regular(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str
    ) -> None:
        self._count(member.size)
        content = archive.extractfile(member)
        if content is None:
            raise TarError(f"member {member.name!r}: no content")
        with held(
            os.open(
                name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
                dir_fd=parent,
            )
        ) as descriptor:
            for offset, size in _content(member):
                content.seek(offset)
                os.lseek(descriptor, offset, os.SEEK_SET)
                self._copy(member, content, descriptor, size)
            os.ftruncate(descriptor, member.size)
            os.utime(descriptor, (member.mtime, member.mtime))
            self._ids_ok(member)
            if self.keep_owner:
                os.fchown(descriptor, member.uid, member.gid)
            os.fchmod(descriptor, stat.S_IMODE(member.mode))  # after the owner: chown clears setuid

    @staticmethod
    def _copy(member: tarfile.TarInfo, content: IO[bytes], descriptor: int, left: int) -> None:
        while left:
            data = content.read(min(left, _CHUNK))
            if not data:
                raise TarError(f"member {member.name!r}: truncated")
            left -= len(data)
            if data.count(0) == len(data):
                os.lseek(descriptor, len(data), os.SEEK_CUR)
                continue
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

    def _ids_ok(self, member: tarfile.TarInfo) -> None:
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise TarError(
                f"member {member.name!r}: owner {member.uid}:{member.gid} is beyond {_MAX_ID}"
            )

    def _own(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        self._ids_ok(member)
        if self.keep_owner:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        if not member.issym():
            os.chmod(name, stat.S_IMODE(member.mode), dir_fd=parent)
