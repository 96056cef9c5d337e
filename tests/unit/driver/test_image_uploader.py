from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.driver.utils import ImageUploader, Segment

LOG = logging.getLogger("test.uploader")


class Uploader(ImageUploader):
    segment_size = 10
    concurrency = 3

    def __init__(self, path: Path, fail: Any = None) -> None:
        super().__init__(None, LOG, str(path), "image", {"a": "b"})
        self.fail = fail
        self.received: dict[int, tuple[int, bytes]] = {}
        self.events: list[str] = []
        self.lock = threading.Lock()

    def startUpload(self) -> None:
        self.events.append("start")

    def uploadSegment(self, segment: Segment) -> None:
        self.retry(self.send, segment)

    def send(self, segment: Segment) -> None:
        if self.fail:
            self.fail(segment)
        with self.lock:
            self.received[segment.index] = (segment.offset, segment.data)

    def finishUpload(self) -> str:
        self.events.append("finish")
        return "external"

    def abortUpload(self) -> None:
        self.events.append("abort")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.raw"
    path.write_bytes(bytes(range(95)))
    return path


def test_all_segments_arrive(image: Path) -> None:
    uploader = Uploader(image)
    assert uploader.size == 95
    assert uploader.upload(timeout=30) == "external"
    assert uploader.events == ["start", "finish"]
    assert b"".join(uploader.received[i][1] for i in range(10)) == image.read_bytes()
    assert [uploader.received[i][0] for i in range(10)] == list(range(0, 100, 10))


@pytest.mark.spec("LAU-19: segments, 10 in flight at most 20 queued")
def test_reading_does_not_run_ahead(image: Path) -> None:
    gate = threading.Semaphore(0)
    created: list[int] = []
    limit: list[int] = []

    class Counting(Segment):
        def __init__(self, index: int, offset: int, data: bytes) -> None:
            super().__init__(index, offset, data)
            created.append(index)

    uploader = Uploader(image, fail=lambda segment: gate.acquire(timeout=10))
    monkey = pytest.MonkeyPatch()
    monkey.setattr("nodepool.driver.toolkit.image_uploader.Segment", Counting)
    original = uploader._collect

    def collect(pending: Any) -> Any:
        limit.append(len(pending))
        gate.release()
        return original(pending)

    monkey.setattr(uploader, "_collect", collect)
    try:
        assert uploader.upload() == "external"
    finally:
        monkey.undo()
    assert max(limit) == 6
    assert len(created) == 10


def test_segment_errors_are_retried(image: Path) -> None:
    seen: set[int] = set()

    def once(segment: Segment) -> None:
        if segment.index not in seen:
            seen.add(segment.index)
            raise OSError("reset")

    uploader = Uploader(image, fail=once)
    assert uploader.upload() == "external"
    assert len(uploader.received) == 10


@pytest.mark.spec("LAU-19: any error aborts")
def test_error_aborts_and_is_raised(image: Path) -> None:
    tries: list[int] = []

    def always(segment: Segment) -> None:
        if segment.index == 4:
            tries.append(1)
            raise OSError("disk on fire")

    uploader = Uploader(image, fail=always)
    waits: list[float] = []
    uploader._aborted.wait = waits.append  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="disk on fire"):
        uploader.upload()
    assert uploader.events == ["start", "abort"]
    assert len(tries) == 3
    assert waits == [2]


def test_errors_not_worth_a_retry(image: Path) -> None:
    uploader = Uploader(image)
    uploader.shouldRetryException = lambda exception: False  # type: ignore[method-assign]
    calls: list[int] = []

    def func() -> None:
        calls.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        uploader.retry(func)
    assert calls == [1]


def test_upload_ends_at_its_deadline(image: Path) -> None:
    uploader = Uploader(image)
    assert uploader.getTimeout() is None
    uploader.checkTimeout()
    uploader.timeout = 1.0  # long ago
    left = uploader.getTimeout()
    assert left is not None
    assert left < 0
    with pytest.raises(exceptions.TimeoutException, match="image"):
        uploader.checkTimeout()
    with pytest.raises(exceptions.TimeoutException):
        uploader._upload_segments()


def test_segment_size_is_required(image: Path) -> None:
    with pytest.raises(Exception, match="segment_size"):
        ImageUploader(None, LOG, str(image), "image", {})
