"""Reports of launchers: what comes from ZooKeeper is checked where it enters."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.status import cluster
from nodepool.status.explain import explain
from nodepool.zk import reports
from nodepool.zk.history import HistoryReader
from nodepool.zk.records import RecordError
from tests.support.mirror import NAMED, Mirror

GOOD: dict[str, Any] = {
    "hostname": "nl01",
    "pid": 7,
    "started": 5.5,
    "ready": True,
    "details": [],
    "config": {"file": "f", "secure": None, "error": None, "stale_since": 5.0, "warnings": ["w"]},
    "providers": {
        "p": {
            "driver": "nodemanager",
            "max_concurrency": 5,
            "launching": 1,
            "limits": {"cores": 4},
            "used": {},
            "pools": {
                "main": {"labels": ["a"], "max_servers": None, "id": "x-PoolWorker.p-main-1"}
            },
            "hosts": [
                {
                    "name": "h",
                    "usable": False,
                    "problem": "down",
                    "limits": {"cores": 4},
                    "used": {"cores": 1},
                }
            ],
            "calls": {
                "paces": {"read": "2/s"},
                "throttled": False,
                "last_error": {"operation": "create", "kind": "quota", "message": "m", "time": 5.5},
            },
        }
    },
    "not_running": {"q": "no credentials"},
    "not_running_labels": {"q": ["a"]},
    "lately": {"a": {"launch": 1.5}},
    "labels": {"a": {"min_ready": 1, "backing": ["b"], "declined": []}},
    "images": {"i": {"paused": False, "rebuild_age": 86400, "labels": ["a"], "providers": ["p"]}},
    "tenants": {"t": {"limits": {"instances": 2}, "used": {"instances": 1}}},
    "waiting": [
        {
            "labels": ["a"],
            "state": "requested",
            "since": 5.0,
            "count": 1,
            "ids": ["1-2"],
            "reasons": [
                {
                    "code": "busy",
                    "pool": "",
                    "text": "busy",
                    "help": "",
                    "root": "busy",
                    "request": "",
                    "blocker": "",
                    "headline": "",
                }
            ],
        }
    ],
}


def test_report_survives_serialization() -> None:
    assert reports.parse(reports.serialize(GOOD)) == GOOD


@pytest.mark.parametrize(
    "data", [b"", b"{}", zlib.compress(b""), zlib.compress(b"[]"), zlib.compress(b"{"), None]
)
def test_damaged_report_is_refused(data: bytes | None) -> None:
    with pytest.raises(RecordError):
        reports.parse(data)


@pytest.mark.parametrize("key", ["hostname", "details", "config", "waiting", *NAMED])
def test_a_key_of_another_kind(key: str) -> None:
    for value in (None, 5):
        with pytest.raises(RecordError, match=key):
            reports.parse(zlib.compress(json.dumps({**GOOD, key: value}).encode()))


@pytest.mark.parametrize(
    "given", [{"stale_since": "x"}, {"error": 5}, {"file": ["x"]}, {"stale_since": 1e300}]
)
def test_strange_files_of_a_configuration(given: dict[str, Any]) -> None:
    """Pages show what can be shown."""
    found = reports.parse(zlib.compress(json.dumps({**GOOD, "config": given}).encode()))["config"]
    assert found == {
        "file": None,
        "secure": None,
        "error": None,
        "stale_since": None,
        "warnings": [],
    }


CONFIG: dict[str, Any] = {
    "hostname": "nl01",
    "labels": {},
    "diskimages": {},
    "providers": {"p": {"driver": "aws"}},
    "tenant-resource-limits": {},
}


def test_damaged_configuration_is_refused() -> None:
    assert reports.parse_config(reports.serialize(CONFIG)) == CONFIG
    for key in CONFIG:
        with pytest.raises(RecordError, match=key):
            reports.parse_config(zlib.compress(json.dumps({**CONFIG, key: 5}).encode()))
    with pytest.raises(RecordError):
        reports.parse_config(b"x")


def test_compression_bomb_is_not_unpacked() -> None:
    """What unpacks to very much is not unpacked."""
    with pytest.raises(RecordError):
        reports.parse(zlib.compress(b'{"hostname": "' + b"x" * (64 << 20)))


def test_too_large_report_is_not_serialized() -> None:
    import random

    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1 << 20))
    with pytest.raises(ValueError, match="the limit is"):
        reports.serialize({**GOOD, "details": [text]})


INNER = [
    "labels",
    "since",
    "ids",
    "reasons",
    "hosts",
    "pools",
    "calls",
    "limits",
    "used",
    "paces",
    "last_error",
    "launch",
    "time",
]
WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner),
    max_leaves=12,
)
#: Like a report, with other values at any place.
OBJECTS = st.dictionaries(
    st.text(max_size=3), st.dictionaries(st.sampled_from(INNER), WILD) | WILD, max_size=3
)


@given(
    st.fixed_dictionaries(dict.fromkeys((*NAMED, "images", "not_running_labels"), OBJECTS)),
    st.lists(WILD, max_size=4),
)
def test_arbitrary_content_has_the_shape_that_readers_rely_on(
    content: dict[str, Any], waiting: list[Any]
) -> None:
    found = reports.parse(
        zlib.compress(json.dumps({**GOOD, **content, "waiting": waiting}).encode())
    )
    usual = reports.parse(reports.serialize(GOOD))
    for key, name in (("providers", "p"), ("labels", "a"), ("images", "i"), ("tenants", "t")):
        assert all(entry.keys() == usual[key][name].keys() for entry in found[key].values())
    for group in found["waiting"]:
        assert group.keys() == usual["waiting"][0].keys()
        assert all(isinstance(one, str) for one in [*group["labels"], *group["ids"]])
        assert isinstance(group["since"], (int, float)) and isinstance(group["count"], (int, float))
        assert all(set(reason) == set(reports.REASON) for reason in group["reasons"])
    mirror = Mirror()
    mirror.reports.append({**found, "name": "nl01"})
    zk: Any = mirror
    for table in (
        cluster.providers,
        cluster.pools,
        cluster.hosts,
        cluster.tenants,
        cluster.by_cause,
    ):
        table(zk)
    assert mirror.health() is not None
    for kind, names in (
        ("provider", found["providers"]),
        ("label", found["labels"]),
        ("image", found["images"]),
    ):
        for name in names:
            assert explain(zk, kind, name, HistoryReader()).answer
