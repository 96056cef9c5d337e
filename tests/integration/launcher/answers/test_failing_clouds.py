"""Clouds that fail or answer slowly: requests, labels and problems name the call, its error and
a remedy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openstack.exceptions import ConflictException

from nodepool.cloud import ErrorKind
from nodepool.driver.fake.api import FakeApi
from nodepool.zk.records import RecordError
from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk, answer
from tests.support.clock import CloudError
from tests.support.launcher import config, provider

API = (
    "check the state of the cloud's API, the network to it, and the credentials; calls are retried"
)


@pytest.fixture
def going_on() -> Iterator[threading.Event]:
    """Lets calls that hang continue; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def through_calls(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, method: str, function: Callable[..., Any]
) -> None:
    """Make this method of the fake cloud as other drivers do: with retries, deadlines and
    records of failures.
    """
    calls = desk.bench.adapter("fake-provider").calls
    monkeypatch.setattr(calls, "classify", lambda error: getattr(error, "kind", ErrorKind.OTHER))
    monkeypatch.setattr(
        FakeApi, method, lambda _api, *args, **kw: calls.call(method, function, *args, **kw)
    )


def unavailable(*args: Any, **kw: Any) -> None:
    raise CloudError(ErrorKind.TRANSIENT, "HTTP 503: Service Unavailable")


FAILS = (
    "provider fake-provider: get_compute_limits fails (transient) since ",
    " UTC: HTTP 503: Service Unavailable",
)


def test_limits_that_cannot_be_renewed_name_the_error_since_when_and_the_remedy(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.bench.quota(instances=1)
    desk.start(config(provider()))
    desk.bench.fulfilled("fake-label")
    through_calls(desk, monkeypatch, "get_compute_limits", unavailable)
    monkeypatch.setattr("nodepool.driver.quota.amounts.max_age", lambda: 0.0)
    request = desk.bench.submit("fake-label")
    assert (
        answer(desk, "request", request, "reading the limits of provider fake-provider", *FAILS)[
            "suggestion"
        ]
        == API
    )
    assert answer(desk, "label", "fake-label", *FAILS)["suggestion"] == API
    assert FAILS[0] in desk.run("status")[1]
    desk.reported("get_compute_limits fails (transient) since ", API)


def test_limits_that_were_never_read_name_the_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider()))
    through_calls(desk, monkeypatch, "get_compute_limits", unavailable)
    assert answer(desk, "request", desk.bench.submit("fake-label"), *FAILS)["suggestion"] == API


def test_request_that_a_failing_cloud_has_ended_names_the_error_and_not_a_bug(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider()))
    monkeypatch.setattr(FakeApi, "get_compute_limits", unavailable)
    request = desk.bench.submit("fake-label")
    desk.bench.wait_request(request, "failed")
    found = answer(desk, "request", request, "error: HTTP 503: Service Unavailable")
    assert found["suggestion"] == f"{API}, then submit the request again"


def test_request_that_a_damaged_record_has_ended_names_the_record_and_not_the_cloud(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **kw: Any) -> None:
        raise RecordError("a JSON object is expected, found list")

    desk.start(config(provider()))
    monkeypatch.setattr(FakeApi, "get_compute_limits", read)
    request = desk.bench.submit("fake-label")
    desk.bench.wait_request(request, "failed")
    found = answer(desk, "request", request, "error: a JSON object is expected, found list")
    assert found["suggestion"].startswith("repair or remove the damaged record in ZooKeeper")


def test_calls_that_take_long_are_named_while_they_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, going_on: threading.Event
) -> None:
    monkeypatch.setattr("nodepool.cloud.calls.SLOW", 0.2)
    desk.start(config(provider()))
    through_calls(desk, monkeypatch, "create_server", lambda *args, **kw: going_on.wait(60))
    words = ("provider fake-provider: calls take more than ", " s (create_server)")
    assert answer(desk, "request", desk.bench.submit("fake-label"), *words)["suggestion"] == API
    desk.reported("calls take more than ", " s (create_server)", API)


def test_conflict_of_a_cloud_is_one_line_in_the_log_for_each_attempt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.start(config(provider()))
    request, (node,) = desk.bench.fulfilled("fake-label")

    def refuse(*args: Any, **kw: Any) -> None:
        raise ConflictException("HTTP 409: server is locked")

    desk.bench.zuul.accept(request)

    def logged() -> list[logging.LogRecord]:
        return [
            record
            for record in caplog.records
            if record.levelno > logging.DEBUG and "HTTP 409" in record.getMessage()
        ]

    with monkeypatch.context() as patched:
        patched.setattr(FakeApi, "delete_server", refuse)
        desk.bench.zuul.give_back(node.id)
        wait_for(lambda: len(logged()) >= 2, what="the second attempt")
    assert {(record.exc_info, "\n" in record.getMessage()) for record in logged()} == {
        (None, False)
    }
    assert (
        f"Exception deleting node {node.id} in provider fake-provider: "
        "openstack.exceptions.ConflictException" in caplog.text
    )
