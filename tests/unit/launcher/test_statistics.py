"""Long queues are warned about."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from kazoo.exceptions import ConnectionLoss, NoAuthError, NotEmptyError

from nodepool.launcher.statistics import QUEUE_WARNING, WARNING_INTERVAL, StatsWorker


@pytest.mark.spec("LAU-21.155: threshold 1024, once per 60 s per queue")
def test_long_queues_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    worker = StatsWorker(
        cast(Any, SimpleNamespace(statsd=None)),
        cast(Any, None),
        lambda: None,
        Mock(),
        cast(Any, None),
        Mock(),
    )

    def warnings(queues: dict[str, int], now: float) -> list[str]:
        caplog.clear()
        worker.warn_about_queues(queues, now)
        return [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]  # type: ignore[misc]

    long = QUEUE_WARNING + 1
    assert warnings({"a": QUEUE_WARNING, "b": 0}, 0.0) == []
    assert warnings({"a": long, "b": 0}, 1.0) == ["a"]
    assert warnings({"a": long, "b": long}, 2.0) == ["b"]
    assert warnings({"a": long, "b": long}, 1.0 + WARNING_INTERVAL) == ["a"]


@pytest.mark.spec(
    "issue 11: the limits of one provider that cannot be told keep back no other's, and are told "
    "of once"
)
def test_limits_of_a_broken_provider(caplog: pytest.LogCaptureFixture) -> None:
    def provider(name: str, *limits: Any) -> Any:
        return SimpleNamespace(
            name=name, pools={str(i): SimpleNamespace(max_servers=n) for i, n in enumerate(limits)}
        )

    providers = {
        name: provider(name, *limits)
        for name, limits in {"a": (1, 2), "b": ("20", 1), "c": (3,)}.items()
    }
    settings = SimpleNamespace(providers=providers, tenant_resource_limits={"t": {"cores": 4}})
    nothing: Any = None
    worker = StatsWorker(
        cast(Any, SimpleNamespace(statsd=None, config=settings)),
        nothing,
        lambda: None,
        Mock(),
        nothing,
        Mock(),
    )
    for _ in range(2):
        values: dict[str, float] = {}
        worker._limits(values)
        assert values == {
            "nodepool.provider.a.max_servers": 3,
            "nodepool.provider.c.max_servers": 3,
            "nodepool.tenant_limits.t.cores": 4,
        }
    assert [record.getMessage() for record in caplog.records] == [
        "Error reporting limits of provider b:"
    ]
    providers["b"].pools["0"].max_servers = 20
    values = {}
    worker._limits(values)
    assert values["nodepool.provider.b.max_servers"] == 21


def test_a_part_that_raises_keeps_back_no_other(caplog: pytest.LogCaptureFixture) -> None:
    worker = StatsWorker(
        cast(Any, SimpleNamespace(statsd=None)),
        cast(Any, None),
        lambda: None,
        Mock(),
        cast(Any, None),
        Mock(),
    )
    for error in ("one", "one", "two"):
        worker._safely({"reporting": lambda error=error: [][len(error)]})  # type: ignore[misc]
    assert len(caplog.records) == 1
    worker._safely({"reporting": lambda: None})
    worker._safely({"reporting": lambda: [][3]})
    assert len(caplog.records) == 2


def test_refused_write_keeps_back_no_other_part(caplog: pytest.LogCaptureFixture) -> None:
    """Only a broken connection concerns all parts."""
    worker = StatsWorker(
        cast(Any, SimpleNamespace(statsd=None)),
        cast(Any, None),
        lambda: None,
        Mock(),
        cast(Any, None),
        Mock(),
    )

    def fail(error: Exception) -> None:
        raise error

    for error in (NoAuthError(), NotEmptyError()):
        worker._safely({"writing history": lambda error=error: fail(error)})  # type: ignore[misc]
    assert len(caplog.records) == 2
    with pytest.raises(ConnectionLoss):
        worker._safely({"writing history": lambda: fail(ConnectionLoss())})


def test_election_won_in_a_lost_session_ends() -> None:
    """The session is lost after the lock was taken, before the winner is called."""
    nothing: Any = None

    class Election:
        def __init__(self, *_arguments: Any) -> None:
            pass

        def run(self, won: Any) -> None:
            worker.session_lost()
            won()

    zk = SimpleNamespace(kazoo_client=SimpleNamespace(Election=Election))
    worker = StatsWorker(
        cast(Any, SimpleNamespace(statsd=None, zk=zk)),
        nothing,
        lambda: None,
        Mock(),
        nothing,
        Mock(),
    )
    worker._stand_for_election()
    thread = worker._election_thread
    assert isinstance(thread, threading.Thread)
    thread.join(10)
    try:
        assert not thread.is_alive() and not worker.elected
    finally:
        worker._step_down.set()
