"""Upload of an image as blocks of a snapshot, without object storage (AWS-2.8)."""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import time
import uuid
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.driver.aws.api.errors import classify, code_of
from nodepool.driver.aws.objects import tag_dict_to_list
from nodepool.driver.statemachine.model import Adapter
from nodepool.driver.toolkit.image_uploader import ImageUploader, Segment

GIB = 1024**3
COMPLETE_LIMIT = 3600.0
"""Seconds to wait for the completion when the provider sets no limit."""


class EBSSnapshotUploader(ImageUploader):
    """Result: id of the completed snapshot and its size in GiB."""

    segment_size = 512 * 1024
    _BLANK = bytes(segment_size)

    def __init__(
        self,
        adapter: Adapter,
        log: logging.Logger,
        path: str,
        image_name: str,
        metadata: dict[str, Any] | None,
        encryption: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(adapter, log, path, image_name, metadata)
        self.volume_size = math.ceil(self.size / GIB)
        self.snapshot_id: str | None = None
        self._encryption = encryption or {}
        self._sent: set[int] = set()

    def shouldRetryException(self, exception: BaseException) -> bool:
        return (
            classify(exception) in (ErrorKind.THROTTLED, ErrorKind.TRANSIENT)
            or code_of(exception) == "ValidationException"
        )

    def _ebs(self, method: str, **kw: object) -> Any:
        left = self.getTimeout()
        return self.adapter.calls.call(
            method,
            getattr(self.adapter.ebs_client, method),
            lane="upload",
            idempotent=True,
            deadline=max(1.0, min(120.0, 120.0 if left is None else left)),
            **kw,
        )

    def startUpload(self) -> None:
        answer = self.retry(
            self._ebs,
            "start_snapshot",
            VolumeSize=self.volume_size,
            ClientToken=uuid.uuid4().hex,
            Tags=tag_dict_to_list(self.metadata),
            **self._encryption,
        )
        self.snapshot_id = answer["SnapshotId"]

    def uploadSegment(self, segment: Segment) -> None:
        data = segment.data.ljust(len(self._BLANK), b"\0")
        if data == self._BLANK and segment.index:
            return  # blocks that are not sent read as zeros
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        answer = self.retry(
            self._ebs,
            "put_snapshot_block",
            SnapshotId=self.snapshot_id,
            BlockIndex=segment.index,
            BlockData=data,
            DataLength=len(data),
            Checksum=digest,
            ChecksumAlgorithm="SHA256",
        )
        if answer.get("Checksum", digest) != digest:
            raise exceptions.ImageCreateException(
                f"block {segment.index} of {self.image_name} arrived damaged"
            )
        self._sent.add(segment.index)

    def finishUpload(self) -> tuple[str, int]:
        self._complete()
        assert self.snapshot_id is not None
        return self.snapshot_id, self.volume_size

    def _complete(self) -> None:
        until = self.timeout if self.timeout is not None else time.monotonic() + COMPLETE_LIMIT
        while True:
            answer = self.retry(
                self._ebs,
                "complete_snapshot",
                SnapshotId=self.snapshot_id,
                ChangedBlocksCount=len(self._sent),
            )
            if answer["Status"] == "completed":
                return
            if answer["Status"] == "error":
                raise exceptions.ImageCreateException(
                    f"snapshot {self.snapshot_id} of {self.image_name} failed"
                )
            if time.monotonic() >= until:
                raise exceptions.ImageCreateException(
                    f"snapshot {self.snapshot_id} of {self.image_name} is not completed"
                )
            self.adapter.pause_upload()

    def abortUpload(self) -> None:
        if self.snapshot_id is None:
            return
        self.timeout = None
        self._aborted.clear()
        try:
            self._ebs(
                "complete_snapshot", SnapshotId=self.snapshot_id, ChangedBlocksCount=len(self._sent)
            )
        finally:
            self.adapter.ec2("delete_snapshot", lane="delete", SnapshotId=self.snapshot_id)
