"""SIGKILL at each step of a node's life, then a clean start.

The cases are independent and mostly wait, so several run concurrently; each test only fetches the
outcome of its case.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import wait_for, zookeeper_server
from tests.support.faults.launcher import Bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

#: Transactions about requests and nodes from submission to the last removal, for one request with
#: two nodes.
TRANSACTIONS = 10
#: The same of the first of two launchers, with a node that is kept ready; this many are surely not
#: done by the other one.
TWO_TRANSACTIONS, SURE = 12, 3
#: How often a case is repeated in which the other launcher did everything.
AGAIN = 3
AT_ONCE = 4

CASES = [
    *(f"txn-{when}:{n}" for n in range(1, TRANSACTIONS + 1) for when in ("before", "after")),
    *(
        f"{step}-{when}:{n}"
        for step in ("create", "delete")
        for when in ("before", "after")
        for n in (1, 2)
    ),
    "txn-sent:1",
    "txn-sent:2",
    "txn-done:2",
    "txn-done:6",
    # The launcher that cleans up dies, too (and the third one has to do it).
    "txn-after:1,txn-before:1",
    "txn-after:2,txn-after:1",
    "txn-after:3,txn-after:2",
    "create-after:2,txn-before:3",
    "txn-after:8,delete-after:1",
    # With min-ready nodes: their requests, the hand-over of one that is ready, its replacement.
    *(f"ready:txn-after:{n}" for n in range(1, 13)),
    # Another launcher runs all the time; one of the nodes is held for a while.
    *(
        f"two:txn-{when}:{n}"
        for n in range(1, TWO_TRANSACTIONS + 1)
        for when in ("before", "after")
    ),
]


@pytest.fixture(autouse=True)
def no_thread_survives() -> None:
    """Threads of other cases run on; ``outcomes`` waits for all of them at the end."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The futures of all cases that were selected."""
    selected = [
        i.callspec.params["case"]
        for i in request.session.items
        if i.path == request.path and hasattr(i, "callspec")
    ]
    settings, tmp = zookeeper_server(), tmp_path_factory.mktemp("crash")

    def run(case: str, again: int = AGAIN) -> dict[str, Any]:
        result = attempt(case, again)
        # The other launcher may be faster to start and do everything.
        missed = case.startswith("two:") and result["launchers"] == 1 and _surely_passed(case)
        return run(case, again - 1) if missed and again else result

    def attempt(case: str, again: int) -> dict[str, Any]:
        bench = Bench(settings, tmp / f"{case.replace(':', '-').replace(',', '-')}-{again}")
        try:
            if case.startswith("ready:"):
                return ready_life(bench, case.removeprefix("ready:"))
            if case.startswith("two:"):
                return two_lives(bench, case.removeprefix("two:"))
            return one_life(bench, case.split(",") if case else [])
        finally:
            bench.close()

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="case") as executor:
        yield {case: executor.submit(run, case) for case in ["", *selected]}
        executor.shutdown(cancel_futures=True)


def one_life(bench: Bench, crashes: list[str]) -> dict[str, Any]:
    """Two nodes from request to gone; whenever the launcher has died another is started, at last
    a clean one.
    """
    bench.cloud.set(create_delay=0.1, delete_delay=0.1)
    config = bench.config()
    crashes = list(crashes)
    launchers = [bench.start(config, crash_at=crashes.pop(0) if crashes else "")]
    bench.wait_pools(1)

    def revive() -> None:
        if not launchers[-1].alive():
            launchers.append(
                bench.start(config, wait=False, crash_at=crashes.pop(0) if crashes else "")
            )

    zuul = bench.zuul
    request_id = zuul.submit("l0", "l0")
    zuul.wait_fulfilled([request_id], 30, revive)
    zuul.use([request_id])
    bench.wait_nothing_left(30, revive)
    bench.check_fencing()
    return {
        **bench.check_counts(),
        "launchers": len(launchers),
        "transactions": sum(
            any(
                "/nodepool/nodes" in op["path"] or "/nodepool/requests" in op["path"]
                for op in line["ops"]
            )
            for line in bench.transactions()
        ),
    }


def ready_life(bench: Bench, crash: str) -> dict[str, Any]:
    """One node that is kept ready is handed over and used; at last nothing is kept any more."""
    label = {"name": "l0", "min-ready": 1}
    config = bench.config(labels=[label])
    launchers = [bench.start(config, crash_at=crash, wait=False)]

    def revive() -> None:
        if not launchers[-1].alive():
            launchers.append(bench.start(config, wait=False))

    def kept() -> bool:
        revive()
        nodes = list(zuul.read("nodes").values())
        return (
            len(nodes) == 1
            and nodes[0]["state"] == "ready"
            and not nodes[0]["allocated_to"]
            and not any(r["requestor"] != "zuul" for r in zuul.read("requests").values())
        )

    zuul = bench.zuul
    wait_for(kept, 30, "the ready node")
    request_id = zuul.submit("l0")
    zuul.wait_fulfilled([request_id], 30, revive)
    zuul.use([request_id])
    wait_for(kept, 30, "the next ready node")
    launchers[-1].kill()
    bench.start(bench.config(labels=[{"name": "l0", "max-ready-age": 1}]), wait=False)
    bench.wait_nothing_left(30)
    bench.check_fencing()
    return {**bench.check_counts(), "launchers": len(launchers)}


def two_lives(bench: Bench, crash: str) -> dict[str, Any]:
    """The first of two launchers, which requests are for, dies: the other one finishes what it
    began.
    """
    bench.cloud.set(create_delay=0.1, delete_delay=0.1)
    label = {"name": "l0", "min-ready": 1}
    doomed, other = (
        bench.config(bench.provider(priority=priority), labels=[label]) for priority in (1, 200)
    )
    launchers = [bench.start(doomed, crash_at=crash, wait=False), bench.start(other, wait=False)]
    zuul = bench.zuul

    def kept() -> bool:
        nodes = [node for node in zuul.read("nodes").values() if node["state"] != "hold"]
        return len(nodes) == 1 and nodes[0]["state"] == "ready" and not nodes[0]["allocated_to"]

    wait_for(kept, 40, "the ready node")
    request_id = zuul.submit("l0", "l0")
    zuul.wait_fulfilled([request_id], 40)
    held, given = zuul.accept(request_id)
    zuul.hold(held, 1)
    zuul.give_back(given)
    wait_for(
        lambda: kept() and len(zuul.read("nodes")) == 1,
        40,
        "one ready node, and the held one is gone",
    )
    alive = launchers[0].alive()
    for launcher in launchers:
        launcher.kill()
    bench.start(bench.config(labels=[{"name": "l0", "max-ready-age": 1}]), wait=False)
    bench.wait_nothing_left(30)
    bench.check_fencing()
    return {**bench.check_counts(), "launchers": 1 if alive else 2}


def test_all_transactions_are_covered(outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    result = outcomes[""].result()
    assert result == {
        "requests": 1,
        "created": 2,
        "leaked": 0,
        "launchers": 1,
        "transactions": result["transactions"],
    }
    assert result["transactions"] <= TRANSACTIONS, (
        "more transactions than cases: raise TRANSACTIONS"
    )


@pytest.mark.parametrize("case", CASES)
def test_request_is_served_although_its_launcher_was_killed(
    case: str, outcomes: dict[str, Future[dict[str, Any]]]
) -> None:
    result = outcomes[case].result()
    assert result["requests"] == 1
    assert result["launchers"] > 1 or not _surely_passed(case), "the point was never passed"


def _surely_passed(case: str) -> bool:
    """Return whether a launcher surely comes to the point of a case.

    Deletions at the same time may be merged into one transaction.
    """
    return int(case.rsplit(":", 1)[1]) < (SURE + 1 if case.startswith("two:") else TRANSACTIONS - 2)
