"""Fixtures that several modules use."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.database import Database


@pytest.fixture
def database(tmp_path: pathlib.Path) -> Iterator[Database]:
    found = Database(str(tmp_path / "db"))
    found.open()
    yield found
    found.close()
