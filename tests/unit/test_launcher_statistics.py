"""Long queues are warned about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodepool.launcher.statistics import QUEUE_WARNING, WARNING_INTERVAL, StatsWorker


@pytest.mark.spec("launcher.md 21 test_zk tree_cache_qsize_warning: threshold 1024, once per 60 s per queue")
def test_long_queues_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    worker = StatsWorker(cast(Any, SimpleNamespace(statsd=None)))

    def warnings(queues: dict[str, int], now: float) -> list[str]:
        caplog.clear()
        worker.warn_about_queues(queues, now)
        return [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]  # type: ignore[misc]

    long = QUEUE_WARNING + 1
    assert warnings({"a": QUEUE_WARNING, "b": 0}, 0.0) == []
    assert warnings({"a": long, "b": 0}, 1.0) == ["a"]
    assert warnings({"a": long, "b": long}, 2.0) == ["b"]
    assert warnings({"a": long, "b": long}, 1.0 + WARNING_INTERVAL) == ["a"]
