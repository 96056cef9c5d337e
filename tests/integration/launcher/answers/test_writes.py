"""A request that cannot proceed is written at most once per cause, however often it is
reconsidered.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk
from tests.integration.launcher.answers.test_failing_clouds import (
    going_on,
    through_calls,
    unavailable,
)
from tests.support.launcher import config, provider

__all__ = ["going_on"]
ROUNDS = 5


def start(desk: Desk, pool: dict[str, int] | None = None, **options: Any) -> None:
    """Start a launcher with a second provider, whose requests are served all the time."""
    desk.start(
        config(provider(pool=pool or {}), provider("fake-other", labels=["other"]), **options)
    )


def reconsider(desk: Desk) -> None:
    """Let the launcher consider everything several times; a request that it serves afterwards
    shows that it has.
    """
    (pool,) = desk.bench.pools
    for _ in range(ROUNDS):
        pool.assignment.wake(recheck=True)
        for worker in pool.getPoolWorkers("fake-provider"):
            worker.capacity_changed()
        request, _nodes = desk.bench.fulfilled("other")
        desk.bench.zuul.cancel(request)


def check(desk: Desk, request: str, state: str, writes: int, *codes: str) -> None:
    def waits() -> bool:
        groups = [
            group
            for report in desk.bench.zk.readReports()
            for group in report["waiting"]
            if request in group["ids"]
        ]
        return [reason["root"] for group in groups for reason in group["reasons"]] == list(codes)

    wait_for(waits, what=f"{codes} as the reasons of request {request}")
    reconsider(desk)
    wait_for(waits, what=f"{codes} as the reasons of request {request} afterwards")
    record, stat = desk.bench.zuul.client.get(f"/nodepool/requests/{request}")
    assert (stat.version, f'"state": "{state}"' in record.decode()) == (writes, True)
    assert not desk.bench.zuul.request(request).get("declined_by")


def test_request_that_waits_for_limits_is_not_written(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.bench.quota(instances=1)
    start(desk)
    desk.bench.fulfilled("fake-label")
    reconsider(desk)
    through_calls(desk, monkeypatch, "get_compute_limits", unavailable)
    manager = desk.bench.pools[0].getProviderManager("fake-provider")
    manager.invalidateQuotaCache()
    check(desk, desk.bench.submit("fake-label"), "requested", 0, "limits-unknown")


def test_request_whose_launch_takes_long_is_written_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, going_on: threading.Event
) -> None:
    start(desk)
    cloud = desk.bench.cloud("fake-provider")
    monkeypatch.setattr(cloud, "create_server", lambda *args, **kw: going_on.wait(60))
    check(desk, desk.bench.submit("fake-label"), "pending", 1, "launching")


def test_request_of_a_tenant_at_its_limit_is_not_written(desk: Desk) -> None:
    start(desk, **{"tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 0}]})
    check(desk, desk.bench.submit("fake-label", tenant_name="acme"), "requested", 0, "tenant-limit")


def test_request_at_a_full_pool_is_written_once(desk: Desk) -> None:
    start(desk, {"max-servers": 1})
    desk.bench.fulfilled("fake-label")
    check(desk, desk.bench.submit("fake-label"), "pending", 1, "pool-limit")
