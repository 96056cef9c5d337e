"""Imports and deletes images in AWS (AWS-2.8), on the builder's threads."""

from __future__ import annotations

import functools
import time
import urllib.parse
import uuid
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.driver.aws.api.errors import classify, code_of, passes
from nodepool.driver.aws.api.lookups import all_pages
from nodepool.driver.aws.config import IMAGE_FORMATS, AwsProviderDiskImage
from nodepool.driver.aws.images.ebs_direct import EBSSnapshotUploader
from nodepool.driver.aws.objects import AwsResource, tag_dict_to_list
from nodepool.driver.common.adapter import ImagePart

IMPORT_LIMIT = 6 * 3600.0
"""Maximum seconds of an import."""
CLOCKS = 300.0
"""Seconds by which our clock and that of AWS may differ."""
TOO_MANY = "ResourceCountLimitExceeded"


class AwsImages(ImagePart):
    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self.provider = adapter.provider

    # -- upload

    def upload(
        self,
        image: AwsProviderDiskImage,
        image_name: str,
        filename: str,
        image_format: str,
        metadata: dict[str, Any],
    ) -> str:
        """Upload an image and return the AMI's id; ``image`` is the provider's image entry."""
        tags = {key: str(value) for key, value in metadata.items()}
        self.log.debug("Uploading image %s by %s", image_name, image.import_method)
        if image.import_method == "ebs-direct":
            snapshot_id, size = self._send_blocks(image, image_name, filename, tags)
            return self._register(
                image, image_name, tags, snapshot_id, max(size, image.volume_size or 0)
            )
        if image.import_method == "image":
            task = self._import("image", image, image_name, filename, image_format, tags)
            ami_id = str(task["ImageId"])
            snapshots = [
                detail["SnapshotId"]
                for detail in task.get("SnapshotDetails") or []
                if detail.get("SnapshotId")
            ]
            if not snapshots:
                snapshots = _snapshots_of(self.adapter.ec2("describe_images", ImageIds=[ami_id]))
            self.adapter.tag([ami_id, *snapshots], tags)
            return ami_id
        task = self._import("snapshot", image, image_name, filename, image_format, tags)
        snapshot_id = task["SnapshotTaskDetail"]["SnapshotId"]
        self.adapter.tag([snapshot_id], tags)
        return self._register(image, image_name, tags, snapshot_id, image.volume_size)

    def _send_blocks(
        self, image: AwsProviderDiskImage, image_name: str, filename: str, tags: dict[str, str]
    ) -> tuple[str, int]:
        encryption: dict[str, Any] = {}
        if image.encrypted:
            encryption["Encrypted"] = True
            if image.kms_key_id:
                encryption["KmsKeyArn"] = image.kms_key_id
        uploader = EBSSnapshotUploader(
            self.adapter, self.log, filename, image_name, tags, encryption
        )
        result: tuple[str, int] = uploader.upload(self.provider.image_import_timeout)
        return result

    def _import(
        self,
        what: str,
        image: AwsProviderDiskImage,
        name: str,
        filename: str,
        kind: str,
        tags: dict[str, str],
    ) -> Any:
        """Upload the file to the bucket, import and remove it; return the finished task.

        :param what: result of the import, ``image`` or ``snapshot``.
        """
        storage = self.provider.object_storage
        if not storage:
            raise exceptions.RuntimeConfigurationException(
                f"provider {self.provider.name} needs object-storage to import image {name}"
            )
        bucket, key = storage["bucket-name"], f"{name}.{kind}"
        disk = {"Format": kind, "UserBucket": {"S3Bucket": bucket, "S3Key": key}}
        args: dict[str, Any] = {
            "TagSpecifications": [
                {"ResourceType": f"import-{what}-task", "Tags": tag_dict_to_list(tags)}
            ]
        }
        if what == "image":
            args.update(DiskContainers=[disk], Architecture=image.architecture)
        else:
            args["DiskContainer"] = disk
        if image.encrypted:
            args["Encrypted"] = True
        if image.kms_key_id:
            args["KmsKeyId"] = image.kms_key_id
        self.adapter.upload_object(bucket, key, filename, urllib.parse.urlencode(tags))
        try:
            task_id = self._start_import(name, f"import_{what}", args)
            return self._wait_import(name, task_id, what)
        finally:
            # The leak cleanup finds it by its tags.
            self.quietly(lambda: self.adapter.delete_object(bucket, key), f"object {key}")

    def _start_import(self, name: str, method: str, args: dict[str, Any]) -> str:
        limit = self.provider.image_import_timeout
        until = time.monotonic() + (limit or 0)
        while True:
            try:
                task = self.adapter.ec2(
                    method, lane="write", idempotent=True, ClientToken=uuid.uuid4().hex, **args
                )
                return str(task["ImportTaskId"])
            except Exception as error:
                if code_of(error) != TOO_MANY or time.monotonic() >= until:
                    raise
                self.log.debug("Too many imports at the same time; image %s waits", name)
            self.adapter.pause_upload()

    def _wait_import(self, name: str, task_id: str, what: str) -> Any:
        until = time.monotonic() + IMPORT_LIMIT
        while True:
            task, failure = None, None
            try:
                task = self.task(what, task_id)
            except Exception as error:
                # The import continues whether we can see it or not, and reads the object that a
                # failed upload removes.
                if not passes(error):
                    raise
                failure = error
                self.log.warning(
                    "Reading import task %s of image %s failed, retrying: %s", task_id, name, error
                )
            detail = (task or {}).get("SnapshotTaskDetail") or task or {}
            status = detail.get("Status")
            if status == "completed":
                self.log.debug("Import task %s of %s is completed", task_id, name)
                return task
            if status in ("deleted", "deleting"):
                raise exceptions.ImageCreateException(
                    f"Error uploading image {name}: import task {task_id} is {status}: "
                    f"{detail.get('StatusMessage')}"
                )
            if time.monotonic() >= until:
                raise exceptions.ImageCreateException(
                    f"Timeout importing image {name} by task {task_id}"
                ) from failure
            self.adapter.pause_upload()

    def _register(
        self,
        image: AwsProviderDiskImage,
        name: str,
        tags: dict[str, str],
        snapshot_id: str,
        size: int | None,
    ) -> str:
        ebs: dict[str, Any] = {
            "DeleteOnTermination": True,
            "SnapshotId": snapshot_id,
            "VolumeType": image.volume_type,
        }
        optional = {"VolumeSize": size, "Iops": image.iops, "Throughput": image.throughput}
        ebs.update({key: value for key, value in optional.items() if value})
        args: dict[str, Any] = {
            "Architecture": image.architecture,
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": ebs}],
            "RootDeviceName": "/dev/sda1",
            "VirtualizationType": "hvm",
            "EnaSupport": image.ena_support,
            "Name": name,
            "TagSpecifications": [{"ResourceType": "image", "Tags": tag_dict_to_list(tags)}],
        }
        if image.imds_support == "v2.0":
            args["ImdsSupport"] = "v2.0"
        answer = self.adapter.ec2("register_image", lane="write", **args)
        self.log.info("Registered image %s as %s", name, answer["ImageId"])
        return str(answer["ImageId"])

    # -- tasks

    def task(self, what: str, task_id: str) -> Any:
        """Return an import task, None if it does not exist.

        :param what: ``image`` or ``snapshot``.
        """
        try:
            answer = self.adapter.ec2(
                f"describe_import_{what}_tasks", missing_ok=True, ImportTaskIds=[task_id]
            )
        except Exception as error:
            if classify(error) is ErrorKind.NOT_FOUND:
                return None
            raise
        tasks = answer.get(f"Import{what.capitalize()}Tasks") or []
        return tasks[0] if tasks else None

    # -- removal

    def remove_parts(self, name: str, since: float) -> None:
        """Abort a killed builder's uploads to the bucket with exactly this name.

        :param name: external name that the builder has stored before the upload, and that no other
            builder uses.
        :param since: UNIX time; only uploads that started later are aborted.
        """
        storage = self.provider.object_storage
        if not storage:
            return
        bucket, client, calls = storage["bucket-name"], self.adapter.s3_client, self.adapter.calls
        ask = functools.partial(
            calls.call,
            "list_multipart_uploads",
            client.list_multipart_uploads,
            Bucket=bucket,
            Prefix=f"{name}.",
        )
        try:
            uploads = all_pages(
                ask,
                "Uploads",
                {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
            )
        except Exception as error:
            if classify(error) is not ErrorKind.CONFIGURATION:
                raise
            self.log.warning(
                "Cannot check whether parts of image %s remain in bucket %s (%s); allow "
                "s3:ListBucketMultipartUploads or let a lifecycle rule remove them",
                name,
                bucket,
                error,
            )
            return
        for upload in uploads:
            kind = upload["Key"].removeprefix(f"{name}.")
            if kind in IMAGE_FORMATS and upload["Initiated"].timestamp() >= since - CLOCKS:
                self.log.warning(
                    "Removing parts of the interrupted upload of %s from bucket %s",
                    upload["Key"],
                    bucket,
                )
                self._abort(bucket, upload)

    def _abort(self, bucket: str, upload: dict[str, Any]) -> None:
        try:
            self.adapter.calls.call(
                "abort_multipart_upload",
                self.adapter.s3_client.abort_multipart_upload,
                lane="delete",
                Bucket=bucket,
                Key=upload["Key"],
                UploadId=upload["UploadId"],
            )
        except Exception as error:
            if code_of(error) != "NoSuchUpload":
                raise

    def delete(self, ami_id: str) -> None:
        """Deregister the AMI and delete its snapshots, if they exist."""
        try:
            snapshots = _snapshots_of(
                self.adapter.ec2("describe_images", missing_ok=True, ImageIds=[ami_id])
            )
        except Exception as error:
            if classify(error) is not ErrorKind.NOT_FOUND:
                raise
            snapshots = []
        self.adapter.remove(AwsResource.TYPE_AMI, ami_id)
        for snapshot_id in snapshots:
            self.adapter.remove(AwsResource.TYPE_SNAPSHOT, snapshot_id)


def _snapshots_of(answer: dict[str, Any]) -> list[str]:
    return [
        mapping["Ebs"]["SnapshotId"]
        for image in answer.get("Images") or []
        for mapping in image.get("BlockDeviceMappings") or []
        if (mapping.get("Ebs") or {}).get("SnapshotId")
    ]
