"""How often pages are notified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nodepool.web.http import Request
from nodepool.web.streams import DIGEST, pace
from nodepool.web.v1 import Api


def test_few_cheap_pages_follow_within_half_a_second() -> None:
    assert pace(1, 0.001) == DIGEST <= 0.5


def test_many_pages_or_expensive_answers_are_notified_less_often() -> None:
    assert pace(200, 0.001) == 4.0
    assert pace(1, 0.1) == 1.0


def test_renewal_returns_the_seconds_that_answers_took() -> None:
    ticks = iter(range(100))
    nodepool: Any = SimpleNamespace(getZK=lambda: SimpleNamespace(synced=True))
    api = Api(nodepool, monotonic=lambda: float(next(ticks)))
    api.answer(Request(path="/api/v1"))
    assert api.renew() >= 1.0
    assert api.renew() == 0.0
