"""How far uploads are (BLD-20: progress)."""

from __future__ import annotations

import os
import pathlib

import pytest

from nodepool.builder.upload.meter import UploadMeter

SIZE = 1_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def image(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "image.raw"
    path.write_bytes(bytes(SIZE))
    return path


def test_nothing_before_somebody_reads(image: pathlib.Path) -> None:
    meter = UploadMeter(str(image))
    meter.sample()
    assert (meter.total, meter.sent, meter.rate) == (SIZE, None, None)


def test_position_and_rate(image: pathlib.Path) -> None:
    clock = Clock()
    meter = UploadMeter(str(image), clock)
    with image.open("rb", buffering=0) as file:
        for _ in range(20):
            meter.sample()
            file.read(10_000)
            clock.now += 1
        meter.sample()
        assert meter.sent == 200_000
        assert meter.rate == pytest.approx(10_000)
    meter.sample()
    assert meter.sent == 200_000


def test_never_decreases_within_a_pass(image: pathlib.Path) -> None:
    meter = UploadMeter(str(image))
    with image.open("rb", buffering=0) as file:
        file.seek(600_000)
        meter.sample()
        file.seek(400_000)
        meter.sample()
        assert meter.sent == 600_000


def test_checksums_before_the_upload(image: pathlib.Path) -> None:
    meter = UploadMeter(str(image))
    with image.open("rb", buffering=0) as file:
        file.read(SIZE)
        meter.sample()
        assert meter.sent == SIZE
    meter.sample()
    assert meter.sent == SIZE
    with image.open("rb", buffering=0) as file:
        file.read(1000)
        meter.sample()
        assert (meter.sent, meter.rate) == (1000, None)


def test_several_files_of_one_upload(image: pathlib.Path) -> None:
    meter = UploadMeter(str(image))
    descriptors = [os.open(image, os.O_RDONLY) for _ in range(3)]
    try:
        for number, descriptor in enumerate(descriptors):
            os.lseek(descriptor, 100_000 * number, os.SEEK_SET)
        meter.sample()
        assert meter.sent == 200_000
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_other_files_do_not_count(image: pathlib.Path, tmp_path: pathlib.Path) -> None:
    meter = UploadMeter(str(image))
    other = tmp_path / "other"
    other.write_bytes(bytes(100))
    with other.open("rb", buffering=0) as file:
        file.read(50)
        meter.sample()
        assert meter.sent is None
