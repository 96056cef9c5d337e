"""Nodes: who holds the lock, who has leased them, and why they were deleted."""

from __future__ import annotations

import getpass
import os
import pathlib
import socket
import sys
import threading

import pytest

from nodepool.driver.fake.api import FakeApi
from nodepool.lease import Leases, Terms
from nodepool.zk.records import HOLD
from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk
from tests.support.launcher import config, provider


def answers(desk: Desk, request: str, *words: str) -> None:
    """Wait until API and command explain the request with these words."""

    def found() -> bool:
        seen = (
            desk.explain("request", request)["answer"],
            desk.explained("request", request).splitlines()[0],
        )
        return all(word in text for word in words for text in seen)

    wait_for(found, what=f"{words} instead of {desk.explain('request', request)['answer']}")


def test_lock_of_a_launcher_names_its_process_and_that_of_zuul_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider()))
    create, going_on = FakeApi.create_server, threading.Event()
    monkeypatch.setattr(
        FakeApi, "create_server", lambda *args, **kw: going_on.wait(60) and create(*args, **kw)
    )
    request = desk.bench.submit("fake-label")
    (node,) = desk.bench.wait_nodes(1, state="building")
    me = f"{pathlib.Path(sys.argv[0]).name} on {socket.gethostname()} (process {os.getpid()})"

    def held_by(name: str) -> None:
        wait_for(
            lambda: desk.explain("node", node.id)["facts"].get("lock") == f"held by {name}",
            what=f"the lock of {name}",
        )

    held_by(me)
    going_on.set()
    desk.bench.wait_request(request, "fulfilled")
    desk.bench.zuul.accept(request)
    held_by("a client without a name, such as Zuul")


def test_request_of_a_live_lease_names_owner_end_and_nodes(desk: Desk) -> None:
    desk.start(config(provider()))
    leases = Leases(desk.bench.zk)
    lease = leases.ask(["fake-label", "fake-label"], Terms("alice", "unix:1000", "debug #12"))
    desk.bench.wait_request(lease.id, "fulfilled")
    held = leases.hand_over(lease.id, 3600)
    one, two = sorted(str(node.id) for node in held.nodes)
    answers(
        desk,
        lease.id,
        "leased by alice (unix:1000) until ",
        "(in 59 min",
        f"nodes {one} (hold), {two} (hold)",
    )
    leases.give_back(lease.id)
    desk.bench.wait_gone(one, two)
    answers(desk, lease.id, "served: its requestor accepted the nodes")


def test_request_whose_nodes_zuul_uses_names_them(desk: Desk) -> None:
    desk.start(config(provider()))
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    answers(desk, request, f"served and deleted; its requestor has node {node.id} (in-use)")


def history(desk: Desk, name: str, words: str, kind: str = "node") -> None:
    """Wait until the history has these words, for pages and API."""
    wait_for(
        lambda: words in str(desk.explain(kind, name)["history"]),
        what=f"{words} in the history of {kind} {name}",
    )


def test_history_of_a_node_shows_why_it_was_deleted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"fake-label": {}, "young": {"max-ready-age": 1}}
    desk.start(
        config(
            provider(labels=list(labels), **{"launch-retries": 1}),
            labels=labels,
            **{"max-hold-age": 1},
        )
    )
    request, (returned,) = desk.bench.fulfilled("fake-label")
    desk.bench.use_up(request)
    history(desk, returned.id, "deleting (was used): its user has returned it")
    request, (held,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    desk.bench.zuul.write_node(held.id, state=HOLD)
    desk.bench.zuul.unlock(held.id)
    history(desk, held.id, "deleting, because it has exceeded its hold time")
    request, (lost,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request)
    desk.bench.zuul.unlock(lost.id)
    history(
        desk,
        lost.id,
        "deleting (was in-use): its user released or lost its lock without returning it",
    )
    request, (old,) = desk.bench.fulfilled("young")
    desk.bench.zuul.cancel(request)
    history(desk, old.id, "unallocated ready, because its request no longer exists")
    history(desk, old.id, "deleting, because it has exceeded its max-ready-age")
    request, (deleted,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.cancel(request)
    wait_for(lambda: desk.bench.node(deleted.id).allocated_to is None, what="a free node")
    desk.run("delete", deleted.id)
    wait_for(
        lambda: f"delete by {getpass.getuser()}" in desk.explained("node", deleted.id),
        what="the operator in the history",
    )
    monkeypatch.setattr(FakeApi, "create_server", lambda *args, **kw: 1 / 0)
    request = desk.bench.submit("fake-label")
    desk.bench.wait_request(request, "failed")
    history(desk, request, "deleting (was building): its launch failed or was abandoned", "request")


def test_nodes_of_min_ready_that_expire_unused_again_and_again_are_a_problem(desk: Desk) -> None:
    labels = {"fake-label": {"min-ready": 1, "max-ready-age": 1}, "other": {"max-ready-age": 1}}
    desk.start(config(provider(labels=list(labels)), labels=labels))
    desk.reported(
        " ready nodes of label fake-label expired unused within 1 h (max-ready-age 1 s) and were "
        "replaced",
        "Suggestion: raise `max-ready-age` of the label, or lower its `min-ready`",
    )
    assert "label other" not in str(desk.problems())
