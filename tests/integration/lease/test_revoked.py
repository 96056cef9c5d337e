"""Long answers of a caller whose token was revoked, or has expired."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.access.access import Access
from nodepool.access.identity import Role
from nodepool.access.tokens import Tokens
from nodepool.client import NodepoolError, NotAllowed, Pool
from nodepool.config.access import AccessConfig
from nodepool.web import admissions
from nodepool.web.access import Callers
from tests.conftest import wait_for
from tests.integration.lease.conftest import Answer, Api
from tests.integration.lease.test_exec import Programs
from tests.integration.lease.test_exec import programs as programs
from tests.support.calls import count_calls
from tests.support.deadline import limit

ENDED = 3.0
"""Seconds from the revocation to the end: that of the cached record, and some for the machine."""


class Events:
    """Follows events until the launcher ends the answer."""

    def __init__(self, api: Api, token: str | None, unix: bool = False) -> None:
        pool = Pool(f"unix://{api.socket}" if unix else api.url, token)
        self._events = pool.events("drain-changed")
        assert next(self._events) is None, "it follows"
        self.drains: list[list[str]] = []
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._reader = self._executor.submit(self._read)

    def _read(self) -> None:
        for each in self._events:
            self.drains.append(each["drains"] if each is not None else [])

    @property
    def ended(self) -> bool:
        return self._reader.done()

    def wait_end(self, seconds: float = ENDED) -> None:
        self._reader.result(limit(seconds))
        self._executor.shutdown()


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test is about ends an answer: the change of a token, or its end."""
    monkeypatch.setattr(admissions, "CHECK", 600.0)


def accesses(api: Api) -> Access:
    found = api.actions.callers._access
    assert found is not None
    return found


def revoke(api: Api, token: str) -> None:
    assert Tokens(lambda: api.bench.zk).revoke(token[3:11])


def drain(api: Api, name: str) -> None:
    assert api.call("PUT", f"/drains/label/{name}", {}, api.token(role=Role.OPERATE)).status == 200


@pytest.fixture
def in_background() -> Iterator[Callable[..., concurrent.futures.Future[Answer]]]:
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield executor.submit


def held(api: Api, token: str) -> str:
    answer = api.call("POST", "/leases", {"labels": ["fake-label"], "wait": 30}, token)
    assert answer.status == 201
    return str(answer.content["id"])


def waiting(api: Api, token: str) -> str:
    """Return a lease that waits: all nodes are in use."""
    assert api.call("POST", "/leases", {"labels": ["other"] * 4, "wait": 30}, token).status == 201
    answer = api.call("POST", "/leases", {"labels": ["other"]}, token)
    assert answer.content["state"] == "waiting"
    return str(answer.content["id"])


@pytest.mark.core
def test_stream_of_events_ends_when_its_token_is_revoked(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = count_calls(Callers, "identify", monkeypatch)
    revoked, other = api.token("bob", Role.READ), api.token("carol", Role.READ)
    mine, theirs = Events(api, revoked), Events(api, other)
    wait_for(lambda: len(checks) >= 4, what="the first check of both callers")
    revoke(api, revoked)
    mine.wait_end()
    drain(api, "fake-label")
    wait_for(lambda: theirs.drains, what="the event of the other stream")
    assert mine.drains == [] and not theirs.ended
    with pytest.raises(NotAllowed, match="revoked"):
        next(Pool(api.url, revoked).events("drain-changed"))
    revoke(api, other)
    theirs.wait_end()


def test_stream_that_begins_while_its_token_is_revoked_ends(api: Api) -> None:
    token = api.token("bob", Role.READ)
    assert api.call("GET", "/me", token=token).status == 200  # the record is cached
    revoke(api, token)
    Events(api, token).wait_end()


def test_stream_of_events_ends_when_its_token_expires(api: Api) -> None:
    ends = time.time() + 2.5
    mine = Events(api, api.token("bob", Role.READ, expires=ends))
    mine.wait_end(2.5 + ENDED)
    assert time.time() >= ends


def test_stream_ends_when_its_user_loses_the_access(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check that no change of a token causes."""
    monkeypatch.setattr(admissions, "CHECK", 0.1)
    mine = Events(api, api.token("bob", Role.READ))
    behind_a_proxy = AccessConfig({"proxies": ["127.0.0.1"]})  # and so not protected
    monkeypatch.setattr(accesses(api), "_config", lambda: behind_a_proxy)
    mine.wait_end()


def test_streams_continue_while_zookeeper_cannot_be_reached(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "CHECK", 0.1)
    checks: list[object] = []

    def unreachable() -> Any:
        checks.append(None)
        raise TimeoutError("no answer")

    mine = Events(api, api.token("bob", Role.READ))
    monkeypatch.setattr(accesses(api)._tokens, "_zk", unreachable)
    wait_for(lambda: len(checks) > 5, what="some checks")
    assert not mine.ended
    api.app.stop()
    mine.wait_end()


def test_streams_without_a_token_and_of_users_continue(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "CHECK", 0.1)
    checks = count_calls(Callers, "identify", monkeypatch)
    anonymous, user = Events(api, None), Events(api, None, unix=True)
    wait_for(lambda: len(checks) >= 5, what="some checks")
    drain(api, "fake-label")
    wait_for(lambda: anonymous.drains and user.drains, what="the event")
    api.app.stop()
    for each in (anonymous, user):
        each.wait_end()


def test_long_poll_is_refused_when_its_token_is_revoked(
    api: Api, in_background: Callable[..., concurrent.futures.Future[Answer]]
) -> None:
    token = api.token("bob", Role.READ)
    lease_id = waiting(api, api.token())
    poll = in_background(api.call, "GET", f"/leases/{lease_id}?wait=60", None, token)
    wait_for(lambda: len(api.actions.waiting) == 1, what="the poll")
    revoke(api, token)
    answer = poll.result(limit(ENDED))
    assert (answer.status, answer.content["code"]) == (401, "unauthorized")
    assert len(api.actions.waiting) == 0


def test_waiting_call_for_a_lease_returns_its_token_when_that_of_the_caller_expires(
    api: Api, in_background: Callable[..., concurrent.futures.Future[Answer]]
) -> None:
    """Without that answer nobody could return the lease."""
    waiting(api, api.token())
    body = {"labels": ["other"], "wait": 60}
    call = in_background(
        api.call, "POST", "/leases", body, api.token("bob", expires=time.time() + 2.0)
    )
    answer = call.result(limit(2.0 + ENDED))
    assert (answer.status, answer.content["state"]) == (202, "waiting")
    path = f"/leases/{answer.content['id']}"
    assert api.call("DELETE", path, token=answer.content["token"]).status == 204


def test_program_is_ended_when_the_token_of_its_caller_is_revoked(
    api: Api, programs: Programs, in_background: Callable[..., concurrent.futures.Future[object]]
) -> None:
    token = api.token()
    lease = Pool(api.url, token).get(held(api, token))
    done = in_background(lease.run, "sleep 100")
    wait_for(lambda: programs.started, what="the program")
    revoke(api, token)
    with pytest.raises(NodepoolError, match="its token was revoked") as raised:
        done.result(limit(ENDED))
    assert raised.value.code == "broken"
    assert programs.started[0].closed.wait(20)


def test_program_of_the_token_of_a_lease_outlives_the_token_that_created_the_lease(
    api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "CHECK", 0.1)
    token = api.token()
    answer = api.call("POST", "/leases", {"labels": ["fake-label"], "wait": 30}, token).content
    lease = Pool(api.url, "").get(answer["id"], token=answer["token"])
    revoke(api, token)
    assert lease.run("sleep 2.5; echo done").stdout == b"done\n"


def test_program_is_ended_when_the_role_of_its_token_does_not_suffice_any_more(
    api: Api, programs: Programs
) -> None:
    token = api.token()
    lease_id = held(api, token)
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=90)
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    body = json.dumps({"command": ["sleep", "100"]})
    connection.request("POST", f"/api/v1/leases/{lease_id}/exec", body, head)
    answer = connection.getresponse()
    assert answer.status == 200
    path = f"/nodepool/api-tokens/{token[3:11]}"
    record = json.loads(api.bench.zk.kazoo_client.get(path)[0])
    record["role"] = "read"
    api.bench.zk.kazoo_client.set(path, json.dumps(record).encode())
    assert answer.read() == b""
    connection.close()
