"""Which image is built next, and delays after failures (BLD-6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.builder.building.plan import Plan, plan
from nodepool.config.diskimages import DiskImage
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import BUILDING, FAILED, READY, ImageBuild

NOW = 1_000_000.0


def image(name: str, formats: tuple[str, ...] = ("raw",), **options: Any) -> DiskImage:
    result = DiskImage(name)
    result.image_types = set(formats)
    for key, value in options.items():
        setattr(result, key, value)
    return result


def build(
    name: str,
    build_id: str,
    age: float = 0,
    state: str = READY,
    formats: tuple[str, ...] = ("raw",),
    builder: str = "ours",
) -> ImageBuild:
    result = ImageBuild(name, build_id)
    result.builder_id = builder
    result.state = state
    result.state_time = NOW - age
    result.formats = list(formats)
    return result


def decide(
    images: list[DiskImage],
    data: ImageData,
    busy: tuple[str, ...] = (),
    waits: dict[str, float] | None = None,
) -> Plan:
    config = SimpleNamespace(diskimages={i.name: i for i in images})
    return plan(
        config, data, busy, lambda name, _subject: (waits or {}).get(name, 0.0), NOW, "ours"
    )


def built(images: list[DiskImage], data: ImageData, **options: Any) -> str | None:
    wanted = decide(images, data, **options).build
    return wanted.image if wanted else None


@pytest.mark.spec("BLD-6: build when the image has no record in state ready")
def test_no_ready_build() -> None:
    data = ImageData(builds=[build("a", "1", state=FAILED), build("a", "2", state=BUILDING)])
    assert built([image("a")], data) == "a"


@pytest.mark.spec("BLD-6: build when the newest ready build is as old as rebuild-age")
def test_image_is_built_at_its_rebuild_age() -> None:
    one = image("a", rebuild_age=100)
    assert built([one], ImageData(builds=[build("a", "1", 100)])) == "a"
    young = decide([one], ImageData(builds=[build("a", "1", 99), build("a", "2", 5000)]))
    assert young.build is None and young.wait == pytest.approx(1)


@pytest.mark.spec(
    "BLD-6: build when the newest ready build's formats do not include every format wanted now"
)
def test_image_is_built_for_a_missing_format() -> None:
    data = ImageData(builds=[build("a", "1", formats=("raw", "tar"))])
    assert built([image("a", ("raw",))], data) is None
    assert built([image("a", ("raw", "qcow2"))], data) == "a"


@pytest.mark.spec("BLD-6.3: builders that need different formats of an image")
def test_build_of_another_builder_in_another_format_replaces_none() -> None:
    one = image("a", ("raw",), rebuild_age=100)
    other = build("a", "2", 10, formats=("qcow2",), builder="other")
    both = ImageData(builds=[build("a", "1", 40), other])
    decision = decide([one], both)
    assert decision.build is None and decision.wait == pytest.approx(60)
    old = ImageData(builds=[build("a", "1", 100), other])
    wanted = decide([one], old).build
    assert wanted is not None and wanted.newest == "2"
    assert built([one], ImageData(builds=[other])) == "a"
    # The only builder has built the newest one without the format: it must build again.
    ours = build("a", "2", 10, formats=("qcow2",))
    assert built([one], ImageData(builds=[build("a", "1", 40), ours])) == "a"


@pytest.mark.spec("BLD-6: paused images and images without a format are not considered at all")
def test_paused_images_and_images_without_format_are_not_built() -> None:
    data = ImageData(
        paused={"flag"}, request_marks=dict.fromkeys(("flag", "pause", "none"), (1, 0))
    )
    assert built([image("flag"), image("pause", pause=True), image("none", ())], data) is None


def test_manual_first_then_file_order() -> None:
    images = [image("a"), image("b"), image("c")]
    data = ImageData(request_marks={"c": (7, 0)}, builds=[build("c", "9")])
    wanted = decide(images, data).build
    assert wanted is not None
    assert (wanted.image, wanted.newest, wanted.request) == ("c", "9", (7, 0))
    assert built(images, data, busy=("c",)) == "a"
    assert built(images, data, busy=("c", "a")) == "b"


def test_locked_by_another_builder() -> None:
    assert (
        built(
            [image("a"), image("b")], ImageData(build_locks={"a": (1.0, True), "b": (1.0, False)})
        )
        == "b"
    )


def test_waits_for_the_earliest() -> None:
    images = [image("a"), image("b", rebuild_age=50), image("c")]
    data = ImageData(builds=[build("b", "1", 20)], request_marks={"c": (1, 0)})
    decision = decide(images, data, waits={"a": 40.0, "c": 35.0})
    assert decision.build is None and decision.wait == pytest.approx(30)


def test_another_request_or_configuration_is_another_subject() -> None:
    def subject(mark: tuple[int, int] | None, **options: Any) -> Any:
        data = ImageData(request_marks={"a": mark} if mark else {})
        wanted = decide([image("a", **options)], data).build
        assert wanted is not None
        return wanted.subject

    subjects = [
        subject(None),
        subject((1, 0)),
        subject((1, 1)),
        subject((2, 0)),
        subject(None, elements="x"),
    ]
    assert len(set(subjects)) == len(subjects)
    assert subject(None) == subject(None)
