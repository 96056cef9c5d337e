"""Limits of tenants: what is promised to one request is not promised to another."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.launcher.requests import tenants
from nodepool.reasons import Reason
from nodepool.zk.mirror.reservations import Reservations, Sums


def test_two_pools_do_not_spend_the_same_rest() -> None:
    """While one has looked and not booked yet, another asks."""
    reservations, seen = Reservations(), threading.Event()
    answers: list[Reason | None] = []

    def ask(key: str) -> None:
        request: Any = SimpleNamespace(node_types=["label"], tenant_name="t")
        answers.append(
            tenants.tenant_shortage(
                state, request, {"instances": 1}, SimpleNamespace(), manager, key
            )
        )  # type: ignore[arg-type]

    other = threading.Thread(target=ask, args=("other",), name="other pool")

    def looked(tenant: str) -> dict[str, float]:
        promised = reservations.tenant(tenant)
        if not seen.is_set():
            seen.set()
            other.start()
            other.join(0.2)  # it comes to an end here only if nothing keeps it
        return promised

    tree = SimpleNamespace(lock=threading.RLock(), measured=Sums(), unmeasured=Sums())
    kept = SimpleNamespace(tenant=looked, reserve=reservations.reserve)
    state: Any = SimpleNamespace(zk=SimpleNamespace(node_tree=tree, reservations=kept), config=None)
    manager = SimpleNamespace(quotaNeededByLabels=lambda *_: QuotaInformation(instances=1))
    ask("first")
    other.join(10)
    assert [answer is None for answer in answers] == [True, False]
