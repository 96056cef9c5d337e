"""Upload of a large image file in segments (DRV-6.7)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from nodepool import exceptions


@dataclass(eq=False, slots=True)
class Segment:
    """A part of the file: the bytes ``data`` at ``offset``; ``index`` counts from 0."""

    index: int
    offset: int
    data: bytes


class ImageUploader:
    """Sends a file in segments through a few threads; subclasses fill in the four hooks.

    ``upload`` returns what ``finishUpload`` returns; on any error it calls ``abortUpload`` and
    raises that error.
    """

    error_retries = 3
    concurrency = 10
    segment_size: int | None = None

    def __init__(
        self,
        adapter: Any,
        log: logging.Logger,
        path: str,
        image_name: str,
        metadata: dict[str, Any] | None,
    ) -> None:
        if self.segment_size is None:
            raise Exception(f"{type(self).__name__} must set segment_size")
        self.adapter = adapter
        self.log = log
        self.path = path
        self.size = os.path.getsize(path)
        self.image_name = image_name
        self.metadata = metadata
        #: When the upload must be done, on the monotonic clock.
        self.timeout: float | None = None
        self._aborted = threading.Event()

    # Hooks

    def startUpload(self) -> None:
        """Prepare the service for the segments."""

    def uploadSegment(self, segment: Segment) -> None:
        """Send one segment, on several threads. Wrap calls that may be repeated in ``retry``."""
        raise NotImplementedError

    def finishUpload(self) -> Any:
        """Create an image from the segments; return the external id."""
        raise NotImplementedError

    def abortUpload(self) -> None:
        """Remove what was sent."""

    def shouldRetryException(self, exception: BaseException) -> bool:
        return True

    # For subclasses

    def getTimeout(self) -> float | None:
        """Return the seconds left, or None when there is no limit."""
        if self.timeout is None:
            return None
        return self.timeout - time.monotonic()

    def checkTimeout(self) -> None:
        """Raise TimeoutException when the time is used up."""
        left = self.getTimeout()
        if left is not None and left <= 0:
            raise exceptions.TimeoutException(f"Timeout uploading image {self.image_name}")

    def retry(self, func: Callable[..., Any], *args: object, **kw: object) -> Any:
        """Call ``func`` up to ``error_retries`` times, after 0 s, then 2 s each."""
        for attempt in range(1, self.error_retries + 1):
            self.checkTimeout()
            try:
                return func(*args, **kw)
            except Exception as error:
                if (
                    attempt >= self.error_retries
                    or self._aborted.is_set()
                    or not self.shouldRetryException(error)
                ):
                    raise
                self.log.warning(
                    "Upload of %s: attempt %s failed: %s", self.image_name, attempt, error
                )
            if attempt > 1:
                left = self.getTimeout()
                self._aborted.wait(2 if left is None else max(0.0, min(2, left)))
        raise AssertionError("error_retries must be at least 1")

    # Work

    def upload(self, timeout: float | None = None) -> Any:
        """Upload the file within ``timeout`` seconds; raises what went wrong."""
        if timeout:
            self.timeout = time.monotonic() + timeout
        try:
            self.startUpload()
            self._upload_segments()
            return self.finishUpload()
        except Exception:
            self.log.exception("Error uploading image %s", self.image_name)
            try:
                self.abortUpload()
            except Exception:
                self.log.exception("Error removing the unfinished upload of %s", self.image_name)
            raise

    def _upload_segments(self) -> None:
        assert self.segment_size is not None
        pending: set[Future[None]] = set()
        with (
            ThreadPoolExecutor(
                self.concurrency, thread_name_prefix="ThreadPoolExecutor-upload"
            ) as executor,
            open(self.path, "rb") as image,
        ):
            try:
                index = offset = 0
                while data := image.read(self.segment_size):
                    # Reading ahead of the senders would fill the memory.
                    while len(pending) >= 2 * self.concurrency:
                        pending = self._collect(pending)
                    self.checkTimeout()
                    pending.add(executor.submit(self.uploadSegment, Segment(index, offset, data)))
                    index += 1
                    offset += len(data)
                while pending:
                    pending = self._collect(pending)
            except BaseException:
                self._aborted.set()
                for future in pending:
                    future.cancel()
                raise

    def _collect(self, pending: set[Future[None]]) -> set[Future[None]]:
        left = self.getTimeout()
        done, rest = wait(
            pending, timeout=None if left is None else max(left, 0), return_when=FIRST_COMPLETED
        )
        for future in done:
            future.result()
        if not done:
            self.checkTimeout()
        return rest
