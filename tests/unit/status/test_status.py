from __future__ import annotations

import csv
import io
import json
import math
from types import SimpleNamespace

import pytest
import yaml

from nodepool import status
from nodepool.status.results import Results, format_use, output, to_json
from nodepool.zk import records
from nodepool.zk.mirror.progress import ProgressData

NOW = 1_760_000_469.0


def clock():
    return NOW


def make_node(number, **kw):
    data = {
        "state": "ready",
        "state_time": NOW - 469,
        "type": ["l1", "l2"],
        "provider": "p",
        "public_ipv6": "",
        "public_ipv4": "192.0.2.1",
        **kw,
    }
    contenders = data.pop("contenders", set())
    node = records.Node.fromDict(data, f"{number:010}")
    node.lock_contenders = contenders
    return node


def stat(ctime):
    return SimpleNamespace(ctime=ctime * 1000)


def make_build(image, build_id, state="ready", ctime=10):
    build = records.ImageBuild.fromDict(
        {"state": state, "state_time": NOW - 60, "builder": "nb", "formats": "qcow2"},
        image,
        build_id,
    )
    build.stat = stat(ctime)
    return build


class FakeZK:
    synced = True

    def __init__(self, nodes=(), node_requests=(), pools=(), **images):
        self.nodes, self.requests, self.pools = list(nodes), list(node_requests), list(pools)
        base = {
            "names": set(),
            "providers": {},
            "builds": [],
            "uploads": [],
            "paused": set(),
            "requests": {},
            "build_locks": {},
        }
        self.images = SimpleNamespace(**{**base, **images})

    def readNodes(self):
        return self.nodes

    def readRequests(self):
        return self.requests

    def readImages(self):
        return self.images

    def readReports(self):
        return []

    def readProgress(self):
        return ProgressData()

    def readDeclines(self, requests):
        return {}

    def getRegisteredPools(self):
        return self.pools


@pytest.mark.spec("CLI-4: age DD:HH:MM:SS, days may grow")
def test_ages_show_days_hours_minutes_and_seconds():
    assert status.format_age(469) == "00:00:07:49"
    assert status.format_age(123 * 86400 + 3600) == "123:01:00:00"
    assert status.format_age(-5) == "00:00:00:00"


@pytest.mark.spec("CLI-4: tables as PrettyTable draws them, left-aligned")
def test_node_table_is_left_aligned():
    zk = FakeZK([make_node(2, contenders={"x"}), make_node(1, external_id="srv-1")])
    text = status.output(status.node_list(zk, detail=False, clock=clock), "pretty", clock=clock)
    assert text.splitlines() == [
        "+------------+----------+-------+-----------+-------------+------+-------+-------------+--"
        "--------+",
        "| ID         | Provider | Label | Server ID | Public IPv4 | IPv6 | State | Age         | "
        "Locked   |",
        "+------------+----------+-------+-----------+-------------+------+-------+-------------+--"
        "--------+",
        "| 0000000001 | p        | l1,l2 | srv-1     | 192.0.2.1   |      | ready | 00:00:07:49 | "
        "unlocked |",
        "| 0000000002 | p        | l1,l2 |           | 192.0.2.1   |      | ready | 00:00:07:49 | "
        "locked   |",
        "+------------+----------+-------+-----------+-------------+------+-------+-------------+--"
        "--------+",
    ]


@pytest.mark.spec("CLI-4: an empty table prints border, header, border, border")
def test_empty_table_has_a_header():
    assert (
        status.output(status.request_list(FakeZK()), "pretty").splitlines()[0::2]
        == [
            "+------------+----------+-------+-----------+------------+-------+-------------+------"
            "----+"
        ]
        * 2
    )
    assert len(status.output(status.label_list(FakeZK()), "pretty").splitlines()) == 4


@pytest.mark.spec("CLI-9: list: 9 cells per row, --detail 21; state is cell 6, id cell 0")
@pytest.mark.parametrize(("detail", "cells"), [(False, 9), (True, 21)])
def test_rows_go_through_add_row(detail, cells, monkeypatch):
    import prettytable

    rows = []
    monkeypatch.setattr(prettytable.PrettyTable, "add_row", lambda self, row: rows.append(row))
    status.output(status.node_list(FakeZK([make_node(1)]), detail=detail), "pretty")
    assert [len(row) for row in rows] == [cells]
    assert rows[0][0] == "0000000001" and rows[0][6] == "ready"


@pytest.mark.spec("CLI-6.5: /node-list keys, in order")
def test_node_json_keys():
    row = json.loads(status.output(status.node_list(FakeZK([make_node(1)])), "json"))[0]
    keys = (
        "id provider label server_id public_ipv4 ipv6 state age locked pool hostname private_ipv4 "
        "AZ username "
        "connection_port launcher allocated_to hold_job comment user_data driver_data"
    )
    assert " ".join(row) == keys
    assert row["label"] == ["l1", "l2"] and row["ipv6"] == "" and row["connection_port"] == 22
    assert row["pool"] is None and row["locked"] == "unlocked"


@pytest.mark.spec("CLI-5: Port: anything but an integer is replaced by redacted")
@pytest.mark.parametrize(
    ("port", "shown"),
    [
        (22, 22),
        ("22", "22"),
        ({"token": "secret"}, "redacted"),
        ("abc", "redacted"),
        (None, "redacted"),
        (True, "redacted"),
    ],
)
def test_ports_with_credentials_are_redacted(port, shown):
    zk = FakeZK([make_node(1, connection_port=port)])
    results = status.node_list(zk)
    assert results.rows[0]["connection_port"] == shown
    assert "secret" not in status.output(results, "pretty")


def test_node_list_shows_the_requested_node():
    zk = FakeZK([make_node(1), make_node(2)])
    assert [row["id"] for row in status.node_list(zk, node_id="0000000002").rows] == ["0000000002"]
    assert status.node_list(zk, node_id="0000000003").rows == []


def test_node_without_state_time():
    results = status.node_list(FakeZK([make_node(1, state_time=None)]))
    assert results.rows[0]["age"] is None
    status.output(results, "pretty")


def test_image_list_shows_the_age_of_the_state():
    upload = records.ImageUpload.fromDict(
        {"state": "ready", "state_time": NOW - 61.5, "external_id": "e", "external_name": "n"},
        "b" * 32,
        "p",
        "noble",
        "0000000001",
    )
    results = status.image_list(FakeZK(uploads=[upload]))
    assert json.loads(status.output(results, "json")) == [
        {
            "id": "b" * 32,
            "upload_id": "0000000001",
            "provider": "p",
            "image": "noble",
            "external_name": "n",
            "external_id": "e",
            "state": "ready",
            "age": int(NOW - 61.5),
        }
    ]
    text = status.output(results, "pretty", clock=clock)
    assert "| Build ID" in text and "| 00:00:01:02 |" in text
    text = status.output(results, "pretty", fields=["state", "id", "nonsense", "image"])
    assert f"| {'b' * 32} | noble | ready |" in text


@pytest.mark.spec("CLI-5: dib-image-list shows paused for every build of a paused image")
def test_dib_image_list():
    zk = FakeZK(
        builds=[make_build("noble", "b2"), make_build("noble", "b1"), make_build("jammy", "b3")],
        paused={"noble"},
    )
    rows = status.dib_image_list(zk).rows
    assert [(r["id"], r["state"]) for r in rows] == [
        ("jammy-b3", "ready"),
        ("noble-b1", "paused"),
        ("noble-b2", "paused"),
    ]
    assert list(rows[0]) == ["id", "image", "builder", "formats", "state", "age"]
    assert rows[0]["formats"] == ["qcow2"] and isinstance(rows[0]["age"], int)


@pytest.mark.spec("CLI-5: image-status pending and building")
@pytest.mark.parametrize(
    ("builds", "lock", "expected"),
    [
        ([], None, "pending"),
        ([make_build("noble", "b1")], (5, False), "pending"),
        ([make_build("noble", "b1", ctime=3)], (5, True), "pending"),
        (
            [make_build("noble", "b1", "building", ctime=7), make_build("noble", "b2", ctime=9)],
            (5, True),
            "building",
        ),
        (
            [make_build("noble", "b1", ctime=3), make_build("noble", "b2", ctime=9)],
            (5, True),
            "building",
        ),
        ([make_build("other", "b1", ctime=9)], (5, True), "pending"),
    ],
)
def test_build_request_state(builds, lock, expected):
    zk = FakeZK(
        builds=builds, requests={"noble": 1760000000.7}, build_locks={"noble": lock} if lock else {}
    )
    rows = [row for row in status.image_status(zk).rows if row["image"] == "noble"]
    assert rows == [
        {
            "image": "noble",
            "paused": False,
            "build_request": expected,
            "build_request_age": 1760000000,
        }
    ]


def test_image_status_of_all_known_images():
    zk = FakeZK(builds=[make_build("b", "1")], paused={"a"}, requests={"c": 1.0}, names={"d"})
    results = status.image_status(zk)
    assert [(r["image"], r["paused"], r["build_request"]) for r in results.rows] == [
        ("a", True, None),
        ("b", False, None),
        ("c", False, "pending"),
        ("d", False, None),
    ]
    assert "| a     | True   |               |                   |" in status.output(
        results, "pretty"
    )


def test_info_lists_images_and_nodes_of_the_provider():
    def upload(build, number, provider="p"):
        return records.ImageUpload.fromDict({"state": "ready"}, build, provider, "noble", number)

    zk = FakeZK(
        [make_node(2, external_id="s"), make_node(1, provider="q")],
        providers={("noble", "b2"): {"p"}, ("noble", "b1"): {"p", "q"}, ("jammy", "b3"): {"q"}},
        uploads=[
            upload("b1", "0000000002"),
            upload("b1", "0000000001"),
            upload("b1", "0000000001", "q"),
        ],
    )
    results = status.provider_images(zk, "p")
    assert [list(row.values()) for row in results.rows] == [
        ["noble", "b1", ["0000000001", "0000000002"]],
        ["noble", "b2", []],
    ]
    assert "| noble      | b1       | 0000000001,0000000002 |" in status.output(results, "pretty")
    assert status.provider_nodes(zk, "p").rows == [{"id": "0000000002", "server_id": "s"}]
    assert (
        status.provider_images(zk, "nobody").rows == status.provider_nodes(zk, "nobody").rows == []
    )


def test_request_list_shows_labels_and_requestor():
    request = records.NodeRequest.fromDict(
        {
            "state": "requested",
            "state_time": 1.0,
            "node_types": ["a", "b"],
            "requestor": "r",
            "event_id": "e",
        },
        "200-0000000001",
    )
    results = status.request_list(FakeZK(node_requests=[request]))
    assert results.rows == [
        {
            "id": "200-0000000001",
            "relative_priority": 0,
            "state": "requested",
            "requestor": "r",
            "node_types": ["a", "b"],
            "nodes": [],
            "declined_by": [],
            "event_id": "e",
            "reasons": [],
        }
    ]
    assert "| a,b        |" in status.output(results, "pretty")


@pytest.mark.spec('CLI-9: /label-list equals [{"label": "fake-label"}] for one label')
def test_label_list_contains_each_label_once():
    pools = [
        SimpleNamespace(supported_labels=["b", "a"]),
        SimpleNamespace(supported_labels=["b"]),
        SimpleNamespace(supported_labels=None),
    ]
    assert status.label_list(FakeZK(pools=pools)).rows == [{"label": "a"}, {"label": "b"}]


def test_yaml_and_csv():
    zk = FakeZK([make_node(1, comment='a "b", c')])
    results = status.node_list(zk, detail=False, clock=clock)
    rows = yaml.safe_load(status.output(results, "yaml"))
    assert list(rows[0]) == list(status.NODE_COLUMNS) and rows[0]["label"] == ["l1", "l2"]
    lines = list(csv.reader(io.StringIO(status.output(status.node_list(zk, clock=clock), "csv"))))
    assert lines[0] == list(status.NODE_DETAIL_COLUMNS)
    assert lines[1][2] == "l1,l2" and 'a "b", c' in lines[1] and lines[1][7] == "00:00:07:49"


@pytest.mark.parametrize(
    "text", ["0000000007", "0000000008", "12e34567", "1.5", "-8", ".8e1", "0o17", "08"]
)
def test_texts_in_the_form_of_numbers_are_quoted_in_yaml(text: str) -> None:
    """Readers of YAML 1.2 take more texts for numbers than PyYAML does."""
    shown = status.output(
        status.Results([{"id": text, "count": 8}], {"id": "", "count": ""}), "yaml"
    )
    assert shown == f"- id: '{text}'\n  count: 8"


def test_csv_has_neither_formulas_nor_control_characters():
    zk = FakeZK([make_node(1, comment="=cmd|x"), make_node(2, comment="\x1b[2Jx\u202ey")])
    text = status.output(status.node_list(zk, clock=clock), "csv")
    assert "'=cmd|x" in text and "\\x1b[2Jx\\u202ey" in text


def test_cells_of_tables_have_a_limit():
    zk = FakeZK([make_node(1, comment="x" * 200_000), make_node(2)])
    assert (
        max(map(len, status.output(status.node_list(zk, clock=clock), "table").splitlines())) < 2000
    )


def test_unknown_output_format_is_an_error():
    with pytest.raises(ValueError, match="unknown output format 'xml'"):
        status.output(status.label_list(FakeZK()), "xml")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cores 1/4, instances 2/20", "cores 1 of 4, instances 2 of 20"),
        ("ram 163840/1e+06", "RAM 160 of 977 GiB"),
        ("ram 512/4096", "RAM 0.5 of 4 GiB"),
        ("disk 70.9233/200", "disk 70.9 of 200 GiB"),
        ("volume-gb 0/2048", "volume size 0 of 2 TiB"),
        ("cores 1.9/1234567", "cores 1.9 of 1,234,567"),
        ("none reported", "none reported"),
    ],
)
def test_limits_have_names_and_units(text: str, shown: str) -> None:
    assert format_use(text) == shown
    assert text in output(Results([{"limits": text}], {"limits": "L"}), "csv").replace('"', "")
    assert shown in output(Results([{"limits": text}], {"limits": "L"}), "table")


def test_infinite_numbers_are_null_in_json_at_every_depth():
    value = {"a": (1, math.inf), "b": [-math.inf], "c": math.nan, "d": {1}, "e": 1e305}
    assert json.loads(to_json(value)) == {
        "a": [1, None],
        "b": [None],
        "c": None,
        "d": "{1}",
        "e": 1e305,
    }
    for _ in range(480):  # as deep as the records of others may be
        value = {"a": value}
    assert "null" in to_json(value)
