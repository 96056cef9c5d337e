"""Order, groups and columns of the tables of the API."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.web.tables import TABLES, TYPES, grouped, ordered, values_of


def ids(rows: list[dict[str, Any]]) -> str:
    return "".join(row["id"] for row in rows)


ROWS: list[dict[str, Any]] = [
    {"id": "a", "place": None, "since": 5.0, "labels": ["x", "y"]},
    {"id": "b", "place": 2, "since": 7.0, "labels": ["x"]},
    {"id": "c", "place": 1, "since": None, "labels": []},
    {"id": "d", "place": None, "since": 9.0, "labels": ["x"]},
    {"id": "e", "place": 2, "since": 8.0, "labels": ["y"]},
]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), "abcde"),
        (("place", "-since"), "cebda"),
        (("-place",), "becad"),
        (("since",), "abedc"),
        (("-since",), "debac"),
    ],
)
def test_rows_are_ordered_with_empty_values_last(keys: tuple[str, ...], expected: str) -> None:
    assert ids(ordered(ROWS, keys)) == expected


def test_numbers_come_before_texts() -> None:
    assert [
        row["v"] for row in ordered([{"v": "x"}, {"v": 3}, {"v": True}, {"v": "1"}], ["v"])
    ] == [True, 3, "1", "x"]


def test_groups_are_the_largest_first_and_keep_the_order_of_their_rows() -> None:
    found, counts = grouped(ROWS, "labels")
    assert counts == [("x", 2), ("", 1), ("x, y", 1), ("y", 1)]
    assert ids(found) == "bdcae"


def test_choices_contain_the_values_of_lists() -> None:
    assert values_of(ROWS, "labels") == ["x", "y"]
    assert values_of(ROWS, "place") == ["1", "2"]


@pytest.mark.parametrize("name", TABLES)
def test_columns_have_the_type_of_their_numbers(name: str) -> None:
    table = TABLES[name]
    assert {each["key"]: each["type"] for each in table.shown()} == {
        key: TYPES.get(key) for key in table.columns
    }
    keys = [each["key"] for each in (*table.shown(), *table.more())]
    assert len(keys) == len(set(keys)) and set(keys) == set(table.keys)
    assert {*table.choices, *(key.lstrip("-") for key in table.order)} <= set(keys)


def test_other_columns_have_their_key_as_title() -> None:
    assert [each["title"] for each in TABLES["tenants"].more()] == ["Used", "Limit"]
    assert {"key": "hold_job", "title": "Hold job", "type": None} in TABLES["nodes"].more()


def test_causes_that_end_only_with_help_come_first_and_then_the_largest() -> None:
    rows = [
        {"key": key, "problem": problem, "count": count}
        for key, problem, count in (("a", False, 1), ("b", False, 5), ("c", True, 2))
    ]
    assert [row["key"] for row in ordered(rows, TABLES["waiting"].order)] == ["c", "b", "a"]
