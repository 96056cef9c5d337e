"""Reports of launchers: what comes from ZooKeeper is checked where it enters."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.zk import reports
from nodepool.zk.records import RecordError

GOOD: dict[str, Any] = {
    "hostname": "nl01", "details": [],
    "config": {"file": "f", "secure": None, "error": None, "stale_since": 5.0, "warnings": ["w"]},
    "providers": {"p": {}}, "not_running": {}, "labels": {}, "lately": {},
    "tenants": {},
    "waiting": [{"labels": ["a"], "state": "requested", "since": 5.0, "count": 1, "ids": ["1-2"],
                 "reasons": [{"code": "busy", "pool": "", "text": "busy", "help": "", "root": "busy", "request": "",
                              "blocker": "", "headline": ""}]}],
}  # fmt: skip


def test_report_survives_serialization() -> None:
    assert reports.parse(reports.serialize(GOOD)) == GOOD


@pytest.mark.parametrize("data", [b"", b"{}", zlib.compress(b""), zlib.compress(b"[]"), zlib.compress(b"{"), None])
def test_damaged_report_is_refused(data: bytes | None) -> None:
    with pytest.raises(RecordError):
        reports.parse(data)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_key_of_another_kind(key: str) -> None:
    for value in (None, 5):
        with pytest.raises(RecordError, match=key):
            reports.parse(zlib.compress(json.dumps({**GOOD, key: value}).encode()))


@pytest.mark.parametrize("given", [{"stale_since": "x"}, {"error": 5}, {"file": ["x"]}, {"stale_since": 1e300}])
def test_strange_files_of_a_configuration(given: dict[str, Any]) -> None:
    """Pages show what can be shown."""
    found = reports.parse(zlib.compress(json.dumps({**GOOD, "config": given}).encode()))["config"]
    assert found == {"file": None, "secure": None, "error": None, "stale_since": None, "warnings": []}


CONFIG: dict[str, Any] = {
    "hostname": "nl01", "labels": {}, "diskimages": {}, "providers": {"p": {"driver": "aws"}}, "tenant-resource-limits": {},
}  # fmt: skip


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


WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["labels", "since", "ids", "reasons", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.lists(WILD, max_size=4), st.dictionaries(st.text(max_size=3), WILD, max_size=3))
def test_arbitrary_content_is_refused_or_has_a_usable_shape(waiting: list[Any], named: dict[str, Any]) -> None:
    """It is refused, or has the shape that readers rely on."""
    try:
        found = reports.parse(zlib.compress(json.dumps({**GOOD, "waiting": waiting, "labels": named, "lately": named}).encode()))
    except RecordError:
        return
    for group in found["waiting"]:
        assert all(isinstance(one, str) for one in [*group["labels"], *group["ids"]])
        assert isinstance(group["since"], (int, float)) and isinstance(group["count"], int)
        assert all(set(reason) == set(reports.REASON) for reason in group["reasons"])
    assert all(isinstance(entry, dict) for entry in [*found["labels"].values(), *found["lately"].values()])
