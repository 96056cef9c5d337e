"""Tokens of the API in a real ZooKeeper, and the command that manages them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nodepool.access.identity import Role
from nodepool.access.tokens import FRESH, ROOT, Tokens
from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from nodepool.zk.history import HistoryReader
from tests.integration.lease.conftest import Api
from tests.support.clock import HandClock
from tests.support.launcher import LauncherBench


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def tokens(bench: LauncherBench, clock: HandClock) -> Tokens:
    return Tokens(lambda: bench.zk, clock, clock)


@pytest.fixture
def nodepool(api: Api, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command and returns its output."""

    def run(*args: str) -> str:
        assert nodepoolcmd.main(["-c", str(api.bench.tmp / "nodepool.yaml"), *args]) == 0
        return capsys.readouterr().out

    return run


def test_token_is_found_by_its_text_and_only_its_hash_is_stored(
    bench: LauncherBench, tokens: Tokens
) -> None:
    token_id, text = tokens.create(
        "ci-7", Role.BORROW, "root@host", tenant="acme", labels=("small-*",), longest=3600
    )
    found = tokens.find(text)
    assert found is not None and (found.id, found.name, found.role, found.tenant) == (
        token_id,
        "ci-7",
        Role.BORROW,
        "acme",
    )
    assert (found.labels, found.longest, found.created_by) == (("small-*",), 3600, "root@host")
    data, _stat = bench.zk.kazoo_client.get(f"{ROOT}/{token_id}")
    assert text.split("_", 2)[2].encode() not in data


def test_wrong_secret_finds_nothing(tokens: Tokens) -> None:
    _, text = tokens.create("ci-7", Role.BORROW)
    for wrong in (
        text[:-1] + ("a" if text[-1] != "a" else "b"),
        text + "a",
        text[:-1],
        "np_00000000_" + "a" * 43,
        "",
        "np_../../x_" + "a" * 43,
    ):
        assert tokens.find(wrong) is None, wrong


def test_revoked_token_is_refused_after_a_second(tokens: Tokens, clock: HandClock) -> None:
    token_id, text = tokens.create("ci-7", Role.BORROW)
    assert tokens.find(text) is not None
    assert tokens.revoke(token_id) and not tokens.revoke(token_id) and not tokens.revoke("../nodes")
    clock.now += FRESH
    assert tokens.find(text) is None


def test_token_expires(tokens: Tokens, clock: HandClock) -> None:
    _, text = tokens.create("ci-7", Role.BORROW, expires=clock.now + 60)
    clock.now += 59.5
    assert tokens.find(text) is not None
    clock.now += 0.5  # the record is still cached
    assert tokens.find(text) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"name": "x", "role": "root"}'])
def test_damaged_record_grants_nothing(
    bench: LauncherBench, tokens: Tokens, clock: HandClock, data: bytes
) -> None:
    token_id, text = tokens.create("ci-7", Role.BORROW)
    bench.zk.kazoo_client.set(f"{ROOT}/{token_id}", data)
    assert tokens.find(text) is None and tokens.all() == []


@pytest.mark.parametrize(
    "change", [{"expires": "later"}, {"labels": "small"}, {"longest": "x"}, {"role": 4}]
)
def test_record_with_an_unreadable_limit_grants_nothing(
    bench: LauncherBench, tokens: Tokens, change: dict[str, Any]
) -> None:
    token_id, text = tokens.create("ci-7", Role.BORROW)
    path = f"{ROOT}/{token_id}"
    record = json.loads(bench.zk.kazoo_client.get(path)[0])
    bench.zk.kazoo_client.set(path, json.dumps({**record, **change}).encode())
    assert tokens.find(text) is None


@pytest.mark.parametrize("name", ["", "a b", "github:acme", "a\nb", "x" * 65, "ä"])
def test_names_that_others_could_have_are_refused(tokens: Tokens, name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        tokens.create(name, Role.BORROW)


def test_command_creates_lists_and_revokes_tokens(api: Api, nodepool: Callable[..., str]) -> None:
    text = nodepool(
        "token", "create", "alice", "--label", "fake-*", "--max", "2h", "--expires", "90d"
    ).strip()
    assert api.call("POST", "/leases", {"labels": ["fake-label"], "wait": 30}, text).status == 201
    assert api.call("POST", "/leases", {"labels": ["other"], "wait": 30}, text).status == 403
    [row] = json.loads(nodepool("token", "list", "--format", "json"))
    assert (row["name"], row["role"], row["labels"]) == ("alice", "borrow", "fake-*")
    nodepool("token", "revoke", row["id"])
    assert json.loads(nodepool("token", "list", "--format", "json")) == []


def test_commands_are_recorded_in_the_history(api: Api, nodepool: Callable[..., str]) -> None:
    [node] = api.bench.fulfilled("fake-label")[1]
    nodepool("hold", str(int(node.id)))
    nodepool("token", "create", "alice")
    events = [
        event
        for event in HistoryReader().read_all(api.bench.zk.kazoo_client)
        if event["type"] == "action"
    ]
    assert [(event["action"], event["target"], event["result"]) for event in events] == [
        ("hold", f"node {node.id}", "ok"),
        ("token create", "token alice", "ok"),
    ]
    assert {event["via"] for event in events} == {"unix:0"}


def test_lease_that_the_command_has_chosen_is_recorded(
    api: Api, nodepool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = api.call("POST", "/leases", {"labels": ["fake-label"], "wait": 30}, api.token()).content
    monkeypatch.setenv("NODEPOOL_LEASE", lease["id"])
    nodepool("lease", "renew", "--for", "9000")
    nodepool("lease", "return")
    events = [
        event
        for event in HistoryReader().read_all(api.bench.zk.kazoo_client)
        if event["type"] == "action"
    ]
    found = [(event["action"], event["target"], event["result"]) for event in events]
    assert [
        ("lease renew", f"lease {lease['id']}", "ok"),
        ("lease return", f"lease {lease['id']}", "ok"),
    ] == found[-2:]


def test_empty_name_of_a_lease_is_not_the_only_lease(
    api: Api, nodepool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodepool("lease", "fake-label", "--for", "1h")
    for name in ("", "/2"):
        with pytest.raises((SystemExit, CommandError)):
            nodepool("lease", "ssh", name)
    monkeypatch.setenv("NODEPOOL_LEASE", "")
    for command in (["return"], ["return", ""], ["renew", "--for", "1h"], ["ssh"]):
        with pytest.raises((SystemExit, CommandError)):
            nodepool("lease", *command)
    monkeypatch.delenv("NODEPOOL_LEASE")
    nodepool("lease", "return")


def test_command_on_a_lease_that_has_ended_is_recorded_as_failed(
    api: Api, nodepool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODEPOOL_LEASE", "200-0000009999")
    with pytest.raises(SystemExit):
        nodepool("lease", "return")
    [event] = [
        event
        for event in HistoryReader().read_all(api.bench.zk.kazoo_client)
        if event["type"] == "action"
    ]
    assert (event["action"], event["target"], event["result"]) == (
        "lease return",
        "lease",
        "failed",
    )
