"""Images through object storage (IBM-12), whose library only this module imports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from nodepool import exceptions
from nodepool.base import optional
from nodepool.cloud import ErrorKind
from nodepool.cloud.http import HttpRefused, NoAccess
from nodepool.driver.common.adapter import ImagePart
from nodepool.driver.ibmvpc import names
from nodepool.driver.ibmvpc.config import IBMVPCDiskImage
from nodepool.driver.ibmvpc.errors import classify

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 60.0
NO_KEY = "none"
"""API key for object storage where there is none: tests and stand-ins."""


class IBMVPCImages(ImagePart):
    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._lock = threading.Lock()
        self._storage: Any = None

    @property
    def _options(self) -> dict[str, str]:
        return dict(self.adapter.provider.object_storage or {})

    @property
    def bucket(self) -> str:
        return self._options["bucket-name"]

    def _instance(self) -> str:
        """Return the CRN of the object storage.

        :raises LaunchNodepoolException: there is none of the name.
        """
        wanted = self._options["instance-name"]
        told = self.adapter.read(
            "list_resource_instances",
            lambda: self.adapter.client.send(
                "GET",
                "RESOURCE_CONTROLLER",
                "/v2/resource_instances",
                "list resource instances",
                name=wanted,
                type="service_instance",
            ),
        )
        for found in told.get("resources") or []:
            parts = str(found.get("crn") or "").split(":")
            if len(parts) > 4 and parts[4] == "cloud-object-storage":
                return str(found["crn"])
        raise exceptions.LaunchNodepoolException(
            f"object-storage: cloud-object-storage has no instance {wanted}"
        )

    def storage(self) -> Any:
        """Return the client of object storage; its threads may share it."""
        with self._lock:
            if self._storage is None:
                try:
                    import ibm_boto3
                    from ibm_botocore.client import Config
                    from ibm_botocore.credentials import DefaultTokenManager
                except ImportError:
                    raise NoAccess(f"images need {optional.missing(['ibm_boto3'])}") from None
                # Its requests for tokens ignore the configuration of the client.
                DefaultTokenManager.set_default_auth_function_timeout(READ_TIMEOUT)
                values = self.adapter.client.settings.values()
                address = values.get("VPC_AUTH_URL")
                self._storage = ibm_boto3.client(
                    "s3",
                    ibm_api_key_id=values.get("VPC_APIKEY") or NO_KEY,
                    ibm_service_instance_id=self._instance(),
                    config=Config(
                        signature_version="oauth",
                        connect_timeout=CONNECT_TIMEOUT,
                        read_timeout=READ_TIMEOUT,
                        retries={"max_attempts": 4},
                        # Not every S3 server supports checksums in trailers.
                        request_checksum_calculation="when_required",
                        response_checksum_validation="when_required",
                    ),
                    endpoint_url=self._options["endpoint"],
                    **(
                        {"ibm_auth_endpoint": f"{address.rstrip('/')}/identity/token"}
                        if address
                        else {}
                    ),
                )
            return self._storage

    def close(self) -> None:
        with self._lock:
            if self._storage is None:
                return
            self._storage.close()
            # The library offers no method to end the thread that renews its token.
            with contextlib.suppress(AttributeError):
                self._storage._request_signer._credentials.token_manager.stop_refresh_thread()  # noqa: SLF001

    def _call(self, operation: str, lane: str = "upload", **arguments: Any) -> Any:
        return self.adapter.calls.call(
            operation,
            lambda: getattr(self.storage(), operation)(Bucket=self.bucket, **arguments),
            lane=lane,
            idempotent=True,
        )

    # -- upload

    def _key(self, name: str, image_format: str) -> str:
        """Return the object's key; the prefix keeps providers with one bucket apart."""
        return f"{names.image_group(self.adapter.provider.name)}/{name}.{image_format}"

    def upload(
        self,
        entry: IBMVPCDiskImage,
        image_name: str,
        filename: str,
        image_format: str,
        metadata: dict[str, Any],
    ) -> str:
        """Upload the image; return its id."""
        until = time.monotonic() + self.adapter.provider.image_import_timeout
        name = names.image(str(metadata["nodepool_build_id"]), str(metadata["nodepool_upload_id"]))
        key = self._key(name, image_format)
        place = str(self._call("get_bucket_location")["LocationConstraint"]).rpartition("-")[0]
        image_id = None
        try:
            self.adapter.calls.call(
                "upload_fileobj",
                lambda: self._send(filename, key),
                lane="upload",
                idempotent=False,
                deadline=float("inf"),
            )
            body = {
                "name": name,
                "resource_group": {
                    "id": self.adapter.group_id(names.image_group(self.adapter.provider.name))
                },
                "file": {"href": f"cos://{place}/{self.bucket}/{key}"},
                "operating_system": {"name": entry.operating_system},
            }
            image_id = str(
                self.adapter.change(
                    "create_image", "POST", "/images", f"create image {name}", body
                )["id"]
            )
            self._wait(image_id, name, until)
        except BaseException:
            if image_id is not None:
                self.quietly(lambda: self.delete(image_id), f"image {name}")
            raise
        finally:
            self.quietly(lambda: self.delete_object(key), f"object {key}")
        return image_id

    def _send(self, filename: str, key: str) -> None:
        with open(filename, "rb") as image:
            self.storage().upload_fileobj(image, self.bucket, key)

    def _wait(self, image_id: str, name: str, until: float) -> None:
        while True:
            found = self.adapter.read(
                "get_image",
                lambda: self.adapter.client.send(
                    "GET", "VPC", f"/images/{image_id}", f"get image {name}"
                ),
            )
            status = found.get("status")
            if status == "available":
                return
            if status != "pending":
                reasons = "; ".join(
                    str(each.get("message")) for each in found.get("status_reasons") or []
                )
                raise exceptions.ImageCreateException(
                    f"image {name} is {status}: {reasons or 'no reason given'}"
                )
            if time.monotonic() > until:
                raise exceptions.ImageCreateException(f"image {name} is still pending")
            self.adapter.pause_upload()

    # -- deletion and lists

    def delete(self, external_id: str) -> None:
        """Delete the image and the object it was created from, if they exist."""
        client, what = self.adapter.client, f"get image {external_id}"
        try:
            found = self.adapter.read(
                "get_image",
                lambda: client.send("GET", "VPC", f"/images/{external_id}", what),
                missing_ok=True,
            )
        except HttpRefused as error:
            if error.status == 404:
                return
            raise
        if self._options:
            self.delete_object(self._key(str(found.get("name")), self.adapter.provider.image_type))
        self.adapter.delete(
            "delete_image",
            lambda: client.send(
                "DELETE", "VPC", f"/images/{external_id}", f"delete image {found.get('name')}"
            ),
        )

    def delete_object(self, key: str) -> None:
        self._unless_missing("delete_object", lane="delete", Key=key)

    def remove_parts(self, key: str, upload_id: str) -> None:
        """Abort an interrupted upload, which no list of objects shows."""
        self._unless_missing("abort_multipart_upload", lane="delete", Key=key, UploadId=upload_id)

    def _unless_missing(self, operation: str, lane: str, **arguments: Any) -> dict[str, Any]:
        """Make a call; return an empty result if the object or bucket does not exist."""
        try:
            return dict(self._call(operation, lane=lane, **arguments))
        except Exception as error:
            if classify(error) is not ErrorKind.NOT_FOUND:
                raise
            return {}

    def objects(self) -> Iterator[str]:
        """Yield the keys of all objects of the bucket; nothing if it does not exist."""
        marker: dict[str, str] = {}
        while True:
            answer = self._unless_missing("list_objects", lane="read", **marker)
            found = [str(each["Key"]) for each in answer.get("Contents") or []]
            yield from found
            if not answer.get("IsTruncated") or not found:
                return
            marker = {"Marker": answer.get("NextMarker") or found[-1]}

    def unfinished(self) -> Iterator[tuple[str, str]]:
        """Yield key and id of each unfinished upload to the bucket."""
        markers: dict[str, str] = {}
        while True:
            answer = self._unless_missing("list_multipart_uploads", lane="read", **markers)
            for each in answer.get("Uploads") or []:
                yield str(each["Key"]), str(each["UploadId"])
            if not answer.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": answer["NextKeyMarker"],
                "UploadIdMarker": answer["NextUploadIdMarker"],
            }
