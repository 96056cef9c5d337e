"""Locks that are held over lost sessions: nothing is written unless the lock is held, or was
taken again.
"""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.exceptions import ZKLockException
from nodepool.zk import paths
from nodepool.zk.locks import ContenderGone, long_held
from nodepool.zk.locks.long_held import HeldLock, Lost
from nodepool.zk.records import BUILDING, READY, UPLOADING, ImageBuild, ImageUpload
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for
from tests.support.launcher import expire_session

DIRECTORY = "/nodepool/images/debian/builds/lock"


@pytest.fixture
def client(zk_chroot: Chroot) -> Any:
    return zk_chroot.connect()


@pytest.fixture
def lock(client: Any) -> HeldLock:
    return HeldLock(client, DIRECTORY)


def lose_session(client: Any) -> None:
    """End it, and wait for the next one."""
    before = client.session_id
    expire_session(SimpleNamespace(zk=SimpleNamespace(kazoo_client=client.client)))
    wait_for(
        lambda: client.connected and client.session_id not in (None, before), what="a new session"
    )


def usable() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_lock_that_another_client_holds_is_not_taken(lock: HeldLock, zk_chroot: Chroot) -> None:
    with pytest.raises(ZKLockException):
        HeldLock(zk_chroot.connect(), DIRECTORY)
    lock.release()
    assert HeldLock(zk_chroot.connect(), DIRECTORY).held


def test_result_is_written_immediately_while_the_lock_is_held(lock: HeldLock) -> None:
    written: list[bool] = []
    lock.store(lambda _contender: written.append(lock.regained), usable(), lambda: True)
    assert written == [False]


def test_lock_is_taken_again_before_a_result_is_written_in_a_new_session(
    client: Any, lock: HeldLock, zk_chroot: Chroot
) -> None:
    lose_session(client)
    assert not lock.held
    written: list[bool] = []

    def write(_contender: str) -> None:
        written.append(lock.regained)
        with pytest.raises(ZKLockException):
            HeldLock(zk_chroot.connect(), DIRECTORY)

    lock.store(write, usable(), lambda: True)
    assert written == [True] and lock.held


def test_result_is_lost_when_another_client_has_taken_the_lock(
    client: Any, lock: HeldLock, zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_held, "REGAIN_TIMEOUT", 0.1)
    lose_session(client)
    other = HeldLock(zk_chroot.connect(), DIRECTORY)
    written: list[None] = []
    with pytest.raises(Lost, match="cannot be acquired again"):
        lock.store(lambda _contender: written.append(None), usable(), lambda: True)
    assert written == [] and other.held


class Result:
    """A build or an upload whose result is written under the lock."""

    def __init__(self, client: Any, kind: str) -> None:
        self.zk = ZooKeeper(client, enable_cache=False)
        build, upload = ImageBuild("debian"), ImageUpload("", "east", "debian")
        build.state, upload.state = BUILDING, UPLOADING
        build_id = self.zk.storeBuild("debian", build)
        if kind == "build":
            self.record: Any = build
            self.path = paths.build("debian", build_id)
            self._place: tuple[Any, ...] = (self.zk.storeBuild, "debian", build, build_id)
        else:
            number = self.zk.storeImageUpload("debian", build_id, "east", upload)
            self.record, self.path = upload, paths.upload("debian", build_id, "east", number)
            place = ("debian", build_id, "east", upload, number)
            self._place = (self.zk.storeImageUpload, *place)
        #: Of each attempt.
        self.contenders: list[str] = []

    def write(self, contender: str) -> None:
        self.contenders.append(contender)
        self.record.state = READY
        store, *place = self._place
        store(*place, contender)

    @property
    def state(self) -> str:
        return str(json.loads(self.zk.kazoo_client.get(self.path)[0])["state"])


@pytest.mark.spec("BLD-17.4")
@pytest.mark.parametrize("kind", ["build", "upload"])
def test_result_is_not_written_without_the_lock_that_was_held_at_its_check(
    client: Any, lock: HeldLock, kind: str
) -> None:
    result = Result(client, kind)
    before = result.state

    def write(contender: str) -> None:
        if not result.contenders:  # as at the end of a session that is not noticed yet
            client.client.delete(contender)
            with pytest.raises(ContenderGone):
                result.write(contender)
            assert result.state == before
            raise ContenderGone
        result.write(contender)

    lock.store(write, usable(), lambda: True)
    assert len(set(result.contenders)) == 2 and lock.regained
    assert result.state == READY


@pytest.mark.parametrize("kind", ["build", "upload"])
def test_result_whose_record_is_missing_creates_it(client: Any, lock: HeldLock, kind: str) -> None:
    result = Result(client, kind)
    client.client.delete(result.path, recursive=True)
    if kind == "upload":
        client.client.ensure_path(result.path.rpartition("/")[0])
    lock.store(result.write, usable(), lambda: True)
    assert result.state == READY


def test_released_lock_is_not_taken_again(client: Any, lock: HeldLock) -> None:
    lock.release()
    lose_session(client)
    assert not lock.regain()


def test_result_is_lost_when_there_is_no_session_and_nobody_waits_any_longer(
    lock: HeldLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_held, "SESSION_WAIT", 0.01)
    asked: list[None] = []

    def going_on() -> bool:
        asked.append(None)
        return len(asked) < 3

    with pytest.raises(Lost, match="did not become available"):
        lock.store(pytest.fail, threading.Event(), going_on)
    assert len(asked) == 3
