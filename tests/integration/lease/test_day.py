"""A day of borrowing, compressed into seconds: after it nothing is left, and no node was ever in
two leases.
"""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import pytest

from nodepool import client
from nodepool.access.identity import Role
from nodepool.client import LeaseEnded, NodepoolError
from nodepool.lease import Leases
from nodepool.lease.record import end_of
from nodepool.zk.records import HOLD, READY
from tests.conftest import wait_for
from tests.integration.lease import asker
from tests.integration.lease.conftest import Api
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench, config, provider

#: Fewer instances than the borrowers want.
QUOTA, BORROWERS, ROUNDS = 6, 8, 24
#: Seconds until a lease that has ended is deleted, with its nodes.
SOON = 30.0
#: Seconds by which a node may outlive its end, until its deletion.
LATE = 60.0
ALL = {"ended", "returned", "too-late", "key-in-use"}


class Event(NamedTuple):
    """What a borrower has learned from an answer; times are monotonic."""

    moment: float
    what: str
    lease_id: str
    node_ids: tuple[str, ...]


class Day:
    """What all borrowers share: the history, and the invariants."""

    def __init__(self, api: Api, seed: int) -> None:
        self.api, self.bench, self.seed = api, api.bench, seed
        self.history: list[Event] = []
        self.refusals: Counter[str] = Counter()
        self._lease_of: dict[str, str] = {}
        self._lock = threading.Lock()

    def note(self, what: str, lease: client.Lease) -> None:
        """Add an event.

        :raises AssertionError: a node was in another lease before; returned nodes are deleted,
            never lent again.
        """
        event = Event(time.monotonic(), what, lease.id, tuple(node.id for node in lease.nodes))
        with self._lock:
            self.history.append(event)
            for node_id in event.node_ids:
                first = self._lease_of.setdefault(node_id, lease.id)
                assert first == lease.id, f"node {node_id} is in lease {first} and in {lease.id}"

    def check(self) -> None:
        """Check what holds at each moment."""
        nodes = self.bench.nodes()
        assert len(nodes) <= QUOTA, f"{len(nodes)} nodes, but the quota is {QUOTA}: {nodes}"
        assert len(self.bench.servers("fake-provider")) <= QUOTA
        now = time.time()
        late = {
            node.id: now - end
            for node in nodes
            if node.state == HOLD and (end := end_of(node)) is not None
        }
        assert max(late.values(), default=0.0) < limit(LATE), f"held after their end: {late}"
        seen = Counter(
            node_id
            for lease in Leases(self.bench.zk).all()
            for node_id in {node.id for node in lease.nodes}
        )
        assert not seen or max(seen.values()) == 1, f"nodes in several leases: {seen}"

    def refused(self, code: str, call: Callable[[], object]) -> None:
        with pytest.raises(NodepoolError) as caught:
            call()
        assert caught.value.code == code, caught.value
        self.refusals[code] += 1

    def wait_gone(self, *node_ids: str) -> None:
        self.bench.wait_gone(*node_ids, timeout=SOON)


class Borrower:
    """Borrows again and again, and ends each lease in one of the ways that exist."""

    def __init__(self, day: Day, number: int) -> None:
        self._day, self.name = day, f"borrower-{number}"
        self._random = random.Random(f"{day.seed} {number}")
        self._pool = day.api.pool(self.name)
        self._operator = day.api.pool(f"operator-{number}", Role.OPERATE)
        self._used: set[str] = set()

    def live(self) -> None:
        # Each way at least once, in a random order.
        ways = [
            self.give_back,
            self.twice,
            self.renew,
            self.forget,
            self.too_late,
            self.lose,
            self.repeat,
            self.leave,
        ]
        for way in self._random.sample(ways, len(ways)) + self._random.choices(
            ways, k=ROUNDS - len(ways)
        ):
            way()
            self._day.check()

    # -- borrow

    def borrow(self, key: bool | None = None) -> tuple[client.Lease, list[str], str | None]:
        """Return a lease with its labels and its key."""
        labels = ["small"] * self._random.choice((1, 1, 2))
        wanted = self._random.random() < 0.5 if key is None else key
        # The keys are few: one whose lease has ended gives a new lease.
        text = f"job-{self._random.randrange(2)}" if wanted else None
        lease = self._pool.lease(
            *labels, for_=self._random.randrange(60, 7200), wait=limit(SOON * 2), key=text
        )
        assert (lease.state, len(lease.nodes), lease.owner) == ("held", len(labels), self.name)
        assert lease.id not in self._used, f"{lease.id} had ended, and key {text} gave it again"
        self._used.add(lease.id)
        self._day.note("borrowed", lease)
        return lease, labels, text

    def end(self, lease: client.Lease) -> None:
        """Return a lease and check that it has ended, for its holder immediately, and its nodes
        soon.
        """
        nodes = [node.id for node in lease.nodes]
        lease.give_back()
        self._day.note("returned", lease)
        self._day.refused("ended", lambda: lease.renew(600))
        self._day.refused("returned", lease.refresh)  # this program knows
        self._day.wait_gone(*nodes)

    def moved(self, lease: client.Lease, left: float) -> None:
        """Let a lease end that many seconds from now."""
        for node in lease.nodes:
            stored = self._day.bench.zuul.node(node.id)
            self._day.bench.zuul.write_node(
                node.id, state_time=time.time() + left - stored["hold_expiration"]
            )

    # -- the ways

    def give_back(self) -> None:
        self.end(self.borrow()[0])

    def twice(self) -> None:
        lease = self.borrow()[0]
        lease.give_back()
        self.end(lease)

    def renew(self) -> None:
        lease = self.borrow()[0]
        for count in range(1, self._random.randrange(2, 4)):
            before = lease.ends
            lease.renew(self._random.randrange(60, 7200))
            assert (
                before is not None
                and lease.ends is not None
                and lease.ends >= before
                and lease.renewed == count
            )
            self._day.note("renewed", lease)
        self.end(lease)

    def forget(self) -> None:
        """A holder that is killed renews no more: the end is not waited for, time is moved."""
        lease = self.borrow()[0]
        self.moved(lease, -1)
        self._day.note("forgotten", lease)
        self._day.wait_gone(*(node.id for node in lease.nodes))
        wait_for(lambda: self.has_ended(lease), SOON, f"end of {lease.id}")

    def has_ended(self, lease: client.Lease) -> bool:
        try:
            lease.refresh()
        except LeaseEnded:
            return True
        return False

    def too_late(self) -> None:
        lease = self.borrow()[0]
        self.moved(lease, 10)
        try:
            lease.renew(600)
        except NodepoolError as error:  # ended: this process was paused for ten seconds
            assert error.code in ("too-late", "ended"), error
            self._day.refusals[error.code] += 1
        else:
            raise AssertionError(f"lease {lease.id} was renewed 10 s before its end")
        self.end(lease)

    def lose(self) -> None:
        """An operator deletes a node underneath."""
        lease, labels, key = self.borrow(key=True)
        node_id = lease.nodes[0].id
        self._operator.call("DELETE", f"/nodes/{node_id}?force=true")
        self._day.note("lost one", lease)
        self._day.wait_gone(node_id)
        if len(labels) == 1:
            wait_for(lambda: self.has_ended(lease), SOON, f"end of {lease.id}")
            return
        wait_for(lambda: lease.refresh().lost == 1, SOON, f"loss of {lease.id}")
        again = self._pool.lease(*labels, for_=600, key=key)
        assert (again.id, again.lost, len(again.nodes)) == (lease.id, 1, 1), (
            "its key still belongs to what is left of it"
        )
        self.end(again)

    def repeat(self) -> None:
        """The answer to a call is lost, and it is repeated."""
        lease, labels, key = self.borrow(key=True)
        again = self._pool.lease(*labels, for_=600, key=key)
        assert (again.id, again.nodes, again.ends) == (lease.id, lease.nodes, lease.ends)
        self._day.note("repeated", again)
        self._day.refused(
            "key-in-use", lambda: self._pool.lease("small", "small", "small", for_=600, key=key)
        )
        self.end(again)

    def leave(self) -> None:
        """A lease that lives as long as a block."""
        with self._pool.lease("small", wait=limit(SOON * 2)) as lease:
            self._day.note("borrowed", lease)
        self._day.note("returned", lease)
        self._day.wait_gone(lease.nodes[0].id)


def kill_while_waiting(bench: LauncherBench, log: pathlib.Path) -> None:
    """Kill -9 a process that has asked for two nodes: its request goes with its session."""
    chroot = bench.chroot
    command = [
        sys.executable,
        asker.__file__,
        chroot.connection,
        chroot.ca,
        chroot.cert,
        chroot.key,
        "waiting",
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with process:
            assert process.stdout is not None
            lease_id = process.stdout.readline().strip()
            process.kill()
    assert lease_id, log.read_text()
    wait_for(
        lambda: bench.zk.getNodeRequest(lease_id) is None, SOON, f"end of the request {lease_id}"
    )


@pytest.fixture
def day_api(bench: LauncherBench, tmp_path: pathlib.Path) -> Iterator[Api]:
    bench.quota(instances=QUOTA)
    served = Api(bench, bench.start(config(provider(labels=["small"]))), tmp_path)
    try:
        yield served
    finally:
        served.app.stop()


def nothing_left(bench: LauncherBench) -> bool:
    """Return whether only free nodes are left: those whose asker was killed."""
    nodes = bench.nodes()
    free = all(node.state == READY and node.allocated_to is None for node in nodes)
    return free and not Leases(bench.zk).all() and not bench.zk.getNodeRequests()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 21))]
)
def test_day_of_borrowers_leaves_nothing_behind(
    day_api: Api, seed: int, tmp_path: pathlib.Path
) -> None:
    day, bench = Day(day_api, seed), day_api.bench
    try:
        borrowers = [Borrower(day, number) for number in range(BORROWERS)]
        with ThreadPoolExecutor(BORROWERS + 1) as executor:
            found = [executor.submit(one.live) for one in borrowers]
            found.append(executor.submit(kill_while_waiting, bench, tmp_path / "asker.log"))
            for future in found:
                future.result()
        day.check()
        assert day.refusals.keys() == ALL, day.refusals
        wait_for(lambda: nothing_left(bench), SOON, "the end of all leases")
        for node_id in bench.zuul.client.get_children("/nodepool/nodes"):
            assert bench.zuul.contenders(node_id) == [], f"node {node_id} is still locked"
    except BaseException as error:
        with suppress(TypeError):
            error.add_note(
                f"seed {seed}, the last events: " + "\n".join(map(str, day.history[-40:]))
            )
        raise
