"""The rule that recognizes resources of a history that ZooKeeper has lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.cluster import MOST_POINTS, Cluster, View
from nodepool.zk.records import Node, RecordError

#: Ids up to 24 were given; at time 5000 no id from 20 on had been given.
VIEW = View(Cluster("here", points=((10, 2000), (20, 5000)), skipped=((15, 17),)), counter=25)


def node(created: int, created_time: float | None = None) -> Node:
    found = Node("0000000020")
    found.stat = ZnodeStat(1, 2, created, created, 3, 0, 0, 0, 0, 0, 1)
    found.created_time = created_time
    return found


def metadata(
    number: int | str | None, created: object = None, cluster: str | None = "here"
) -> dict[str, Any]:
    found = {
        "nodepool_provider_name": "p",
        "nodepool_cluster_id": cluster,
        "nodepool_node_created": created,
    }
    if number is not None:
        found["nodepool_node_id"] = f"{number:010}" if isinstance(number, int) else number
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("marks", "record"),
    [
        (metadata(19, "4000"), None),  # below the counter of the time
        (metadata(20, "5000"), None),  # created when the point was recorded, or later
        (metadata(24, "9000"), None),
        (metadata(20, "4000"), node(4000)),  # its record accounts for it
        (metadata(30, "4000"), node(4000)),
        (metadata(20, "4000"), node(9000, 4.0)),  # a record that was re-created for it
        (metadata(24, cluster=None), None),  # of 11.0.0, or a driver without space for marks
        (metadata(30, cluster=None), node(4000)),
        (metadata(19, "4000", "there"), node(9000, 4.0)),
        (metadata(14, cluster=None), None),
        (metadata(18, cluster=None), None),
        (metadata(15, "9000"), None),  # given after the ids were skipped
        (metadata("no-number", "4000"), None),
        (metadata("²", "4000"), None),
        (metadata(None), None),  # an upload
        (metadata(None, cluster=None), None),
    ],
)
def test_a_resource_of_this_history_is_not_foreign(
    marks: dict[str, Any], record: Node | None
) -> None:
    assert VIEW.foreign(marks, record) is None


@pytest.mark.parametrize(
    ("marks", "record", "reason"),
    [
        (metadata(19, "4000", "there"), None, "cluster there"),
        (metadata(19, "9000", "there"), node(4000), "cluster there"),
        (metadata(19, None, "there"), node(4000), "cluster there"),
        (metadata(None, cluster="there"), None, "cluster there"),
        (metadata(20, "4999"), None, "undid"),
        (metadata(24, "4999"), None, "undid"),
        (metadata(12, "1999"), None, "undid"),
        (metadata(20, "4000"), node(9000), "another node"),
        (metadata(20, "9000"), node(9001, 9.002), "another node"),
        (metadata(25, "9000"), None, "not been given"),
        (metadata(25, cluster=None), None, "not been given"),
        (metadata(15, cluster=None), None, "skipped"),
        (metadata(17, cluster=None), None, "skipped"),
    ],
)
def test_a_resource_of_a_lost_history_is_foreign(
    marks: dict[str, Any], record: Node | None, reason: str
) -> None:
    assert reason in str(VIEW.foreign(marks, record))


def test_no_machine_of_an_undamaged_history_is_foreign() -> None:
    """Whenever points are recorded, and however the clock of the server stands still between two
    records.
    """
    for step in (0, 1, 3):
        cluster, nodes = Cluster("here"), []
        for number in range(40):
            if number % 7 == 0:
                cluster = cluster.with_point(number, number * step)
            nodes.append(metadata(number, str(number * step)))
        assert not [marks for marks in nodes if View(cluster, 40).foreign(marks, None)]


def test_a_point_replaces_those_that_it_implies() -> None:
    cluster = Cluster("here").with_point(10, 1000).with_point(20, 2000)
    assert cluster.with_point(20, 3000).points == ((10, 1000), (20, 3000))
    assert cluster.with_point(5, 3000).points == ((5, 3000),)
    for number in range(200):
        cluster = cluster.with_point(100 + number, 5000 + number)
    assert len(cluster.points) == MOST_POINTS and cluster.points[-1] == (299, 5199)


def test_the_record_survives_writing_and_reading() -> None:
    assert Cluster.parse(VIEW.cluster.serialize()) == VIEW.cluster
    assert Cluster.parse(b"") is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"id": 5},
        {"id": ""},
        {"id": "here", "points": 5},
        {"id": "here", "points": [[1]]},
        {"id": "here", "points": [[1, "2"]]},
        {"id": "here", "skipped": [[True, 2]]},
    ],
)
def test_a_damaged_record_is_reported_with_its_path(content: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="/nodepool/cluster"):
        Cluster.parse(json.dumps(content).encode())
