"""One owner takes all it gets of each shared place of the API; another one works as before."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jwt
import pytest

from nodepool.access.identity import Role
from nodepool.access.oidc import Keys
from nodepool.config.access import AccessConfig
from nodepool.lease.leases import turn_of
from nodepool.web import shares, streams
from nodepool.web.actions import waiting
from tests.conftest import wait_for
from tests.integration.lease.conftest import Answer, Api
from tests.integration.lease.test_exec import Programs, places
from tests.integration.lease.test_exec import programs as programs
from tests.support.fairness import assert_fair, in_threads

NEW = {"labels": ["fake-label"], "for": 3600, "wait": 30, "purpose": "debug #12"}


def me(api: Api, token: str) -> Callable[[], None]:
    """Return a call that needs nothing but a thread."""

    def ask() -> None:
        assert api.call("GET", "/leases?owner=me", token=token).status == 200

    return ask


def test_programs_of_one_owner_leave_places_for_others(
    api: Api, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    places(api, monkeypatch, 4, 3, 3)
    honest, other = (
        api.pool(name).lease("fake-label", for_="10m") for name in ("honest", "greedy")
    )

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        before, answers = len(programs.started), list[Answer]()

        def run() -> None:
            path, body = f"/leases/{other.id}/exec", {"command": ["sleep", "100"], "timeout": 60}
            answers.append(api.call("POST", path, body, other.token))

        with in_threads(run, 6) as threads:
            wait_for(
                lambda: len(programs.started) - before + len(answers) == 6, what="all programs"
            )
            mine = programs.started[before:]
            try:
                yield lambda: sum(thread.is_alive() for thread in threads) == len(mine)
            finally:
                for program in mine:
                    program.process.kill()
        assert {(each.status, each.headers.get("Retry-After")) for each in answers} == {
            (503, "1"),
            (200, None),
        }

    def program() -> None:
        assert honest.run("true", timeout=20).status == 0

    assert_fair(program, greedy)
    for lease in (honest, other):
        lease.give_back()


def test_polls_of_one_owner_leave_places_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.actions.waiting.places, "limits", (6, 3))
    tokens = {name: api.token(name) for name in ("greedy", "honest")}
    for _ in range(4):
        api.call("POST", "/leases", NEW, tokens["greedy"])
    leases = {
        name: api.call("POST", "/leases", {**NEW, "wait": 0}, token).content["id"]
        for name, token in tokens.items()
    }

    def poll(name: str, seconds: float) -> Answer:
        return api.call("GET", f"/leases/{leases[name]}?wait={seconds}", None, tokens[name])

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        with in_threads(lambda: poll("greedy", 5), 8) as threads:
            wait_for(
                lambda: sum(each.is_alive() for each in threads) == len(api.actions.waiting) < 8,
                what="polls that wait, and no others",
            )
            yield lambda: len(api.actions.waiting) > 0

    def honest() -> None:
        answer = poll("honest", 0.1)
        assert answer.status == 200 and "Retry-After" not in answer.headers, "it was waited for"

    assert_fair(honest, greedy)


def test_waiting_leases_of_one_owner_leave_places_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_EXPECTED", (4, 3))
    token, greedy = api.token("honest"), api.token("greedy", Role.OPERATE)
    for _ in range(4):
        api.call("POST", "/leases", NEW, greedy)

    @contextlib.contextmanager
    def waits() -> Iterator[Callable[[], bool]]:
        answers = [
            api.call("POST", "/leases", {**NEW, "wait": 0, "priority": "300"}, greedy)
            for _ in range(5)
        ]
        ids = [answer.content["id"] for answer in answers if answer.status == 202]
        yield lambda: all(map(api.actions.waiting.expects, ids))
        assert {answer.headers["Retry-After"] for answer in answers if answer.status == 503} == {
            "1"
        }
        for lease_id in ids:
            api.call("DELETE", f"/leases/{lease_id}", token=greedy)
        wait_for(lambda: not any(map(api.actions.waiting.expects, ids)), what="their end")

    def honest() -> None:
        answer = api.call("POST", "/leases", {**NEW, "wait": 0}, token)
        assert answer.status == 202
        lease_id = answer.content["id"]
        api.call("DELETE", f"/leases/{lease_id}", token=token)
        wait_for(lambda: not api.actions.waiting.expects(lease_id), what="its end")

    assert_fair(honest, waits)


def test_calls_of_one_owner_that_block_leave_threads_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server has the turn of the greedy owner to create requests."""
    monkeypatch.setattr("nodepool.lease.leases.TURN", 60.0)
    kazoo, token = api.bench.zk.kazoo_client, api.token("greedy")

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        turn = turn_of(kazoo, "greedy")
        assert turn.take()
        with in_threads(
            lambda: api.call("POST", "/leases", {**NEW, "wait": 0}, token), 8
        ) as threads:
            wait_for(
                lambda: (
                    [each.name for each in threading.enumerate()].count("Thread-WebApp-call")
                    == shares.AT_A_TIME
                ),
                what="as many calls as run at a time",
            )
            try:
                yield lambda: all(each.is_alive() for each in threads)
            finally:
                turn.drop()
        for lease in api.call("GET", "/leases?owner=me", token=token).content["leases"]:
            api.call("DELETE", f"/leases/{lease['id']}", token=token)

    assert_fair(me(api, api.token("honest")), greedy)


def test_unknown_keys_of_one_owner_do_not_delay_known_ones(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The issuer does not answer while its keys are read again because of an unknown one."""
    rule = {"match": {"sub": "*"}, "role": "borrow", "owner": "{sub}"}
    issuer = {"name": "ci", "issuer": "http://127.0.0.1:9", "audience": "nodepool", "rules": [rule]}
    monkeypatch.setattr(api.launcher.config.access, "oidc", AccessConfig({"oidc": [issuer]}).oidc)
    monkeypatch.setattr("nodepool.access.oidc.ALGORITHMS", ["HS256"])
    monkeypatch.setattr("nodepool.access.oidc.PAUSE", 0.0)
    claims = {"iss": issuer["issuer"], "aud": "nodepool", "sub": "acme", "exp": 4e9}
    known = jwt.PyJWK({"kty": "oct", "k": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg"})
    reading, blocks, answered = threading.Event(), threading.Event(), threading.Event()
    answered.set()

    def fetch(_keys: Keys) -> Any:
        reading.set()
        if blocks.is_set():
            answered.wait(60)
        return {"known": known}

    monkeypatch.setattr(Keys, "_fetch", fetch)

    def call(kid: str) -> Answer:
        text = jwt.encode(claims, "x" * 32, "HS256", headers={"kid": kid})
        return api.call("GET", "/leases?owner=me", token=text)

    def honest() -> None:
        assert call("known").status == 200

    wait_for(lambda: call("known").status == 200, what="the keys")

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        reading.clear()
        answered.clear()
        blocks.set()
        with in_threads(lambda: call("invented"), 8):
            wait_for(reading.is_set, what="a read of the keys")
            try:
                yield lambda: call("invented").headers.get("Retry-After") == "1"
            finally:
                blocks.clear()
                answered.set()

    assert_fair(honest, greedy)


def test_streams_of_one_owner_leave_places_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMS", 3)
    tokens = {name: api.token(name, Role.READ) for name in ("greedy", "honest")}

    def follow(name: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
        headers = {"Authorization": f"Bearer {tokens[name]}"}
        connection.request("GET", "/api/v1/events", headers=headers)
        answer = connection.getresponse()
        connection.close()  # with the answer
        return answer

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        wait_for(lambda: len(api.app.streams) == 0, what="the end of the streams")
        found = [follow("greedy") for _ in range(6)]
        assert [(each.status, each.headers["Retry-After"]) for each in found] == [
            (200, None)
        ] * 3 + [(503, "1")] * 3
        for each in found[:3]:
            each.readline()
        yield lambda: len(api.app.streams) >= 2
        for each in found:
            each.close()

    def honest() -> None:
        answer = follow("honest")
        assert answer.status == 200 and answer.readline() == b"retry: 3000\n"
        answer.close()

    assert_fair(honest, greedy)
