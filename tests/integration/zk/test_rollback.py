"""Returning to an earlier upload of an image, and back (BLD-22)."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest import mock

import pytest

from nodepool.status.images import image_list
from nodepool.zk import locks, paths
from nodepool.zk.locks import ContenderGone
from nodepool.zk.records import DELETING, READY, UPLOADING, ImageBuild, ImageUpload, NodeRequest
from nodepool.zk.rollback import (
    UPLOAD,
    Result,
    RollbackRefused,
    Rollbacks,
    earlier_upload,
    rolled_back,
    unverified,
    upload_of,
    upload_path,
    why_unused,
)
from tests.conftest import Chroot, wait_for
from tests.support.interference import OtherClient, sets

IMAGE, NOW = "debian", 1_760_000_000.0


class Scene:
    """Builds of one image with their uploads."""

    def __init__(self, zk: Any) -> None:
        self.zk = zk
        self.rollbacks = Rollbacks(zk, lambda: NOW)

    def build(self, age: float, *providers: str) -> list[ImageUpload]:
        """Store a build with its uploads, which have this age in seconds."""
        build = ImageBuild()
        build.state, build.formats, build.state_time = READY, ["qcow2"], NOW - age - 1
        build_id, made = self.zk.storeBuild(IMAGE, build), []
        for provider in providers:
            upload = ImageUpload(build_id, provider, IMAGE)
            upload.state, upload.external_id, upload.format = READY, f"{build_id} there", "qcow2"
            upload.state_time = NOW - age
            self.zk.storeImageUpload(IMAGE, build_id, provider, upload)
            made.append(upload)
        return made

    def back(self, provider: str | None = None) -> Result:
        return self.rollbacks.back(IMAGE, provider, "root@np01", "no network")

    def forward(self, provider: str | None = None) -> Result:
        return self.rollbacks.forward(IMAGE, provider)

    def stored(self, upload: ImageUpload) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.zk.kazoo_client.get(upload_path(upload))[0])
        return found

    def used(self, provider: str) -> str | None:
        """Return the build that launchers use, by the rule of 11.0.0 (ZK-11.6)."""
        client, found = self.zk.kazoo_client, []
        for build_id in client.get_children(paths.builds(IMAGE)):
            parent = paths.uploads(IMAGE, build_id, provider)
            for number in client.get_children(parent) if client.exists(parent) else []:
                record = json.loads(client.get(f"{parent}/{number}")[0])
                if record["state"] == "ready":
                    found.append((record["state_time"], build_id))
        return max(found)[1] if found else None

    def launched(self, provider: str = "east") -> str | None:
        """Return the build that our launchers use; with and without the mirror."""
        client = self.zk.kazoo_client
        client.sync(paths.IMAGES)
        client.exists(paths.IMAGES)  # what has changed before has arrived
        found = [
            self.zk.getMostRecentImageUpload(IMAGE, provider, cached=cached)
            for cached in (False, True)
        ]
        first, second = (None if each is None else str(each.build_id) for each in found)
        assert first == second
        return first


@pytest.fixture
def scene(zk: Any) -> Scene:
    return Scene(zk)


@pytest.fixture
def other(zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(zk_chroot.connect().client, monkeypatch)


@pytest.mark.spec("BLD-22.1")
def test_all_providers_use_the_previous_upload_after_a_rollback(scene: Scene) -> None:
    (old, old_west), (new, new_west) = (
        scene.build(50, "east", "west"),
        scene.build(20, "east", "west"),
    )
    assert scene.used("east") == scene.used("west") == new.build_id
    result = scene.back()
    assert [switch.provider for switch in result.changed] == ["east", "west"]
    assert scene.used("east") == scene.used("west") == old.build_id
    for replaced, used in ((new, old), (new_west, old_west)):
        assert scene.stored(replaced)["rolled_back"] == {
            "by": "root@np01",
            "time": NOW,
            "reason": "no network",
            "build": used.build_id,
            "upload": used.id,
            "was": NOW - 50,
            "automatic": False,
            "undone": False,
            "unverified": False,
        }
        assert [scene.stored(one)["state"] for one in (replaced, used)] == ["ready", "ready"]


@pytest.mark.spec("BLD-22.1")
def test_launcher_uses_the_previous_upload_within_a_second(scene: Scene) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")

    def uses(expected: ImageUpload) -> bool:
        upload = scene.zk.getMostRecentImageUpload(IMAGE, "east", cached=True)
        return upload is not None and upload.build_id == expected.build_id

    wait_for(lambda: uses(new))
    scene.back()
    wait_for(lambda: uses(old), 1)
    scene.forward()
    wait_for(lambda: uses(new), 1)


@pytest.mark.spec("BLD-22.1")
def test_only_the_named_provider_is_rolled_back(scene: Scene) -> None:
    (old, _), (new, _) = scene.build(50, "east", "west"), scene.build(20, "east", "west")
    scene.back("west")
    assert scene.used("west") == old.build_id and scene.used("east") == new.build_id
    with pytest.raises(RollbackRefused, match="no usable upload at provider north"):
        scene.back("north")


@pytest.mark.spec("BLD-22.3")
def test_rollforward_restores_the_records_but_for_the_note(scene: Scene) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    before = scene.stored(old), scene.stored(new)
    scene.back()
    scene.forward()
    after = scene.stored(new)
    assert after.pop("rolled_back")["undone"] is True
    assert (scene.stored(old), after) == before
    assert scene.forward().unchanged == {
        "east": f"no roll-back is in force; build {new.build_id} is used"
    }
    # It can be repeated.
    assert scene.back().changed and scene.used("east") == old.build_id


@pytest.mark.spec("BLD-22.2")
def test_second_operator_is_informed_that_somebody_has_rolled_back(scene: Scene) -> None:
    scene.build(90, "east")
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    scene.back()
    result = scene.rollbacks.back(IMAGE, None, "alice@np02", "slow")
    assert result.changed == [] and result.impossible == {}
    assert result.unchanged == {
        "east": f"root@np01 has rolled back from build {new.build_id} to {old.build_id} already: "
        "no network"
    }
    assert scene.used("east") == old.build_id


@pytest.mark.spec("BLD-22.2")
def test_provider_without_an_earlier_upload_keeps_the_current_one(scene: Scene) -> None:
    (old,) = scene.build(50, "east")
    new = scene.build(20, "east", "west")[0]
    result = scene.back()
    assert [switch.provider for switch in result.changed] == ["east"]
    assert result.impossible == {"west": f"build {new.build_id} has no earlier usable upload there"}
    assert scene.used("east") == old.build_id and scene.used("west") == new.build_id


@pytest.mark.spec("BLD-22.4")
def test_newer_upload_becomes_current_and_each_step_is_undone_on_its_own(scene: Scene) -> None:
    (good,), (bad,) = scene.build(50, "east"), scene.build(20, "east")
    scene.back()
    (newer,) = scene.build(10, "east")
    assert scene.used("east") == newer.build_id
    assert rolled_back(scene.zk.readImages(cached=False)) == []
    scene.back()
    assert scene.used("east") == good.build_id != bad.build_id
    scene.forward()
    assert scene.used("east") == newer.build_id
    assert not scene.forward().changed


@pytest.mark.spec("BLD-22.2")
def test_replaced_upload_is_not_returned_to(scene: Scene) -> None:
    (good,), _bad = scene.build(50, "east"), scene.build(20, "east")
    scene.back()
    (newer,) = scene.build(10, "east")
    scene.zk.deleteUpload(IMAGE, good.build_id, "east", good.id)
    assert scene.back().impossible and scene.used("east") == newer.build_id


@pytest.mark.spec("BLD-24.2")
def test_launches_try_only_current_uploads_that_nobody_has_returned_to(scene: Scene) -> None:
    (oldest,), (old,), (new,) = (scene.build(age, "east") for age in (90, 50, 20))

    def earlier(upload: ImageUpload) -> str | None:
        found = earlier_upload(scene.zk.readImages(cached=False), upload)
        return None if found is None else found.build_id

    assert [earlier(each) for each in (new, old, oldest)] == [old.build_id, None, None]
    scene.back()
    assert [earlier(each) for each in (new, old, oldest)] == [None] * 3


@pytest.mark.spec("BLD-22.2")
def test_upload_of_a_deleted_build_is_not_used_again(scene: Scene) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    scene.zk.markDeleting(IMAGE, old.build_id)
    assert scene.back().impossible and scene.used("east") == new.build_id


@pytest.mark.spec("BLD-22.2")
def test_build_that_is_deleted_is_not_returned_to(scene: Scene) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    scene.back()
    scene.zk.markDeleting(IMAGE, new.build_id)
    assert scene.forward().impossible == {"east": f"build {new.build_id} is being deleted"}
    assert scene.used("east") == old.build_id


@pytest.mark.spec("BLD-23.4")
def test_failed_upload_that_is_not_current_changes_nothing(scene: Scene) -> None:
    """A launcher hears late that an upload fails."""
    scene.build(50, "east")
    (bad,), (newer,) = scene.build(20, "east"), scene.build(10, "east")
    result = scene.rollbacks.back(IMAGE, "east", "launcher np01", "no SSH", bad)
    assert result.changed == [] and scene.used("east") == newer.build_id
    assert result.unchanged == {
        "east": f"build {newer.build_id} is newer, or an operator has returned to it"
    }


@pytest.mark.parametrize("changed", ["current", "earlier", "build"])
@pytest.mark.spec("BLD-22.2")
def test_nothing_is_changed_if_somebody_changes_a_record_meanwhile(
    scene: Scene, other: OtherClient, changed: str
) -> None:
    (old, old_west), (new, _) = scene.build(50, "east", "west"), scene.build(20, "east", "west")
    path = {
        "current": upload_path(new),
        "earlier": upload_path(old),
        "build": paths.build(IMAGE, old.build_id or ""),
    }[changed]
    late = other.before(sets("/images/"), lambda _path: other.write(path, state=DELETING))
    with pytest.raises(RollbackRefused, match=r"somebody has changed .* nothing was done"):
        scene.back()
    assert late.refused() == path
    assert scene.used("west") == new.build_id != old_west.build_id


@pytest.mark.spec("BLD-22.2")
def test_upload_that_is_deleted_meanwhile_is_not_created_again(
    scene: Scene, other: OtherClient
) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    other.before(sets("/images/"), lambda _path: other.delete(upload_path(old)))
    with pytest.raises(RollbackRefused):
        scene.back()
    assert scene.zk.kazoo_client.exists(upload_path(old)) is None
    assert "rolled_back" not in scene.stored(new)


@pytest.mark.parametrize(
    "mark",
    [
        7,
        {},
        {"by": "x", "time": "now", "reason": "", "build": "b", "upload": "1", "was": 1},
        {"by": "x", "time": 1, "reason": "", "build": "b", "upload": 1, "was": 1},
        {"by": "x", "time": float("nan"), "reason": "", "build": "b", "upload": "1", "was": 1},
        {"by": "x", "time": 1, "reason": "", "build": "b", "upload": "1", "was": 1, "undone": 3},
    ],
)
@pytest.mark.spec("BLD-22.5; ZK-1.5")
def test_notes_that_are_not_valid_are_ignored(scene: Scene, mark: object) -> None:
    (old,), (new,) = scene.build(50, "east"), scene.build(20, "east")
    path = upload_path(new)
    record = json.dumps({**scene.stored(new), "rolled_back": mark})
    scene.zk.kazoo_client.set(path, record.encode())
    assert rolled_back(scene.zk.readImages(cached=False)) == []
    scene.back()
    assert scene.used("east") == old.build_id


def test_record_without_a_note_is_written_as_by_11_0_0(scene: Scene) -> None:
    (upload,) = scene.build(time.time() - NOW, "east")
    assert "rolled_back" not in scene.stored(upload)


def finish(scene: Scene, old: ImageUpload | None, age: float = 20) -> ImageUpload:
    """Return the upload of a new build as its builder is about to store it."""
    (new,) = scene.build(age, "east")
    new.state = UPLOADING
    scene.zk.storeImageUpload(IMAGE, new.build_id, "east", new, new.id)
    assert scene.used("east") == (None if old is None else old.build_id)
    new.state, new.state_time = READY, NOW - age
    return new


@pytest.mark.spec("BLD-25.1")
def test_upload_that_is_held_back_is_used_only_once_it_is_verified(scene: Scene) -> None:
    (old,) = scene.build(50, "east")
    before, new = scene.stored(old), finish(scene, old)
    # The answer to the first call may be lost.
    for _ in range(2):
        scene.rollbacks.hold_back(new)
        assert scene.used("east") == scene.launched() == old.build_id
        (switch,) = unverified(scene.zk.readImages(cached=False))
        assert (switch.replaced.build_id, switch.used.build_id) == (new.build_id, old.build_id)
        assert (
            switch.replaced.rolled_back is not None and switch.replaced.rolled_back.was == NOW - 50
        )
    assert "east" in scene.back().impossible
    assert scene.rollbacks.verified(new, None)
    assert scene.used("east") == scene.launched() == new.build_id
    assert scene.stored(old) == before and "rolled_back" not in scene.stored(new)
    assert scene.stored(new)["state_time"] == NOW - 20
    assert not scene.rollbacks.verified(new, "too late") and "rolled_back" not in scene.stored(new)


@pytest.mark.spec("BLD-25.1; BLD-25.8")
def test_first_upload_is_used_only_once_it_is_verified(scene: Scene) -> None:
    new = finish(scene, None)
    for _ in range(2):
        scene.rollbacks.hold_back(new)
        # Launchers of 11.0.0 know no other one.
        assert scene.launched() is None and scene.used("east") == new.build_id
    (switch,) = unverified(scene.zk.readImages(cached=False))
    assert upload_path(switch.replaced) == upload_path(switch.used) == upload_path(new)
    assert "all are held back" in scene.back().impossible["east"]
    assert earlier_upload(scene.zk.readImages(cached=False), new) is None
    why = why_unused(scene.zk.readImages(cached=False), IMAGE, "east")
    assert why == f"build {new.build_id} is held back until it is verified; there is no other one"
    assert scene.rollbacks.verified(new, None) and scene.launched() == new.build_id
    assert "rolled_back" not in scene.stored(new)
    assert scene.stored(new)["state_time"] == NOW - 20
    assert why_unused(scene.zk.readImages(cached=False), IMAGE, "east") == ""
    assert why_unused(scene.zk.readImages(cached=False), IMAGE, "west") == ""


@pytest.mark.spec("BLD-25.6; BLD-25.8")
@pytest.mark.parametrize("failure", [None, "no network"])
def test_operator_uses_a_first_upload_without_verification(
    scene: Scene, failure: str | None
) -> None:
    new = finish(scene, None)
    scene.rollbacks.hold_back(new)
    if failure is not None:
        assert scene.rollbacks.verified(new, failure) and scene.launched() is None
        why = why_unused(scene.zk.readImages(cached=False), IMAGE, "east")
        assert why.endswith("is held back by verification: no network")
    (switch,) = scene.forward().changed
    assert switch.used is switch.replaced and scene.launched() == new.build_id
    assert not scene.rollbacks.verified(new, "too late") and scene.launched() == new.build_id
    assert "no roll-back is in force" in scene.forward().unchanged["east"]


@pytest.mark.spec("BLD-25.8")
def test_upload_after_a_bad_first_one_is_verified_as_the_first_one(scene: Scene) -> None:
    bad = finish(scene, None, 40)
    scene.rollbacks.hold_back(bad)
    scene.rollbacks.verified(bad, "no network")
    good = finish(scene, bad, 20)
    scene.rollbacks.hold_back(good)
    assert scene.launched() is None and not scene.rollbacks.verified(bad, None)
    assert scene.rollbacks.verified(good, None) and scene.launched() == good.build_id
    # There is nothing to return to.
    assert "no earlier usable upload" in scene.back().impossible["east"]


@pytest.mark.spec("BLD-25.8")
def test_first_upload_waits_again_if_the_next_one_is_bad(scene: Scene) -> None:
    """It was not verified when the next one arrived; nothing else can be used."""
    first = finish(scene, None, 40)
    scene.rollbacks.hold_back(first)
    bad = finish(scene, first, 20)
    scene.rollbacks.hold_back(bad)
    assert not scene.rollbacks.verified(first, None), "a newer one is verified before"
    assert scene.rollbacks.verified(bad, "no network") and scene.launched() is None
    (switch,) = unverified(scene.zk.readImages(cached=False))
    assert switch.replaced.build_id == switch.used.build_id == first.build_id
    assert scene.rollbacks.verified(first, None) and scene.launched() == first.build_id


@pytest.mark.spec("BLD-25.8")
@pytest.mark.parametrize("older", [False, True])
def test_upload_that_is_held_back_is_not_used_when_the_one_in_use_is_deleted(
    scene: Scene, older: bool
) -> None:
    (oldest,) = scene.build(90, "east") if older else (None,)
    (old,) = scene.build(50, "east")
    new = finish(scene, old)
    scene.rollbacks.hold_back(new)
    scene.zk.markDeleting(IMAGE, old.build_id, "east", old.id)
    assert scene.launched() == (oldest.build_id if oldest is not None else None)
    why = why_unused(scene.zk.readImages(cached=False), IMAGE, "east")
    assert ("there is no other one" in why) is not older
    # No one names the deleted build as the one in use.
    used = f"build {oldest.build_id} is used" if oldest is not None else "there is no other one"
    scene.zk.kazoo_client.sync(paths.IMAGES)
    rows = {row["id"]: row for row in image_list(scene.zk, detail=True).rows}
    assert rows[new.build_id]["reason"] == f"held back until it is verified; {used}"
    before = scene.stored(oldest) if oldest is not None else None
    (switch,) = unverified(scene.zk.readImages(cached=False))
    assert upload_path(switch.replaced) == upload_path(new)
    assert scene.rollbacks.verified(new, None) and scene.launched() == new.build_id
    assert oldest is None or scene.stored(oldest) == before


@pytest.mark.spec("BLD-25.8")
def test_first_upload_that_is_verified_after_the_next_has_arrived_is_used(scene: Scene) -> None:
    """The builder has stored the second one when the launcher was about to write the result."""
    first = finish(scene, None, 40)
    scene.rollbacks.hold_back(first)
    second = finish(scene, first, 20)
    data = scene.zk.readImages(cached=False)
    scene.rollbacks.hold_back(second)
    with mock.patch.object(scene.zk, "readImages", return_value=data):
        assert scene.rollbacks.verified(first, None)
    assert scene.launched() == first.build_id
    (switch,) = unverified(scene.zk.readImages(cached=False))
    assert (switch.replaced.build_id, switch.used.build_id) == (second.build_id, first.build_id)
    before = scene.stored(first)
    assert scene.rollbacks.verified(second, None) and scene.launched() == second.build_id
    assert scene.stored(first) == before


@pytest.mark.spec("BLD-25.4")
def test_bad_upload_is_not_used_again_and_the_next_one_is_verified(scene: Scene) -> None:
    (old,) = scene.build(50, "east")
    bad = finish(scene, old, 40)
    scene.rollbacks.hold_back(bad)
    assert scene.rollbacks.verified(bad, "no network") and scene.used("east") == old.build_id
    mark = scene.stored(bad)["rolled_back"]
    assert (mark["automatic"], mark["unverified"], mark["reason"]) == (True, False, "no network")
    good = finish(scene, old, 20)
    scene.rollbacks.hold_back(good)
    assert scene.rollbacks.verified(good, None) and scene.used("east") == good.build_id
    # From the good one, launchers return to the old one, not to the bad one.
    scene.back()
    assert scene.used("east") == old.build_id


@pytest.mark.spec("BLD-25.6")
def test_upload_that_an_operator_has_chosen_keeps_its_note(scene: Scene) -> None:
    (old,) = scene.build(50, "east")
    new = finish(scene, old)
    scene.rollbacks.hold_back(new)
    scene.forward()
    for verdict in (None, "no network"):
        assert not scene.rollbacks.verified(new, verdict) and scene.used("east") == new.build_id


@pytest.mark.spec("BLD-25.1")
def test_upload_is_held_back_although_others_change_the_one_in_use(
    scene: Scene, other: OtherClient
) -> None:
    (old,) = scene.build(50, "east")
    new, path = finish(scene, old), upload_path(old)
    late = other.before(sets("/images/"), lambda _path: other.write(path, username="other"))
    scene.rollbacks.hold_back(new)
    assert late.refused() == path
    assert scene.used("east") == old.build_id and scene.stored(old)["username"] == "other"


@pytest.mark.spec("BLD-25.1")
def test_upload_whose_lock_was_lost_is_not_stored(scene: Scene) -> None:
    (old,) = scene.build(50, "east")
    new = finish(scene, old)
    lost, held = (
        locks.acquire(scene.zk.kazoo_client, directory, None) for directory in ("/lost", "/held")
    )
    locks.release(scene.zk.kazoo_client, lost)
    with pytest.raises(ContenderGone, match=lost.path):
        scene.rollbacks.hold_back(new, lost.path)
    assert scene.stored(new)["state"] == UPLOADING and scene.used("east") == old.build_id
    scene.rollbacks.hold_back(new, held.path)
    assert scene.stored(new)["state"] == READY


@pytest.mark.spec("BLD-25.2")
def test_request_of_a_verification_names_an_upload_of_its_image_and_provider(scene: Scene) -> None:
    east, west = scene.build(50, "east", "west")
    data, request = scene.zk.readImages(cached=False), NodeRequest()
    for wanted in (None, {}, {UPLOAD: None}, {UPLOAD: 1}, {UPLOAD: upload_path(west)}):
        request.requestor_data = wanted
        assert upload_of(data, request, IMAGE, "east") is None
    request.requestor_data = {UPLOAD: upload_path(east)}
    assert upload_of(data, request, IMAGE, "east") == east
    assert upload_of(data, request, "other", "east") is None


@pytest.mark.spec("BLD-25.6; BLD-22.2")
@pytest.mark.parametrize("verdict", [None, "no network"])
def test_operator_returns_from_the_upload_in_use_while_another_is_held_back(
    scene: Scene, verdict: str | None
) -> None:
    (older,), (old,) = scene.build(90, "east"), scene.build(50, "east")
    new = finish(scene, old)
    scene.rollbacks.hold_back(new)
    if verdict is not None:
        scene.rollbacks.verified(new, verdict)
    earlier = earlier_upload(scene.zk.readImages(cached=False), old)
    assert earlier is not None and earlier.build_id == older.build_id
    assert scene.back().changed and scene.used("east") == older.build_id
    assert not scene.rollbacks.verified(new, None) and scene.used("east") == older.build_id
    assert scene.forward().changed and scene.used("east") == old.build_id
    assert scene.forward().changed and scene.used("east") == new.build_id
