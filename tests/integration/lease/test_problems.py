"""Errors of every path below ``/api/v1``."""

from __future__ import annotations

import http.client

import pytest

from nodepool.access.identity import Role
from nodepool.client import NodepoolError
from nodepool.web.connections import MOST_BODY, MOST_HEAD
from tests.integration.lease.conftest import Answer, Api

CASES = [
    ("GET", "/nosuch", 404, "not-found"),
    ("GET", "/nodes?nosuch=1", 400, "bad-request"),
    ("GET", "/nodes?q=%ff", 400, "bad-request"),
    ("GET", "/explain/node/nosuch", 404, "not-found"),
    ("GET", "/events?since=x", 400, "bad-request"),
    ("POST", "/nosuch", 405, "method-not-allowed"),
    ("PUT", "/nodes", 405, "method-not-allowed"),
    ("PUT", "/drains/label/a%2Fb", 405, "method-not-allowed"),
    ("DELETE", "", 405, "method-not-allowed"),
    ("DELETE", "/leases//", 405, "method-not-allowed"),
    ("POST", "/events", 405, "method-not-allowed"),
    ("PUT", "/leases", 405, "method-not-allowed"),
]


@pytest.mark.parametrize("named", [True, False])
def test_every_error_is_a_problem(api: Api, named: bool) -> None:
    token = api.token(role=Role.OPERATE) if named else None
    for method, path, status, code in CASES:
        answer = api.call(method, path, token=token)
        assert is_problem(answer, status, code), (method, path, answer)
        assert ("Allow" in answer.headers) is (status == 405)


def test_client_knows_the_code_of_errors_of_tables(api: Api) -> None:
    for path, code in (("/nosuch", "not-found"), ("/nodes?nosuch=1", "bad-request")):
        with pytest.raises(NodepoolError) as raised:
            api.pool().call("GET", path)
        assert raised.value.code == code


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_refused_tokens_get_a_problem_on_every_path(api: Api, method: str) -> None:
    for path in ("/nodes", "/events", "/nosuch", ""):
        answer = api.call(method, path, token="np_0_wrong")
        assert is_problem(answer, 401, "unauthorized"), (path, answer)
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        answer = api.call(method, path, token=f"npl_200-0000000001_{'a' * 43}")
        assert is_problem(answer, 410, "ended"), (path, answer)


def test_requests_that_are_too_large_get_a_problem_below_the_api_only(api: Api) -> None:
    large = b"x" * (MOST_BODY + 1)
    for path in ("/nodes", "/leases"):
        assert is_problem(api.call("POST", path, large), 413, "too-large")
    long = api.call("GET", "/nodes", headers={"X-Long": "x" * (MOST_HEAD + 1)})
    assert is_problem(long, 431, "too-large")
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=90)
    connection.request("POST", "/node-list", large)
    answer = connection.getresponse()
    assert (answer.status, answer.headers.get_content_type()) == (413, "text/plain")
    connection.close()


def is_problem(answer: Answer, status: int, code: str) -> bool:
    kind = answer.headers["Content-Type"]
    return (answer.status, kind) == (status, "application/problem+json") and (
        answer.content["status"],
        answer.content["code"],
    ) == (status, code)
