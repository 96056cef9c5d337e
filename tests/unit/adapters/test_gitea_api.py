"""Calls of Gitea and Forgejo: what is asked, and how the answers are understood."""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool import answers
from nodepool.adapters.gitea.api import ForgeConnection, Forgejo, Gitea, Job
from nodepool.adapters.runners.forge import ForgeError
from tests.conftest import wait_for
from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request

#: Answers a request; None: 404.
Answer = Callable[[Request], Any]
TOKEN = "0123456789abcdef"


class Served:
    """A forge that gives recorded answers."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.proxy = FaultProxy(("127.0.0.1", 9), look_alike=self._answer)
        self.url = f"http://127.0.0.1:{self.proxy.port}"

    def _answer(self, request: Request, _forward: Forward) -> Reply:
        found = self.answers.get(request.operation)
        content = None if found is None else found(request)
        if isinstance(content, Reply):
            return content
        if found is None:
            return Reply(404, b'{"message": "not found"}')
        return Reply(
            204 if content == "" else 200, b"" if content == "" else json.dumps(content).encode()
        )

    def connection(self, scope: str = "") -> ForgeConnection:
        return ForgeConnection(self.url, lambda: TOKEN, scope)

    def asked(self) -> list[str]:
        return [request.operation for request in self.proxy.requests]


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    with found.proxy:
        yield found


def pages(entries: list[dict[str, Any]], key: str, size: int = 50) -> Answer:
    """Answer as Gitea does: page and limit, and a number of all."""

    def answer(request: Request) -> Any:
        query = dict(pair.split("=") for pair in request.path.partition("?")[2].split("&"))
        first = (int(query["page"]) - 1) * min(size, int(query["limit"]))
        return {key: entries[first : first + size] or None, "total_count": len(entries)}

    return answer


def waiting(number: int, *labels: str) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"job-{number}",
        "labels": list(labels),
        "status": "queued",
        "runner_id": 0,
    }


def running(number: int, runner: str) -> dict[str, Any]:
    return {
        **waiting(number, "noble"),
        "status": "in_progress",
        "runner_id": 7,
        "runner_name": runner,
    }


JOBS, RUNNERS = "GET /api/v1/admin/actions/jobs", "GET /api/v1/admin/actions/runners"


# -- Gitea


@pytest.mark.spec("Gitea 2: one request per instance; page through, filter ourselves")
def test_queue_of_one_page_takes_one_request(served: Served) -> None:
    served.answers[JOBS] = pages([waiting(1, "noble"), running(2, "np-a")], "jobs")
    assert Gitea(served.connection()).queue() == [
        Job(1, "job-1", frozenset({"noble"})),
        Job(2, "job-2", frozenset({"noble"}), "np-a"),
    ]
    [request] = served.proxy.requests
    assert request.path.endswith(
        "/admin/actions/jobs?page=1&limit=50&status=queued&status=in_progress"
    )
    assert request.headers["authorization"] == f"token {TOKEN}"


@pytest.mark.parametrize("size", [50, 30])
def test_queue_of_many_pages_is_complete(served: Served, size: int) -> None:
    served.answers[JOBS] = pages([waiting(number, "noble") for number in range(130)], "jobs", size)
    assert [job.id for job in Gitea(served.connection()).queue()] == list(range(130))


def test_job_that_moves_to_the_next_page_is_counted_once(served: Served) -> None:
    entries = [waiting(number, "noble") for number in range(60)]

    def answer(request: Request) -> Any:
        found = pages(entries, "jobs")(request)
        if "page=1&" in request.path:
            entries.insert(0, waiting(99, "noble"))
        return found

    served.answers[JOBS] = answer
    found = [job.id for job in Gitea(served.connection()).queue()]
    assert len(found) == len(set(found)) and set(range(60)) <= set(found)


@pytest.mark.spec("Gitea 1: scopes of tokens, and the paths of each scope")
@pytest.mark.parametrize(
    ("scope", "path", "needed"),
    [
        ("", "/admin", "read:admin,write:admin"),
        ("orgs/acme", "/orgs/acme", "write:organization"),
        ("user", "/user", "write:user"),
        ("repos/acme/widget", "/repos/acme/widget", "write:repository"),
    ],
)
def test_token_without_rights_is_refused_with_those_it_needs(
    served: Served, scope: str, path: str, needed: str
) -> None:
    operation = f"GET /api/v1{path}/actions/jobs"
    served.answers[operation] = lambda _request: Reply(
        403, b'{"message": "token does not have the scope"}'
    )
    with pytest.raises(
        ForgeError, match=f"403 token does not have the scope.* it needs the scopes {needed}"
    ) as error:
        Gitea(served.connection(scope)).queue()
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply(401, b'{"message": "invalid"}'), "the token is not valid"),
        (Reply(502, b"<html>gateway</html>"), "502 <html>gateway"),
        (Reply(200, b"<html>log in</html>"), "the answer is not JSON"),
        (Reply(200, b'{"jobs": 7, "total_count": 1}'), "not a list"),
        (Reply(200, b"[]"), "not an object"),
        (Reply(200, b'{"jobs": [{"id": "x"}], "total_count": 1}'), "not a number"),
        (Reply(200, b'{"jobs": [{"id": null}], "total_count": 1}'), "not a number: None"),
        (
            Reply(302, b"", [("Location", "https://new.example.com/")]),
            "redirects to https://new.example.com/",
        ),
    ],
)
def test_bad_answer_is_an_error_and_never_an_empty_queue(
    served: Served, reply: Reply, text: str
) -> None:
    served.answers[JOBS] = lambda _request: reply
    with pytest.raises(ForgeError, match=text):
        Gitea(served.connection()).queue()


@pytest.mark.parametrize(
    ("headers", "wait"), [([("Retry-After", "1800")], 1800), ([], 60), ([("Retry-After", "x")], 60)]
)
def test_forge_that_refuses_calls_for_their_number_is_not_called_during_the_pause(
    served: Served, headers: list[tuple[str, str]], wait: int
) -> None:
    served.answers["GET /api/v1/admin/actions/jobs"] = lambda _request: Reply(429, b"", headers)
    connection = served.connection()
    for _ in range(3):
        with pytest.raises(ForgeError, match=rf"jobs: 429 .*; no calls for {wait} s"):
            connection.call("GET", "/jobs")
    assert len(served.asked()) == 1


def test_forge_is_called_again_after_the_pause(served: Served) -> None:
    replies = [Reply(429, b"", [("Retry-After", "1")]), {"jobs": []}]
    served.answers["GET /api/v1/admin/actions/jobs"] = lambda _request: replies.pop(0)
    connection = served.connection()
    with pytest.raises(ForgeError, match="no calls for 1 s"):
        connection.call("GET", "/jobs")

    def answered() -> bool:
        with contextlib.suppress(ForgeError):
            return connection.call("GET", "/jobs") == {"jobs": []}
        return False

    wait_for(answered)


def test_netrc_of_the_user_does_not_replace_the_token(
    served: Served, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    served.answers[JOBS] = pages([], "jobs")
    Gitea(served.connection()).queue()
    assert served.proxy.requests[0].headers["authorization"] == f"token {TOKEN}"


REGISTRATION, REGISTER = (
    "POST /api/v1/admin/actions/runners/registration-token",
    "POST /api/actions/runner.v1.RunnerService/Register",
)


def registers(served: Served, **runner: Any) -> None:
    served.answers[REGISTRATION] = lambda _request: {"token": "registration-token"}
    made = {"id": "12", "uuid": "u-u", "token": "runner-token", "name": "np-a", "ephemeral": True}
    served.answers[REGISTER] = lambda _request: {"runner": {**made, **runner}}


@pytest.mark.spec("Gitea 3.1, 3.2: the registration token does not reach the node")
def test_secret_of_a_runner_is_its_file_without_the_registration_token(served: Served) -> None:
    registers(served)
    number, secret = Gitea(served.connection()).register(
        "np-a", ["noble:host", "gpu:docker://image"], None
    )
    assert number == 12
    found = json.loads(secret)
    assert found.pop("WARNING")
    assert found == {
        "id": 12,
        "uuid": "u-u",
        "name": "np-a",
        "token": "runner-token",
        "address": served.url,
        "labels": ["noble:host", "gpu:docker://image"],
        "ephemeral": True,
    }
    request = served.proxy.requests[-1]
    assert json.loads(request.body) == {
        "token": "registration-token",
        "name": "np-a",
        "version": "nodepool",
        "labels": ["noble", "gpu"],
        "ephemeral": True,
    }
    assert "authorization" not in request.headers and b"registration-token" not in secret


@pytest.mark.spec("Gitea 5: check that ephemeral came back true: an older server drops it")
def test_server_that_makes_lasting_runners_is_refused_and_nothing_is_left(served: Served) -> None:
    registers(served, ephemeral=False)
    served.answers[JOBS] = pages([], "jobs")
    served.answers["DELETE /api/v1/admin/actions/runners/12"] = lambda _request: ""
    with pytest.raises(ForgeError, match=r"Gitea 1\.24 or later is needed"):
        Gitea(served.connection()).register("np-a", ["noble:host"], None)
    assert served.asked()[-1] == "DELETE /api/v1/admin/actions/runners/12"


@pytest.mark.spec("Gitea 3.5: disable, look, delete; a runner that has a job is not removed")
def test_runner_with_a_job_is_disabled_but_not_removed(served: Served) -> None:
    served.answers["PATCH /api/v1/admin/actions/runners/7"] = lambda _request: {}
    served.answers["DELETE /api/v1/admin/actions/runners/7"] = lambda _request: ""
    served.answers[JOBS] = pages([running(1, "np-a")], "jobs")
    assert not Gitea(served.connection()).remove(7)
    assert served.asked() == ["PATCH /api/v1/admin/actions/runners/7", JOBS]
    served.answers[JOBS] = pages([], "jobs")
    assert Gitea(served.connection()).remove(7)
    assert served.asked()[-1].startswith("DELETE ")


def test_runner_that_counts_as_busy_is_not_removed(served: Served) -> None:
    served.answers["PATCH /api/v1/admin/actions/runners/7"] = lambda _request: {
        "id": 7,
        "busy": True,
    }
    served.answers["DELETE /api/v1/admin/actions/runners/7"] = lambda _request: ""
    served.answers[JOBS] = pages([], "jobs")
    assert not Gitea(served.connection()).remove(7)


@pytest.mark.parametrize("status", [404, 405])
def test_runner_is_removed_where_it_cannot_be_disabled(served: Served, status: int) -> None:
    served.answers["PATCH /api/v1/admin/actions/runners/7"] = lambda _request: Reply(status, b"")
    served.answers["DELETE /api/v1/admin/actions/runners/7"] = lambda _request: ""
    served.answers[JOBS] = pages([], "jobs")
    assert Gitea(served.connection()).remove(7)
    assert served.asked()[-1].startswith("DELETE ")


def test_runner_that_no_longer_exists_is_removed(served: Served) -> None:
    served.answers[JOBS] = pages([], "jobs")
    assert Gitea(served.connection()).remove(7)


# -- Forgejo: recorded answers, not tried against the real server

QUEUED, MADE = "GET /api/v1/admin/actions/runners/jobs", "POST /api/v1/admin/actions/runners"


def forgejo_job(number: int, status: str = "waiting", handle: str = "") -> dict[str, Any]:
    return {
        "id": number,
        "name": f"job-{number}",
        "runs_on": ["noble"],
        "status": status,
        "handle": handle or f"h-{number}",
    }


@pytest.mark.spec(
    "Forgejo 6: null for an empty queue; running jobs are listed too; no filter by the server"
)
@pytest.mark.parametrize("answer", [None, [], [forgejo_job(1, "running")]])
def test_forgejo_queue_without_waiting_jobs_is_empty(served: Served, answer: Any) -> None:
    served.answers[QUEUED] = lambda _request: Reply(200, json.dumps(answer).encode())
    assert Forgejo(served.connection()).queue() == []
    assert "labels" not in served.proxy.requests[0].path


@pytest.mark.spec("Forgejo 6: made ephemeral by the API; token, uuid and handle go in the secret")
def test_forgejo_runner_is_made_for_one_job(served: Served) -> None:
    served.answers[MADE] = lambda _request: Reply(
        201, json.dumps({"id": 3, "uuid": "u-u", "token": "t-t"}).encode()
    )
    job = Job(1, "check", frozenset({"noble"}), handle="h-1")
    assert Forgejo(served.connection()).register("np-a", ["noble:host"], job) == (
        3,
        b"t-t\nu-u\nh-1\n",
    )
    assert json.loads(served.proxy.requests[0].body) == {
        "name": "np-a",
        "description": "nodepool: check",
        "ephemeral": True,
    }


@pytest.mark.parametrize(
    ("answer", "handle"),
    [({"id": 3, "uuid": "u-u"}, "h"), ({"id": 3, "uuid": "u", "token": "t"}, "h\nx")],
)
def test_forgejo_runner_without_a_token_or_with_odd_texts_is_refused(
    served: Served, answer: Any, handle: str
) -> None:
    served.answers[MADE] = lambda _request: answer
    with pytest.raises(ForgeError, match="the new runner has no token"):
        Forgejo(served.connection()).register(
            "np-a", ["noble:host"], Job(1, "check", frozenset(), handle=handle)
        )


@pytest.mark.spec("Forgejo 6: the token by file, never on the command line; no --wait")
@pytest.mark.parametrize(("handle", "words"), [("h-1", ["--handle", "h-1"]), ("", [])])
def test_forgejo_program_gets_its_token_by_a_file(
    tmp_path: pathlib.Path, handle: str, words: list[str]
) -> None:
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\n')
    show.chmod(0o755)
    (tmp_path / "secret").write_text(f"t-t\nu-u\n{handle}\n")
    script = Forgejo(ForgeConnection("https://forge.example.com", lambda: TOKEN)).script(
        f"{show} one-job", ["noble:host", "a b:host"]
    )
    subprocess.run(["sh", "-c", f"umask 077; {script}"], cwd=tmp_path, check=True, timeout=10)
    assert (tmp_path / "words").read_text().splitlines() == [
        "one-job",
        "--url",
        "https://forge.example.com",
        "--uuid",
        "u-u",
        "--token-url",
        f"file:{tmp_path}/token",
        "--label",
        "noble:host",
        "--label",
        "a b:host",
        *words,
    ]
    assert (tmp_path / "token").read_text() == "t-t" and (
        tmp_path / "token"
    ).stat().st_mode & 0o777 == 0o600


@pytest.mark.spec("Forgejo 6: status offline, idle, active")
def test_forgejo_runner_with_a_job_is_not_removed(served: Served) -> None:
    served.answers["GET /api/v1/admin/actions/runners"] = lambda request: (
        [
            {"id": 3, "name": "np-a", "status": "active"},
            {"id": 4, "name": "np-b", "status": "offline"},
        ]
    )
    served.answers["DELETE /api/v1/admin/actions/runners/4"] = lambda _request: ""
    forge = Forgejo(served.connection())
    assert not forge.remove(3) and forge.remove(4)
    assert [each.online for each in forge.runners()] == [True, False]


def slowly(pieces: int) -> Iterator[bytes]:
    for _ in range(pieces):
        time.sleep(0.05)
        yield b" "


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (
            lambda: Reply(200, gzip.compress(b"{}"), [("Content-Encoding", "gzip")]),
            r"compressed \(gzip\) although",
        ),
        (lambda: Reply(200, b" " * 5001), "more than 5000 bytes"),
        (lambda: Reply(200, b"", stream=slowly(4000)), "took longer than 0.3 s"),
        (
            lambda: Reply(302, b"", [("Location", "/elsewhere")], stream=slowly(4000)),
            "took longer than 0.3 s",
        ),
    ],
)
def test_answer_that_is_compressed_too_long_or_too_slow_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, reply: Callable[[], Reply], text: str
) -> None:
    monkeypatch.setattr(answers, "MOST", 5000)
    monkeypatch.setattr(answers, "LONGEST", 0.3)
    served.answers["GET /api/v1/admin/actions/jobs"] = lambda _request: reply()
    with pytest.raises(ForgeError, match=text):
        Gitea(served.connection()).queue()
    assert served.proxy.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [200, 400, 500])
def test_error_that_repeats_the_token_is_shown_without_it(served: Served, status: int) -> None:
    text = f"bad header: Authorization: token {TOKEN} ({'x' * 300})"
    served.answers["GET /api/v1/admin/actions/jobs"] = lambda _request: Reply(status, text.encode())
    with pytest.raises(ForgeError, match=r"token \[token\]") as found:
        Gitea(served.connection()).queue()
    assert TOKEN not in str(found.value)
