"""The ZooKeeper facade on a real server: images, builds, uploads and their locks (LAU-21)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.zk import paths
from nodepool.zk import zookeeper as zkm
from nodepool.zk.locks.long_held import HeldLock
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for

SPEC = "LAU-21: "


@pytest.fixture
def other(zk_chroot: Chroot) -> Any:
    """Another process: its own session, without a mirror."""
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


def build(state: str = zkm.READY, **values: Any) -> zkm.ImageBuild:
    result = zkm.ImageBuild()
    result.state = state
    for key, value in values.items():
        setattr(result, key, value)
    return result


def upload(state: str = zkm.READY, **values: Any) -> zkm.ImageUpload:
    result = zkm.ImageUpload()
    result.state = state
    for key, value in values.items():
        setattr(result, key, value)
    return result


# -- locks of images


def image_locks(facade: Any) -> dict[str, tuple[Any, str]]:
    build_id = facade.storeBuild("image", build())
    number = facade.storeImageUpload("image", build_id, "prov", upload())
    record = facade.getImageUpload("image", build_id, "prov", number)
    root = "/nodepool/images/image/builds"
    uploads = f"{root}/{build_id}/providers/prov/images"
    return {
        "build": (lambda f, **k: f.imageBuildLock("image", **k), f"{root}/lock"),
        "build id": (
            lambda f, **k: f.imageBuildIdLock("image", build_id, **k),
            f"{root}/{build_id}/lock",
        ),
        "upload": (
            lambda f, **k: f.imageUploadLock("image", build_id, "prov", **k),
            f"{uploads}/lock",
        ),
        "number": (lambda f, **k: f.imageUploadNumberLock(record, **k), f"{uploads}/{number}/lock"),
    }


@pytest.mark.spec(
    SPEC + "imageBuildLock, imageBuildIdLock, imageUploadLock, imageUploadNumberLock, each with "
    "…_exception_nonblocking and …_exception_blocking"
)
@pytest.mark.parametrize("name", ["build", "build id", "upload", "number"])
def test_image_locks_are_exclusive(zk: Any, other: Any, name: str) -> None:
    lock, path = image_locks(zk)[name]
    with lock(zk, blocking=False):
        assert zk.kazoo_client.exists(path) is not None
        with (
            pytest.raises(exceptions.ZKLockException, match=r"Did not get lock on .*"),
            lock(other, blocking=False),
        ):
            pytest.fail("locked twice")
        begin = time.monotonic()
        with pytest.raises(exceptions.TimeoutException), lock(other, blocking=True, timeout=0.2):
            pytest.fail("locked twice")
        assert time.monotonic() - begin >= 0.2
        assert len(zk.kazoo_client.get_children(path)) == 1, (
            "a failed attempt withdraws its contender"
        )
    with lock(other, blocking=True, timeout=5):
        pass
    assert zk.kazoo_client.get_children(path) == []


@pytest.mark.spec(SPEC + "imageBuildLock: before there is any image")
def test_lock_of_a_new_image(zk: Any) -> None:
    with zk.imageBuildLock("new", blocking=False):
        assert zk.kazoo_client.exists("/nodepool/images/new/builds/lock") is not None
    assert zk.getBuildIds("new") == []


@pytest.mark.spec(SPEC + "imageUploadNumberLock_delete")
def test_deleting_an_upload_under_its_lock(zk: Any) -> None:
    build_id = zk.storeBuild("image", build())
    number = zk.storeImageUpload("image", build_id, "prov", upload())
    record = zk.getImageUpload("image", build_id, "prov", number)
    with zk.imageUploadNumberLock(record, blocking=False):
        zk.deleteUpload("image", build_id, "prov", number)
        path = zk._imageUploadPath("image", build_id, "prov")
        assert zk.kazoo_client.get_children(path) == []
    assert zk.kazoo_client.get_children(path) == []


@pytest.mark.spec(SPEC + "imageUploadNumberLock_orphan, buildLock_orphan; ZK-6.2")
def test_orphans_read_as_none(zk: Any) -> None:
    build_id = zk.storeBuild("image", build())
    number = zk.storeImageUpload("image", build_id, "prov", upload())
    record = zk.getImageUpload("image", build_id, "prov", number)
    zk.deleteUpload("image", build_id, "prov", number)
    with zk.imageUploadNumberLock(record, blocking=False):
        pass
    assert zk.getImageUpload("image", build_id, "prov", number) is None
    assert zk.getUploads("image", build_id, "prov") == []
    with zk.imageBuildIdLock("image", "f" * 32, blocking=False):
        pass
    assert zk.getBuild("image", "f" * 32) is None
    assert [b.id for b in zk.getBuilds("image")] == [build_id]


# -- builds and uploads


@pytest.mark.spec(SPEC + "storeBuild, store_and_get_build; getImageNames, getBuildIds")
def test_stored_builds_can_be_read(zk: Any) -> None:
    first = build(
        builder="host",
        builder_id="id",
        formats=["raw", "qcow2"],
        username="u",
        python_path="p",
        shell_type="s",
    )
    one, two = zk.storeBuild("image", first), zk.storeBuild("image", build())
    assert one != two and len(one) == 32
    with zk.imageBuildLock("image", blocking=False):
        assert zk.getImageNames() == ["image"]
        assert set(zk.getBuildIds("image")) == {one, two}
    again = zk.getBuild("image", one)
    assert (again.id, again.image_name) == (one, "image")
    assert again.toDict() == {**first.toDict(), "formats": "qcow2,raw"}
    first.state = zkm.DELETING
    assert zk.storeBuild("image", first, one) == one
    assert zk.getBuild("image", one).state == "deleting"


@pytest.mark.spec(
    SPEC + "getImageNames_not_found, getBuildIds_not_found, getBuildProviders_not_found, "
    "getImageUploadNumbers_not_found, getBuild_not_found, getImageUpload_not_found"
)
def test_images_not_found(zk: Any) -> None:
    assert zk.getImageNames() == zk.getBuildIds("x") == zk.getBuildProviders("x", "y") == []
    assert (
        zk.getImageUploadNumbers("x", "y", "z")
        == zk.getUploads("x", "y", "z")
        == zk.getBuilds("x")
        == []
    )
    assert zk.getBuild("x", "y") is None and zk.getImageUpload("x", "y", "z", "0000000001") is None
    assert zk.getMostRecentImageUpload("x", "z") is None and zk.getBuildRequest("x") is None
    assert zk.kazoo_client.get_children("/nodepool/images") == [], "reading creates nothing"


@pytest.mark.spec(
    SPEC + "storeImageUpload, storeImageUpload_invalid_build, store_and_get_image_upload"
)
def test_upload_of_a_missing_build_is_refused(zk: Any) -> None:
    with pytest.raises(exceptions.ZKException, match="Cannot find build"):
        zk.storeImageUpload("image", "f" * 32, "prov", upload())
    build_id = zk.storeBuild("image", build())
    record = upload(
        external_id="e",
        external_name="image-1",
        format="raw",
        username="u",
        python_path="p",
        shell_type="s",
    )
    first = zk.storeImageUpload("image", build_id, "prov", record)
    second = zk.storeImageUpload("image", build_id, "prov", upload())
    assert first < second and len(first) == 10
    with zk.imageUploadLock("image", build_id, "prov", blocking=False):
        assert sorted(zk.getImageUploadNumbers("image", build_id, "prov")) == [first, second]
        assert zk.getBuildProviders("image", build_id) == ["prov"]
    again = zk.getImageUpload("image", build_id, "prov", first)
    assert (again.id, again.build_id, again.provider_name, again.image_name) == (
        first,
        build_id,
        "prov",
        "image",
    )
    assert again.toDict() == record.toDict()
    record.state = zkm.DELETING
    assert zk.storeImageUpload("image", build_id, "prov", record, first) == first
    assert zk.getImageUpload("image", build_id, "prov", first).state == "deleting"
    wait_for(lambda: {u.id for u in zk.getCachedImageUploads()} == {first, second})


@pytest.mark.spec(SPEC + "build_request")
def test_build_request_can_be_submitted_and_removed(zk: Any, other: Any) -> None:
    assert not zk.hasBuildRequest("image")
    zk.submitBuildRequest("image")
    zk.submitBuildRequest("image")
    assert zk.hasBuildRequest("image") and zk.getBuildRequest("image").pending
    assert zk.getBuildRequest("image").image_name == "image"
    with other.imageBuildLock("image", blocking=False):
        assert zk.getBuildRequest("image").pending  # the builder has only begun
        other.storeBuild("image", build(zkm.BUILDING))
        assert not zk.getBuildRequest("image").pending
    zk.removeBuildRequest("image")
    zk.removeBuildRequest("image")
    assert not zk.hasBuildRequest("image") and zk.getBuildRequest("image") is None


@pytest.mark.spec(SPEC + "getMostRecentBuilds, getBuilds_any, getBuilds")
def test_most_recent_builds(zk: Any) -> None:
    ids = [zk.storeBuild("image", build(state_time=1000.0 + i)) for i in (2, 1, 3)]
    failed = zk.storeBuild("image", build(zkm.FAILED, state_time=5000.0))
    with zk.imageBuildLock("image", blocking=False):
        assert [b.id for b in zk.getMostRecentBuilds(2, "image", zkm.READY)] == [ids[2], ids[0]]
        assert [b.id for b in zk.getMostRecentBuilds(9, "image")] == [
            failed,
            ids[2],
            ids[0],
            ids[1],
        ]
        assert len(zk.getBuilds("image")) == 4
        assert {b.id for b in zk.getBuilds("image", [zkm.READY])} == set(ids)


@pytest.mark.spec(
    SPEC + "getMostRecentBuildImageUploads_with_state, …_any_state, getUploads, getUploads_any, "
    "getMostRecentImageUpload, getProviderUploads"
)
def test_most_recent_uploads(zk: Any) -> None:
    first, second = zk.storeBuild("image", build()), zk.storeBuild("image", build())
    old = zk.storeImageUpload("image", first, "prov", upload(state_time=10.0))
    newest = zk.storeImageUpload(
        "image", first, "prov", upload(state_time=20.0, external_id="wanted")
    )
    later = zk.storeImageUpload("image", first, "prov", upload(zkm.UPLOADING, state_time=30.0))
    elsewhere = zk.storeImageUpload("image", second, "prov", upload(state_time=15.0))
    theirs = zk.storeImageUpload("image", second, "other", upload(state_time=99.0))
    with zk.imageUploadLock("image", first, "prov", blocking=False):
        assert [
            u.id for u in zk.getMostRecentBuildImageUploads(1, "image", first, "prov", zkm.READY)
        ] == [newest]
        assert [u.id for u in zk.getMostRecentBuildImageUploads(1, "image", first, "prov")] == [
            later
        ]
        assert {u.id for u in zk.getUploads("image", first, "prov", [zkm.READY])} == {old, newest}
        assert len(zk.getUploads("image", first, "prov")) == 3
        assert zk.getMostRecentImageUpload("image", "prov").external_id == "wanted"
        assert zk.getMostRecentImageUpload("image", "prov", zkm.UPLOADING).id == later
    wait_for(lambda: zk.getMostRecentImageUpload("image", "prov", cached=True))
    wait_for(
        lambda: zk.getMostRecentImageUpload("image", "prov", cached=True).external_id == "wanted"
    )
    found = zk.getProviderUploads("prov")
    assert {b: {u.id for u in ups} for b, ups in found["image"].items()} == {
        first: {old, newest, later},
        second: {elsewhere},
    }
    assert [u.id for u in zk.getProviderUploads("other")["image"][second]] == [theirs]
    assert zk.getProviderUploads("nobody") == {}


def test_lock_of_a_record_that_is_deleted_meanwhile_is_refused(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = zk.storeBuild("image", build())
    waiting = [
        f"{paths.build('image', build_id)}/lock"
    ] * 2  # it is read before and after our contender is created
    read = zk.kazoo_client.get_children_async

    def deleted(path: str, *arguments: Any, **named: Any) -> Any:
        """Another builder deletes the record with our contender."""
        if waiting and path == waiting.pop() and not waiting:
            assert zk.deleteBuild("image", build_id)
        return read(path, *arguments, **named)

    monkeypatch.setattr(zk.kazoo_client, "get_children_async", deleted)
    with (
        pytest.raises(exceptions.ZKLockException, match="deleted concurrently"),
        zk.imageBuildIdLock("image", build_id, False),
    ):
        pytest.fail("locked what does not exist")


def test_records_are_deleted_although_another_client_asks_for_their_lock(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = zk.storeBuild("image", build())
    number = zk.storeImageUpload("image", build_id, "prov", upload())
    waiting = [paths.upload("image", build_id, "prov", number), paths.build("image", build_id)]
    for path in waiting:
        zk.kazoo_client.create(f"{path}/lock")
    read = zk.kazoo_client.get_children

    def contended(path: str, *arguments: Any, **named: Any) -> Any:
        """The contender arrives after the children were listed."""
        found = read(path, *arguments, **named)
        if waiting and path == f"{waiting[0]}/lock":
            zk.kazoo_client.create(f"{waiting.pop(0)}/lock/contender")
        return found

    monkeypatch.setattr(zk.kazoo_client, "get_children", contended)
    zk.deleteUpload("image", build_id, "prov", number)
    assert zk.deleteBuild("image", build_id)
    assert not waiting and zk.getBuildIds("image") == []


@pytest.mark.spec(SPEC + "deleteBuild, deleteBuild_with_uploads, deleteUpload")
def test_build_with_uploads_is_not_deleted(zk: Any) -> None:
    build_id = zk.storeBuild("image", build())
    assert zk.deleteBuild("image", zk.storeBuild("image", build()))
    number = zk.storeImageUpload("image", build_id, "prov", upload())
    with zk.imageUploadLock("image", build_id, "prov", blocking=False):
        assert zk.deleteBuild("image", build_id) is False
    zk.deleteUpload("image", build_id, "prov", number)
    zk.deleteUpload("image", build_id, "prov", number)
    assert zk.getImageUpload("image", build_id, "prov", number) is None
    assert zk.deleteBuild("image", build_id)
    assert zk.getBuildIds("image") == [] and zk.deleteBuild("image", build_id)


@pytest.mark.spec("ZK-11: corrupt or empty records read as none")
def test_broken_image_records_read_as_none(zk: Any) -> None:
    for data in (b"", b"{", b'{"state": "odd"}'):
        zk.kazoo_client.create(f"/nodepool/images/image/builds/{data.hex()}x", data, makepath=True)
    assert len(zk.getBuildIds("image")) == 3 and zk.getBuilds("image") == []


@pytest.mark.spec("ZK-11: export and import; later upload numbers do not collide")
def test_export_and_import(zk: Any) -> None:
    build_id = zk.storeBuild("image", build())
    for _ in range(3):
        number = zk.storeImageUpload("image", build_id, "prov", upload())
    zk.setImagePaused("image", True)
    data = zk.exportImageData()
    uploads = f"/nodepool/images/image/builds/{build_id}/providers/prov/images"
    assert (
        data["/nodepool/images/image/pause"] == ""
        and f"{uploads}/{number}" in data
        and len(data) == 5
    )
    zk.kazoo_client.delete("/nodepool/images/image", recursive=True)
    zk.importImageData(data)
    assert zk.exportImageData() == data
    assert zk.getImagePaused("image")
    assert zk.storeImageUpload("image", build_id, "prov", upload()) > number


def test_import_passes_numbers_that_were_not_counted(zk: Any) -> None:
    uploads = "/nodepool/images/image/builds/b/providers/prov/images"
    for number in (2, 3):
        zk.kazoo_client.create(f"{uploads}/{number:010}", b"{}", makepath=True)
    zk.importImageData({f"{uploads}/0000000005": '{"state": "ready"}'})
    assert zk.getImageUploadNumbers("image", "b", "prov") == [
        f"{number:010}" for number in (2, 3, 5)
    ]
    assert zk.storeImageUpload("image", "b", "prov", upload()) > "0000000005"


@pytest.mark.spec(SPEC + "tree_cache_parsing; ZK-14: which path is what")
def test_what_the_mirror_takes_for_what(zk: Any, zk_chroot: Chroot) -> None:
    kazoo = zk_chroot.connect().client
    record, root = b'{"state": "ready", "state_time": 1.0}', "/nodepool/images/image"
    uploads = f"{root}/builds/b1/providers/prov/images"
    for path, data in {
        f"{root}/pause": b"",
        f"{root}/request-build": b"",
        f"{root}/builds/lock/{'a' * 32}__lock__0000000000": b"",
        f"{root}/builds/b1": record,
        f"{root}/builds/b1/lock/x": record,
        f"{root}/builds/b1/other/y": record,
        f"{uploads}/0000000001": record,
        f"{uploads}/lock/z": record,
        f"{uploads}/0000000001/lock/c": record,
        f"{root}/odd/builds": record,
        "/nodepool/images/empty": b"",
    }.items():
        if kazoo.exists(path):
            kazoo.set(path, data)
        else:
            kazoo.create(path, data, makepath=True)
    for path in ("/nodepool/nodes/0000000001", "/nodepool/nodes/0000000002"):
        kazoo.create(path, record)
    kazoo.create(f"/nodepool/nodes/0000000001/lock/{'a' * 32}__lock__0000000003", makepath=True)
    kazoo.create("/nodepool/nodes/0000000001/other/thing", record, makepath=True)
    kazoo.create("/nodepool/nodes/0000000002/lock/nonsense", record, makepath=True)
    second = ZooKeeper(zk_chroot.connect())
    assert second.wait_synced(20)
    for facade in (zk, second):  # by events, and by the first synchronisation
        tree = facade.image_tree
        wait_for(
            lambda t=tree: (
                (d := t.data()).builds and len(d.uploads) == 1 and d.paused and d.requests
            )
        )  # type: ignore[misc]
        wait_for(lambda f=facade: f.node_tree.is_locked("0000000001"))  # type: ignore[misc]
        data = tree.data()
        assert (data.names, [each.id for each in data.builds], data.paused) == (
            {"image", "empty"},
            ["b1"],
            {"image"},
        )
        assert [(each.build_id, each.provider_name, each.id) for each in data.uploads] == [
            ("b1", "prov", "0000000001")
        ]
        assert set(facade.node_tree.nodes) == {"0000000001", "0000000002"}
        assert not facade.node_tree.is_locked("0000000002")
        assert facade.getNode("0000000001", cached=True).lock_contenders == {
            f"{'a' * 32}__lock__0000000003"
        }


def test_damaged_build_keeps_its_providers(zk: Any) -> None:
    """Containers of providers are announced once: they must not be forgotten with a record that
    is repaired later.
    """
    build_id = zk.storeBuild("image", build())
    number = zk.storeImageUpload("image", build_id, "prov", upload())
    tree, path = zk.image_tree, f"/nodepool/images/image/builds/{build_id}"
    key = ("image", build_id)
    wait_for(lambda: tree.data().builds and tree.data().uploads, what="the mirror")
    good = zk.kazoo_client.get(path)[0]
    zk.kazoo_client.set(path, b"{")
    wait_for(lambda: not tree.data().builds, what="the damaged record")
    assert tree.data().providers == {key: {"prov"}}
    zk.kazoo_client.set(path, good)
    wait_for(lambda: tree.data().builds, what="the repaired record")
    assert tree.data().providers == {key: {"prov"}} and [
        each.id for each in tree.data().uploads
    ] == [number]
    zk.kazoo_client.delete(path, recursive=True)
    wait_for(lambda: not tree.data().builds, what="the end of the build")
    assert tree.data().providers == {}


def test_released_locks_of_images_leave_nothing_in_the_mirror(zk: Any, other: Any) -> None:
    tree, locks = zk.image_tree, image_locks(other)
    held: dict[str, Callable[[], object]] = {
        "build": lambda: any(locked for _since, locked in tree.data().build_locks.values()),
        "upload": lambda: tree.data().upload_locks,
    }
    for name, is_held in held.items():
        with locks[name][0](other, blocking=False):
            wait_for(is_held, what=f"the {name} lock in the mirror")
        wait_for(lambda found=is_held: not found(), what=f"no entry for the {name} lock")  # type: ignore[misc]
    lock_nodes = [path for path in tree.known_paths() if "/lock/" in path]
    assert lock_nodes == []


def test_lock_that_is_released_while_it_is_checked_counts_as_not_held(zk: Any) -> None:
    class Racing(HeldLock):
        """Its handle can be read once; then another thread has released the lock."""

        @property
        def _handle(self) -> Any:
            handle, self.__dict__["handle"] = self.__dict__["handle"], None
            return handle

        @_handle.setter
        def _handle(self, value: Any) -> None:
            self.__dict__["handle"] = value

    lock = Racing(zk.client, "/nodepool/images/image/builds/lock")
    assert lock.held
    assert not lock.held
