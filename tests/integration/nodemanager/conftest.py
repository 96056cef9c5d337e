"""Fixtures of the tests that change the host."""

from __future__ import annotations

import fcntl
import pathlib
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def host_network() -> Iterator[None]:
    """Alone with what there is once per host: whether it routes, and the rules that hold for the
    slivers of all daemons.
    """
    with pathlib.Path(tempfile.gettempdir(), "nodepool-tests-host-network").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
