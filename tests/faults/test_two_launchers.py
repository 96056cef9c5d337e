"""Two launcher processes with the same providers: nothing is lost, nothing is handed out twice."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import Bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

REQUESTS = 100


def test_one_is_killed_in_the_middle(bench: Bench) -> None:
    bench.cloud.set(create_delay=0.5, delete_delay=0.2)
    config = bench.config(bench.provider(pool={"max-servers": 40}))
    launchers = [bench.start(config, wait=False) for _ in range(2)]
    bench.wait_pools(2)
    open_ids = [bench.zuul.submit(*["l0"] * (1 + i % 2)) for i in range(REQUESTS)]
    began, served = time.monotonic(), 0
    while open_ids:
        assert time.monotonic() - began < limit(60), bench.zuul.states(open_ids)
        records = bench.zuul.read("requests", open_ids)
        assert len(records) == len(open_ids), "requests are lost"
        ready = [i for i in open_ids if records[i]["state"] == "fulfilled"]
        bench.zuul.use(ready)
        served += len(ready)
        open_ids = [i for i in open_ids if i not in ready]
        if served >= REQUESTS // 4 and all(launcher.alive() for launcher in launchers):
            # They share 40 servers: on a busy machine one may have had them all so far.
            pids = Counter(entry[1] for entry in bench.cloud.log() if entry[2] == "created")
            max(launchers, key=lambda launcher: pids[str(launcher.process.pid)]).kill()
        time.sleep(0.02)
    assert [launcher.alive() for launcher in launchers].count(True) == 1
    bench.wait_nothing_left(30)
    counts = bench.check_counts()
    print(f"{counts}, {time.monotonic() - began:.1f} s")
    assert counts["requests"] == REQUESTS
    pids = Counter(entry[1] for entry in bench.cloud.log() if entry[2] == "created")
    assert len(pids) == 2, "only one of them has worked"
    bench.check_fencing()


def test_min_ready_is_kept_exactly(bench: Bench) -> None:
    """Started at the same moment, when nodes are taken, and when one launcher dies: never more
    than five.
    """
    bench.cloud.set(create_delay=0.3, delete_delay=0.1)
    config = bench.config(labels=[{"name": "l0", "min-ready": 5}])
    launchers = [bench.start(config, wait=False) for _ in range(2)]
    zuul = bench.zuul

    def idle() -> int:
        return sum(
            n["state"] == "ready" and not n["allocated_to"] for n in zuul.read("nodes").values()
        )

    def settled() -> bool:
        return idle() == 5 and not zuul.read("requests")

    def stays() -> None:
        """For longer than both need to notice."""
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert idle() == 5 and len(zuul.read("nodes")) == 5, zuul.read("nodes")
            time.sleep(0.05)

    bench.wait_pools(2)
    wait_for(settled, 20, "five idle nodes")
    stays()
    assert bench.cloud.count("created") == 5
    # Three are taken: three new ones, not six.
    ids = [zuul.submit("l0") for _ in range(3)]
    zuul.wait_fulfilled(ids)
    wait_for(lambda: idle() == 5, 20, "five idle nodes again")
    zuul.use(ids)
    wait_for(lambda: settled() and len(zuul.read("nodes")) == 5, 20, "only idle nodes")
    stays()
    assert bench.cloud.count("created") == 8
    # One stops in good order while replacements are asked for, and is started again.
    ids = [zuul.submit("l0") for _ in range(2)]
    zuul.wait_fulfilled(ids)
    launchers[1].stop()
    zuul.use(ids)
    wait_for(lambda: settled() and len(zuul.read("nodes")) == 5, 20, "five idle nodes after a stop")
    stays()
    assert bench.cloud.count("created") == 10
    launchers[1] = bench.start(config, wait=False)
    bench.wait_pools(2)
    stays()
    # One dies while replacements are asked for.
    ids = [zuul.submit("l0") for _ in range(4)]
    zuul.wait_fulfilled(ids)
    launchers[0].kill()
    zuul.use(ids)
    wait_for(
        lambda: settled() and len(zuul.read("nodes")) == 5, 30, "five idle nodes after a crash"
    )
    stays()
    launchers[1].rewrite(lambda c: c.update(labels=[{"name": "l0", "max-ready-age": 1}]))
    bench.wait_nothing_left(20)
    print(bench.check_counts())


#: One of each kind of write: request accepted, nodes locked, nodes ready and request fulfilled,
#: deletion; before and after.
CRASHES = [
    *(f"txn-{when}:{n}" for n in (1, 2, 3, 5, 7) for when in ("before", "after")),
    "create-after:1",
    "delete-before:1",
]


@pytest.mark.parametrize("crash", CRASHES)
def test_crash_alongside_other_launchers_loses_nothing(bench: Bench, crash: str) -> None:
    """A second launcher with the same provider, and one with another provider of the label, end
    what the dead one began.
    """
    bench.cloud.set(create_delay=0.1, delete_delay=0.1)
    zuul = bench.zuul
    config = bench.config(bench.provider("p0"))
    doomed = bench.start(config, wait=False, crash_at=crash)
    bench.wait_pools(1)
    ids = [zuul.submit("l0", "l0") for _ in range(2)]
    bench.start(config, wait=False)
    bench.start(bench.config(bench.provider("p1", ["l0"])), wait=False)
    used: list[str] = []

    def use_fulfilled() -> None:
        records = zuul.read("requests", [i for i in ids if i not in used])
        assert len(records) == len(ids) - len(used), "requests are lost"
        for request_id, record in records.items():
            if record["state"] == "fulfilled":
                zuul.use([request_id])
                used.append(request_id)

    wait_for(lambda: use_fulfilled() or len(used) == len(ids), 40, "all requests served")
    # Others may have been faster at the last steps; then this launcher dies without having passed
    # the point.
    doomed.kill()
    bench.wait_nothing_left(40)
    bench.check_fencing()
    assert bench.check_counts()["requests"] == 2
    held = [
        path
        for path in zuul.read("requests-lock")
        if zuul.kazoo.get_children(f"/nodepool/requests-lock/{path}")
    ]
    assert not held, held


def test_held_node_ends_once_after_its_launcher_died(bench: Bench) -> None:
    """Two launchers with the same provider; the one that made the node is dead when its hold
    time ends.
    """
    bench.cloud.set(create_delay=0.1, delete_delay=0.1)
    zuul = bench.zuul
    config = bench.config(bench.provider("p0"))
    maker = bench.start(config, wait=False)
    bench.wait_pools(1)
    request_id = zuul.submit("l0")
    zuul.wait_fulfilled([request_id])
    (node_id,) = zuul.accept(request_id)
    others = [bench.start(config, wait=False) for _ in range(2)]
    bench.wait_pools(3)
    maker.kill()
    zuul.hold(node_id, expiration=1)
    bench.wait_nothing_left(30)
    ends = [
        op
        for line in bench.transactions()
        for op in line["ops"]
        if op["path"] == f"/nodepool/nodes/{node_id}" and op["op"] == "Delete"
    ]
    assert len(ends) == 1, ends
    assert bench.cloud.count("deleted") == 1
    assert all(launcher.alive() for launcher in others)
    bench.check_fencing()


def test_metastatic_slots_are_booked_once(bench: Bench) -> None:
    """200 nodes on backing nodes of 16 slots, taken and returned while one of the launchers
    dies.
    """
    bench.cloud.set(create_delay=0.2, delete_delay=0.1)
    backing = bench.provider("p0", ["backing"])
    metastatic = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "max-servers": 200,
                "labels": [
                    {
                        "name": "slot",
                        "backing-label": "backing",
                        "max-parallel-jobs": 16,
                        "grace-time": 1,
                    }
                ],
            }
        ],
    }
    config = bench.config(backing, metastatic)
    launchers = [bench.start(config, wait=False) for _ in range(2)]
    zuul = bench.zuul
    bench.wait_pools(4)
    began = time.monotonic()
    ids = [zuul.submit(*["slot"] * 4) for _ in range(25)]
    zuul.wait_fulfilled(ids, 40)
    more = [zuul.submit(*["slot"] * 4) for _ in range(25)]
    zuul.wait_states(more, lambda states: states["fulfilled"] > 2, 40)
    launchers[0].kill()
    zuul.wait_fulfilled(more, 40)
    taken = [node_id for request_id in ids + more for node_id in zuul.accept(request_id)]
    assert len(taken) == len(set(taken)) == 200
    nodes = zuul.read("nodes")
    booked = Counter((nodes[i]["interface_ip"], nodes[i]["slot"]) for i in taken)
    twice = {place: count for place, count in booked.items() if count > 1}
    assert not twice, twice
    assert all(0 <= nodes[i]["slot"] < 16 for i in taken)
    print(
        f"200 slots on {bench.cloud.count('created')} backing nodes, "
        f"{time.monotonic() - began:.1f} s"
    )
    zuul.external.clear()  # the slots of a backing node share its id
    zuul.give_back(*taken)
    bench.wait_nothing_left(30)
    print(bench.check_counts())
