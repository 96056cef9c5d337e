"""What the emulator of GitHub's service does not show: answers made by hand."""

from __future__ import annotations

import email.utils
import json
import logging
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import jwt
import pytest

from nodepool.adapters.github import listener, service
from nodepool.adapters.github.listener import ScaleSet, Settings
from nodepool.adapters.github.program import SCHEMA, main, service_of, settings_of
from nodepool.adapters.github.service import Place, Service, ServiceError, moment
from nodepool.adapters.runners import program
from nodepool.adapters.runners.fleet import Pause
from nodepool.adapters.runners.forge import Kind
from nodepool.adapters.runners.program import ConfigError, Pools
from nodepool.adapters.runners.runner import Runner
from tests.conftest import wait_for
from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request

BOM = b"\xef\xbb\xbf"


class Answers:
    """A service whose answers are decided by the test: path and method -> what to answer."""

    def __init__(self) -> None:
        self.proxy = FaultProxy(("127.0.0.1", 1), self._answer)
        self.url = self.proxy.url
        self.made: dict[tuple[str, str], Callable[[Request], Reply]] = {}
        self.give(
            "POST",
            "/api/v3/orgs/acme/actions/runners/registration-token",
            {"token": "registration"},
        )
        self.give(
            "POST",
            "/api/v3/actions/runner-registration",
            {"url": f"{self.url}/service/", "token": "admin"},
        )

    def give(self, method: str, path: str, body: object, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.made[method, path] = lambda _request: Reply(status, data, list(headers.items()))

    def row(self, method: str, path: str, *replies: Reply) -> None:
        """Give one answer after the other; the last one remains."""
        left = list(replies)
        self.made[method, path] = lambda _request: left.pop(0) if len(left) > 1 else left[0]

    def _answer(self, request: Request, _forward: Forward) -> Reply | None:
        made = self.made.get((request.method, request.path.partition("?")[0]))
        return Reply(599, b"{}") if made is None else made(request)

    def requests(self, method: str, path: str) -> list[Request]:
        return [
            each
            for each in self.proxy.requests
            if (each.method, each.path.partition("?")[0]) == (method, path)
        ]


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.proxy.close()


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def calls(answers: Answers, stopping: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(service, "REPEAT", 3.0)
    return Service(Place.read(f"{answers.url}/acme"), lambda: "ghp_secret", stopping)


SETS = "/service/_apis/runtime/runnerscalesets"
AGENTS = "/service/_apis/distributedtask/pools/0/agents"
SESSION = {
    "sessionId": "7b3c4a3e-0000-4000-8000-000000000001",
    "messageQueueAccessToken": "queue-token",
    "statistics": {"totalAssignedJobs": 2},
}


@pytest.mark.spec("GitHub 2: configuration URL and REST base")
@pytest.mark.parametrize(
    ("url", "rest", "path"),
    [
        ("https://github.com/acme/", "https://api.github.com", "/orgs/acme"),
        ("https://www.github.com/acme/widget", "https://api.github.com", "/repos/acme/widget"),
        ("https://github.com/Enterprises/big", "https://api.github.com", "/enterprises/big"),
        ("https://acme.ghe.com/acme", "https://api.acme.ghe.com", "/orgs/acme"),
        (
            "https://ghes.example.org:8443/acme",
            "https://ghes.example.org:8443/api/v3",
            "/orgs/acme",
        ),
        ("http://127.0.0.1:4100/acme", "http://127.0.0.1:4100/api/v3", "/orgs/acme"),
    ],
)
def test_place_of_a_configuration_url(url: str, rest: str, path: str) -> None:
    found = Place.read(url)
    assert (found.rest, found.path) == (rest, path)


@pytest.mark.parametrize(
    "url",
    [
        "github.com/acme",
        "https://github.com",
        "https://github.com/a/b/c",
        "http://github.com/acme",
        "",
    ],
)
def test_url_that_names_nothing_or_is_not_safe_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="github: url: "):
        Place.read(url)


@pytest.mark.spec(
    "GitHub 2: byte-order mark, tokens in the right headers, api-version on every call"
)
def test_chain_of_tokens(answers: Answers, calls: Service) -> None:
    answers.give(
        "POST",
        "/api/v3/actions/runner-registration",
        BOM + json.dumps({"url": f"{answers.url}/service/", "token": "admin"}).encode(),
    )
    answers.give("GET", SETS, {"count": 1, "value": [{"id": 7, "name": "set"}]})
    assert calls.find("set", 1) == {"id": 7, "name": "set"}
    [first] = answers.requests("POST", "/api/v3/orgs/acme/actions/runners/registration-token")
    [second] = answers.requests("POST", "/api/v3/actions/runner-registration")
    [third] = answers.requests("GET", SETS)
    lowered = [
        {name.lower(): value for name, value in each.headers.items()}
        for each in (first, second, third)
    ]
    assert [each["authorization"] for each in lowered] == [
        "Bearer ghp_secret",
        "RemoteAuth registration",
        "Bearer admin",
    ]
    assert json.loads(second.body) == {"url": f"{answers.url}/acme", "runner_event": "register"}
    assert "api-version=6.0-preview" in third.path and "name=set" in third.path
    assert json.loads(lowered[2]["user-agent"])["kind"] == "scaleset"


def test_admin_token_is_used_until_it_is_about_to_end(
    answers: Answers, calls: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path = time.time(), "/api/v3/actions/runner-registration"
    token = jwt.encode({"exp": int(now) + 3600}, "a key of the service, 32 bytes long", "HS256")
    answers.give("POST", path, {"url": f"{answers.url}/service/", "token": token})
    answers.give("GET", SETS, {"count": 0, "value": []})
    for later, made in ((0, 1), (3600 - service.SOON - 10, 1), (3600 - service.SOON + 1, 2)):
        monkeypatch.setattr(service.time, "time", lambda later=later: now + later)
        calls.find("set", 1)
        assert len(answers.requests("POST", path)) == made


@pytest.mark.spec("GitHub 2: retry of the admin connection on 401 and 403, and no other")
def test_fresh_registration_token_may_need_a_moment(answers: Answers, calls: Service) -> None:
    good = Reply(200, json.dumps({"url": f"{answers.url}/service/", "token": "admin"}).encode())
    answers.row("POST", "/api/v3/actions/runner-registration", Reply(401, b"{}"), good)
    answers.give("GET", SETS, {"count": 0, "value": []})
    assert calls.find("set", 1) is None
    answers.give(
        "POST",
        "/api/v3/orgs/acme/actions/runners/registration-token",
        {"message": "Bad credentials"},
        401,
    )
    other = Service(calls.place, lambda: "ghp_revoked", threading.Event())
    with pytest.raises(ServiceError, match="status 401: Bad credentials"):
        other.find("set", 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"url": "http://elsewhere.example.org/x", "token": "admin"}, "not https"),
        ({"url": "", "token": "admin"}, "no url"),
        ([], "not an object"),
        (b"<html>", "not JSON"),
    ],
)
def test_admin_connection_that_cannot_be_used_is_refused(
    answers: Answers, calls: Service, body: object, text: str
) -> None:
    answers.give("POST", "/api/v3/actions/runner-registration", body)
    with pytest.raises(ServiceError, match=text):
        calls.find("set", 1)


def test_redirect_is_not_followed_so_that_tokens_stay(answers: Answers, calls: Service) -> None:
    answers.give("GET", SETS, b"", 302, Location="http://127.0.0.1:1/")
    with pytest.raises(ServiceError, match="status 302"):
        calls.find("set", 1)


def opened(answers: Answers, calls: Service, **more: object) -> service.Session:
    answers.give(
        "POST",
        f"{SETS}/7/sessions",
        {**SESSION, "messageQueueUrl": f"{answers.url}/queue?sessionId=x", **more},
    )
    return calls.open(7, "host")


@pytest.mark.spec(
    "GitHub 4: an empty queue URL is a failed open; an open is not repeated when it may have "
    "arrived"
)
def test_open_session(answers: Answers, calls: Service) -> None:
    assert opened(answers, calls).statistics == {"totalAssignedJobs": 2}
    for wrong in (
        {"messageQueueUrl": ""},
        {"sessionId": "x"},
        {"messageQueueUrl": "http://elsewhere.example.org/"},
    ):
        with pytest.raises((ServiceError, ValueError)):
            opened(answers, calls, **wrong)
    before = len(answers.requests("POST", f"{SETS}/7/sessions"))
    answers.give("POST", f"{SETS}/7/sessions", {}, 503)
    with pytest.raises(ServiceError, match="status 503"):
        calls.open(7, "host")
    assert len(answers.requests("POST", f"{SETS}/7/sessions")) == before + 1


@pytest.mark.spec("GitHub 5: 202, empty 200, unknown message type, capacity header, lastMessageId")
def test_polls(answers: Answers, calls: Service) -> None:
    session = opened(answers, calls)
    answers.give("GET", "/queue", b"", 202)
    assert calls.poll(session, 0, 5) is None
    answers.give("GET", "/queue", b"", 200)
    assert calls.poll(session, 3, 5) is None
    first, second = answers.requests("GET", "/queue")
    assert (
        first.path == "/queue?sessionId=x" and second.path == "/queue?sessionId=x&lastMessageId=3"
    )
    headers = {name.lower(): value for name, value in second.headers.items()}
    assert (
        headers["x-scalesetmaxcapacity"] == "5" and headers["authorization"] == "Bearer queue-token"
    )
    answers.give("GET", "/queue", {"messageId": 1, "messageType": "Other"})
    with pytest.raises(ServiceError, match="unknown type Other"):
        calls.poll(session, 0, 5)


@pytest.mark.spec("GitHub 5: rate limits are waited for as told")
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {"Retry-After": "1"}),
        (403, {"Retry-After": "1"}),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()))}),
    ],
)
def test_rate_limit(answers: Answers, calls: Service, status: int, headers: dict[str, str]) -> None:
    answers.row(
        "GET",
        SETS,
        Reply(status, b"{}", list(headers.items())),
        Reply(200, b'{"count": 0, "value": []}'),
    )
    assert calls.find("set", 1) is None
    assert len(answers.requests("GET", SETS)) == 2


NO_SETS = Reply(200, b'{"count": 0, "value": []}')


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Retry-After": "1800"}, {}),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()) + 1800)}, {}),
        # As GitHub answers without any header that says how long.
        ({"X-RateLimit-Remaining": "4290"}, {"message": "You exceeded a secondary rate limit"}),
    ],
)
def test_no_call_is_made_before_the_end_of_a_pause_that_is_longer_than_a_call_may_last(
    answers: Answers, calls: Service, headers: dict[str, str], body: dict[str, str]
) -> None:
    answers.give("GET", SETS, body, 403, **headers)
    for _ in range(3):
        with pytest.raises(ServiceError, match=r"status 403.*; no calls for"):
            calls.find("set", 1)
    assert len(answers.requests("GET", SETS)) == 1


def test_calls_are_made_again_after_the_pause(
    answers: Answers, calls: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.row("GET", SETS, Reply(429, b"{}", [("Retry-After", "1")]), NO_SETS)
    monkeypatch.setattr(service, "REPEAT", 0.5)
    with pytest.raises(ServiceError, match="no calls for 1 s"):
        calls.find("set", 1)
    monkeypatch.setattr(service, "REPEAT", 30.0)
    assert calls.find("set", 1) is None


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_end_of_a_rate_limit_is_read_by_the_clock_of_the_service(
    answers: Answers, calls: Service, ahead: int
) -> None:
    now = int(time.time()) + ahead
    headers = {
        "Date": email.utils.formatdate(now, usegmt=True),
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": str(now + 600),
    }
    answers.give("GET", SETS, {}, 403, **headers)
    with pytest.raises(ServiceError, match="no calls for 600 s"):
        calls.find("set", 1)


@pytest.mark.parametrize("date", ["soon", f"Fri, 31 Dec {10**20} 23:59:59 GMT"])
def test_invalid_date_of_the_service_is_replaced_by_our_clock(
    answers: Answers, calls: Service, date: str
) -> None:
    reset = str(int(time.time()) + 600)
    headers = {"Date": date, "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset}
    answers.give("GET", SETS, {}, 403, **headers)
    with pytest.raises(ServiceError, match=r"no calls for [56]\d\d s"):
        calls.find("set", 1)


def test_service_that_asks_for_no_pause_is_called_after_a_second(
    answers: Answers, calls: Service
) -> None:
    answers.row(
        "GET",
        SETS,
        Reply(429, b"{}", [("Retry-After", "0")]),
        Reply(200, b'{"count": 0, "value": []}'),
    )
    began = time.monotonic()
    assert calls.find("set", 1) is None
    assert time.monotonic() - began >= 1.0 and len(answers.requests("GET", SETS)) == 2


def test_call_that_is_repeated_is_reported_at_its_first_failure(
    answers: Answers,
    calls: Service,
    stopping: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers.row(
        "GET",
        SETS,
        Reply(503, b"away"),
        Reply(503, b"away"),
        Reply(200, b'{"count": 0, "value": []}'),
    )
    settings: Any = SimpleNamespace(kind=Kind("set", "small", 1), folder="/runner")
    listener = ScaleSet(settings, calls, cast(Any, None), stopping)
    seen: list[object] = []
    monkeypatch.setattr(
        stopping, "wait", lambda _seconds: seen.append(listener.status()["trouble"])
    )
    assert calls.find("set", 1) is None
    assert len(seen) == 2 and all("503" in str(text) for text in seen)
    assert listener.status()["trouble"] == "not connected yet"
    (logged,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert "503" in logged and logged.endswith("; the call is repeated for up to 3 s")


def test_longer_wait_than_allowed_is_an_error_immediately(answers: Answers, calls: Service) -> None:
    answers.give("GET", SETS, {"message": "slow down"}, 429, **{"Retry-After": "3600"})
    with pytest.raises(ServiceError, match="slow down"):
        calls.find("set", 1)
    assert len(answers.requests("GET", SETS)) == 1


@pytest.mark.spec("GitHub 6: ids of the service are in the text of an error")
def test_answer_that_is_too_long_is_refused(
    answers: Answers, calls: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.answers.MOST", 5000)
    answers.give("POST", f"{SETS}/3/sessions", b" " * 5001)
    with pytest.raises(ServiceError, match="more than 5000 bytes"):
        calls.open(3, "host")


def test_call_that_may_have_arrived_is_not_repeated_if_it_would_have_two_effects(
    answers: Answers, calls: Service
) -> None:
    for method, path, call in (
        ("POST", SETS, lambda: calls.create("set", 1, [])),
        ("POST", f"{SETS}/3/sessions", lambda: calls.open(3, "host")),
    ):
        answers.give(method, path, b"", **{"Content-Encoding": "br"})  # the answer cannot be read
        with pytest.raises(ServiceError, match="does not answer"):
            call()
        assert len(answers.requests(method, path)) == 1


@pytest.mark.parametrize("key", ["typeName", "exceptionName"])
def test_error_has_the_ids_that_support_asks_for(
    answers: Answers, calls: Service, key: str
) -> None:
    body = {key: "GitHub.Runner.AgentExistsException, x", "message": "name is taken"}
    answers.give(
        "POST",
        f"{SETS}/7/generatejitconfig",
        body,
        409,
        ActivityId="act-1",
        **{"X-GitHub-Request-Id": "req-1"},
    )
    with pytest.raises(
        ServiceError, match="name is taken ActivityId act-1 X-GitHub-Request-Id req-1"
    ) as found:
        calls.register(7, "np-1")
    assert found.value.status == 409 and "AgentExists" in found.value.kind


@pytest.fixture
def one(calls: Service, stopping: threading.Event) -> ScaleSet:
    made = ScaleSet(
        Settings(Kind("set", "small", most=3, least=1)),
        calls,
        Pools({"url": "http://127.0.0.1:1"}, "test"),
        stopping,
    )
    made.number = 7
    return made


@pytest.mark.spec(
    "GitHub 6: AgentExists: ours from before is removed and made again; JobStillRunning is left "
    "alone"
)
def test_name_of_a_former_runner_is_freed(answers: Answers, one: ScaleSet) -> None:
    taken = Reply(409, b'{"typeName": "x.AgentExistsException", "message": "taken"}')
    answers.row(
        "POST",
        f"{SETS}/7/generatejitconfig",
        taken,
        Reply(200, b'{"encodedJITConfig": "c2VjcmV0"}'),
    )
    answers.give("GET", AGENTS, {"count": 1, "value": [{"id": 31, "name": "np-1"}]})
    answers.give("DELETE", f"{AGENTS}/31", b"", 204)
    assert one.register("np-1") == b"c2VjcmV0\n"
    answers.row("POST", f"{SETS}/7/generatejitconfig", taken)
    answers.give(
        "DELETE", f"{AGENTS}/31", {"typeName": "x.JobStillRunningException", "message": "busy"}, 400
    )
    assert one.remove("np-1") is False
    with pytest.raises(listener.ForgeError, match="np-1 runs a job"):
        one.register("np-1")
    answers.give("DELETE", f"{AGENTS}/31", {"typeName": "x.AgentNotFoundException"}, 404)
    assert one.remove("np-1") is True


def handle(
    one: ScaleSet,
    answers: Answers,
    calls: Service,
    ident: int,
    statistics: object,
    *events: dict[str, Any],
) -> None:
    session = opened(answers, calls)
    answers.give("DELETE", f"/queue/{ident}", b"", 204)
    answers.give("POST", f"{SETS}/7/acquirejobs", {"value": []})
    one.handle(
        7, session, {"messageId": ident, "statistics": statistics, "body": json.dumps(events)}
    )


@pytest.mark.spec("GitHub 1.3, 8.1: the number comes from the statistics, not from the events")
def test_required_number_is_that_of_the_statistics(
    answers: Answers, calls: Service, one: ScaleSet
) -> None:
    assigned = {
        "messageType": "JobAssigned",
        "runnerRequestId": 0,
        "jobId": "j-1",
        "ownerName": "acme",
        "repositoryName": "w",
        "jobDisplayName": "build",
        "workflowRunId": 9,
        "queueTime": "2026-11-27T09:00:00Z",
    }
    handle(
        one,
        answers,
        calls,
        1,
        {"totalAssignedJobs": 1},
        assigned,
        assigned,
        {"messageType": "New"},
        assigned,
    )
    assert one.fleet.wanted == 2
    assert one.status()["notes"] == ["acme/w: build (run 9) waits for a runner since 09:00:00 UTC"]
    handle(
        one,
        answers,
        calls,
        2,
        {"totalAssignedJobs": 50},
        {**assigned, "messageType": "JobStarted", "runnerName": "other"},
    )
    assert one.fleet.wanted == 3 and one.status()["notes"] == []
    handle(
        one,
        answers,
        calls,
        3,
        {},
        {"messageType": "JobCompleted", "jobId": "j-1", "finishTime": "0001-01-01T00:00:00Z"},
    )
    handle(one, answers, calls, 4, {"totalAssignedJobs": None})
    assert one.fleet.wanted == 1
    assert len(answers.requests("DELETE", "/queue/4")) == 1


@pytest.mark.spec(
    "GitHub 5: at most max - totalAssignedJobs are acquired; the others when there is room"
)
def test_offers_wait_until_there_is_capacity(
    answers: Answers, calls: Service, one: ScaleSet
) -> None:
    offers = [
        {"messageType": "JobAvailable", "runnerRequestId": number} for number in (11, 12, 13, 14)
    ]
    handle(one, answers, calls, 1, {"totalAssignedJobs": 1}, *offers)
    [request] = answers.requests("POST", f"{SETS}/7/acquirejobs")
    assert json.loads(request.body) == [11, 12]
    assert {name.lower(): value for name, value in request.headers.items()}[
        "authorization"
    ] == "Bearer queue-token"
    assert answers.requests("DELETE", "/queue/1") == []
    handle(one, answers, calls, 2, {"totalAssignedJobs": 3})
    assert len(answers.requests("POST", f"{SETS}/7/acquirejobs")) == 1
    handle(one, answers, calls, 3, {"totalAssignedJobs": 0})
    assert json.loads(answers.requests("POST", f"{SETS}/7/acquirejobs")[-1].body) == [13, 14]


def test_offers_are_acquired_when_capacity_returns_without_another_message(
    answers: Answers, one: ScaleSet, stopping: threading.Event
) -> None:
    offer = json.dumps([{"messageType": "JobAvailable", "runnerRequestId": 11}])
    message = {
        "messageId": 1,
        "messageType": "RunnerScaleSetJobMessages",
        "statistics": {"totalAssignedJobs": 0},
        "body": offer,
    }
    sent: list[Reply] = [Reply(200, json.dumps(message).encode())]

    def poll(_request: Request) -> Reply:
        time.sleep(0 if sent else 0.1)
        return sent.pop() if sent else Reply(202)

    answers.give("GET", SETS, {"value": [{"id": 7}]})
    answers.give(
        "POST",
        f"{SETS}/7/sessions",
        {**SESSION, "messageQueueUrl": f"{answers.url}/queue", "statistics": {}},
    )
    answers.give("DELETE", f"{SETS}/7/sessions/{SESSION['sessionId']}", b"", 204)
    answers.give("POST", f"{SETS}/7/acquirejobs", {"value": []})
    answers.give("DELETE", "/queue/1", b"", 204)
    answers.made["GET", "/queue"] = poll
    one.fleet.broken.until = time.monotonic() + 1000
    one.start()
    try:
        wait_for(lambda: len(answers.requests("GET", "/queue")) > 1, 30, "a poll after the offer")
        assert answers.requests("POST", f"{SETS}/7/acquirejobs") == []
        one.fleet.broken.clear()
        wait_for(
            lambda: answers.requests("DELETE", "/queue/1") != [],
            30,
            "the offer acquired and acknowledged",
        )
    finally:
        stopping.set()
        one.fleet.stop()
        one.join(30)
    assert json.loads(answers.requests("POST", f"{SETS}/7/acquirejobs")[0].body) == [11]


def test_completed_job_and_offline_runner_are_reported_to_the_runner(
    answers: Answers, calls: Service, one: ScaleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(one.fleet, "np-1")
    monkeypatch.setattr(one.fleet, "find", lambda name: runner if name == "np-1" else None)
    handle(
        one,
        answers,
        calls,
        1,
        {},
        {"messageType": "JobCompleted", "jobId": "j", "runnerName": "np-1", "result": "canceled"},
    )
    assert runner.finished
    for agents, presence in (
        ([], None),
        ([{"id": 1, "status": "offline"}], False),
        ([{"id": 1, "status": "online"}], True),
    ):
        answers.give("GET", AGENTS, {"value": agents})
        assert one.presence("np-1") is presence
    answers.give("GET", AGENTS, {"value": [{"id": 1}]})
    assert one.presence("np-1") is True, "a service that does not say whether it is online"


@pytest.mark.spec("GitHub 7: what each status of the runner means")
def test_status_of_the_runner(one: ScaleSet) -> None:
    assert one.failure(0) is None
    for status, text in (
        (1, "status 1"),
        (2, "status 2"),
        (5, "another runner"),
        (7, "rebuild the image of small"),
        (127, "no runner in /opt/actions-runner"),
        (None, "killed"),
    ):
        found = one.failure(status)
        assert found is not None and text in found[0]
    outdated = one.failure(7)
    assert outdated is not None and outdated[1] >= 1800
    assert one.capacity() == 3
    one.fleet.failed("old", 1800)
    assert one.capacity() == 0


def test_job_of_a_lost_runner_does_not_count_for_the_capacity(one: ScaleSet) -> None:
    lost = Runner(one.fleet, "np-a")
    one.fleet._runners["np-a"] = lost
    lost.lost = True
    assert one.capacity() == 4
    lost.finish(True)
    assert one.capacity() == 3


def test_time_that_is_not_set() -> None:
    assert moment("0001-01-01T00:00:00Z") is None and moment(None) is None and moment("x") is None
    assert str(moment("2026-11-27T09:00:00Z")) == "2026-11-27 09:00:00+00:00"


@pytest.mark.spec("GitHub 8.2: after 3 in a row a pause of 60 s, doubled to 30 min")
def test_pause_grows_from_the_third_and_ends_with_success() -> None:
    pause = Pause(60.0, 1800.0, after=3)
    lengths = []
    for _ in range(9):
        pause.add("x")
        lengths.append(round(pause.left))
    assert lengths == [0, 0, 60, 120, 240, 480, 960, 1800, 1800]
    pause.clear()
    assert pause.left == 0 and pause.count == 0


# -- configuration


def config(**more: Any) -> dict[str, Any]:
    return {
        "github": {"url": "https://github.com/acme", "token-file": "/x"},
        "scale-sets": [{"name": "set"}],
        **more,
    }


def test_settings_have_the_documented_defaults() -> None:
    [found] = settings_of(SCHEMA(config()))
    assert (
        found.kind.label,
        found.kind.most,
        found.kind.least,
        found.kind.idle,
        found.kind.job_time,
    ) == ("set", 10, 0, 900, 21600)
    assert (found.group, found.labels, found.folder) == ("default", (), "/opt/actions-runner")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale-sets": []}, "scale-sets"),
        ({"scale-sets": [{"name": "a b"}]}, "letters, digits"),
        ({"scale-sets": [{"name": "a", "max": -1}]}, "max"),
        ({"scale-sets": [{"name": "a", "idle": "soon"}]}, "not a duration"),
        ({"scale-sets": [{"name": "a", "folder": "relative"}]}, "an absolute path"),
        ({"other": 1}, "extra keys"),
        ({"scale-sets": [{"name": "a"}, {"name": "a"}]}, "a is there twice"),
        ({"scale-sets": [{"name": "a", "min": 5, "max": 2}]}, r"min \(5\) is above max \(2\)"),
        ({"github": {"url": "https://github.com/acme"}}, "either token-file or app"),
        ({"listen": "8010"}, "is not an address"),
    ],
)
def test_wrong_configuration_is_refused_with_the_place(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], text: str
) -> None:
    import re

    import yaml

    token = tmp_path / "token"
    token.write_text("ghp_x")
    token.chmod(0o600)
    path = tmp_path / "github.yaml"
    base = config(listen="127.0.0.1:0")
    base["github"]["token-file"] = str(token)
    path.write_text(yaml.safe_dump({**base, **change}))
    words = ["--config", str(path), "status" if "listen" in change else "check"]
    with pytest.raises(SystemExit) as found:
        main(words)
    assert re.search(text, str(found.value.code))
    path.write_text(yaml.safe_dump(base))
    assert main(["-c", str(path), "check"]) == 0
    assert capsys.readouterr().out == f"{path}: correct\n"


def test_secret_that_others_may_read_is_refused(
    tmp_path: pathlib.Path, stopping: threading.Event
) -> None:
    token = tmp_path / "token"
    token.write_text("ghp_x")
    token.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod o= {token}"):
        service_of({"url": "https://github.com/acme", "token-file": str(token)}, stopping)
    token.chmod(0o640)
    token.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        service_of({"url": "https://github.com/acme", "token-file": str(token)}, stopping)
    with pytest.raises(ConfigError, match="not a private RSA key"):
        key = tmp_path / "key"
        key.write_text("nonsense")
        key.chmod(0o600)
        app = {"client-id": "x", "installation": "1", "key-file": str(key)}
        service_of({"url": "https://github.com/acme", "app": app}, stopping)


def test_directory_of_somebody_else_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    (tmp_path / "run").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        Pools({"url": "http://127.0.0.1:1"}, "test").open()
    (tmp_path / "run").unlink()
    (tmp_path / "run" / "999999999").mkdir(parents=True)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="belongs to somebody else"),
    ):
        patch.setattr("os.getuid", lambda: 4000000)
        Pools({"url": "http://127.0.0.1:1"}, "test").open()
    pools = Pools({"url": "http://127.0.0.1:1"}, "test")
    pools.open()
    [folder] = (tmp_path / "run").iterdir()
    assert str(pools("np-1").ssh_directory) == f"{folder}/np-1" and pools("").ssh_directory is None
    pools.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_status_as_text() -> None:
    runner = {
        "name": "np-1",
        "state": "busy",
        "seconds": 3,
        "job": "acme/w: build (run 9)",
        "lease": "200-1",
        "why": "on node 1",
        "kills": ["process 7 (cc) was killed"],
    }
    fleet = {
        "name": "set",
        "label": "small",
        "wanted": None,
        "most": 3,
        "runners": [runner],
        "trouble": "old",
        "notes": ["n"],
    }
    assert program.show_status({"trouble": ["t"], "fleets": [fleet]}).splitlines() == [
        "! t",
        "set (label small): wanted 0 of 3; 1 busy",
        "  ! old",
        "  n",
        "  np-1  busy for 3 s  lease 200-1  acme/w: build (run 9); on node 1",
        "    ! process 7 (cc) was killed",
    ]


def job_ended(folder: pathlib.Path, kills: str | None, counter: str | None) -> str:
    """Return what the script for the end of a job writes, with this counter of kills."""
    events = folder / "memory.events"
    if counter is not None:
        events.write_text(f"low 0\noom 0\noom_kill {counter}\n")
    script = folder / "job-ended.sh"
    assert listener.JOB_ENDED.count("/sys/fs/cgroup/memory.events") == 1
    script.write_text(listener.JOB_ENDED.replace("/sys/fs/cgroup/memory.events", str(events)))
    if kills is not None:
        (folder / "kills").write_text(kills)
    done = subprocess.run(
        ["bash", "-e", script], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("counter", [None, "0", "3"])
def test_end_of_a_job_names_each_kill_in_its_log(tmp_path: pathlib.Path, counter: str) -> None:
    expected = "::error title=Out of memory::100%25 one\n::error title=Out of memory::two\n"
    assert job_ended(tmp_path, "100% one\ntwo\n", counter) == expected
    assert job_ended(tmp_path, "", None if counter is None else "0") == ""


def test_end_of_a_job_that_has_removed_the_file_is_no_failure(tmp_path: pathlib.Path) -> None:
    assert job_ended(tmp_path, None, "0") == ""


def test_end_of_a_job_waits_for_the_name_of_what_the_control_group_counts(
    tmp_path: pathlib.Path,
) -> None:
    # The script itself waits: what makes the time pass writes the line.
    folder = tmp_path / "bin"
    folder.mkdir()
    sleep = folder / "sleep"
    sleep.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/waits\n[ ! -e {tmp_path}/known ] || "
        f"echo late > {tmp_path}/kills\n"
    )
    sleep.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        assert job_ended(tmp_path, "", "1") == ""
        assert len((tmp_path / "waits").read_text().split()) == 30, "and no longer"
        (tmp_path / "known").touch()
        assert job_ended(tmp_path, "", "1") == "::error title=Out of memory::late\n"
        assert len((tmp_path / "waits").read_text().split()) == 31


def test_script_that_the_image_names_for_the_end_of_a_job_stays(tmp_path: pathlib.Path) -> None:
    settings = Settings(Kind("set", "small", most=1), folder=str(tmp_path))
    script = ScaleSet(settings, cast(Any, None), cast(Any, None), threading.Event()).script
    program = tmp_path / "bin" / "Runner.Listener"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$ACTIONS_RUNNER_HOOK_JOB_COMPLETED"\n')
    program.chmod(0o755)
    (tmp_path / "secret").write_text("secret")
    for own, expected in ((None, f"{tmp_path}/job-ended.sh"), ("/own.sh", "/own.sh")):
        environment = {"PATH": os.environ["PATH"]}
        environment |= {} if own is None else {"ACTIONS_RUNNER_HOOK_JOB_COMPLETED": own}
        (tmp_path / "secret").write_text("secret")
        done = subprocess.run(
            ["sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert done.stdout.strip() == expected, done.stderr
    assert (tmp_path / "job-ended.sh").read_text() == listener.JOB_ENDED
