"""Slivers without a record, after the database was lost."""

from __future__ import annotations

import pathlib
import types
from typing import Any

from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.slivers.reconciler import SliverReconciler


def recovered(path: pathlib.Path, numbers: dict[str, int | None]) -> Database:
    """Recover slivers with these numbers, with an empty database."""
    database = Database(str(path / "db"))
    database.open()
    host: Any = types.SimpleNamespace(
        _database=database,
        _config=types.SimpleNamespace(max_slivers=9),
        _backend=types.SimpleNamespace(found=lambda: list(numbers), number=numbers.get),
        _slivers=types.SimpleNamespace(effective=dict),
    )
    SliverReconciler.recover(host)
    return database


def test_sliver_without_a_record_keeps_its_number_until_it_is_deleted(
    tmp_path: pathlib.Path,
) -> None:
    """Otherwise the first one that is deleted frees the number of another, and a new sliver fails
    with it.
    """
    database = recovered(tmp_path, {"a": 2, "b": None, "c": 1})
    assert [database.owner_of_index(number) for number in (1, 2, 3)] == ["c", "a", "b"]
    assert {key: local["index"] for key, local in database.locals().items()} == {
        "sliver_a": 2,
        "sliver_b": 3,
        "sliver_c": 1,
    }
    database.close()
