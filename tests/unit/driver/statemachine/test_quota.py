"""What a label needs, in the pool that offers it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.driver.utils import QuotaInformation


class Adapter:
    """Asks how large the label is in its pool."""

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        if label.ram is None:
            raise exceptions.RuntimeConfigurationException("no such flavor")
        return QuotaInformation(ram=label.ram)


def pool(name: str, ram: int | None) -> Any:
    return SimpleNamespace(name=name, labels={"big": SimpleNamespace(name="big", ram=ram)})


def make() -> StateMachineProvider:
    adapter: Any = Adapter()
    provider: Any = SimpleNamespace(name="cloud")
    return StateMachineProvider(adapter, provider)


@pytest.mark.spec("issue 11, B6: what a label needs is remembered by pool")
def test_one_label_in_two_pools() -> None:
    provider = make()
    for _ in range(2):
        assert provider.quotaNeededByLabel("big", pool("a", 8192)).get_resources()["ram"] == 8192
        assert provider.quotaNeededByLabel("big", pool("b", 32768)).get_resources()["ram"] == 32768


@pytest.mark.spec("issue 11, B6: what a label needs is remembered by pool")
def test_what_cannot_work_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = make()
    assert not any(provider.quotaNeededByLabel("big", pool("a", None)).get_resources().values())
    assert "big" in provider.errorLabels()
    assert provider.quotaNeededByLabel("big", pool("b", 1024)).get_resources()["ram"] == 1024
    monkeypatch.setattr(provider, "ERROR_LABEL_RETRY", -1.0)
    assert "big" not in provider.errorLabels()
    assert provider.quotaNeededByLabel("big", pool("a", 2048)).get_resources()["ram"] == 2048
