"""Whose share of the threads a request uses: of the client behind a proxy, of a named owner."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool import metrics
from nodepool.access.identity import Identity
from nodepool.base import threads
from nodepool.web import shares
from nodepool.web.actions.actions import Actions
from nodepool.web.actions.bodies import NewProgram
from nodepool.web.actions.execution import ProgramCalls
from nodepool.web.actions.routes import Refused, Reply, Route
from nodepool.web.http import Request
from nodepool.web.server import WebApp
from nodepool.web.shares import Shares
from nodepool.zk.records import Node
from tests.conftest import wait_for

PROXY = "127.0.0.9"


class Desk:
    """A server whose answers wait, but for those of ``/metrics``; it counts those that do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.busy = 0
        monkeypatch.setattr(Actions, "_call", staticmethod(self._call))
        access = SimpleNamespace(
            networks=[ipaddress.ip_network(f"{PROXY}/32")], users={}, certificates=None
        )
        zk = SimpleNamespace(synced=True)
        config = SimpleNamespace(access=access, max_hold_age=60)
        launcher: Any = SimpleNamespace(
            getReadiness=self._readiness, getZK=lambda: zk, config=config, feed=None
        )
        self.app = WebApp(
            launcher,
            port=0,
            listen_address="127.0.0.1",
            statistics=metrics.Metrics(),
            actions=Actions(launcher, "everywhere"),
            pages="everywhere",
        )
        self.app.start()

    def _wait(self) -> None:
        self.busy += 1
        self.free.wait(60)

    def _readiness(self) -> tuple[bool, list[str]]:
        self._wait()
        return True, []

    def _call(
        self, request: Request, identity: Identity, route: Route, names: dict[str, str]
    ) -> Reply:
        if request.address != "127.0.0.2":
            self._wait()
        return Reply({})

    def ask(self, path: str, address: str, behind: str | None = None) -> http.client.HTTPConnection:
        port = self.app.server.socket.getsockname()[1]
        connection = http.client.HTTPConnection(
            "127.0.0.1", port, timeout=30, source_address=(address, 0)
        )
        connection.request("GET", path, headers={"X-Forwarded-For": behind} if behind else {})
        return connection


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    found = Desk(monkeypatch)
    yield found
    found.free.set()
    found.app.stop()
    found.app.join(5)


def test_clients_behind_a_named_proxy_have_a_share_each(desk: Desk) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            open_ones.callback(desk.ask("/ready", PROXY, "10.0.0.1").close)
        wait_for(lambda: desk.busy == shares.AT_A_TIME, 20, "the greedy client's requests")
        honest = desk.ask("/metrics", PROXY, "10.0.0.2")
        open_ones.callback(honest.close)
        assert honest.getresponse().status == 200


def test_anonymous_callers_of_different_addresses_have_a_share_each(desk: Desk) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            open_ones.callback(desk.ask("/api/v1/leases", "127.0.0.1").close)
        wait_for(lambda: desk.busy == shares.AT_A_TIME, 20, "the greedy client's calls")
        honest = desk.ask("/api/v1/leases", "127.0.0.2")
        open_ones.callback(honest.close)
        assert honest.getresponse().status == 200


def test_program_has_its_place_only_when_it_is_about_to_start() -> None:
    """A client that disconnects while the call is prepared would leave one behind."""
    node = Node("0000000001")
    node.interface_ip, node.hostname = "192.0.2.1", "node"
    lease = SimpleNamespace(id="l1", nodes=[node], terms=SimpleNamespace(owner="alice"))
    launcher: Any = SimpleNamespace(getProviderManager={}.__getitem__)
    calls = ProgramCalls(launcher, SimpleNamespace(held=lambda _call: lease))
    program = NewProgram(["true"])
    later = calls.execute(SimpleNamespace(parsed=lambda _type: program))
    assert len(calls.places) == 0

    async def start() -> None:
        with pytest.raises(Refused, match="runs no programs"):
            await later.outcome(Shares(threads.shared().lane("test-shares", 1)).of("alice"))

    taken: list[int] = []
    calls._start = lambda *_: taken.append(len(calls.places)) or ProgramCalls._start(calls, *_)
    later = calls.execute(SimpleNamespace(parsed=lambda _type: program))
    asyncio.run(start())
    assert taken == [1]
    wait_for(lambda: len(calls.places) == 0, 20, "the place to be free")
