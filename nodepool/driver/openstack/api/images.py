"""Images that we upload to the cloud (OST-2.7)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from nodepool import exceptions
from nodepool.driver.openstack.api.errors import is_quota, status_of
from nodepool.driver.openstack.api.transport import Transport

#: Fields of the image that are not properties, and their types.
FIELDS: dict[str, Any] = {
    "min_disk": int,
    "min_ram": int,
    "protected": bool,
    "tags": list,
    "visibility": str,
    "container_format": str,
    "hw_disk_bus": str,
}
POLL = (0.5, 10.0)
"""First and longest pause in seconds between two polls of an image that is being imported."""
STALLED = 60.0
"""Seconds without a sent byte after which an upload fails."""


class ProtectedImage(exceptions.BuilderError):
    """The image cannot be deleted before its protection is removed."""


class ImageApi(Transport):
    """Upload and removal, for one provider."""

    def create_image(
        self,
        name: str,
        filename: str,
        disk_format: str,
        md5: str | None = None,
        sha256: str | None = None,
        timeout: float = 3600,
        wait: bool = True,
        is_public: bool = False,
        **metadata: dict[str, str],
    ) -> dict[str, Any]:
        """Upload the file and wait until the image is active. A failure leaves no image.

        :param timeout: seconds for everything.
        :raises ImageCreateException: it took longer.
        """
        until = time.monotonic() + timeout
        size = os.path.getsize(filename)
        if self.client.config.config.get("image_api_use_tasks"):
            # A legacy method of one vendor, through the object store.
            image = self.client.create_image(
                name=name,
                filename=filename,
                disk_format=disk_format,
                md5=md5,
                sha256=sha256,
                wait=True,
                timeout=timeout,
                allow_duplicates=True,
                **metadata,
            )
            return {"id": image.id}
        body = {
            "name": name,
            "disk_format": disk_format,
            "container_format": "bare",
            "visibility": "public" if is_public else "private",
            **properties(metadata, md5, sha256),
        }
        # Protection would prevent the removal of a damaged image: it is set last.
        protected = body.pop("protected", False)
        created = self.request("create_image", "image", "POST", "/images", wanted="id", json=body)
        image_id = str(created["id"])
        try:
            self._send(image_id, filename, size, until)
            image = self._wait_active(image_id, until)
            self._compare(image, size, md5)
            if protected:
                self._protect(image_id, True)
        except BaseException:
            self._remove_failed(image_id)
            raise
        return image

    def _send(self, image_id: str, filename: str, size: int, until: float) -> None:
        left = max(1.0, until - time.monotonic())
        options = {
            "timeout": (min(left, STALLED), left),
            "headers": {
                "Content-Type": "application/octet-stream",
                "Accept": "",
                "X-OpenStack-Image-Size": str(size),
            },
        }

        def send() -> None:
            # Opened for each attempt: a part of it may have been sent.
            with open(filename, "rb") as data:
                try:
                    self.send(
                        "image", "PUT", f"/images/{image_id}/file", None, {**options, "data": data}
                    )
                except Exception as error:
                    if status_of(error) == 413 or is_quota(str(error)):
                        raise exceptions.BuilderError(
                            f"image {filename} ({size} bytes) does not fit into the image quota of "
                            "cloud"
                            f" {self.provider.cloud_config.name} (provider {self.provider.name}): "
                            f"{error}"
                        ) from error
                    raise

        self.authenticated(
            lambda: self.calls.call(
                "upload_image", send, lane="image", deadline=left, idempotent=False
            )
        )

    def _wait_active(self, image_id: str, until: float) -> dict[str, Any]:
        pause, longest = POLL
        while True:
            image: dict[str, Any] = self.request(
                "get_image", "image", "GET", f"/images/{image_id}", wanted="status"
            )
            status = str(image["status"]).lower()
            if status == "active":
                return image
            if status in ("killed", "deleted", "pending_delete", "deactivated"):
                raise exceptions.BuilderError(f"image {image_id} became {status} instead of active")
            if time.monotonic() + pause > until:
                raise exceptions.ImageCreateException(
                    f"image {image_id} is still {status}, not active (image-upload-timeout)"
                )
            if self.calls.pause(pause):
                raise exceptions.BuilderError(f"provider {self.provider.name} is stopping")
            pause = min(longest, pause * 1.5)

    def _compare(self, image: dict[str, Any], size: int, md5: str | None) -> None:
        there = image.get("checksum")
        if md5 and there and len(there) == len(md5) and there.lower() != md5.lower():
            raise exceptions.BuilderError(
                f"image {image['id']} arrived damaged: its md5 is {there}, that of the file is "
                f"{md5}"
            )
        if image.get("size") not in (None, size):
            raise exceptions.BuilderError(
                f"image {image['id']} has {image['size']} bytes in the cloud, the file has {size}"
            )

    def _remove_failed(self, image_id: str) -> None:
        try:
            self.discard_image(image_id)
        except Exception as error:
            self.log.error(
                "Image %s of a failed upload remains, the leak cleanup will remove it: %s",
                image_id,
                error,
            )

    def _protect(self, image_id: str, yes: bool) -> None:
        self.request(
            "protect_image",
            "image",
            "PATCH",
            f"/images/{image_id}",
            idempotent=True,
            data=json.dumps([{"op": "replace", "path": "/protected", "value": yes}]),
            headers={"Content-Type": "application/openstack-images-v2.1-json-patch"},
        )

    def discard_image(self, image_id: str, delete: Callable[[str], Any] | None = None) -> None:
        """Delete the remains of an unfinished upload, after removing its own protection.

        :param delete: instead of :meth:`delete_image`.
        :raises BuilderError: as :meth:`delete_image`.
        """
        delete = delete or self.delete_image
        try:
            delete(image_id)
        except ProtectedImage:
            self.log.warning(
                "Image %s of an unfinished upload is protected; removing the protection", image_id
            )
            self._protect(image_id, False)
            delete(image_id)

    def delete_image(self, image_id: str) -> bool:
        """Delete the image; return False when it does not exist."""
        try:
            return self.delete("delete_image", "image", f"/images/{image_id}")
        except Exception as error:
            if status_of(error) == 403 and "protected" in str(error).lower():
                raise ProtectedImage(
                    f"image {image_id} of provider {self.provider.name} is protected and cannot be "
                    "deleted; remove the"
                    f" protection in cloud {self.provider.cloud_config.name}:"
                    f" openstack image set --unprotected {image_id}"
                ) from error
            if status_of(error) == 409:
                raise exceptions.BuilderError(
                    f"image {image_id} of provider {self.provider.name} is in use in cloud"
                    f" {self.provider.cloud_config.name} and cannot be deleted yet: {error}"
                ) from error
            raise


def properties(metadata: dict[str, Any], md5: str | None, sha256: str | None) -> dict[str, Any]:
    """Return fields and properties of the image from our metadata; properties are strings.

    The checksums are stored in the same way as by the SDK.
    """
    renamed = {"is_protected": "protected"}
    found: dict[str, Any] = {
        "owner_specified.openstack.md5": md5 or "",
        "owner_specified.openstack.sha256": sha256 or "",
    }
    for name, value in metadata.items():
        key = renamed.get(name, name)
        if value is None:
            continue
        kind = FIELDS.get(key, str)
        if kind is bool and isinstance(value, str):
            found[key] = value.strip().lower() in ("true", "yes", "on", "1")
        else:
            found[key] = kind(value)
    return found
