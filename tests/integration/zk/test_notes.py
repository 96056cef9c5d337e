"""Notes: small shared records of operators and launchers."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.zk import paths
from nodepool.zk.drains import Drain
from nodepool.zk.mirror import notes
from nodepool.zk.records import RecordError
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for


def test_changes_of_others_are_followed(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    heard = []
    zk.note_tree.listeners.append(lambda: heard.append(zk.note_tree.of(Drain)))
    drain = Drain("pool", "a/b-main", 1000.0, reason="new disks", by="ann@admin")
    notes.write(other.kazoo_client, drain)
    wait_for(lambda: zk.note_tree.of(Drain) == [drain])
    later = Drain("pool", "a/b-main", 1000.0, until=5000.0, keep_idle=True)
    notes.write(other.kazoo_client, later)
    wait_for(lambda: zk.note_tree.of(Drain) == [later])
    assert other.readNotes(Drain) == [later]
    assert notes.remove(other.kazoo_client, later)
    assert not notes.remove(other.kazoo_client, later)
    wait_for(lambda: zk.note_tree.of(Drain) == [])
    assert heard == [[drain], [later], []]


def test_unusable_note_affects_no_other(zk: Any) -> None:
    drain = Drain("label", "small", 1.0)
    zk.kazoo_client.create(f"{paths.NOTES}/drain:label%20bad", b'{"since": "yesterday"}')
    zk.kazoo_client.create(f"{paths.NOTES}/drain:label blank", b'{"since": 1}')
    zk.kazoo_client.create(f"{paths.NOTES}/of-a-newer-release:x", b"?")
    notes.write(zk.kazoo_client, drain)
    wait_for(lambda: zk.note_tree.of(Drain) == [drain])
    assert zk.note_tree.bad == {
        f"{paths.NOTES}/drain:label%20bad": "'yesterday' is not a time in seconds",
        f"{paths.NOTES}/drain:label blank": "the znode of this note must be called "
        "drain:label%20blank",
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", {"since": 1}),
        ("planet earth", {"since": 1}),
        ("label a", {}),
        ("label a", {"since": 1, "until": float("nan")}),
        ("label a", {"since": 1, "until": -1}),
    ],
)
def test_invalid_drain_is_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        Drain.parse(name, values)
