from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from nodepool import exceptions, metrics
from nodepool.cloud import AdaptiveRate, CallsStopped, CallTimeout, CloudCalls, ErrorKind, translate
from tests.conftest import wait_for
from tests.support.clock import CloudError, HandClock, classify
from tests.support.deadline import limit


class Script:
    """Raises or returns the given values, in order."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kw: Any) -> Any:
        self.calls.append((*args, *kw.items()))
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step


def make(rate: float = 10) -> tuple[CloudCalls, HandClock]:
    clock = HandClock()
    rates = {
        lane: AdaptiveRate(lane, rate, clock=clock, wait=clock.wait)
        for lane in ("read", "write", "delete")
    }
    calls = CloudCalls("p", classify, rates, clock=clock, wait=clock.wait, jitter=lambda: 1.0)
    return calls, clock


def test_a_call_passes_arguments_and_result() -> None:
    calls, _ = make()
    script = Script("result")
    assert calls.call("describe", script, 1, Two=2) == "result"
    assert script.calls == [(1, ("Two", 2))]


def test_throttled_calls_slow_down_and_succeed() -> None:
    calls, clock = make()
    script = Script(CloudError(ErrorKind.THROTTLED), CloudError(ErrorKind.THROTTLED), "ok")
    assert calls.call("run", script, lane="write") == "ok"
    rate = calls.rates["write"]
    assert rate.pace == 10 / 4 + 10 / 20
    assert calls.describe()["throttled"] is True
    assert not calls.rates["read"].slowed, "other lanes are not slowed"
    assert clock.waits[:1] == [0.5]
    while rate.slowed:
        calls.call("run", Script("ok"), lane="write")
    assert calls.describe()["throttled"] is False


def test_transient_errors_are_repeated_only_when_that_is_safe() -> None:
    calls, _ = make()
    assert calls.call("list", Script(CloudError(ErrorKind.TRANSIENT), "ok")) == "ok"
    assert (
        calls.call("delete", Script(CloudError(ErrorKind.TRANSIENT), "ok"), lane="delete") == "ok"
    )
    assert (
        calls.call(
            "create", Script(CloudError(ErrorKind.TRANSIENT), "ok"), lane="write", idempotent=True
        )
        == "ok"
    )
    script = Script(CloudError(ErrorKind.TRANSIENT), "never")
    with pytest.raises(CloudError):
        calls.call("create", script, lane="write")
    assert len(script.calls) == 1


@pytest.mark.parametrize(
    "kind",
    [
        ErrorKind.NOT_FOUND,
        ErrorKind.QUOTA,
        ErrorKind.CAPACITY,
        ErrorKind.CONFIGURATION,
        ErrorKind.OTHER,
    ],
)
def test_other_errors_are_raised_immediately(kind: ErrorKind) -> None:
    calls, clock = make()
    script = Script(CloudError(kind), "never")
    with pytest.raises(CloudError):
        calls.call("list", script)
    assert len(script.calls) == 1
    assert clock.waits == []


def test_the_deadline_bounds_the_retries() -> None:
    calls, clock = make()
    script = Script(*[CloudError(ErrorKind.TRANSIENT, "no answer")] * 100)
    started = clock.now
    with pytest.raises(
        CallTimeout, match=r"list did not succeed within 60 s \(7 tries\), last error: no answer"
    ) as caught:
        calls.call("list", script, deadline=60)
    assert caught.value.kind is ErrorKind.TRANSIENT
    assert clock.now - started <= 60


def test_the_last_error_is_kept_for_display() -> None:
    calls, _ = make()
    assert calls.describe()["last_error"] is None
    with pytest.raises(CloudError):
        calls.call("list", Script(CloudError(ErrorKind.CONFIGURATION, "wrong credentials")))
    with pytest.raises(CloudError):
        calls.call("get", Script(CloudError(ErrorKind.NOT_FOUND, "no such id")))
    error = calls.describe()["last_error"]
    assert (error["operation"], error["kind"], error["message"]) == (
        "list",
        "configuration",
        "wrong credentials",
    )
    assert abs(error["time"] - time.time()) < 60


def test_troubles_are_those_of_the_latest_calls() -> None:
    calls, _ = make()
    calls._wall = lambda: 1000.0
    for operation, kind, lane in (
        ("list", ErrorKind.CONFIGURATION, "read"),
        ("create", ErrorKind.CAPACITY, "write"),
        ("get", ErrorKind.NOT_FOUND, "read"),
        ("delete", ErrorKind.NOT_FOUND, "delete"),
    ):
        with pytest.raises(CloudError):
            calls.call(operation, Script(CloudError(kind, "two\nlines")), lane=lane)
    since = "since 00:16:40 UTC: two lines"
    assert calls.troubles() == [
        f"list fails (configuration) {since}",
        f"get fails (not_found) {since}",
    ]
    calls.call("list", Script("ok"))
    with pytest.raises(CloudError):
        calls.call("get", Script(CloudError(ErrorKind.NOT_FOUND, "gone")), missing_ok=True)
    assert calls.troubles() == []
    calls.call("get", Script(CloudError(ErrorKind.THROTTLED), "ok"))
    assert calls.troubles() == ["throttled: read calls at 5.5/s of 10/s (throttled)"]


def test_troubles_with_single_things_fade() -> None:
    now = [1000.0]
    clock = HandClock()
    calls = CloudCalls("p", classify, {}, clock=clock, wait=clock.wait, wall=lambda: now[0])
    for kind in (
        ErrorKind.CONFIGURATION,
        ErrorKind.NOT_FOUND,
        ErrorKind.OTHER,
        ErrorKind.TRANSIENT,
    ):
        with pytest.raises(CloudError):
            calls.call(f"get {kind.value}", Script(CloudError(kind, "no")), idempotent=False)
    assert len(calls.troubles()) == 4
    now[0] += 599
    assert len(calls.troubles()) == 4
    now[0] += 2
    kept = [
        f"get {kind} fails ({kind}) since 00:16:40 UTC: no"
        for kind in ("configuration", "transient")
    ]
    assert calls.troubles() == kept
    with pytest.raises(CloudError):
        calls.call("get other", Script(CloudError(ErrorKind.OTHER, "again")))
    assert "get other fails (other) since 00:16:40 UTC: again" in calls.troubles()


def test_slow_answers_are_reported_until_one_is_fast_or_long_ago() -> None:
    now = [1000.0]
    clock = HandClock()
    calls = CloudCalls("p", classify, {}, clock=clock, wait=clock.wait, wall=lambda: now[0])
    seen: list[list[str]] = []

    def answer(seconds: float) -> None:
        clock.now += seconds
        seen.append(calls.troubles())

    calls.call("list", answer, 34.0)
    assert seen == [calls.troubles()] == [["calls take more than 30 s (list)"]]
    calls.call("get", answer, 9.9)
    assert calls.troubles() == ["calls take more than 30 s (list)"]
    calls.call("list", answer, 0.1)
    assert calls.troubles() == []
    calls.call("upload", answer, 400.0, deadline=3600.0)
    assert seen[-1] == calls.troubles() == [], (
        "the time of a transfer depends on the size of the image"
    )
    calls.call("list", answer, 10.0)
    now[0] += 601
    assert calls.troubles() == []


def test_calls_are_counted_by_operation_and_kind_of_error() -> None:
    calls = CloudCalls("cloud.x", classify, {})
    before = metrics.shared().snapshot()
    calls.call("ListThings", Script("ok"))
    with pytest.raises(CloudError):
        calls.call("ListThings", Script(CloudError(ErrorKind.QUOTA)))
    after = metrics.shared().snapshot()
    name = metrics.API_CALLS("cloud.x", "ListThings")
    errors = metrics.API_ERRORS("cloud.x", "ListThings", "quota")
    assert after.timers[name][0] - before.timers.get(name, (0, 0))[0] == 2
    assert after.counters[errors] - before.counters.get(errors, 0) == 1
    assert (name, errors) == (
        "nodepool.provider.cloud.x.api.ListThings",
        "nodepool.provider.cloud.x.api.ListThings.error.quota",
    )


def test_a_broken_classifier_does_no_harm() -> None:
    def broken(_error: BaseException) -> ErrorKind:
        raise ValueError("oops")

    calls = CloudCalls("p", broken, {})
    with pytest.raises(CloudError):
        calls.call("list", Script(CloudError(ErrorKind.QUOTA)))


def test_lanes_have_separate_threads() -> None:
    calls = CloudCalls("p", classify, {}, threads={"read": 1, "write": 1, "delete": 1})
    gate = threading.Event()
    try:
        stuck = calls.submit("delete", gate.wait, 30, lane="delete")
        more = calls.submit("delete", gate.wait, 30, lane="delete")
        assert (
            calls.submit("create", lambda: threading.current_thread().name, lane="write")
            .result(5)
            .startswith("Thread-p-w")
        )
        assert (
            calls.submit("list", lambda: threading.current_thread().name)
            .result(5)
            .startswith("Thread-p-read")
        )
        assert not stuck.done()
        assert not more.done()
    finally:
        gate.set()
        calls.stop()
    wait_for(
        lambda: not any(t.name.startswith("Thread-p-") for t in threading.enumerate()),
        5,
        "threads end",
    )


def test_stop_ends_waits_and_refuses_new_calls() -> None:
    calls = CloudCalls(
        "p", classify, {"write": AdaptiveRate("write", 0.01)}, threads={"read": 1, "write": 2}
    )
    backing_off = calls.submit("list", Script(*[CloudError(ErrorKind.TRANSIENT)] * 100))
    calls.call("create", Script("ok"), lane="write")
    pacing = calls.submit("create", Script("never"), lane="write")
    queued = [calls.submit("create", Script("never"), lane="write") for _ in range(3)]
    wait_for(
        lambda: calls.last_error is not None and pacing.running(),
        5,
        "a first failure, and a call that is paced",
    )
    started = time.monotonic()
    calls.stop()
    for future in (backing_off, pacing):
        assert isinstance(future.exception(5), CallsStopped)
    assert time.monotonic() - started < limit(3)
    assert all(
        future.cancelled() or isinstance(future.exception(5), CallsStopped) for future in queued
    )
    assert isinstance(calls.submit("list", Script("never")).exception(1), CallsStopped)
    with pytest.raises(CallsStopped):
        calls.call("list", Script("never"))


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        (ErrorKind.NOT_FOUND, exceptions.NotFound),
        (ErrorKind.QUOTA, exceptions.QuotaException),
        (ErrorKind.CAPACITY, exceptions.CapacityException),
        (ErrorKind.CONFIGURATION, exceptions.RuntimeConfigurationException),
    ],
)
def test_kinds_become_the_launchers_exceptions(kind: ErrorKind, cls: type[Exception]) -> None:
    error = CloudError(kind, "text")
    result = translate(error, classify)
    assert type(result) is cls
    assert str(result) == "text"
    assert translate(error, classify, ErrorKind.OTHER) is error
    assert translate(CloudError(ErrorKind.TRANSIENT), classify).__class__ is CloudError


def test_cloud_without_answers_is_silent() -> None:
    calls, clock = make()
    assert not calls.silent(clock())
    seen: list[bool] = []

    def asked() -> None:
        clock.now += 1
        seen.append(calls.silent(clock()))
        seen.append(calls.silent(clock() - 2))

    calls.call("describe", Script("earlier"))
    calls.call("describe", asked)
    assert seen == [True, False], "under way without an answer since; but there was one before that"
    assert not calls.silent(clock() + 1), "nothing is under way"

    def no_answer() -> None:
        seen.append(calls.silent(clock()))
        clock.now += 1
        raise CloudError(ErrorKind.TRANSIENT)

    since = clock() + 0.5
    clock.now += 1
    with pytest.raises(CloudError):
        calls.call("run", no_answer, lane="write")
    assert calls._answered < since, "a connection that fails is no answer"


def test_overload_slows_down_without_another_try() -> None:
    """Whether the work was done is not known: a creation is not repeated."""
    clock = HandClock()
    rate = AdaptiveRate("write", 10, clock=clock, wait=clock.wait)
    calls = CloudCalls(
        "p",
        classify,
        {"write": rate},
        clock=clock,
        wait=clock.wait,
        overload=lambda error: "busy" in str(error),
    )
    script = Script(
        CloudError(ErrorKind.TRANSIENT, "busy"), CloudError(ErrorKind.TRANSIENT, "gone")
    )
    for expected in (5, 5):
        with pytest.raises(CloudError):
            calls.call("create", script, lane="write")
        assert rate.pace == expected
    assert len(script.calls) == 2


def test_lasting_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls, _ = make()
    caplog.set_level("INFO", "nodepool")
    broken = [CloudError(ErrorKind.TRANSIENT, "made up")]
    calls.call("list", Script(*broken, "ok"))
    assert caplog.messages == []
    calls.call("list", Script(*broken * 4, "ok"))
    calls.call("list", Script("ok"))
    assert caplog.messages == [
        "Provider p: list fails repeatedly (transient): made up",
        "Provider p: list works again",
    ]


def test_long_errors_are_kept_and_logged_by_their_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    calls, _ = make()
    with pytest.raises(CallTimeout) as caught:
        calls.call(
            "describe",
            Script(*[CloudError(ErrorKind.TRANSIENT, "start " + "x" * 100000)] * 100),
            deadline=20,
        )
    assert calls.last_error is not None
    for text in (
        str(caught.value),
        calls.last_error.message,
        *(record.getMessage() for record in caplog.records),
    ):
        assert len(text) < 1200
    assert calls.last_error.message.startswith("start xxx")
