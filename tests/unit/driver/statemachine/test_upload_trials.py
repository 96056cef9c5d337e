"""Counts of launches of new uploads (BLD-23, BLD-24)."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.config.diskimages import DiskImage
from nodepool.driver.statemachine.upload_trials import (
    KEPT,
    UploadTrials,
    blames_image,
    trial_options,
)
from nodepool.zk.records import READY, ImageUpload, Node
from nodepool.zk.rollback import upload_path
from tests.unit.builder.test_retention import build, data, upload

OLD, NEW = upload("b1", "east", 1, 10), upload("b2", "east", 1, 20)


class Launch:
    """Stands for a launch."""


class Zk:
    """A mirror with two builds, and nodes of these uploads."""

    def __init__(self, *of: ImageUpload) -> None:
        self.nodes = []
        for each in of:
            node = Node()
            node.state, node.image_id = READY, upload_path(each)
            self.nodes.append(node)
        self.counted = 0

    def readImages(self) -> Any:
        return data([build("b1", 5), build("b2", 15)], [OLD, NEW])

    def nodeIterator(self) -> list[Node]:
        self.counted += 1
        return self.nodes


@pytest.fixture
def trials() -> UploadTrials:
    return UploadTrials(lambda: 0.0)


def choose(trials: UploadTrials, zk: Any, canary: int, launch: object, first: bool = True) -> str:
    return str(trials.choose(zk, NEW, canary, launch, first).build_id)


@pytest.mark.spec("BLD-24.1")
def test_ended_launch_lets_another_one_try(trials: UploadTrials) -> None:
    zk, launches = Zk(), [Launch() for _ in range(3)]
    assert [choose(trials, zk, 1, launch) for launch in launches] == ["b2", "b1", "b1"]
    trials.ended(launches[1], OLD)
    assert choose(trials, zk, 1, launches[1]) == "b1"
    trials.ended(launches[0], NEW)
    assert choose(trials, zk, 1, launches[1]) == "b2"


@pytest.mark.spec("BLD-24.1")
def test_prepared_launch_that_is_dropped_lets_another_one_try(trials: UploadTrials) -> None:
    zk = Zk()
    assert choose(trials, zk, 1, Launch()) == "b2"
    gc.collect()
    assert choose(trials, zk, 1, Launch()) == "b2"


@pytest.mark.spec("BLD-24.1")
def test_later_attempts_use_the_previous_upload_until_the_new_one_has_started(
    trials: UploadTrials,
) -> None:
    zk, launch, other = Zk(), Launch(), Launch()
    assert choose(trials, zk, 1, launch) == "b2"
    assert choose(trials, zk, 1, launch, first=False) == "b1"
    assert choose(trials, zk, 1, other) == "b2"
    trials.started(NEW)
    assert choose(trials, zk, 1, launch, first=False) == "b2"


@pytest.mark.spec("BLD-24.1")
def test_nodes_of_others_are_counted_once(trials: UploadTrials) -> None:
    zk, launches = Zk(NEW, NEW, OLD), [Launch(), Launch()]
    assert [choose(trials, zk, 3, launch) for launch in launches] == ["b2", "b1"]
    assert zk.counted == 1
    trials.started(NEW)
    assert choose(trials, zk, 3, launches[1]) == "b2"


def test_without_canary_nothing_is_counted(trials: UploadTrials) -> None:
    zk = Zk()
    assert choose(trials, zk, 0, Launch()) == "b2" and zk.counted == 0


@pytest.mark.spec("BLD-23.1")
def test_launches_of_the_previous_upload_do_not_count_for_the_new_one(trials: UploadTrials) -> None:
    assert [trials.failed(NEW, 2), trials.failed(OLD, 2)] == [False, False]
    trials.started(OLD)
    assert trials.failed(NEW, 2)
    trials.started(NEW)
    assert not trials.failed(NEW, 2)


def test_old_uploads_are_forgotten(trials: UploadTrials) -> None:
    first = upload("b0", "east", 1, 0)
    trials.started(first)
    for number in range(KEPT):
        trials.failed(upload(f"c{number}", "east", 1, number), 9)
    assert trials.failed(first, 1), "its success is not known any more"


@pytest.mark.spec("BLD-23.1")
@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (exceptions.ConnectionTimeoutException("port 22"), True),
        (exceptions.ServerCreateTimeoutException("3600 s"), True),
        (exceptions.LaunchKeyscanException("no keys"), True),
        (exceptions.LaunchStatusException("in error state"), True),
        (exceptions.OfferRefusedException("sold out"), False),
        (exceptions.CapacityException("full"), False),
        (exceptions.QuotaException("cores"), False),
        (exceptions.TimeoutException("no answer of the API"), False),
        (RuntimeError("HTTP 500"), False),
    ],
)
def test_only_symptoms_of_machines_blame_the_image(error: Exception, blamed: bool) -> None:
    assert blames_image(error) is blamed


@pytest.mark.spec("BLD-23.1, BLD-24.1")
def test_labels_without_our_images_have_no_trials() -> None:
    assert trial_options(SimpleNamespace(diskimage=DiskImage("debian"))) == (3, 0)
    # Drivers of others may have another class.
    assert trial_options(SimpleNamespace(diskimage=SimpleNamespace(name="debian"))) == (0, 0)
    assert trial_options(SimpleNamespace(cloud_image="debian")) == (0, 0)
