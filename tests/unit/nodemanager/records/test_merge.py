"""Adopting updates: A.6 with its fixes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.nodemanager.records import merge
from nodepool.nodemanager.records.database import ABANDONED, Database
from tests.support.nodemanager.node import delegate, sliver

NOW = 1_000_000.0


def names(database: Database) -> list[str]:
    return sorted(r.key for r in database.records() if r.key != "timestamp")


def full(
    database: Database,
    *given: Any,
    source: str = "s",
    serial: float | None = None,
    now: float = NOW,
) -> merge.Changes:
    return merge.deliver(database, source, serial, given, True, now)


def partial(
    database: Database,
    *given: Any,
    source: str = "s",
    serial: float | None = None,
    now: float = NOW,
) -> merge.Changes:
    return merge.deliver(database, source, serial, given, False, now)


@pytest.mark.spec("NM-A.6: accepted iff the timestamp is not older than the stored one")
def test_older_timestamps_are_refused(database: Database) -> None:
    assert full(database, sliver("a", timestamp=10, id=1)).changed == {"sliver_a"}
    assert "sliver_a" in full(database, sliver("a", timestamp=9, id=2)).refused
    assert database.get("sliver_a").content["id"] == 1  # type: ignore[union-attr]
    assert full(database, sliver("a", timestamp=10, id=3)).changed == {"sliver_a"}, (
        "an equal one is taken"
    )
    assert full(database, sliver("a", timestamp=11, id=3)).changed == {"sliver_a"}
    assert full(database, sliver("a", timestamp=11, id=3)).changed == set()


@pytest.mark.spec("NM-A.6: database timestamp is when the last complete update was made")
def test_timestamp_is_that_of_the_last_complete_update(database: Database) -> None:
    partial(database, sliver("a"))
    assert database.get("timestamp") is None
    full(database, {"type": "timestamp", "timestamp": 5}, sliver("a"))
    assert database.get("timestamp").content == {"type": "timestamp", "timestamp": NOW}  # type: ignore[union-attr]


@pytest.mark.spec("NM-A.6 a: an old version in a complete update is not swept")
def test_a_old_version(database: Database) -> None:
    full(database, sliver("a", timestamp=1))
    changes = full(database, sliver("a", timestamp=1))
    assert not changes.deleted
    assert not changes.refused
    assert full(database, sliver("a", timestamp=0)).deleted == set()
    assert names(database) == ["sliver_a"]


def test_a_version_appears(database: Database) -> None:
    """Without a version of the authority's, the time of taking it over is nothing to compare
    with.
    """
    full(database, sliver("a", id=1))
    assert full(database, sliver("a", id=2, timestamp=5)).changed == {"sliver_a"}
    assert full(database, sliver("a", id=3)).changed == {"sliver_a"}
    assert full(database, sliver("a", id=4, timestamp=4)).changed == {"sliver_a"}


@pytest.mark.spec("NM-A.6 b: nothing is stored on reject")
def test_b_no_empty_entry(database: Database) -> None:
    changes = full(database, {"account_type": "sliver", "name": "a/b"}, "junk", {}, sliver("ok"))
    assert names(database) == ["sliver_ok"]
    assert set(changes.refused) == {"1", "2", "3"}
    assert full(database, sliver("ok")).refused == {}


def test_broken_record_keeps_its_predecessor(database: Database) -> None:
    full(database, sliver("a", id=1), sliver("b"))
    changes = full(database, sliver("a", rspec={"nm_x": 1}, record_key="other"), sliver("b"))
    assert not changes.deleted
    assert database.get("sliver_a").content["id"] == 1  # type: ignore[union-attr]


@pytest.mark.spec("NM-A.6 d: expiry acts by itself; no expiry = never")
def test_records_expire(database: Database) -> None:
    full(database, sliver("a", expiry=NOW + 10), sliver("b", expiry=NOW + 5), sliver("c"))
    assert database.next_expiry() == NOW + 5
    assert merge.expire(database, NOW + 6).deleted == {"sliver_b"}
    assert merge.expire(database, NOW + 6).deleted == set()
    assert merge.expire(database, NOW + 1e9).deleted == {"sliver_a"}
    assert names(database) == ["sliver_c"]
    assert database.next_expiry() is None


@pytest.mark.spec("NM-A.6: expiry < now is deleted, and does not come back with every update")
def test_expired_is_not_taken(database: Database) -> None:
    full(database, sliver("a", expiry=NOW + 1))
    assert full(database, sliver("a", expiry=NOW + 1), now=NOW + 2).deleted == {"sliver_a"}
    changes = full(database, sliver("a", expiry=NOW + 1), now=NOW + 3)
    assert (changes.changed, changes.deleted) == (set(), set())
    assert full(database, sliver("a", expiry=NOW + 9), now=NOW + 3).changed == {"sliver_a"}


@pytest.mark.spec("NM-A.6 e: clock steps backwards do not freeze updates")
def test_e_clock_steps_back(database: Database) -> None:
    full(database, sliver("a", id=1), now=NOW)
    assert full(database, sliver("a", id=2), now=NOW - 1e6).changed == {"sliver_a"}
    assert full(database, now=NOW - 2e6).deleted == {"sliver_a"}


@pytest.mark.spec("NM-A.6 e: per-authority monotonic serial; an older update is refused as a whole")
def test_older_update_is_refused(database: Database) -> None:
    full(database, sliver("a"), serial=7)
    changes = full(database, sliver("b"), serial=6)
    assert (changes.changed, changes.deleted, list(changes.refused)) == (set(), set(), [""])
    assert full(database, sliver("b"), serial=7).deleted == {"sliver_a"}


@pytest.mark.spec("NM-A.6 f, B.2: removed fields disappear")
def test_f_replaced_as_a_whole(database: Database) -> None:
    full(database, sliver("a", colour="red"))
    database.update_local("sliver_a", loans=[["b", "nm_cpu_share", 1]])
    full(database, sliver("a"))
    assert "colour" not in database.get("sliver_a").content  # type: ignore[union-attr]
    assert database.local("sliver_a")["loans"], "what this host adds stays"


@pytest.mark.spec("NM-A.6 g, C.6: only a complete update of the same source sweeps")
def test_only_a_complete_update_of_the_same_source_deletes(database: Database) -> None:
    full(database, sliver("a"), sliver("b"), source="one")
    partial(database, sliver("c"), source="driver")
    full(database, delegate("d"), source="configuration")
    assert partial(database, sliver("a"), source="one").deleted == set()
    assert full(database, sliver("x"), source="two").deleted == set()
    assert full(database, sliver("a"), source="one").deleted == {"sliver_b"}
    assert names(database) == ["delegate_d", "sliver_a", "sliver_c", "sliver_x"]


@pytest.mark.spec("NM-C.6: no source takes what belongs to another")
def test_no_source_takes_records_of_another(database: Database) -> None:
    full(database, sliver("a", id=1), source="one")
    assert "one" in partial(database, sliver("a", id=2), source="ticket").refused["sliver_a"]
    assert database.get("sliver_a").source == "one"  # type: ignore[union-attr]


def test_abandoned_records_are_adopted(database: Database) -> None:
    full(database, sliver("a"), sliver("b"), source="gone")
    full(database, source="here")
    assert database.abandon({"here"}) == ["sliver_a", "sliver_b"]
    assert database.abandon({"here"}) == []
    assert full(database, sliver("a"), source="here").deleted == set()
    assert database.get("sliver_a").source == "here"  # type: ignore[union-attr]
    assert database.get("sliver_b").source == ABANDONED  # type: ignore[union-attr]


@pytest.mark.spec("NM-A.7: when the lender disappears, its loans vanish with it")
def test_loans_end_with_the_record(database: Database) -> None:
    full(database, sliver("a"))
    database.update_local("sliver_a", loans=[["b", "nm_cpu_share", 1]], index=4)
    full(database)
    full(database, sliver("a"))
    assert database.local("sliver_a") == {"index": 4}


updates = st.lists(
    st.tuples(
        st.sampled_from(["one", "two"]),
        st.booleans(),
        st.dictionaries(
            st.sampled_from(["a", "b", "c"]),
            st.tuples(st.none() | st.integers(0, 5), st.none() | st.integers(-5, 9)),
            max_size=3,
        ),
    ),
    max_size=8,
)


@pytest.mark.spec(
    "NM-A.6: what a source has is a subset of its last complete update and later partial ones"
)
@given(updates)
def test_sources_are_independent(tmp_path: pathlib.Path, given_updates: Any) -> None:
    path = tmp_path / "property"
    for file in tmp_path.glob("property*"):
        file.unlink()
    database = Database(str(path))
    database.open()
    try:
        told: dict[str, set[str]] = {"one": set(), "two": set()}
        for step, (source, complete, content) in enumerate(given_updates):
            others = {
                r.key: (r.source, r.content)
                for r in database.records()
                if r.source not in (source, "")
            }
            items = [
                sliver(
                    n,
                    **({} if v is None else {"timestamp": v}),
                    **({} if e is None else {"expiry": NOW + e}),
                )
                for n, (v, e) in content.items()
            ]
            merge.deliver(database, source, None, items, complete, NOW + step * (-1) ** step)
            told[source] = (set() if complete else told[source]) | set(content)
            after = {r.key: r for r in database.records() if r.key != "timestamp"}
            assert {r.content["name"] for r in after.values() if r.source == source} <= told[source]
            assert all(
                (after[key].source, after[key].content) == value for key, value in others.items()
            )
            for record in after.values():
                assert record.content["name"], "never an empty entry"
    finally:
        database.close()
