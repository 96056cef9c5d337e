"""The API of leases, with a real ZooKeeper and a launcher (lease, section 6)."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jwt
import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Create

from nodepool.access.identity import Role
from nodepool.access.oidc import Keys
from nodepool.client import NoCapacity, Pool
from nodepool.config.access import AccessConfig
from nodepool.lease import Leases, Terms
from nodepool.zk.records import BUILDING, DELETING, HOLD, READY, UPLOADING
from nodepool.zk.rollback import Rollbacks
from nodepool.zk.writer import Txn, Writer
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api
from tests.support.deadline import limit

NEW = {"labels": ["fake-label"], "for": 3600, "wait": 30, "purpose": "debug #12"}


def test_lease_is_granted_in_one_call(api: Api) -> None:
    token = api.token()
    status, lease, headers = api.call("POST", "/leases", NEW, token)
    assert status == 201 and headers["Location"] == f"/api/v1/leases/{lease['id']}"
    assert (lease["state"], lease["owner"], lease["purpose"], lease["labels"]) == (
        "held",
        "alice",
        "debug #12",
        ["fake-label"],
    )
    assert lease["token"].startswith(f"npl_{lease['id']}_") and lease["why"] is None
    [node] = lease["nodes"]
    stored = api.bench.zuul.node(node["id"])
    assert (stored["state"], stored["hold_expiration"], stored["allocated_to"]) == (
        HOLD,
        3600,
        lease["id"],
    )
    assert lease["token"].rpartition("_")[2] not in str(stored), (
        "only the hash of the token is stored"
    )
    assert (node["address"], node["port"], node["username"]) == (
        stored["interface_ip"],
        stored["connection_port"],
        stored["username"],
    )
    shown = api.call("GET", f"/leases/{lease['id']}", token=token).content
    assert shown == {**lease, "token": None}


def test_waiting_lease_shows_why_and_is_handed_over_when_its_nodes_are_ready(api: Api) -> None:
    token = api.token()
    held = [api.call("POST", "/leases", NEW, token).content["id"] for _ in range(4)]
    status, lease, _ = api.call("POST", "/leases", {**NEW, "wait": 0}, token)
    assert (status, lease["state"], lease["nodes"], lease["ends"]) == (202, "waiting", [], None)
    assert lease["why"]["text"] and lease["why"]["queue_position"] == 1
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(api.call("GET", f"/leases/{lease['id']}?wait=60", token=token))
    )
    thread.start()
    assert api.call("DELETE", f"/leases/{held[0]}", token=token).status == 204
    thread.join(30)
    assert [(answer.status, answer.content["state"]) for answer in found] == [(200, "held")]


def test_long_polls_occupy_no_thread(api: Api) -> None:
    token = api.token()
    for _ in range(4):
        api.call("POST", "/leases", NEW, token)
    waiting = api.call("POST", "/leases", {**NEW, "wait": 0}, token).content["id"]
    polls = [
        threading.Thread(target=api.call, args=("GET", f"/leases/{waiting}?wait=60", None, token))
        for _ in range(20)
    ]
    for poll in polls:
        poll.start()
    wait_for(lambda: len(api.actions.waiting) == 20, what="20 long polls")
    assert api.call("GET", "/leases", token=token).status == 200
    assert api.call("DELETE", f"/leases/{waiting}", token=token).status == 204
    for poll in polls:
        poll.join(10)
        assert not poll.is_alive()


def test_polls_beyond_the_limit_are_answered_immediately(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.actions.waiting.places, "limits", (0, 0))
    token = api.token()
    for _ in range(4):
        api.call("POST", "/leases", {**NEW, "wait": 0}, token)
    waiting = api.call("POST", "/leases", {**NEW, "wait": 0}, token).content["id"]
    start = time.monotonic()
    answer = api.call("GET", f"/leases/{waiting}?wait=60", token=token)
    assert (answer.content["state"], answer.headers["Retry-After"]) == ("waiting", "1")
    assert time.monotonic() - start < limit(30)


def test_waiting_client_polls_at_most_once_per_second(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.actions.waiting.places, "limits", (0, 0))
    calls, call = [], Pool.call
    monkeypatch.setattr(
        Pool, "call", lambda *args, **options: calls.append(args[2]) or call(*args, **options)
    )
    pool = api.pool()
    for _ in range(4):
        pool.lease("fake-label", for_=600)
    calls.clear()
    start = time.monotonic()
    with pytest.raises(NoCapacity):
        pool.lease("fake-label", for_=600, wait=2.5)
    assert calls.count("GET") <= 1 + time.monotonic() - start


def test_long_polls_of_one_owner_leave_places_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.actions.waiting.places, "limits", (6, 3))
    greedy, honest = api.token("greedy"), api.token("honest")
    held = [api.call("POST", "/leases", NEW, greedy).content["id"] for _ in range(4)]
    waiting = [
        api.call("POST", "/leases", {**NEW, "wait": 0}, token).content["id"]
        for token in (greedy, honest)
    ]
    polls = [
        threading.Thread(
            target=api.call, args=("GET", f"/leases/{waiting[0]}?wait=60", None, greedy)
        )
        for _ in range(8)
    ]
    for poll in polls:
        poll.start()
    wait_for(
        lambda: sum(poll.is_alive() for poll in polls) == 3 == len(api.actions.waiting),
        what="3 polls that wait",
    )
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(api.call("GET", f"/leases/{waiting[1]}?wait=60", None, honest))
    )
    thread.start()
    wait_for(lambda: len(api.actions.waiting) == 4, what="the honest poll")
    for lease in held[:2]:
        api.call("DELETE", f"/leases/{lease}", token=greedy)
    for one in (thread, *polls):
        one.join(30)
    assert [(answer.content["state"], "Retry-After" in answer.headers) for answer in found] == [
        ("held", False)
    ]
    assert len(api.actions.waiting) == 0 and api.actions.waiting.places.take("greedy"), (
        "the places are free again"
    )


def test_poll_ends_at_its_deadline_with_the_lease_as_it_is(api: Api) -> None:
    token = api.token()
    for _ in range(4):
        api.call("POST", "/leases", NEW, token)
    start = time.monotonic()
    status, lease, _ = api.call("POST", "/leases", {**NEW, "wait": 1.5}, token)
    assert (status, lease["state"]) == (202, "waiting") and time.monotonic() - start >= 1.5


def test_same_key_gives_the_same_lease_with_a_new_token(api: Api) -> None:
    token, key = api.token(), {"Idempotency-Key": "job-1"}
    first = api.call("POST", "/leases", NEW, token, key)
    second = api.call("POST", "/leases", NEW, token, key)
    assert (first.status, second.status) == (201, 200) and second.content["id"] == first.content[
        "id"
    ]
    path = f"/leases/{first.content['id']}/renew"
    assert api.call("POST", path, {"for": 4000}, first.content["token"]).status == 401
    assert api.call("POST", path, {"for": 4000}, second.content["token"]).status == 200
    other = api.call("POST", "/leases", {**NEW, "labels": ["other"]}, token, key)
    assert (other.status, other.content["code"]) == (409, "key-in-use")
    assert api.call("POST", "/leases", NEW, api.token("bob"), key).status == 201


def test_repeated_call_gives_its_lease_although_the_owner_has_as_many_as_allowed(api: Api) -> None:
    token = api.token(per_owner=1)
    first = api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "job-1"})
    again = api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "job-1"})
    assert (first.status, again.status, again.content["id"]) == (201, 200, first.content["id"])
    other = api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "job-2"})
    assert (other.status, other.content["code"]) == (429, "too-many-leases")


def test_no_more_leases_wait_than_one_session_should_own(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.web.actions.waiting.MOST_EXPECTED", (1, 1))
    held = [
        api.call("POST", "/leases", NEW, api.token(f"user{number}")).content["id"]
        for number in range(4)
    ]
    assert api.call("POST", "/leases", {**NEW, "wait": 0}, api.token("bob")).status == 202
    status, content, headers = api.call("POST", "/leases", NEW, api.token("carol"))
    assert (status, content["code"], headers["Retry-After"]) == (503, "busy", "1")
    assert api.call("DELETE", f"/leases/{held[0]}", token=api.token("user0")).status == 204
    wait_for(lambda: not api.actions.waiting.full("bob"), what="the hand-over to bob")
    assert api.call("POST", "/leases", {**NEW, "wait": 0}, api.token("carol")).status == 202


def interrupt(api: Api, monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Let the mirror be incomplete when the threads that hand leases over check it for the
    given times.
    """
    kind, looks = type(api.launcher.zk), itertools.count()
    synced = kind.synced

    def get(zk: ZooKeeper) -> bool:
        ours = threading.current_thread().name in ("Thread-WebApp", "Thread-WebApp-lease")
        return synced.fget(zk) and not (ours and next(looks) in calls)

    monkeypatch.setattr("nodepool.web.actions.waiting.RETRY", 0.1)
    monkeypatch.setattr(kind, "synced", property(get))


@pytest.mark.parametrize("call", range(4))
def test_lease_is_handed_over_although_the_mirror_was_not_complete(
    api: Api, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The connection is lost before one of the reads on the way to the hand-over."""
    interrupt(api, monkeypatch, call, call + 1)
    waiting, token = api.actions.waiting, api.token()
    lease = api.call("POST", "/leases", {**NEW, "wait": 0}, token).content
    wait_for(lambda: not waiting.expects(lease["id"]), what="the hand-over")
    assert api.call("GET", f"/leases/{lease['id']}?wait=30", token=token).content["state"] == "held"


def test_lease_whose_nodes_were_ready_before_it_was_expected_is_handed_over(api: Api) -> None:
    waiting, leases = api.actions.waiting, Leases(api.launcher.zk)
    lease = leases.ask(["fake-label"], Terms("alice", "test"))
    wait_for(
        lambda: api.launcher.zk.getCachedRequest(lease.id).state == "fulfilled", what="its nodes"
    )
    waiting.expect(lease.id, 600)
    wait_for(lambda: not waiting.expects(lease.id), what="the hand-over")
    assert len(api.bench.nodes(state=HOLD)) == 1


@pytest.mark.parametrize("state", ["fulfilled", "failed"])
def test_request_of_others_with_the_id_of_a_lost_lease_is_kept(api: Api, state: str) -> None:
    waiting, zk = api.actions.waiting, api.launcher.zk
    if state == "failed":
        request_id = api.bench.zuul.submit("no-such-label")
    else:
        request_id = Leases(zk).ask(["fake-label"], Terms("bob", "test")).id
    wait_for(lambda: zk.getCachedRequest(request_id).state == state, what="the request")
    waiting.expect(request_id, 600, "alice")
    wait_for(lambda: not waiting.expects(request_id), what="the end of the lease")
    assert api.bench.zuul.request(request_id)["state"] == state
    assert api.bench.nodes(state=HOLD) == []


def test_hand_over_that_the_connection_has_interrupted_is_repeated_without_further_news(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, zk, losses = type(api.launcher.zk), api.launcher.zk, [1]
    synced, waiting = kind.synced, api.actions.waiting

    def get(facade: ZooKeeper) -> bool:
        ours = threading.current_thread().name == "Thread-WebApp-lease"
        return synced.fget(facade) and not (ours and losses and losses.pop())

    lease = Leases(zk).ask(["fake-label"], Terms("alice", "test"))
    wait_for(lambda: zk.getCachedRequest(lease.id).state == "fulfilled", what="its nodes")
    monkeypatch.setattr("nodepool.web.actions.waiting.RETRY", 0.1)
    monkeypatch.setattr(kind, "synced", property(get))
    waiting.expect(lease.id, 600)
    wait_for(lambda: not waiting.expects(lease.id), what="the second attempt")
    assert losses == [] and len(api.bench.nodes(state=HOLD)) == 1


def test_request_that_is_fulfilled_while_it_is_read_is_handed_over(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror does not show the request; the server shows it as it was before its nodes were
    ready.
    """
    kind, waiting = type(api.launcher.zk), api.actions.waiting
    cached, read, known, handled = (
        kind.getCachedRequest,
        kind.getNodeRequest,
        threading.Event(),
        threading.Event(),
    )

    def get_cached(facade: ZooKeeper, request_id: str) -> Any:
        if threading.current_thread().name == "Thread-WebApp" and request_id == "200-0000009999":
            handled.set()
        return cached(facade, request_id) if known.is_set() else None

    def get(facade: ZooKeeper, request_id: str, *args: Any, **kwargs: Any) -> Any:
        found = read(facade, request_id, *args, **kwargs)
        if threading.current_thread().name == "Thread-WebApp-lease" and not known.is_set():
            found.state = "pending"
            wait_for(lambda: cached(facade, request_id).state == "fulfilled", what="its nodes")
            known.set()
            waiting.expect(request_id, 600)  # an event
            waiting.expect("200-0000009999", 600)  # the next one is handled after it
            assert handled.wait(20)
        return found

    lease = Leases(api.launcher.zk).ask(["fake-label"], Terms("alice", "test"))
    monkeypatch.setattr(kind, "getCachedRequest", get_cached)
    monkeypatch.setattr(kind, "getNodeRequest", get)
    waiting.expect(lease.id, 600)
    wait_for(lambda: not waiting.expects(lease.id), what="the hand-over")
    assert known.is_set() and len(api.bench.nodes(state=HOLD)) == 1


def test_request_that_was_canceled_while_the_mirror_was_not_complete_is_forgotten(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, token = api.actions.waiting, api.token()
    for _ in range(4):
        api.call("POST", "/leases", NEW, token)
    lease = api.call("POST", "/leases", {**NEW, "wait": 0}, token).content
    interrupt(api, monkeypatch, 0, 1)
    api.bench.zuul.cancel(lease["id"])
    wait_for(lambda: not waiting.expects(lease["id"]), what="the end of the lease")
    answer = api.call("GET", f"/leases/{lease['id']}", token=token)
    assert (answer.status, answer.content["code"]) == (410, "gone")


def test_request_whose_creation_has_an_unknown_outcome_is_withdrawn(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, run = api.token(), Writer.run

    def lose(writer: Writer, txn: Txn, *args: Any) -> Any:
        results = run(writer, txn, *args)
        if any("/requests/" in op.path for op in txn.operations if isinstance(op, Create)):
            raise ConnectionLoss
        return results

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "run", lose)
        status, content, _ = api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "job-1"})
        assert (status, content["code"]) == (503, "no-zookeeper")
    wait_for(
        lambda: not api.bench.zk.getNodeRequests(),
        what="the end of the request that nobody follows",
    )
    assert (
        api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "job-1"}).content["state"]
        == "held"
    )


@pytest.mark.parametrize("path", ["/leases", "/nodes", "/events?digest=1", "/me"])
def test_client_of_a_named_proxy_on_this_machine_is_not_on_this_machine(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(api.launcher.config, "access", AccessConfig({"proxies": ["127.0.0.1"]}))
    for protocol in ("https", "http"):
        sent = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": protocol}
        assert api.call("GET", path, headers=sent).status == 403
    if path.startswith("/events"):
        return  # an answer that is allowed does not end
    sent = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
    assert api.call("GET", path, headers=sent, token=api.token()).status == 200
    assert api.call("GET", path, headers={**sent, "X-Forwarded-For": "127.0.0.1"}).status == 200
    assert api.call("GET", path).status == 200


def test_slow_issuer_of_job_tokens_occupies_no_web_thread(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client sends job tokens whose keys are being read for long; another one uses the API
    meanwhile.
    """
    reading = threading.Event()
    monkeypatch.setattr(Keys, "_fetch", lambda _keys: reading.wait(60) and {})
    rule = {"match": {"sub": "*"}, "role": "borrow", "owner": "{sub}"}
    issuer = {"name": "ci", "issuer": "http://127.0.0.1:9", "audience": "nodepool", "rules": [rule]}
    monkeypatch.setattr(api.launcher.config.access, "oidc", AccessConfig({"oidc": [issuer]}).oidc)
    claims = {"iss": issuer["issuer"], "aud": "nodepool", "sub": "acme"}
    token, answers, stop = api.token("honest"), [], threading.Event()

    def ask() -> float:
        begin = time.monotonic()
        assert api.call("GET", "/leases", token=token).status == 200
        return time.monotonic() - begin

    def greedy(number: int) -> None:
        while not stop.is_set():
            text = jwt.encode(claims, "x" * 32, headers={"kid": f"invented {number}"})
            answers.append(api.call("GET", "/me", token=text))
            stop.wait(0.05)

    alone = statistics.median(ask() for _ in range(20))
    threads = [
        threading.Thread(target=greedy, args=(number,), name="greedy") for number in range(8)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) >= 8, what="the greedy client")
    try:
        assert statistics.median(ask() for _ in range(20)) <= max(2 * alone, 0.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        reading.set()  # last: with the keys, the invented one would be refused
    assert {
        (answer.status, answer.content["code"], answer.headers.get("Retry-After"))
        for answer in answers
    } == {(503, "busy", "1")}


def test_concurrent_calls_with_one_key_give_one_lease(api: Api) -> None:
    token, answers = api.token(), []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                api.call("POST", "/leases", NEW, token, {"Idempotency-Key": "k"})
            )
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({answer.content["id"] for answer in answers}) == 1, answers
    assert len(api.bench.nodes(state=HOLD)) == 1


def test_lease_token_renews_describes_and_returns_its_own_lease_only(api: Api) -> None:
    token = api.token()
    one, two = (api.call("POST", "/leases", NEW, token).content for _ in range(2))
    path, own = f"/leases/{one['id']}", one["token"]
    assert api.call("POST", path + "/renew", {"for": 7000}, own).content["renewed"] == 1
    described = api.call("PATCH", path, {"purpose": "new", "notes": {"runner": 1004}}, own).content
    assert (described["purpose"], described["notes"]) == ("new", {"runner": 1004})
    assert api.call("GET", path, token=own).status == 200
    for method, other, body in (
        ("DELETE", f"/leases/{two['id']}", None),
        ("POST", "/leases", NEW),
        ("GET", "/leases", None),
        ("GET", "/nodes", None),
        ("GET", f"/leases/{two['id']}", None),
        ("DELETE", f"/nodes/{one['nodes'][0]['id']}", None),
    ):
        assert api.call(method, other, body, own).status == 403, (method, other)
    assert api.call("DELETE", path, token=own).status == 204


def test_lease_token_has_the_limit_of_the_token_that_created_the_lease(api: Api) -> None:
    for longest in (7200, 12 * 3600):  # the configured limit is 8 hours
        lease = api.call("POST", "/leases", NEW, api.token(longest=longest)).content
        path = f"/leases/{lease['id']}/renew"
        answer = api.call("POST", path, {"for": longest + 1}, lease["token"])
        assert (answer.status, answer.content["code"]) == (403, "cap")
        assert api.call("POST", path, {"for": longest}, lease["token"]).status == 200


def test_return_is_repeatable(api: Api) -> None:
    token = api.token()
    lease = api.call("POST", "/leases", NEW, token).content
    for _ in range(3):
        assert api.call("DELETE", f"/leases/{lease['id']}", token=token).status == 204
    api.bench.wait_gone(lease["nodes"][0]["id"])
    answer = api.call("POST", f"/leases/{lease['id']}/renew", {"for": 60}, token)
    assert (answer.status, answer.content["code"]) == (410, "ended")


def test_token_of_an_ended_lease_is_for_the_return_of_this_lease_only(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = (api.call("POST", "/leases", NEW, api.token()).content for _ in range(2))
    for token in (first["token"], "npl_200-0000009999_invented"):
        assert api.call("DELETE", f"/leases/{first['id']}", token=token).status == (
            204 if token == first["token"] else 410
        )
    with caplog.at_level("INFO", "nodepool.audit"):
        assert api.call("DELETE", f"/leases/{first['id']}", token=first["token"]).status == 204, (
            "again"
        )
    [line] = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "nodepool.audit"
    ]
    assert (line["via"], line["target"], line["result"]) == (
        f"lease:{first['id']}",
        f"lease {first['id']}",
        "ok",
    )
    for path in (
        f"/leases/{other['id']}",
        f"/nodes/{other['nodes'][0]['id']}",
        "/requests/200-0000000001",
        "/images/a/builds/1",
    ):
        for token in (first["token"], "npl_200-0000009999_invented"):
            answer = api.call("DELETE", path, token=token)
            assert (answer.status, answer.content["code"]) == (410, "ended"), path
    assert api.call("GET", f"/leases/{other['id']}", token=api.token()).content["state"] == "held"


def test_others_neither_change_a_lease_nor_see_its_notes(api: Api) -> None:
    lease = api.call("POST", "/leases", {**NEW, "notes": {"job": 7}}, api.token()).content
    path = f"/leases/{lease['id']}"
    bob, operator = api.token("bob"), api.token("carol", Role.OPERATE)
    for method, body in (("DELETE", None), ("PATCH", {"purpose": "mine"})):
        answer = api.call(method, path, body, bob)
        assert (answer.status, answer.content["code"]) == (
            403,
            "not-allowed",
        ) and "alice" in answer.content["detail"]
    assert api.call("GET", path, token=bob).content["notes"] == {}
    assert api.call("GET", path, token=operator).content["notes"] == {"job": 7}
    assert api.call("DELETE", path, token=operator).status == 204


def test_autohold_belongs_to_no_caller_who_has_the_name_in_its_record(api: Api) -> None:
    node = api.bench.ready_node(
        "p", "main", "a", state=HOLD, hold_job="acme project job", hold_expiration=600
    )
    path = f"/leases/node-{node.id}"
    assert api.call("GET", path, token=api.token("zuul")).content["owner"] == "zuul"
    assert api.call("DELETE", path, token=api.token("zuul")).status == 403
    assert api.call("DELETE", path, token=api.token("carol", Role.OPERATE)).status == 204


@pytest.mark.parametrize(
    "change, code",
    [
        ({"labels": ["other"]}, "not-allowed"),
        ({"tenant": "else"}, "not-allowed"),
        ({"priority": "100"}, "not-allowed"),
        ({"for": 7201}, "cap"),
    ],
)
def test_lease_beyond_what_the_token_allows_is_refused(
    api: Api, change: dict[str, Any], code: str
) -> None:
    answer = api.call(
        "POST",
        "/leases",
        {**NEW, **change},
        api.token(labels=("fake-*",), tenant="acme", longest=7200.0),
    )
    assert (answer.status, answer.content["code"]) == (403, code)
    assert api.bench.zk.getNodeRequests() == []


def test_label_that_may_not_be_leased_is_refused(api: Api) -> None:
    answer = api.call(
        "POST", "/leases", {**NEW, "labels": ["zuul-only"]}, api.token(role=Role.ADMIN)
    )
    assert (answer.status, answer.content["code"]) == (403, "not-allowed")
    assert (
        answer.content["detail"]
        == "label zuul-only may not be leased (lease: false in its configuration)"
    )


def test_lease_that_nobody_polls_is_handed_over_when_its_node_is_ready(api: Api) -> None:
    token = api.token()
    held = [api.call("POST", "/leases", NEW, token).content for _ in range(4)]
    waiting = api.call("POST", "/leases", {**NEW, "wait": 0}, token)
    assert waiting.status == 202
    api.bench.wait_request(waiting.content["id"], "requested", "pending")
    assert api.call("DELETE", f"/leases/{held[0]['id']}", token=token).status == 204
    wait_for(
        lambda: any(
            node.allocated_to == waiting.content["id"] for node in api.bench.nodes(state=HOLD)
        ),
        30,
        "it is held",
    )


def test_poll_of_a_held_lease_is_answered_when_it_is_returned(api: Api) -> None:
    token = api.token()
    path = f"/leases/{api.call('POST', '/leases', NEW, token).content['id']}"
    with ThreadPoolExecutor(1) as executor:
        began = time.monotonic()
        poll = executor.submit(api.call, "GET", f"{path}?wait=60&state=held", token=token)
        wait_for(lambda: len(api.actions.waiting) == 1, 20, "the poll")
        assert api.call("DELETE", path, token=token).status == 204
        assert poll.result(90).status == 410
    assert time.monotonic() - began < limit(20)


def test_poll_is_answered_although_its_lease_changed_before_it_waited(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, waiting = api.token(), api.actions.waiting
    path, changed = (
        f"/leases/{api.call('POST', '/leases', NEW, token).content['id']}",
        waiting.changed,
    )

    def end(lease_id: str) -> None:
        assert api.call("DELETE", path, token=token).status == 204
        wait_for(lambda: Leases(api.launcher.zk).get(lease_id) is None, what="the end of the lease")

    async def wait_late(lease_id: str, since: int, seconds: float) -> None:
        await asyncio.to_thread(end, lease_id)
        await changed(lease_id, since, seconds)

    monkeypatch.setattr(waiting, "changed", wait_late)
    with ThreadPoolExecutor(1) as executor:
        poll = executor.submit(api.call, "GET", f"{path}?wait=30&state=held", token=token)
        wait_for(poll.done, what="the answer")
        assert poll.result().status == 410


@pytest.mark.parametrize("key", ["", "a\tb", "x" * 256])
def test_key_that_cannot_be_stored_is_refused(api: Api, key: str) -> None:
    answer = api.call("POST", "/leases", NEW, api.token(), {"Idempotency-Key": key})
    assert (answer.status, answer.content["code"]) == (422, "bad-request")


def test_directory_that_ssh_cannot_use_is_refused(api: Api) -> None:
    token = api.token()
    path = f"/leases/{api.call('POST', '/leases', NEW, token).content['id']}/ssh"
    for directory in ('a"b', "a\\b", "a\nb", "${HOME}", "{{x}}"):
        answer = api.call("GET", f"{path}?directory={urllib.parse.quote(directory)}", token=token)
        assert (answer.status, answer.content["code"]) == (422, "bad-request"), directory
    assert api.call("GET", f"{path}?directory=a%20b", token=token).status == 200


def test_limits_of_a_token_are_kept(api: Api) -> None:
    token = api.token(labels=("fake-*",), longest=7200.0, tenant="acme", per_owner=2)
    lease = api.call("POST", "/leases", NEW, token).content
    assert lease["tenant"] == "acme"
    for change, code in (
        ({"labels": ["other"]}, "not-allowed"),
        ({"tenant": "else"}, "not-allowed"),
        ({"for": 7201}, "cap"),
        ({"priority": "100"}, "not-allowed"),
    ):
        answer = api.call("POST", "/leases", {**NEW, **change}, token)
        assert (answer.status, answer.content["code"]) == (403, code), change
    answer = api.call("POST", f"/leases/{lease['id']}/renew", {"for": 7201}, token)
    assert (answer.status, answer.content["code"]) == (403, "cap")
    api.call("POST", "/leases", NEW, token)
    answer = api.call("POST", "/leases", NEW, token)
    assert (answer.status, answer.content["code"]) == (429, "too-many-leases")


@pytest.mark.parametrize(
    "change, place",
    [
        ({"labels": []}, "labels"),
        ({"labels": ["x"] * 21}, "labels"),
        ({"labels": "fake-label"}, "labels"),
        ({"for": 59}, "for"),
        ({"for": 1e3}, "for"),
        ({"for": True}, "for"),
        ({"for": 10**30}, "for"),
        ({"wait": 61}, "wait"),
        ({"wait": -1}, "wait"),
        ({"purpose": "a\nb"}, "purpose"),
        ({"purpose": "x" * 201}, "purpose"),
        ({"unknown": 1}, "unknown"),
        ({"notes": {"a": "x" * 1100}}, "notes"),
        ({"notes": {"a": {}}}, "notes"),
        ({"priority": "1"}, "priority"),
        ({"labels": ["no-such-label"]}, "no-such-label"),
    ],
)
def test_invalid_bodies_are_refused_with_the_place(
    api: Api, change: dict[str, Any], place: str
) -> None:
    answer = api.call("POST", "/leases", {**NEW, **change}, api.token())
    assert answer.status == 422 and place in answer.content["detail"], answer
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert api.bench.zk.getNodeRequests() == []


@pytest.mark.parametrize("name", ["..", ".", "%00", "a%0ab"])
def test_names_that_cannot_exist_are_not_found(api: Api, name: str) -> None:
    operator = api.token("carol", Role.OPERATE)
    for method, path in (("GET", "/leases/"), ("DELETE", "/nodes/"), ("DELETE", "/requests/")):
        assert api.call(method, path + name, token=operator).status == 404, (method, path)
    assert api.call("DELETE", "/leases/x", token=f"npl_{name}_secret").status == 410


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 60000, b'{"labels": ["\\ud800"]}', b"1" * 1000]
)
def test_hostile_json_is_refused(api: Api, data: bytes) -> None:
    assert api.call("POST", "/leases", data, api.token()).status == 422


def test_calls_need_json_and_a_known_method(api: Api) -> None:
    token = api.token()
    assert api.call("POST", "/leases", NEW, token, {"Content-Type": "text/plain"}).status == 415
    answer = api.call("PUT", "/leases", NEW, token)
    assert answer.status == 405 and answer.headers["Allow"] == "GET, POST"
    assert api.call("GET", "/leases?wat=1", token=token).status == 422


def test_callers_without_a_token_may_only_read(api: Api) -> None:
    assert api.call("GET", "/leases").status == 200
    answer = api.call("POST", "/leases", NEW)
    assert answer.status == 401 and answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert api.call("POST", "/leases", NEW, "np_x_y").status == 401
    assert api.call("POST", "/leases", NEW, api.token(role=Role.READ)).status == 403
    # A foreign page whose name resolves to this machine.
    assert api.call("GET", "/leases", headers={"Host": "evil.example"}).status == 403


def test_root_is_administrator_on_the_unix_socket(api: Api) -> None:
    lease = api.call("POST", "/leases", NEW, unix=True).content
    assert (lease["state"], lease["owner"]) == ("held", "root")
    assert api.call("GET", "/nodes", unix=True).content["total"] == 1


def test_operators_hold_and_delete_nodes(api: Api) -> None:
    api.bench.fulfilled("fake-label")
    operator, [node] = api.token("carol", Role.OPERATE), api.bench.nodes()
    [request] = api.bench.zk.getNodeRequests()
    assert api.call("DELETE", f"/requests/{request}", token=operator).status == 204
    assert api.call("DELETE", f"/requests/{request}", token=operator).status == 404
    api.bench.wait_nodes(1, state=READY, allocated_to=None)
    path = f"/nodes/{int(node.id)}"
    assert api.call("POST", path + "/hold", {}, api.token()).status == 403
    held = api.call("POST", path + "/hold", {"for": 600, "purpose": "look"}, operator)
    assert (held.status, held.content["owner"], held.content["state"]) == (201, "carol", "held")
    answer = api.call("DELETE", path, token=operator)
    assert (answer.status, answer.content["code"]) == (409, "leased") and "carol" in answer.content[
        "detail"
    ]
    assert api.call("DELETE", path + "?force=true", token=operator).content == {
        "node": node.id,
        "state": DELETING,
    }
    api.bench.wait_gone(node.id)
    assert api.call("DELETE", path, token=operator).status == 404


def test_operators_drain_and_undrain(api: Api) -> None:
    operator, path = api.token("carol", Role.OPERATE), "/drains/label/fake-label"
    wait_for(lambda: any("fake-label" in each["labels"] for each in api.bench.zk.readReports()))
    body = {"for": 3600, "reason": "new image"}
    assert api.call("PUT", path, body, api.token()).status == 403
    assert api.call("PUT", "/drains/label/nothing", body, operator).status == 404
    assert api.call("PUT", "/drains/planet/earth", body, operator).status == 404
    answer = api.call("PUT", path, body, operator)
    assert answer.status == 200
    assert answer.content == {
        **answer.content,
        "kind": "label",
        "name": "fake-label",
        "by": "carol",
        "reason": "new image",
        "keep_idle": False,
        "nodes": 0,
    }
    wait_for(lambda: api.launcher.state.drains.all())
    lease = api.call("POST", "/leases", {**NEW, "wait": 0}, api.token()).content
    wait_for(
        lambda: (
            "label fake-label is drained until"
            in str(api.call("GET", f"/leases/{lease['id']}", token=api.token()).content["why"])
        )
    )
    found = api.call("GET", "/drains").content
    assert found["drains"] == [answer.content] and list(found["labels"]) == ["fake-label"]
    assert found["labels"]["fake-label"].startswith("label fake-label is drained until ")
    assert api.call("DELETE", path, token=api.token()).status == 403
    assert api.call("DELETE", path, token=operator).status == 204
    assert api.call("DELETE", path, token=operator).status == 404
    held = api.call("GET", f"/leases/{lease['id']}?wait=30", token=api.token())
    assert held.content["state"] == "held"


def test_operators_build_pause_and_resume_images_and_delete_uploads(api: Api) -> None:
    zk, operator = api.bench.zk, api.token("carol", Role.OPERATE)
    upload = api.bench.store_image("fake-image", "fake-provider")
    assert api.call("POST", "/images/fake-image/build", token=operator).status == 202
    assert zk.hasBuildRequest("fake-image")
    assert api.call("POST", "/images/fake-image/pause", token=operator).status == 200
    assert zk.getImagePaused("fake-image")
    assert api.call("POST", "/images/fake-image/build", token=operator).content["code"] == "paused"
    assert api.call("POST", "/images/fake-image/resume", token=operator).status == 200
    assert not zk.getImagePaused("fake-image")
    assert api.call("POST", "/images/none/build", token=operator).status == 404
    path = (
        f"/images/fake-image/builds/{upload.build_id}/providers/fake-provider/uploads/{upload.id}"
    )
    assert api.call("DELETE", path, token=api.token()).status == 403
    assert api.call("DELETE", path, token=operator).status == 202
    assert (
        zk.getImageUpload("fake-image", upload.build_id, "fake-provider", upload.id).state
        == DELETING
    )
    path = f"/images/fake-image/builds/{upload.build_id}"
    assert api.call("DELETE", path, token=api.token()).status == 403
    assert api.call("DELETE", path, token=operator).content == {
        "build": f"fake-image/{upload.build_id}",
        "state": DELETING,
    }
    assert zk.getBuild("fake-image", upload.build_id).state == DELETING
    assert api.call("DELETE", f"{path}0", token=operator).content["code"] == "not-found"


def test_operators_roll_images_back_and_forward(api: Api) -> None:
    # The name of what holds uploads back has no meaning as that of a user.
    zk, operator = api.bench.zk, api.token("verification", Role.OPERATE)
    old, new = (
        api.bench.store_image("fake-image", "fake-provider", state_time=time)
        for time in (1000.0, 2000.0)
    )

    def used() -> str:
        return str(zk.getMostRecentImageUpload("fake-image", "fake-provider").build_id)

    path, body = "/images/fake-image/rollback", {"reason": "no network"}
    assert api.call("POST", path, body, api.token()).status == 403
    assert api.call("POST", "/images/none/rollback", body, operator).status == 404
    nowhere = api.call("POST", path, {"provider": "nowhere"}, operator)
    assert (nowhere.status, nowhere.content["code"]) == (409, "unavailable")
    answer = api.call("POST", path, body, operator)
    switch = {"provider": "fake-provider", "build": old.build_id, "upload": old.id}
    assert answer.content == {
        "image": "fake-image",
        "changed": [{**switch, "instead_of": new.build_id}],
        "unchanged": {},
    }
    assert used() == old.build_id
    again = api.call("POST", path, body, operator)
    assert again.status == 409
    assert "user verification has rolled back" in again.content["detail"]
    found = wait_for(
        lambda: [row for row in api.call("GET", "/uploads").content["rows"] if row["reason"]]
    )
    assert "by user verification: no network" in found[0]["reason"]
    path = "/images/fake-image/rollforward"
    assert api.call("POST", path, {}, api.token()).status == 403
    assert api.call("POST", path, {}, operator).status == 200 and used() == new.build_id
    assert api.call("POST", path, {}, operator).status == 409


def test_operators_use_an_upload_without_verification(api: Api) -> None:
    zk, operator = api.bench.zk, api.token("carol", Role.OPERATE)
    upload = api.bench.store_image("fake-image", "fake-provider", state=UPLOADING)
    upload.state = READY
    Rollbacks(zk, lambda: 1000.0).hold_back(upload)
    assert zk.getMostRecentImageUpload("fake-image", "fake-provider") is None
    refused = api.call("POST", "/images/fake-image/rollback", {}, operator)
    assert refused.status == 409 and "all are held back" in refused.content["detail"]
    (changed,) = api.call("POST", "/images/fake-image/rollforward", {}, operator).content["changed"]
    assert (changed["upload"], changed["instead_of"]) == (upload.id, None)
    assert zk.getMostRecentImageUpload("fake-image", "fake-provider").id == upload.id


def test_operators_rotate_labels_and_end_that(api: Api) -> None:
    operator, path = api.token("carol", Role.OPERATE), "/rotations/label/fake-label"
    wait_for(lambda: any("fake-label" in each["labels"] for each in api.bench.zk.readReports()))
    _request, [node] = api.bench.fulfilled("fake-label")
    body = {"reason": "new flavor"}
    assert api.call("PUT", path, body, api.token()).status == 403
    assert api.call("PUT", "/rotations/label/nothing", body, operator).status == 404
    # A launcher can be drained, but not rotated.
    refused = api.call("PUT", "/rotations/launcher/vm", body, operator)
    assert refused.status == 404
    assert refused.content["detail"] == "launcher must be one of label, image, provider"
    answer = api.call("PUT", path, body, operator)
    assert (answer.status, answer.content["by"]) == (200, "carol")
    assert answer.content["nodes"] == 1 and answer.content["reason"] == "new flavor"
    wait_for(lambda: api.call("GET", "/rotations").content["rotations"] == [answer.content])
    assert api.call("DELETE", path, token=api.token()).status == 403
    assert api.call("DELETE", path, token=operator).status == 204
    assert api.call("DELETE", path, token=operator).status == 404
    assert api.bench.node(node.id).state == READY


def test_build_or_upload_in_progress_is_not_deleted(api: Api) -> None:
    zk, operator = api.bench.zk, api.token("carol", Role.OPERATE)
    upload = api.bench.store_image("fake-image", "fake-provider", state=UPLOADING)
    build = zk.getBuild("fake-image", upload.build_id)
    build.state = BUILDING
    zk.storeBuild("fake-image", build, upload.build_id)
    path = f"/images/fake-image/builds/{upload.build_id}"
    for each in (path, f"{path}/providers/fake-provider/uploads/{upload.id}"):
        assert api.call("DELETE", each, token=operator).content["code"] == "unavailable"
    assert zk.getBuild("fake-image", upload.build_id).state == BUILDING


def test_failed_request_is_reported_with_its_reason_and_removed(api: Api) -> None:
    answer = api.call("POST", "/leases", {**NEW, "labels": ["fake-label"] * 5}, api.token())
    assert answer.status == 410, answer
    assert answer.content["code"] == "failed" and answer.content["detail"]
    assert api.bench.zk.getNodeRequests() == []


def test_canceled_request_ends_the_wait(api: Api) -> None:
    token, found = api.token(), []
    for _ in range(4):
        api.call("POST", "/leases", NEW, token)
    waiting = api.call("POST", "/leases", {**NEW, "wait": 0}, token).content["id"]
    poll = threading.Thread(
        target=lambda: found.append(api.call("GET", f"/leases/{waiting}?wait=60", token=token))
    )
    poll.start()
    wait_for(lambda: len(api.actions.waiting) == 1, what="a long poll")
    assert (
        api.call("DELETE", f"/requests/{waiting}", token=api.token("carol", Role.OPERATE)).status
        == 204
    )
    poll.join(30)
    assert [(answer.status, answer.content["code"]) for answer in found] == [(410, "gone")]


def test_audit_log_names_caller_action_object_and_result(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    token = api.token()
    with caplog.at_level("INFO", "nodepool.audit"):
        lease = api.call("POST", "/leases", NEW, token).content
        api.call("DELETE", f"/leases/{lease['id']}", token=token)
        api.call("DELETE", "/nodes/0000000001", token=token)
    lines = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "nodepool.audit"
    ]
    seen = [(line["owner"], line["action"], line["target"], line["result"]) for line in lines]
    assert seen == [
        ("alice", "create", f"lease {lease['id']}", "ok"),
        ("alice", "give-back", f"lease {lease['id']}", "ok"),
        ("alice", "delete", "node 0000000001", "not-allowed"),
    ]
    assert lease["token"] not in caplog.text and token not in caplog.text
    assert {"action"} <= {event["type"] for event in api.launcher.feed.since(0)[0]}


def test_openapi_document_describes_every_call(api: Api) -> None:
    document = api.call("GET", "/openapi.json").content
    calls = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, item in document["paths"].items()
        for method in item
    }
    assert calls == {(route.method, route.path) for route in api.actions.table.routes}
    assert document["components"]["schemas"]["NewLease"]["required"] == ["labels"]
