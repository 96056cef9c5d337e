"""Publishing the configuration in force: once, again after a failure, and not for ever when it is too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.base.clock import SYSTEM
from nodepool.config.model import Config
from nodepool.launcher.report import Reporter
from nodepool.launcher.trends import Trends
from nodepool.zk import reports


def test_publish_config(monkeypatch: pytest.MonkeyPatch) -> None:
    kazoo = SimpleNamespace(client_id=(1, b""))
    state: Any = SimpleNamespace(config=Config(), zk=SimpleNamespace(kazoo_client=kazoo), clock=SYSTEM, identifier="nl01-1")
    reporter = Reporter(state, Trends(), list, lambda: (True, []), dict)
    written: list[str] = []
    fails: list[Exception] = [ConnectionLoss()]

    def write(_kazoo: Any, where: str, _content: Any) -> None:
        if fails:
            raise fails.pop()
        written.append(where)

    monkeypatch.setattr(reports, "write", write)
    with pytest.raises(ConnectionLoss):
        reporter.publish_config()
    for _ in range(2):
        reporter.publish_config()
    assert written == ["/nodepool/launcher-configs/nl01-1"], "what could not be written is written later, and once"
    kazoo.client_id = (2, b"")
    reporter.publish_config()
    assert len(written) == 2, "another session"
    state.config = Config()
    fails.append(ValueError("too large"))
    with pytest.raises(ValueError, match="too large"):
        reporter.publish_config()
    reporter.publish_config()
    assert len(written) == 2, "it is not made again each second"
