"""Images from a managed disk that is filled with pages (AZU-11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.cloud.http import HttpRefused, send
from nodepool.driver.azure import bodies
from nodepool.driver.azure.arm import DISK, IMAGE
from nodepool.driver.azure.config import AzureDiskImage
from nodepool.driver.azure.errors import classify
from nodepool.driver.common.adapter import ImagePart
from nodepool.driver.toolkit.image_uploader import ImageUploader, Segment

MIB = 1 << 20
PAGE = 512
ACCESS_SECONDS = 86400
PAGE_DEADLINE = 300.0


class DiskUploader(ImageUploader):
    """Writes the nonzero pages to a new disk, creates an image from it and deletes the disk."""

    segment_size = 4 * MIB

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sas = ""
        self._image_begun = False

    @property
    def _tags(self) -> dict[str, str]:
        return {str(key): str(value) for key, value in (self.metadata or {}).items()}

    def _do(
        self,
        operation: str,
        method: str,
        kind: tuple[str, str],
        body: object = None,
        path: str = "",
        lane: str = "upload",
    ) -> Any:
        """Make a call and wait for the operation that it starts."""
        adapter, arm = self.adapter, self.adapter.arm
        what = f"{operation} {self.image_name}"
        answer = adapter.calls.call(
            operation,
            lambda: arm.send(method, arm.path(kind, self.image_name) + path, kind[1], what, body),
            lane=lane,
            idempotent=True,
        )
        return arm.finish(
            answer, what, lambda name, ask: adapter.calls.call(name, ask), self._pause
        )

    def _pause(self, seconds: float) -> None:
        self.checkTimeout()
        self.adapter.pause_upload(min(seconds, self.adapter.IMAGE_UPLOAD_SLEEP))

    def startUpload(self) -> None:
        if self.size % PAGE:
            raise exceptions.ImageCreateException(
                f"image {self.path} has {self.size} bytes; Azure supports multiples of {PAGE} only "
                "(fixed-size VHD)"
            )
        location = self.adapter.provider.location
        self._do("put_disk", "PUT", DISK, bodies.upload_disk(location, self._tags, self.size))
        told = self._do(
            "begin_access",
            "POST",
            DISK,
            {"access": "Write", "durationInSeconds": ACCESS_SECONDS},
            "/beginGetAccess",
        )
        output = (told or {}).get("properties", {}).get("output", told) or {}
        self._sas = str(output.get("accessSAS") or "")
        if not self._sas:
            raise exceptions.ImageCreateException(
                f"Azure gives no access to disk {self.image_name}"
            )

    def uploadSegment(self, segment: Segment) -> None:
        if not segment.data.strip(b"\0"):
            return
        end = segment.offset + len(segment.data) - 1
        headers = {
            "x-ms-blob-type": "PageBlob",
            "x-ms-page-write": "update",
            "x-ms-version": "2019-12-12",
            "Range": f"bytes={segment.offset}-{end}",
            "Content-Length": str(len(segment.data)),
        }
        # The signed URL is the whole credential: it must not be in a message.
        self.adapter.calls.call(
            "put_page",
            lambda: send(
                self.adapter.arm.session,
                "PUT",
                f"{self._sas}&comp=page",
                f"put_page at {segment.offset} of {self.image_name}",
                headers=headers,
                data=segment.data,
                parse=False,
            ),
            lane="upload",
            idempotent=True,
            deadline=PAGE_DEADLINE,
        )

    def _end_access(self) -> None:
        self._do("end_access", "POST", DISK, path="/endGetAccess")

    def _delete_disk(self) -> None:
        self._do("delete_disk", "DELETE", DISK, lane="delete")

    def finishUpload(self) -> str:
        self._end_access()
        disk = self.adapter.calls.call(
            "get_disk", lambda: self.adapter.arm.get(DISK, self.image_name)
        )
        self._image_begun = True
        self._do(
            "put_image",
            "PUT",
            IMAGE,
            bodies.image(self.adapter.provider.location, self._tags, disk["id"]),
        )
        self.adapter.images.quietly(self._delete_disk, f"disk {self.image_name}")
        return self.image_name

    def abortUpload(self) -> None:
        steps: list[Callable[[], Any]] = [self._end_access] if self._sas else []
        if self._image_begun:
            steps.append(lambda: self.adapter.images.delete(self.image_name))
        steps.append(self._delete_disk)
        for step in steps:
            try:
                step()
            except Exception as error:
                if classify(error) is not ErrorKind.NOT_FOUND:
                    self.log.warning("Unfinished upload of %s: %s", self.image_name, error)


class AzureImages(ImagePart):
    def upload(
        self,
        entry: AzureDiskImage,
        image_name: str,
        filename: str,
        image_format: str,
        metadata: dict[str, Any],
    ) -> str:
        uploader = DiskUploader(
            self.adapter, self.adapter.log, filename, image_name, {**entry.meta, **metadata}
        )
        uploader.error_retries = 1
        return str(uploader.upload(self.adapter.provider.image_import_timeout))

    def delete(self, external_id: str) -> None:
        """Delete it, and wait for it; that it was there is not needed."""
        adapter, arm, name = self.adapter, self.adapter.arm, external_id
        what = f"delete image {name}"
        try:
            answer = adapter.calls.call(
                "delete_image",
                lambda: arm.send("DELETE", arm.path(IMAGE, name), IMAGE[1], what),
                lane="delete",
            )
            arm.finish(
                answer,
                what,
                lambda operation, ask: adapter.calls.call(operation, ask),
                adapter.pause_upload,
            )
        except HttpRefused as error:
            if error.status != 404:
                raise
