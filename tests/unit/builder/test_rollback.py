"""Builders keep both uploads of a roll-back, and upload neither again (BLD-22)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodepool.builder.retention import Snapshot, upload_candidates, upload_key
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import ImageUpload, Rollback
from nodepool.zk.records.images import VERIFICATION
from nodepool.zk.rollback import STEP
from tests.unit.builder.test_retention import IMAGE, build, data, pairs, provider, rules, upload

MARK = Rollback("root@np01", 0.0, "no network", "b1", "0000000001", 11.0)


def rolled_back(*more: ImageUpload, builds: int = 2) -> ImageData:
    """Builds b1, b2, ...; b2 was rolled back to b1."""
    good, bad = upload("b1", "east", 1, 21 + STEP), upload("b2", "east", 1, 21)
    bad.rolled_back = MARK
    return data([build(f"b{i}", i * 10) for i in range(1, builds + 1)], [good, bad, *more])


def deleted(found: ImageData) -> set[tuple[str, str, str, str]]:
    plans = Snapshot(found).plan(IMAGE, rules({"east": {IMAGE}}))
    assert not any(plan.drop for plan in plans)
    return {upload_key(each) for plan in plans for each in plan.delete}


@pytest.mark.spec("BLD-22.1; BLD-9.4; BLD-10")
def test_both_uploads_are_kept_and_none_is_repeated() -> None:
    found = rolled_back()
    assert deleted(found) == set()
    assert pairs(found, [provider("east")]) == []


@pytest.mark.spec("BLD-22.4")
def test_upload_in_use_is_kept_while_newer_builds_are_not_uploaded() -> None:
    found = rolled_back(builds=4)
    kept = Snapshot(found).uploads_to_keep(IMAGE)
    assert (IMAGE, "b1", "east", "0000000001") in kept and deleted(found) == set()


@pytest.mark.spec("BLD-25.8")
def test_upload_in_use_is_kept_although_two_newer_ones_are_held_back() -> None:
    bad, waits = (upload(f"b{i}", "east", 1, 10 * i) for i in (2, 3))
    bad.rolled_back = replace(MARK, by=VERIFICATION, automatic=True)
    waits.rolled_back = replace(MARK, by=VERIFICATION, unverified=True)
    used = upload("b1", "east", 1, 10)
    found = data([build(f"b{i}", i * 10) for i in (1, 2, 3)], [used, bad, waits])
    assert deleted(found) == set()


@pytest.mark.spec("BLD-22.4")
def test_next_build_replaces_both_and_the_good_one_stays_for_another_rollback() -> None:
    found = rolled_back(upload("b3", "east", 1, 31), builds=3)
    assert deleted(found) == set()
    found = rolled_back(upload("b3", "east", 1, 31), upload("b4", "east", 1, 41), builds=4)
    assert deleted(found) == {
        (IMAGE, "b1", "east", "0000000001"),
        (IMAGE, "b2", "east", "0000000001"),
    }
    found = upload_candidates(rolled_back(builds=3), [provider("east")], "ours")
    assert [candidate.build.id for candidate in found] == ["b3"]


def test_notes_are_read_as_written() -> None:
    for mark in (MARK, replace(MARK, automatic=True, undone=True)):
        record = upload("b2", "east", 1, 21)
        record.rolled_back = mark
        assert ImageUpload.fromDict(record.toDict()).rolled_back == mark
        assert ImageUpload.fromDict({**record.toDict(), "rolled_back": None}).rolled_back is None
