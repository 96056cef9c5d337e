"""Uploaded images, and which images can be used (NM-C.2, NM-C.8)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
from collections.abc import Callable
from typing import Any, BinaryIO

from nodepool.base.files import new_file, remove_unfinished

log = logging.getLogger("nodepool.nodemanager.images")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}", re.ASCII)
_SUFFIX = ".tar"
_CHUNK = 1 << 20
#: Bytes; a larger upload is refused.
MAX_SIZE = 64 << 30


class ImageError(Exception):
    """An upload or deletion is refused; the text is for the caller."""


class Images:
    """Complete files ``<name>.tar`` in a directory of our own.

    :param stored: called with the name of a new image; an exception refuses it.
    :param free_space: bytes that are not promised to slivers.
    """

    def __init__(
        self,
        directory: str,
        stored: Callable[[str], Any] = lambda name: None,
        free_space: Callable[[], int] = lambda: MAX_SIZE,
    ) -> None:
        self._free_space = free_space
        self.directory = directory
        self._stored = stored
        os.makedirs(directory, mode=0o700, exist_ok=True)
        remove_unfinished(directory)

    def path(self, name: str) -> str:
        """Return the path of the image, whether it exists or not.

        :raises ImageError: the name is not valid.
        """
        if not _NAME.fullmatch(name):
            raise ImageError("an image name may have at most 128 letters, digits and _ . -")
        return os.path.join(self.directory, name + _SUFFIX)

    def names(self) -> list[str]:
        return sorted(
            n[: -len(_SUFFIX)]
            for n in os.listdir(self.directory)
            if n.endswith(_SUFFIX) and not n.startswith(".")
        )

    def problem(self, image: str) -> str | None:
        """Return why no sliver can be created from this image; None when one can."""
        kind, _, what = image.partition(":")
        if kind in ("host", "oci"):  # only the backend can check a registry
            return None
        if kind == "image":
            try:
                present = os.path.isfile(self.path(what))
            except ImageError as error:
                return f"image {what!r}: {error}"
            return (
                None
                if present
                else f"this node has no image {what}; it has {', '.join(self.names()) or 'none'}"
            )
        if kind == "dir":
            return None if os.path.isdir(what) else f"there is no directory {what} on this node"
        return None if os.path.isfile(what) else f"there is no file {what} on this node"

    def put(self, name: str, body: BinaryIO, length: int, sha256: str | None) -> str:
        """Store an upload; returns its SHA-256.

        :raises ImageError: too large, incomplete, or not matching the checksum; nothing of it is
            kept.
        """
        path = self.path(name)
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            raise ImageError("sha256 must have 64 hexadecimal digits")
        if not 0 < length <= MAX_SIZE:
            raise ImageError(f"an image must have a length of 1 to {MAX_SIZE} bytes")
        free = self._free_space()
        if free < length:
            raise ImageError(
                f"not enough space for {length >> 20} MiB on the node: {free >> 20} MiB are not "
                "promised"
            )
        digest = hashlib.sha256()
        try:
            with new_file(path) as stream:
                # Allocated now: the upload may take long, and the space could be promised to
                # slivers meanwhile.
                os.posix_fallocate(stream.fileno(), 0, length)
                left = length
                while left:
                    data = body.read(min(_CHUNK, left))
                    if not data:
                        raise ImageError(f"the upload ended {left} bytes too early")
                    digest.update(data)
                    stream.write(data)
                    left -= len(data)
                found = digest.hexdigest()
                if sha256 and not hmac.compare_digest(found, sha256.lower()):
                    raise ImageError(f"the checksum of the upload is {found}, not {sha256}")
        except OSError as error:
            raise ImageError(f"cannot store the image: {error.strerror}") from error
        try:
            self._stored(name)
        except Exception as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise ImageError(f"cannot create a root tree from image {name}: {error}") from error
        log.info("Image %s uploaded: %s MiB, SHA-256 %s", name, length >> 20, found)
        return found

    def open(self, name: str) -> BinaryIO:
        """Open an image for reading.

        :raises ImageError: it cannot be read.
        """
        try:
            return open(self.path(name), "rb")
        except OSError as error:
            raise ImageError(f"cannot read image {name}: {error.strerror}") from error

    def delete(self, name: str) -> bool:
        """Delete the image; return False if it does not exist. Its slivers keep running."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            return False
        log.info("Image %s deleted", name)
        return True
