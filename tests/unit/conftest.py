"""Fixtures that several modules use."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool import config as npconfig
from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.nodemanager.records.database import Database
from tests import FIXTURES
from tests.support.openstack.fake import adapter_over

CONFIGURATIONS = FIXTURES / "config"


@pytest.fixture
def database(tmp_path: pathlib.Path) -> Iterator[Database]:
    found = Database(str(tmp_path / "db"))
    found.open()
    yield found
    found.close()


@pytest.fixture
def fake_provider(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configuration of a provider of the fake driver."""
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(CONFIGURATIONS / "clouds.yaml"))
    return npconfig.loadConfig(
        str(CONFIGURATIONS / "complete.yaml"), {"NODEPOOL_PORT": "1"}
    ).providers["cloud-1"]


@pytest.fixture
def over(fake_provider: Any) -> Iterator[Callable[[FakeOpenStackCloud], FakeAdapter]]:
    """``over(cloud)`` gives an adapter for this cloud."""
    made: list[FakeAdapter] = []

    def make(cloud: FakeOpenStackCloud) -> FakeAdapter:
        made.append(adapter_over(cloud, fake_provider))
        return made[-1]

    yield make
    for adapter in made:
        adapter.stop()
