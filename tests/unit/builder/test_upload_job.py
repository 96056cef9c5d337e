"""Uploads that are held back until they are verified, and whose lock is lost (BLD-17.3)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import SessionExpiredError

from nodepool.builder.upload.job import UploadJob
from nodepool.zk.locks.long_held import Lost
from nodepool.zk.records import READY, ImageUpload
from nodepool.zk.rollback import RollbackRefused, Rollbacks


@pytest.mark.parametrize(("held", "error"), [(False, SessionExpiredError), (True, Lost)])
def test_refused_result_is_stored_again_only_if_the_lock_was_lost(
    monkeypatch: pytest.MonkeyPatch, held: bool, error: type[Exception]
) -> None:
    """The lock acquires itself again, and repeats the write, after errors of ZooKeeper."""

    def refuse(_rollbacks: Rollbacks, _upload: ImageUpload, lock: str) -> None:
        raise RollbackRefused(f"somebody has changed {lock}")

    monkeypatch.setattr(Rollbacks, "hold_back", refuse)
    job: Any = UploadJob.__new__(UploadJob)
    job.image, job.provider, job.number = "debian", "east", "0000000001"
    job._state = SimpleNamespace(zk=None, session_usable=None)
    job._config = SimpleNamespace(diskimages={"debian": SimpleNamespace(verify=object())})
    job._lock = SimpleNamespace(
        regained=False, held=held, contender="/lock/1", store=lambda write, *_: write()
    )
    record = ImageUpload("1", "east", "debian")
    record.state = READY
    with pytest.raises(error):
        job._store(record)
