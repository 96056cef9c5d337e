"""Fixtures of the fault tests."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.conftest import zookeeper_server
from tests.support.faults.launcher import Bench


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    """A bench on the ZooKeeper that all tests share."""
    made = Bench(zookeeper_server(), tmp_path)
    try:
        yield made
    finally:
        made.close()
