"""Records are read again under their lock: what another builder did after we read them is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.builder.building.plan import Plan, WantedBuild
from nodepool.builder.building.worker import BuildWorker, fail_interrupted
from nodepool.builder.cleanup.records import RecordCleaner
from nodepool.builder.retention import RemovalPlan, Snapshot
from nodepool.builder.state import BuilderState
from nodepool.builder.upload.claims import UploadClaims
from nodepool.builder.upload.job import UploadJob
from nodepool.zk import paths
from nodepool.zk.locks.long_held import HeldLock
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    READY,
    UPLOADING,
    ImageBuild,
    ImageUpload,
)
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot

IMAGE, PROVIDER = "debian", "cloud"
LOG = logging.getLogger("test")


class Scene:
    """A builder without threads, and the records of one build with one upload."""

    def __init__(
        self, zk: ZooKeeper, state: str, upload: str | None = None, external_id: str | None = None
    ) -> None:
        self.zk = zk
        self.deleted: list[str] = []
        self.state = BuilderState(lambda: None)
        self.state.zk, self.state.connection = zk, zk.client
        self.state.session_usable.set()
        self.state.managers.use = self._use  # type: ignore[method-assign]
        lanes: Any = SimpleNamespace(submit=lambda _provider, _key, job: job())
        self.cleaner = RecordCleaner(self.state, lanes, LOG)
        build = ImageBuild(IMAGE)
        build.state = state
        self.build_id = zk.storeBuild(IMAGE, build)
        self.number = self.store_upload(upload, external_id) if upload is not None else ""

    @contextmanager
    def _use(self, _config: Any, _provider: str) -> Iterator[Any]:
        yield SimpleNamespace(
            deleteImage=lambda _name, external_id: self.deleted.append(external_id)
        )

    def store_upload(self, state: str, external_id: str | None = None) -> str:
        record = ImageUpload(self.build_id, PROVIDER, IMAGE)
        record.state, record.external_id, record.external_name = state, external_id, external_id
        return self.zk.storeImageUpload(IMAGE, self.build_id, PROVIDER, record)

    def upload_as(self, state: str, external_id: str | None = None) -> ImageUpload:
        """The upload as it was read before."""
        found = self.zk.getImageUpload(IMAGE, self.build_id, PROVIDER, self.number)
        assert found is not None
        found.state, found.external_id = state, external_id
        return found

    @property
    def upload(self) -> str | None:
        """The state of the record; None if it no longer exists."""
        found = self.zk.getImageUpload(IMAGE, self.build_id, PROVIDER, self.number)
        return found.state if found is not None else None

    @property
    def build(self) -> str | None:
        found = self.zk.getBuild(IMAGE, self.build_id)
        return found.state if found is not None else None

    def finish(self, state: str) -> bool:
        """Remove the build, which had this state when it was read."""
        return self.cleaner.finish(
            RemovalPlan(IMAGE, self.build_id, state), Snapshot(self.zk.readImages(cached=False))
        )


@pytest.fixture(autouse=True)
def no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that begins ends immediately."""
    monkeypatch.setattr(UploadJob, "_upload", lambda _job: None)


@pytest.fixture
def zk(zk_chroot: Chroot) -> ZooKeeper:
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


@pytest.fixture
def other(zk_chroot: Chroot) -> ZooKeeper:
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


# -- the clean-up


def test_upload_that_has_ended_meanwhile_is_not_dropped(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY, READY)
    scene.cleaner.drop(scene.upload_as(UPLOADING))
    assert scene.upload == READY


def test_upload_under_way_is_not_dropped(zk: ZooKeeper, other: ZooKeeper) -> None:
    scene = Scene(zk, READY, UPLOADING)
    with other.imageUploadLock(IMAGE, scene.build_id, PROVIDER):
        scene.cleaner.drop(scene.upload_as(UPLOADING))
        assert scene.upload == UPLOADING
    scene.cleaner.drop(scene.upload_as(UPLOADING))
    assert scene.upload is None


def test_upload_that_has_changed_meanwhile_is_not_marked_for_deletion(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY, READY)
    assert not scene.cleaner.delete(scene.upload_as(FAILED))
    assert scene.upload == READY


def test_upload_that_somebody_deletes_is_not_marked_for_deletion(
    zk: ZooKeeper, other: ZooKeeper
) -> None:
    scene = Scene(zk, READY, FAILED)
    with other.imageUploadNumberLock(scene.upload_as(FAILED)):
        assert not scene.cleaner.delete(scene.upload_as(FAILED))
        assert scene.upload == FAILED
    assert scene.cleaner.delete(scene.upload_as(FAILED))
    assert scene.upload is None


def test_upload_that_has_got_an_image_meanwhile_keeps_its_record(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY, DELETING, "there")
    scene.cleaner.delete(scene.upload_as(DELETING))
    assert scene.upload == DELETING and scene.deleted == []


def test_image_of_an_upload_that_is_not_to_be_deleted_stays_in_the_cloud(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY, READY, "there")
    scene.cleaner.delete(scene.upload_as(DELETING, "there"))
    assert scene.upload == READY and scene.deleted == []


def test_image_that_another_builder_deletes_is_not_deleted_twice(
    zk: ZooKeeper, other: ZooKeeper
) -> None:
    scene = Scene(zk, READY, DELETING, "there")
    with other.imageUploadNumberLock(scene.upload_as(DELETING)):
        scene.cleaner.delete(scene.upload_as(DELETING, "there"))
        assert scene.deleted == []
    scene.cleaner.delete(scene.upload_as(DELETING, "there"))
    assert scene.deleted == ["there"] and scene.upload is None


def test_build_that_has_got_an_upload_meanwhile_is_not_removed(zk: ZooKeeper) -> None:
    scene = Scene(zk, FAILED)
    snapshot = Snapshot(zk.readImages(cached=False))
    scene.store_upload(READY)
    assert not scene.cleaner.finish(RemovalPlan(IMAGE, scene.build_id, FAILED), snapshot)
    assert scene.build == FAILED


def test_build_that_is_being_uploaded_is_not_removed(zk: ZooKeeper) -> None:
    scene = Scene(zk, FAILED)
    plan, snapshot = (
        RemovalPlan(IMAGE, scene.build_id, FAILED),
        Snapshot(zk.readImages(cached=False)),
    )
    snapshot.data.upload_locks.add((IMAGE, scene.build_id, PROVIDER))
    assert not scene.cleaner.finish(plan, snapshot)
    assert scene.build == FAILED
    snapshot.data.upload_locks.clear()
    assert scene.cleaner.finish(plan, snapshot)
    assert scene.build is None


def test_build_that_has_ended_meanwhile_is_not_removed(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY)
    assert not scene.finish(BUILDING)
    assert scene.build == READY


def test_build_under_way_is_not_removed(zk: ZooKeeper, other: ZooKeeper) -> None:
    scene = Scene(zk, BUILDING)
    with other.imageBuildLock(IMAGE):
        assert not scene.finish(BUILDING)
        assert scene.build == BUILDING
    assert scene.finish(BUILDING)
    assert scene.build is None


def test_record_with_uploads_is_never_deleted(zk: ZooKeeper) -> None:
    scene = Scene(zk, DELETING, DELETING)
    assert not zk.deleteBuild(IMAGE, scene.build_id)
    assert (scene.build, scene.upload) == (DELETING, DELETING)


# -- builds


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called when a build begins, which is omitted."""
    build = Mock()
    monkeypatch.setattr(BuildWorker, "_build", build)
    return build


def build_pass(scene: Scene, monkeypatch: pytest.MonkeyPatch, newest: str | None) -> None:
    """A pass of a build worker, with a plan that was made when this was the newest build."""
    plans = iter([Plan(WantedBuild(IMAGE, "too old", newest, None, "")), Plan(None)])
    monkeypatch.setattr("nodepool.builder.building.worker.plan", lambda *_arguments: next(plans))
    BuildWorker(0, scene.state, 1.0).make_pass()


def test_image_that_another_builder_has_built_is_not_built_again(
    zk: ZooKeeper, monkeypatch: pytest.MonkeyPatch, built: Mock
) -> None:
    scene = Scene(zk, READY)
    build_pass(scene, monkeypatch, None)
    assert not built.called
    build_pass(scene, monkeypatch, scene.build_id)
    assert built.called


def test_no_build_begins_when_the_builder_is_stopping(
    zk: ZooKeeper, monkeypatch: pytest.MonkeyPatch, built: Mock
) -> None:
    """A build that ended without a result would be planned again until the worker is stopped."""
    scene = Scene(zk, READY)
    scene.state.stopping_at_once.set()
    build_pass(scene, monkeypatch, scene.build_id)
    assert not built.called


def test_image_that_another_builder_builds_is_not_built(
    zk: ZooKeeper, other: ZooKeeper, monkeypatch: pytest.MonkeyPatch, built: Mock
) -> None:
    scene = Scene(zk, READY)
    with other.imageBuildLock(IMAGE):
        build_pass(scene, monkeypatch, scene.build_id)
    assert not built.called


def test_two_workers_of_a_builder_never_build_one_image(
    zk: ZooKeeper, monkeypatch: pytest.MonkeyPatch, built: Mock
) -> None:
    scene = Scene(zk, READY)
    lock = HeldLock(zk.client, f"{paths.builds(IMAGE)}/lock")
    build_pass(scene, monkeypatch, scene.build_id)
    assert not built.called
    lock.release()
    build_pass(scene, monkeypatch, scene.build_id)
    assert built.called


@pytest.mark.parametrize("state, left", [(BUILDING, FAILED), (READY, READY)])
def test_result_that_was_stored_before_the_builder_was_killed_is_kept(
    zk: ZooKeeper, tmp_path: Any, state: str, left: str
) -> None:
    scene = Scene(zk, state)
    scene.state.config = SimpleNamespace(images_dir=str(tmp_path))
    fail_interrupted(scene.state, [(IMAGE, scene.build_id)], LOG)
    assert scene.build == left


# -- uploads


def job_of(scene: Scene) -> UploadJob:
    build = scene.zk.getBuild(IMAGE, scene.build_id)
    provider = SimpleNamespace(name=PROVIDER, image_type="qcow2")
    candidate: Any = SimpleNamespace(
        pair=(IMAGE, PROVIDER), build=build, provider=provider, provider_image=None
    )
    worker: Any = SimpleNamespace(log=LOG, running=True)
    return UploadJob(worker, scene.state, None, candidate, 1)


def test_build_that_another_builder_has_uploaded_is_not_uploaded_again(zk: ZooKeeper) -> None:
    scene = Scene(zk, READY, READY, "theirs")
    assert job_of(scene).run() is False
    assert zk.getImageUploadNumbers(IMAGE, scene.build_id, PROVIDER) == [scene.number]


def test_build_that_another_builder_uploads_is_not_uploaded(
    zk: ZooKeeper, other: ZooKeeper
) -> None:
    scene = Scene(zk, READY)
    job = job_of(scene)
    with other.imageUploadLock(IMAGE, scene.build_id, PROVIDER):
        assert job.run() is False
    assert zk.getImageUploadNumbers(IMAGE, scene.build_id, PROVIDER) == []


def test_build_that_is_being_deleted_is_not_uploaded(zk: ZooKeeper) -> None:
    scene = Scene(zk, DELETING)
    assert job_of(scene).run() is False
    assert zk.getImageUploadNumbers(IMAGE, scene.build_id, PROVIDER) == []


def test_two_workers_of_a_builder_never_upload_one_image_to_one_provider() -> None:
    claims = UploadClaims()
    with (
        claims.claim((IMAGE, PROVIDER), "1") as first,
        claims.claim((IMAGE, "other"), "1") as other,
    ):
        with claims.claim((IMAGE, PROVIDER), "2") as second:
            assert (first, other, second) == (True, True, False)
        assert claims.running() == {(IMAGE, "1", PROVIDER), (IMAGE, "1", "other")}
    with claims.claim((IMAGE, PROVIDER), "2") as again:
        assert again
