"""``nodepool hold --for``: a node becomes a lease without a request (spec: lease, section 4)."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Callable, Iterator

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError, user
from nodepool.lease import LeaseError, Leases, Reason, Terms
from nodepool.zk.records import DELETING, HOLD, USED
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api
from tests.support.launcher import LauncherBench, config, provider

Nodepool = Callable[..., tuple[str, str]]


@pytest.fixture
def nodepool(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Nodepool:
    """Run a command; return what it printed to standard output and standard error."""
    path = bench.config({"labels": [], "providers": []})

    def nodepool(*args: str, status: int = 0) -> tuple[str, str]:
        assert nodepoolcmd.main(["-c", path, *args]) == status
        printed = capsys.readouterr()
        return printed.out, printed.err

    return nodepool


def test_hold_without_options_has_neither_owner_nor_end(
    bench: LauncherBench, nodepool: Nodepool
) -> None:
    node = bench.ready_node("p", "main", "a", allocated_to="200-0000000001", comment="stays")
    before = bench.zuul.node(node.id)
    nodepool("hold", node.id)
    after = bench.zuul.node(node.id)
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {"state", "state_time"} and after["state"] == HOLD


def test_held_node_becomes_a_lease_of_the_caller(bench: LauncherBench, nodepool: Nodepool) -> None:
    node = bench.ready_node("p", "main", "a")
    out, _err = nodepool("hold", node.id, "--for", "8h", "--purpose", "look at it")
    assert "hold" in out
    [lease] = Leases(bench.zk).all()
    assert (lease.id, lease.terms.owner, lease.terms.purpose) == (
        f"node-{node.id}",
        user(),
        "look at it",
    )
    assert lease.ends == pytest.approx(time.time() + 8 * 3600, abs=30)
    stored = bench.zuul.node(node.id)
    assert (stored["hold_expiration"], stored["comment"]) == (
        8 * 3600,
        f"lease {user()}: look at it",
    )
    assert bench.zuul.contenders(node.id) == []


def test_held_node_is_renewed_and_returned_by_its_lease_id(
    bench: LauncherBench, nodepool: Nodepool
) -> None:
    node = bench.ready_node("p", "main", "a")
    nodepool("hold", node.id, "--for", "10m")
    lease_id = f"node-{node.id}"
    assert (
        lease_id in nodepool("lease", "list")[0]
        and node.id in nodepool("lease", "show", lease_id)[0]
    )
    nodepool("lease", "renew", lease_id, "--for", "2h")
    [lease] = Leases(bench.zk).all()
    assert lease.ends == pytest.approx(time.time() + 7200, abs=30) and lease.terms.renewed == 1
    nodepool("lease", "return", lease_id)
    assert bench.node(node.id).state == USED and Leases(bench.zk).all() == []


def test_nodes_of_one_request_are_held_as_separate_leases(
    bench: LauncherBench, nodepool: Nodepool
) -> None:
    nodes = [
        bench.ready_node(
            "p", "main", "a", state=HOLD, hold_job="job", allocated_to="200-0000000001"
        )
        for _ in range(2)
    ]
    _out, err = nodepool("hold", *[node.id for node in nodes], "--for", "1h")
    assert err.count("Zuul may still end it") == 2
    leases = Leases(bench.zk).all()
    assert [(lease.id, lease.lost) for lease in leases] == [
        (f"node-{node.id}", 0) for node in nodes
    ]


def test_user_data_of_others_stays(bench: LauncherBench, nodepool: Nodepool) -> None:
    """Zuul counts the resources of held nodes by its own key."""
    node = bench.ready_node(
        "p", "main", "a", state=HOLD, user_data={"zuul_system": "z", "project_name": "p"}
    )
    nodepool("hold", node.id, "--for", "1h")
    Leases(bench.zk).renew(f"node-{node.id}", 7200)
    data = bench.zuul.node(node.id)["user_data"]
    assert (data["zuul_system"], data["project_name"], data["lease"]["renewed"]) == ("z", "p", 1)


@pytest.mark.parametrize("state", [USED, DELETING, "in-use", "building"])
def test_only_ready_and_held_nodes_can_be_leased(
    bench: LauncherBench, nodepool: Nodepool, state: str
) -> None:
    node = bench.ready_node("p", "main", "a", state=state)
    with pytest.raises(LeaseError, match=f"Node {node.id} is {state}"):
        nodepool("hold", node.id, "--for", "1h")
    assert bench.node(node.id).state == state and bench.zuul.contenders(node.id) == []


def test_leased_node_cannot_be_leased_by_another(bench: LauncherBench, nodepool: Nodepool) -> None:
    data = Terms("bob", "unix:1001").stored()
    node = bench.ready_node(
        "p",
        "main",
        "a",
        state=HOLD,
        allocated_to="200-0000000007",
        user_data=data,
        hold_expiration=600,
    )
    with pytest.raises(LeaseError, match="belongs to lease 200-0000000007 of bob"):
        nodepool("hold", node.id, "--for", "1h")
    assert bench.zuul.node(node.id)["hold_expiration"] == 600


@pytest.mark.parametrize("options", [["--for", "10s"], ["--for", "59"], ["--purpose", "x"]])
def test_impossible_options_change_nothing(
    bench: LauncherBench, nodepool: Nodepool, options: list[str]
) -> None:
    node = bench.ready_node("p", "main", "a")
    with pytest.raises((CommandError, LeaseError)):
        nodepool("hold", node.id, *options)
    assert bench.node(node.id).state == "ready"


def test_hold_of_zuul_can_be_renewed_and_returned(bench: LauncherBench) -> None:
    node = bench.ready_node(
        "p",
        "main",
        "a",
        state=HOLD,
        hold_job="job",
        hold_expiration=600,
        user_data={"zuul_system": "z"},
    )
    leases, lease_id = Leases(bench.zk), f"node-{node.id}"
    assert leases.renew(lease_id, 7200).ends == pytest.approx(time.time() + 7200, abs=30)
    stored = bench.zuul.node(node.id)
    assert (stored["user_data"], stored["hold_job"]) == ({"zuul_system": "z"}, "job")
    with pytest.raises(LeaseError) as refused:
        leases.describe(lease_id, "mine")
    assert refused.value.reason is Reason.BAD_REQUEST
    assert leases.give_back(lease_id) and bench.node(node.id).state == USED


def test_hold_without_end_cannot_be_renewed_but_returned(bench: LauncherBench) -> None:
    node = bench.ready_node("p", "main", "a", state=HOLD)
    leases, lease_id = Leases(bench.zk), f"node-{node.id}"
    with pytest.raises(LeaseError, match="has no end"):
        leases.renew(lease_id, 7200)
    assert leases.give_back(lease_id) and bench.node(node.id).state == USED


def test_deletion_of_a_leased_node_names_owner_and_end(
    bench: LauncherBench, nodepool: Nodepool
) -> None:
    data = Terms("bob", "unix:1001").stored()
    leased = bench.ready_node(
        "p",
        "main",
        "a",
        state=HOLD,
        allocated_to="200-0000000007",
        user_data=data,
        hold_expiration=7200,
    )
    free = bench.ready_node("p", "main", "a")
    _out, err = nodepool("delete", leased.id, free.id)
    assert err.count("\n") == 1 and "bob" in err and "200-0000000007" in err and "1 h 59 min" in err
    assert [bench.node(node.id).state for node in (leased, free)] == [DELETING, DELETING]


# -- max-hold-age


@pytest.fixture
def short(bench: LauncherBench, tmp_path: pathlib.Path) -> Iterator[Api]:
    """A launcher that ends every hold after 100 s."""
    made = Api(bench, bench.start(config(provider(), **{"max-hold-age": 100})), tmp_path)
    try:
        yield made
    finally:
        made.app.stop()


def test_command_promises_no_more_than_max_hold_age(
    short: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    path = short.bench.config(config(provider(), **{"max-hold-age": 100}))

    def run(*args: str) -> tuple[str, str]:
        capsys.readouterr()
        assert nodepoolcmd.main(["-c", path, *args]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    out, err = run("lease", "fake-label", "--for", "10m")
    assert re.search(r"for 1 min \d+ s \(max-hold-age\)", out), out
    assert "the configuration (max-hold-age) permits no later end" in err
    assert re.search(r"1 min \d+ s \(max-hold-age\)", run("lease", "list")[0])
    out, _ = run("lease", "renew", "--for", "10m")
    assert re.search(r"ends in 1 min \d+ s \(max-hold-age\)", out), out
    [node] = short.bench.nodes(state=HOLD)
    assert node.hold_expiration == 100
    assert re.search(
        r"hold ends: .*\(in 1 min \d+ s\), by max-hold-age", run("explain", node.id)[0]
    )
    ready = short.bench.ready_node("fake-provider", "main", "fake-label")
    _, err = run("hold", ready.id, "--for", "99d")
    assert "(max-hold-age)" in err and short.bench.zuul.node(ready.id)["hold_expiration"] == 100
    request_id = short.bench.submit("fake-label")
    short.bench.wait_request(request_id, "fulfilled")
    out, err = run("request", "accept", request_id, "--detach", "--for", "10m")
    assert "for 1 min 40 s" in out and "(max-hold-age)" in err


def test_api_grants_max_hold_age_and_names_it(short: Api) -> None:
    token = short.token()
    lease = short.call(
        "POST", "/leases", {"labels": ["fake-label"], "for": 3600, "wait": 30}, token
    ).content
    assert (
        lease["limited_by"],
        short.bench.zuul.node(lease["nodes"][0]["id"])["hold_expiration"],
    ) == ("max-hold-age", 100)
    renewed = short.call("POST", f"/leases/{lease['id']}/renew", {"for": 3600}, token).content
    assert (renewed["ends"], renewed["limited_by"]) == (lease["ends"], "max-hold-age")
    other = short.call(
        "POST", "/leases", {"labels": ["fake-label"], "for": 60, "wait": 30}, token
    ).content
    assert other["limited_by"] is None
    renewed = short.call("POST", f"/leases/{other['id']}/renew", {"for": 90}, token).content
    assert renewed["limited_by"] is None and renewed["ends"] > other["ends"]
    assert (
        short.call("POST", f"/leases/{other['id']}/renew", {"for": 120}, token).content[
            "limited_by"
        ]
        == "max-hold-age"
    )


def test_holder_of_an_attached_lease_is_warned_before_its_end(
    bench: LauncherBench,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nodepool.client.lease.RENEW_EVERY", 0.1)
    for module in ("lease", "pool"):
        monkeypatch.setattr(f"nodepool.client.{module}.ATTACHED", 60)
    made = Api(bench, bench.start(config(provider(), **{"max-hold-age": 62})), tmp_path)
    try:
        with made.pool().lease("fake-label") as lease:
            wait_for(lambda: lease.limited_by == "max-hold-age", what="a renewal that is limited")
            wait_for(lambda: "max-hold-age permits no later end" in caplog.text, what="the warning")
    finally:
        made.app.stop()
