"""Which nodes a wave deletes, without ZooKeeper."""

from __future__ import annotations

from typing import Any

import pytest
from kazoo.protocol.states import ZnodeStat

from nodepool.base.amounts import Share
from nodepool.launcher.nodes.rotation import SURPLUS, Idle, choose
from nodepool.zk.records import Node, RecordError
from nodepool.zk.rotations import Rotation, remaining


def nodes(pattern: str) -> list[Idle]:
    """Return free nodes: ``o`` outdated, ``s`` surplus if there are too many, ``b`` both, ``-``
    neither.
    """
    return [
        Idle(Node(str(number)), "old" if kind in "ob" else "", kind in "sb")
        for number, kind in enumerate(pattern)
    ]


@pytest.mark.parametrize(
    ("pattern", "keep", "unready", "extra", "outdated"),
    [
        ("oooo", 4, 1, "", "0"),
        ("oooo", 4, 2, "", "01"),
        ("oooo", 4, 9, "", "0123"),
        ("ooo-", 5, 1, "", ""),
        ("ooo-", 5, 2, "", "0"),
        ("oooo", 2, 1, "", "012"),
        ("oo--", 0, 1, "", "01"),
        ("----", 2, 1, "", ""),
        ("ssss", 2, 1, "01", ""),
        ("ss--", 2, 1, "", ""),
        ("sbsb", 2, 1, "13", ""),
        ("bbbb", 2, 1, "01", "2"),
        ("bbbb", 3, 2, "0", "12"),
        ("", 3, 1, "", ""),
    ],
)
def test_wave_leaves_what_is_kept_minus_max_unready(
    pattern: str, keep: int, unready: int, extra: str, outdated: str
) -> None:
    chosen = {each.node.id: each for each in nodes(pattern)}
    found = choose(list(chosen.values()), keep, unready)
    assert [str(node.id) for node, _why in found] == [*extra, *outdated]
    assert [why for _node, why in found[len(extra) :]] == ["old"] * len(outdated)
    assert {why for node, why in found if not chosen[node.id].outdated} <= {SURPLUS}
    left = len(pattern) - len(extra) - len(outdated)
    assert left >= min(len(pattern), keep - unready)


@pytest.mark.parametrize(
    ("given", "of_50"),
    [(1, 1), (True, 1), ("7", 7), ("20%", 10), ("1%", 1), ("100%", 50), (90, 90)],
)
def test_share_is_a_number_or_a_percentage(given: Any, of_50: int) -> None:
    assert Share.parse(given).of(50) == of_50


@pytest.mark.parametrize(
    "given", [0, -1, 1.5, False, None, "", "%", "0%", "101%", "20%%", "2 0", "9" * 5000]
)
def test_other_shares_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected a number from 1 or a share such as 20%"):
        Share.parse(given)


def node(created: int, **values: Any) -> Node:
    found = Node("0000000001")
    found.stat = ZnodeStat(created, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    found.provider, found.pool, found.type, found.state = "p", "main", ["a"], "ready"
    found.image_id = "/nodepool/images/noble/builds/b/providers/p/images/0"
    for key, value in values.items():
        setattr(found, key, value)
    return found


@pytest.mark.parametrize("target", [("label", "a"), ("image", "noble"), ("provider", "p")])
def test_rotation_replaces_nodes_that_were_created_before_it(target: tuple[str, str]) -> None:
    rotation = Rotation(*target, 0, zxid=50)
    assert rotation.replaces(node(49))
    assert not rotation.replaces(node(51))
    assert not Rotation(target[0], "other", 0, zxid=50).replaces(node(49))
    assert not Rotation(*target, 0).replaces(node(49)), "its own znode is unknown"


@pytest.mark.parametrize(
    ("values", "waits"),
    [
        ({"state": "init"}, True),
        ({"state": "building"}, True),
        ({"state": "ready", "allocated_to": "200-1"}, True),
        ({"state": "in-use"}, False),
        ({"state": "hold"}, False),
        ({"state": "deleting"}, False),
        ({"provider": "hosts"}, False),
    ],
)
def test_rotation_waits_for_nodes_that_may_become_idle(values: dict[str, Any], waits: bool) -> None:
    found = remaining(Rotation("label", "a", 0, zxid=50), [node(49, **values)], {"hosts"})
    assert bool(found) is waits


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label a", {}),
        ("label", {"since": 1}),
        ("host a", {"since": 1}),
        ("label a", {"since": "now"}),
        ("label a", {"since": float("nan")}),
    ],
)
def test_invalid_rotation_is_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        Rotation.parse(name, values)


def test_stored_values_do_not_contain_the_change_that_wrote_them() -> None:
    rotation = Rotation("label", "a b", 7.0, "new\nflavor", "ann", zxid=3)
    assert Rotation.parse(rotation.name, rotation.values()) == Rotation(
        "label", "a b", 7.0, "new flavor", "ann"
    )
