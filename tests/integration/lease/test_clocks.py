"""Clocks that differ, and a ZooKeeper that was restored from an old copy (spec: lease, section
5).
"""

from __future__ import annotations

import datetime
import itertools
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nodepool.access.identity import Role
from nodepool.base.clock import ServerTime
from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import lease as command
from nodepool.lease import Lease, LeaseError, Leases, Reason, Terms
from nodepool.lease.leases import TOO_LATE
from nodepool.lease.record import LEAST, end_of
from nodepool.zk.records import HOLD
from tests.integration.lease.conftest import Api
from tests.support.launcher import LauncherBench, config, provider

ALICE = Terms("alice", "token:alice", "debug #12", created=1760000000.0)
SKEWS = [60, -60]
DAY = 86400.0
#: Neither a time nor a number of seconds; JSON readers accept the last ones.
NONSENSE: list[Any] = [
    -5,
    -1e300,
    None,
    "",
    "soon",
    True,
    [],
    {},
    0,
    1e300,
    9.9e10,
    10**400,
    float("inf"),
    float("-inf"),
    float("nan"),
]
#: Of leases that no ZooKeeper of a test comes to.
_numbers = itertools.count(900_000_000)


class Clock:
    """The module ``time`` of a machine whose clock differs."""

    def __init__(self, skew: float) -> None:
        self._skew = skew

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() + self._skew


def stored(
    bench: LauncherBench, ends: float, terms: Terms = ALICE, seconds: int = 120, **values: Any
) -> tuple[str, str]:
    """Write a held node whose lease ends that many seconds from now; return the ids of both."""
    lease_id = f"200-{next(_numbers):010}"
    node = bench.ready_node(
        "fake-provider",
        "main",
        "fake-label",
        state=HOLD,
        allocated_to=lease_id,
        user_data=terms.stored(),
    )
    bench.zuul.write_node(
        node.id,
        **{"hold_expiration": seconds, "state_time": time.time() + ends - seconds, **values},
    )
    return lease_id, node.id


@contextmanager
def served(bench: LauncherBench, folder: pathlib.Path) -> Iterator[Api]:
    """A launcher with an API, which starts with what is stored."""
    api = Api(bench, bench.start(config(provider())), folder)
    try:
        yield api
    finally:
        api.app.stop()


def refused(reason: Reason, call: Callable[[], object]) -> str:
    with pytest.raises(LeaseError) as caught:
        call()
    assert caught.value.reason is reason, caught.value
    return str(caught.value)


def shown(bench: LauncherBench, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what ``nodepool lease`` prints."""
    capsys.readouterr()
    assert (
        nodepoolcmd.main(
            ["-c", bench.config({"labels": [], "providers": []}, "other.yaml"), "lease", *args]
        )
        == 0
    )
    return capsys.readouterr().out


# -- clocks differ


@pytest.mark.parametrize("skew", SKEWS)
def test_end_differs_by_exactly_the_skew_of_the_asker(
    api: Api, skew: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, asker = api.bench, Leases(api.bench.zk, lambda: time.time() + skew)
    lease_id = asker.ask(["fake-label"], ALICE).id
    bench.wait_request(lease_id, "fulfilled")
    earliest = time.time() + 120 + skew
    lease = asker.hand_over(lease_id, 120)
    assert lease.ends is not None and earliest <= lease.ends <= time.time() + 120 + skew
    view = api.call("GET", f"/leases/{lease_id}", token=api.token()).content
    assert datetime.datetime.fromisoformat(view["ends"]).timestamp() == pytest.approx(
        lease.ends, abs=0.001
    )
    text = shown(bench, capsys, "show", lease_id)
    assert "Ends in: 2 min 5" in text if skew > 0 else "Ends in: 5" in text, text
    # The launcher ends it by its own clock; time is moved until three seconds before.
    [node] = lease.nodes
    moved = 120 + skew - 3
    bench.zuul.write_node(node.id, state_time=bench.zuul.node(node.id)["state_time"] - moved)
    bench.wait_gone(node.id, timeout=20)
    assert time.time() >= lease.ends - moved


@pytest.mark.parametrize("skew", SKEWS)
def test_launcher_renews_what_an_asker_with_another_clock_has_leased(api: Api, skew: int) -> None:
    bench, asker = api.bench, Leases(api.bench.zk, lambda: time.time() + skew)
    lease_id = asker.ask(["fake-label"], ALICE).id
    bench.wait_request(lease_id, "fulfilled")
    began = asker.hand_over(lease_id, 120).nodes[0].state_time
    earliest = time.time() + 600
    answer = api.call("POST", f"/leases/{lease_id}/renew", {"for": 600}, api.token())
    [node] = bench.nodes(state=HOLD)
    assert (answer.status, node.state_time) == (200, began), answer
    # Seconds are stored as an integer.
    assert earliest - 1 <= (end_of(node) or 0) <= time.time() + 600


@pytest.mark.parametrize("skew", [*SKEWS, 0])
@pytest.mark.parametrize("left", [-30.0, 0.0, 14.9, 15.1, 74.9, 75.1, 110.0])
def test_renewal_is_granted_or_too_late_by_the_clock_of_its_caller(
    bench: LauncherBench, skew: int, left: float
) -> None:
    lease_id, node_id = stored(bench, left)
    before = bench.zuul.node(node_id)
    end = before["state_time"] + before["hold_expiration"]
    now = end - left + skew
    leases = Leases(bench.zk, lambda: now)
    if left - skew < TOO_LATE:
        text = refused(Reason.TOO_LATE, lambda: leases.renew(lease_id, 60))
        assert f"ends in {max(0.0, left - skew):.0f} s" in text, "never negative"
        assert bench.zuul.node(node_id) == before
        return
    renewed = leases.renew(lease_id, 60)
    after = bench.zuul.node(node_id)
    wanted = max(end, now + 60)
    assert renewed.ends is not None and wanted - 1 <= renewed.ends <= wanted + 1e-3
    assert (
        renewed.ends >= end
        and after["state_time"] == before["state_time"]
        and after["state"] == HOLD
    )
    assert renewed.ends == after["state_time"] + after["hold_expiration"]


@pytest.mark.parametrize("skew", [*SKEWS, 86400])
def test_command_shows_no_negative_time_on_a_machine_whose_clock_differs(
    bench: LauncherBench,
    skew: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lease_id, _node_id = stored(bench, 50)
    monkeypatch.setattr(command, "time", Clock(skew))
    for args in (["list"], ["show", lease_id]):
        text = shown(bench, capsys, *args)
        assert re.search(r"(?<!\d)-\s*\d", text) is None, text
    assert ("1 min 4" in shown(bench, capsys, "show", lease_id)) == (skew < 0)


def test_least_lease_of_an_asker_whose_clock_is_behind_ends_immediately(api: Api) -> None:
    """The launcher alone decides: what the asker takes for a minute may be none."""
    asker = Leases(api.bench.zk, lambda: time.time() - LEAST - 1)
    lease_id = asker.ask(["fake-label"], ALICE).id
    api.bench.wait_request(lease_id, "fulfilled")
    [node] = asker.hand_over(lease_id, LEAST).nodes
    api.bench.wait_gone(node.id or "", timeout=20)
    refused(Reason.ENDED, lambda: asker.renew(lease_id, 60))


def test_operator_sees_the_end_of_an_overdue_lease_without_a_negative_time(api: Api) -> None:
    # No launcher serves its provider: it is not deleted.
    _lease_id, node_id = stored(api.bench, -DAY, provider="away")
    answer = api.call("DELETE", f"/nodes/{node_id}", token=api.token("carol", Role.OPERATE))
    assert (answer.status, answer.content["code"]) == (409, "leased")
    assert "-" not in answer.content["detail"].partition("leased")[2].partition(";")[0], (
        answer.content["detail"]
    )


class SkewedClock:
    """The clock of a launcher, which may step."""

    def __init__(self, skew: float) -> None:
        self.skew = skew
        self.monotonic = time.monotonic

    def time(self) -> float:
        return time.time() + self.skew


def skewed(bench: LauncherBench, skew: float) -> tuple[Any, SkewedClock]:
    """Start a launcher with such a clock."""
    pool, clock = bench.make(config(provider())), SkewedClock(skew)
    pool.state.clock, pool.state.server_time = clock, ServerTime(clock)
    pool.start()
    bench.wait_ready(pool)
    return pool, clock


@pytest.mark.parametrize("steps", [False, True])
def test_launcher_whose_clock_is_ahead_does_not_end_what_its_holder_renews(
    bench: LauncherBench, steps: bool
) -> None:
    pool, clock = skewed(bench, 0 if steps else 300)
    asker = Leases(bench.zk)
    lease_id = asker.ask(["fake-label"], ALICE).id
    bench.wait_request(lease_id, "fulfilled")
    clock.skew = 300
    [node] = asker.hand_over(lease_id, 120).nodes
    # Written once: it may be deleted as soon as it is overdue by the clock that is ahead.
    other, overdue = stored(bench, -500)
    bench.wait_gone(overdue, timeout=30)  # so that it has checked both
    assert asker.renew(lease_id, 120).terms.renewed == 1
    assert bench.zuul.node(node.id or "")["state"] == HOLD and other != lease_id
    [problem] = [problem for problem in pool.problems() if "clock" in problem.text]
    assert (
        re.search(r"is (299|300) s ahead of that of ZooKeeper", problem.text)
        and "NTP" in problem.help
    )


def test_clock_that_is_behind_is_a_problem_and_one_that_is_right_is_none(
    bench: LauncherBench,
) -> None:
    pool, clock = skewed(bench, -60)
    assert re.search(r"is (59|60|61) s behind that of ZooKeeper", str(pool.problems()))
    clock.skew = 0
    assert "clock" not in str(pool.problems())


def test_client_whose_clock_is_ahead_is_a_problem(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.start(config(provider()))
    _lease_id, node_id = stored(bench, 3600, state_time=time.time() + 90)
    path = bench.config({"labels": [], "providers": []}, "other.yaml")
    capsys.readouterr()
    assert nodepoolcmd.main(["-c", path, "problem-list"]) in (0, 1)
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"node {node_id} was leased by a client whose clock is 1 min" in text
        and "ahead of that of ZooKeeper" in text
    )


# -- ZooKeeper is restored from an old copy


def test_launcher_deletes_overdue_leases_of_a_restored_copy_and_keeps_the_others(
    bench: LauncherBench, tmp_path: pathlib.Path
) -> None:
    overdue = [stored(bench, -left) for left in (1, 3600, 30 * DAY)]
    living = [stored(bench, left) for left in (300, 3600, 30 * DAY)]
    before = {node_id: bench.zuul.node(node_id) for _, node_id in living}
    with served(bench, tmp_path) as api:
        bench.wait_gone(*(node_id for _, node_id in overdue), timeout=30)
        assert {node_id: bench.zuul.node(node_id) for _, node_id in living} == before
        found = api.call("GET", "/leases", token=api.token()).content["leases"]
        assert {lease["id"] for lease in found} == {lease_id for lease_id, _ in living}
        for lease_id, _ in overdue:
            answer = api.call("POST", f"/leases/{lease_id}/renew", {"for": 600}, api.token())
            assert (answer.status, answer.content["code"]) == (410, "ended")
        answer = api.call("POST", f"/leases/{living[0][0]}/renew", {"for": 600}, api.token())
        assert (answer.status, answer.content["renewed"]) == (200, 1)


@pytest.mark.parametrize(
    "place",
    [
        "state_time",
        "hold_expiration",
        "created",
        "size",
        "renewed",
        "key",
        "longest",
        "notes",
        "owner",
    ],
)
def test_nonsense_in_one_record_harms_no_other_lease(
    bench: LauncherBench, tmp_path: pathlib.Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in NONSENSE:
        if place in ("state_time", "hold_expiration"):
            stored(bench, 3600, **{place: value})
        else:
            terms = ALICE.stored()
            terms["lease"][place] = (
                {"job": value} if place == "notes" and not isinstance(value, dict) else value
            )
            stored(bench, 3600, user_data=terms)
    (_, overdue), (living, living_node) = stored(bench, -DAY), stored(bench, 3600)
    with served(bench, tmp_path) as api:
        bench.wait_gone(overdue, timeout=30)
        token, pool = api.token(), api.pool("bob")
        answer = api.call("GET", "/leases", token=token)
        assert answer.status == 200 and living in {
            lease["id"] for lease in answer.content["leases"]
        }, answer
        assert living in shown(bench, capsys, "list")
        assert api.call("POST", f"/leases/{living}/renew", {"for": 7200}, token).status == 200
        lease: Any = pool.lease("fake-label", for_=600, key="job-1", wait=60)
        again: Any = pool.lease("fake-label", for_=600, key="job-1")
        assert again.id == lease.id
        again.give_back()
        bench.wait_gone(lease.nodes[0].id, timeout=30)
        # Later ends are still kept: the reconciler has survived all of them.
        bench.zuul.write_node(living_node, state_time=time.time() - DAY)
        bench.wait_gone(living_node, timeout=30)


@pytest.mark.parametrize(
    "values", [{"state_time": 9.9e10}, {"hold_expiration": 9.9e10}, {"hold_expiration": 1e300}]
)
def test_end_in_thousands_of_years_stops_no_launcher(
    bench: LauncherBench, tmp_path: pathlib.Path, values: dict[str, float]
) -> None:
    """It is more than a thread can wait for, and the only thing to wait for."""
    far, far_node = stored(bench, 3600, **values)
    with served(bench, tmp_path) as api:
        with api.pool("bob").lease("fake-label", for_=600, wait=60) as lease:
            pass
        bench.wait_gone(lease.nodes[0].id, timeout=30)
        assert api.call("DELETE", f"/leases/{far}", token=api.token()).status == 204
        bench.wait_gone(far_node, timeout=30)


@pytest.mark.parametrize("left", [-30 * DAY, -1.0, 600.0])
def test_key_gives_a_new_lease_if_its_lease_has_ended_although_it_is_still_stored(
    bench: LauncherBench, left: float
) -> None:
    old, _ = stored(bench, left, Terms("alice", "token:alice", key="job-1"))
    lease: Lease = Leases(bench.zk).ask(["fake-label"], Terms("alice", "token:alice", key="job-1"))
    assert (lease.id == old) == (left > 0)


def test_key_that_is_repeated_after_the_restore_gives_the_lease_that_lives(
    bench: LauncherBench, tmp_path: pathlib.Path
) -> None:
    old = {
        left: stored(bench, left, Terms("alice", "token:alice", key=f"job{left}"))[0]
        for left in (-DAY, 3600.0)
    }
    with served(bench, tmp_path) as api:
        pool = api.pool()
        found = {left: pool.lease("fake-label", for_=600, key=f"job{left}") for left in old}
        assert found[-DAY].id != old[-DAY] and found[3600.0].id == old[3600.0]
        assert [lease.state for lease in found.values()] == ["held", "held"]
        assert {lease.id for lease in pool.leases()} == {lease.id for lease in found.values()}


# -- what was read is old


def fulfilled(bench: LauncherBench, **values: Any) -> tuple[Leases, str, str]:
    """Write a fulfilled request with one node; return the ids of both."""
    leases = Leases(bench.zk)
    lease_id = leases.ask(["fake-label"], ALICE).id
    node = bench.ready_node(
        "fake-provider", "main", "fake-label", **{"allocated_to": lease_id, **values}
    )
    request = bench.zk.getNodeRequest(lease_id)
    request.state, request.nodes = "fulfilled", [node.id]
    bench.zuul.client.set(f"/nodepool/requests/{lease_id}", request.serialize())
    return leases, lease_id, node.id


@pytest.mark.parametrize(
    "values",
    [{"allocated_to": None}, {"allocated_to": "200-1"}, {"state": "used"}, {"state": HOLD}],
)
def test_only_ready_nodes_of_the_request_are_handed_over(
    bench: LauncherBench, values: dict[str, Any]
) -> None:
    leases, lease_id, node_id = fulfilled(bench, **values)
    before = bench.zuul.node(node_id)
    refused(Reason.UNAVAILABLE, lambda: leases.hand_over(lease_id, 600))
    assert bench.zuul.node(node_id) == before


def test_request_that_has_changed_since_it_was_read_is_not_handed_over(
    bench: LauncherBench,
) -> None:
    leases, lease_id, node_id = fulfilled(bench)
    request = bench.zk.getNodeRequest(lease_id)
    bench.zuul.client.set(f"/nodepool/requests/{lease_id}", request.serialize())
    refused(Reason.UNAVAILABLE, lambda: leases.hand_over(lease_id, 600, request=request))
    assert bench.zuul.node(node_id)["state"] == "ready"


def test_node_that_was_given_to_another_lease_meanwhile_is_not_renewed(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_id, node_id = stored(bench, 600)
    leases = Leases(bench.zk)
    lease = leases.get(lease_id)
    monkeypatch.setattr(leases, "get", lambda _lease_id: lease)
    bench.zuul.write_node(node_id, allocated_to="200-0000000099")
    before = bench.zuul.node(node_id)
    refused(Reason.ENDED, lambda: leases.renew(lease_id, 7200))
    assert bench.zuul.node(node_id) == before


def test_node_that_is_deleted_meanwhile_is_not_returned(bench: LauncherBench) -> None:
    lease_id, node_id = stored(bench, 600)
    leases = Leases(bench.zk)
    lease = leases.get(lease_id)
    bench.zuul.write_node(node_id, state="deleting")
    assert leases.give_back(lease_id, lease)
    assert bench.zuul.node(node_id)["state"] == "deleting"
