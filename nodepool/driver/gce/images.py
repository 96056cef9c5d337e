"""Images through Cloud Storage: a compressed disk in resumable pieces, imported (GCE-9)."""

from __future__ import annotations

import json
import os
import re
import tarfile
import time
import urllib.parse
import zlib
from collections.abc import Iterator
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.cloud.http import HttpRefused, NoAnswer
from nodepool.driver.common.adapter import ImagePart
from nodepool.driver.gce import bodies
from nodepool.driver.gce.client import STORAGE, refusal, storage_address
from nodepool.driver.gce.config import GceDiskImage
from nodepool.driver.gce.errors import classify

GIB = 1 << 30
PIECE = 32 << 20
"""Bytes of one piece; Google requires a multiple of 256 KiB."""
READ = 4 << 20
RESUME_INCOMPLETE = 308
DEADLINE = 600.0
"""Seconds for one piece with its retries."""


def disk_archive(path: str) -> Iterator[bytes]:
    """Yield the raw image as Google imports it: ``disk.raw`` of whole GiB in GNU tar, gzip."""
    size = os.path.getsize(path)
    padded = -(-size // GIB) * GIB
    info = tarfile.TarInfo("disk.raw")
    info.size = padded
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    yield packer.compress(info.tobuf(format=tarfile.GNU_FORMAT))
    with open(path, "rb") as image:
        while data := image.read(READ):
            yield packer.compress(data)
    zeros = bytes(READ)
    # The rest of the last GiB, and the two empty blocks at the end of an archive.
    left = padded - size + 2 * tarfile.BLOCKSIZE
    while left:
        part = min(left, READ)
        yield packer.compress(zeros[:part])
        left -= part
    yield packer.flush()


def pieces(source: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of equal size except the last one, which the second value marks."""
    held = bytearray()
    for data in source:
        held += data
        while len(held) > PIECE:
            yield bytes(held[:PIECE]), False
            del held[:PIECE]
    yield bytes(held), True


class GceImages(ImagePart):
    @property
    def bucket(self) -> str:
        return str(self.adapter.provider.object_storage["bucket-name"])

    def _storage(
        self,
        method: str,
        path: str,
        what: str,
        headers: dict[str, str] | None = None,
        data: Any = None,
        lane: str = "upload",
        repeat: bool = True,
    ) -> Any:
        """Make a call of Cloud Storage; ``path`` may be a complete URL."""
        url = path if path.startswith("http") else urllib.parse.urljoin(storage_address(), path)

        def ask() -> Any:
            response = self.adapter.transport.send(method, url, what, headers, data)
            if response.status_code >= 300 and response.status_code != RESUME_INCOMPLETE:
                raise refusal(what, response.status_code, response.headers, response.content)
            return response

        return self.adapter.calls.call(
            what.partition(" ")[0], ask, lane=lane, idempotent=repeat, deadline=DEADLINE
        )

    # -- upload

    def upload(
        self,
        entry: GceDiskImage,
        image_name: str,
        filename: str,
        image_format: str,
        metadata: dict[str, Any],
    ) -> str:
        """Upload the image; return its name in the project."""
        name = bodies.image_name(image_name)
        tags = {key: str(value) for key, value in {**entry.meta, **metadata}.items()}
        key = f"{name}.tar.gz"
        until = time.monotonic() + self.adapter.provider.image_import_timeout
        begun = False
        try:
            self._send(key, filename, tags)
            body = bodies.image(
                name, f"{STORAGE}{self.bucket}/{urllib.parse.quote(key)}", entry, tags
            )
            begun = True
            operation = self.adapter.compute_call(
                "images_insert", "POST", "global", "images", lane="write", body=body
            )
            self._finish(operation, f"import of image {name}", until)
        except BaseException:
            if begun:
                self.quietly(lambda: self.delete(name), f"image {name}")
            raise
        finally:
            self.quietly(lambda: self.delete_object(key), f"object {key}")
        return name

    def _send(self, key: str, filename: str, tags: dict[str, str]) -> None:
        query = urllib.parse.urlencode({"uploadType": "resumable", "name": key})
        about = json.dumps(
            {"name": key, "contentType": "application/gzip", "metadata": tags}
        ).encode()
        started = self._storage(
            "POST",
            f"upload/storage/v1/b/{self.bucket}/o?{query}",
            f"begin_upload of {key}",
            {"Content-Type": "application/json", "X-Upload-Content-Type": "application/gzip"},
            about,
        )
        session = started.headers.get("Location")
        if not session:
            raise NoAnswer(f"upload of {key}: the answer names no session")
        offset = 0
        for piece, last in pieces(disk_archive(filename)):
            offset = self._send_piece(session, key, piece, offset, last)

    def _send_piece(self, session: str, key: str, piece: bytes, offset: int, last: bool) -> int:
        """Send a piece, and only its missing part again; return the offset of the next piece."""
        end = offset + len(piece)
        total = str(end) if last else "*"
        sent = offset
        for _ in range(1 + len(piece) // (256 << 10)):
            data = piece[sent - offset :]
            span = f"{sent}-{end - 1}" if data else "*"
            try:
                response = self._storage(
                    "PUT",
                    session,
                    f"upload_piece of {key}",
                    {"Content-Range": f"bytes {span}/{total}"},
                    data,
                    repeat=False,
                )
            except (NoAnswer, HttpRefused) as error:
                if classify(error) not in (ErrorKind.TRANSIENT, ErrorKind.THROTTLED):
                    raise
                self.log.info("Upload of %s is interrupted at byte %s: %s", key, sent, error)
                self.adapter.pause_upload(0.5)
                response = self._storage(
                    "PUT",
                    session,
                    f"ask_upload of {key}",
                    {"Content-Range": f"bytes */{total}"},
                    b"",
                )
            if response.status_code != RESUME_INCOMPLETE:
                return end  # all data has arrived
            arrived = re.fullmatch(r"bytes=0-(\d+)", response.headers.get("Range") or "")
            sent = int(arrived.group(1)) + 1 if arrived else 0
            if sent == end and not last:
                return end
            if sent < offset or sent > end:
                raise exceptions.ImageCreateException(
                    f"upload of {key}: Google has {sent} bytes, {offset} to {end} were sent"
                )
        raise exceptions.ImageCreateException(f"upload of {key} makes no progress at byte {sent}")

    def _finish(self, operation: dict[str, Any], what: str, until: float | None) -> None:
        """Wait for a global operation.

        :raises ImageCreateException: it failed, or took too long.
        """
        name = operation.get("name")
        while name and operation.get("status") != "DONE":
            if until is not None and time.monotonic() > until:
                raise exceptions.ImageCreateException(f"{what} takes too long")
            self.adapter.pause_upload()
            operation = self.adapter.compute_call(
                "globalOperations_get", "GET", "global", "operations", name
            )
        errors = (operation.get("error") or {}).get("errors") or []
        if errors:
            raise exceptions.ImageCreateException(
                f"{what}: {errors[0].get('code')}: {errors[0].get('message')}"
            )

    # -- removal

    def delete(self, external_id: str) -> None:
        """Ask for it; that it was there is not needed."""
        self.adapter.delete(
            "delete_image",
            lambda: self.adapter.compute_raw("DELETE", "global", "images", external_id),
        )

    def delete_object(self, key: str) -> None:
        path = f"storage/v1/b/{self.bucket}/o/{urllib.parse.quote(key, safe='')}"
        try:
            self._storage("DELETE", path, f"delete_object {key}", lane="delete")
        except HttpRefused as error:
            if error.status != 404:
                raise

    # -- looking

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield all objects of the bucket with their metadata."""
        token = ""
        while True:
            query = urllib.parse.urlencode(
                {"fields": "nextPageToken,items(name,metadata)", "pageToken": token}
            )
            response = self._storage(
                "GET", f"storage/v1/b/{self.bucket}/o?{query}", "list_objects", lane="read"
            )
            try:
                found = response.json()
                yield from found.get("items") or []
                token = found.get("nextPageToken") or ""
            except (ValueError, AttributeError):
                raise NoAnswer("list_objects: the answer is not from Google") from None
            if not token:
                return
