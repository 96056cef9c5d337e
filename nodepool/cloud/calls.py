"""Calls to a cloud: rate-limited, retried, bounded in time and measured."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from nodepool import metrics
from nodepool.base import threads as shared_threads
from nodepool.base.backoff import Backoff
from nodepool.cloud.errors import (
    CallsStopped,
    CallTimeout,
    Classifier,
    ErrorKind,
    bounded,
    message_of,
)
from nodepool.cloud.rates import AdaptiveRate

T = TypeVar("T")

THREADS = {"read": 10, "write": 8, "delete": 8}
"""Threads per lane."""
DEADLINE = 300.0
"""Default time limit in seconds of a call with its waits and retries."""
BACKOFF = Backoff(0.5, 30.0, jitter=0.5)
"""Between two attempts."""

FADE = 600.0
"""Seconds after which a failure that may concern a single object is no longer a problem."""

SLOW = 10.0
"""Seconds after which an answer is slow; the reported time is a multiple of it."""

_FADING = (ErrorKind.OTHER, ErrorKind.NOT_FOUND)
_NORMAL = (ErrorKind.QUOTA, ErrorKind.CAPACITY)
"""Errors that also occur with healthy providers."""


@dataclass(frozen=True)
class LastError:
    """The latest failure of a provider, for display.

    :param when: UNIX time.
    :param since: UNIX time of the first failure in a row.
    """

    operation: str
    kind: ErrorKind
    message: str
    when: float
    since: float


@dataclass
class _Call:
    operation: str
    lane: str
    rate: AdaptiveRate | None
    started: float
    until: float
    missing_ok: bool = False
    tries: int = 0
    #: When the current attempt was sent; None between two attempts.
    sent: float | None = None

    @property
    def is_short(self) -> bool:
        """Return whether the time does not depend on the size of an image that is transferred."""
        return self.until - self.started <= DEADLINE


class CloudCalls:
    """The calls of one provider.

    Lanes separate types of calls: each has its own threads and, if named in ``rates``, its own
    rate, so that creations and deletions never wait for each other. Lanes may share one
    :class:`AdaptiveRate`; a lane that is not named in ``threads`` uses those of "read".

    :param overload: whether an error that is not throttling requires a lower rate, too.
    :param retry_after: seconds that the cloud asks us to wait after this error, or None.
    :param wait: ``wait(event, seconds)`` -> whether the event is set; for tests.
    """

    def __init__(
        self,
        name: str,
        classify: Classifier,
        rates: Mapping[str, AdaptiveRate],
        *,
        threads: Mapping[str, int] | None = None,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait: Callable[[threading.Event, float], bool] | None = None,
        jitter: Callable[[], float] = random.random,
        retry_after: Callable[[BaseException], float | None] | None = None,
        overload: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self.name = name
        self.classify = classify
        self.rates = dict(rates)
        self.clock = clock
        self.last_error: LastError | None = None
        self._failing: dict[str, LastError] = {}
        self._reported: set[str] = set()
        self._log = log or logging.getLogger(f"nodepool.cloud.{name}")
        self._wall = wall
        self._wait = wait or (lambda event, seconds: event.wait(seconds))
        self._jitter = jitter
        self._retry_after = retry_after or (lambda _error: None)
        self._overload = overload or (lambda _error: False)
        self._stopped = threading.Event()
        limits = {"read": 1, **(THREADS if threads is None else threads)}
        pool = shared_threads.shared()
        self.timers = pool.timers(name)
        self._lanes = {
            lane: pool.lane(f"Thread-{name}-{lane}", limit) for lane, limit in limits.items()
        }
        self._under_way: dict[int, _Call] = {}
        #: Operation -> seconds that its last answer took, and when it arrived (UNIX seconds).
        self._slow: dict[str, tuple[float, float]] = {}
        self._answered = float("-inf")

    # -- making calls

    def call(
        self,
        operation: str,
        function: Callable[..., T],
        *args: object,
        lane: str = "read",
        deadline: float = DEADLINE,
        idempotent: bool | None = None,
        missing_ok: bool = False,
        **kw: Any,
    ) -> T:
        """Call ``function(*args, **kw)`` in this thread; its exceptions are raised.

        Throttled calls are repeated within ``deadline`` (seconds), transient errors also if
        ``idempotent`` (default: in the lanes "read" and "delete").

        :param missing_ok: a "not found" error is an expected answer, and is not recorded as a
            problem.
        :raises CallTimeout: no attempt could be made, or none succeeded, in time.
        :raises CallsStopped: the provider is stopping.
        """
        now = self.clock()
        call = _Call(operation, lane, self.rates.get(lane), now, now + deadline, missing_ok)
        self._under_way[id(call)] = call
        try:
            return self._call(call, idempotent, lambda: function(*args, **kw))
        finally:
            del self._under_way[id(call)]

    def _call(self, call: _Call, idempotent: bool | None, function: Callable[[], T]) -> T:
        repeat = {ErrorKind.THROTTLED}
        if idempotent or (idempotent is None and call.lane in ("read", "delete")):
            repeat.add(ErrorKind.TRANSIENT)
        while True:
            delay = call.rate.acquire(call.until) if call.rate else 0.0
            if self._stopped.is_set():
                raise CallsStopped(f"{self.name} is stopping")
            call.tries += 1
            started = call.sent = self.clock()
            try:
                result = function()
            except Exception as error:
                kind = self._note_failure(call, started, delay, error)
                if kind not in repeat:
                    raise
                self._back_off(call, kind, error)
            else:
                self._note_success(call, started, delay)
                return result

    def submit(
        self,
        operation: str,
        function: Callable[..., T],
        *args: object,
        lane: str = "read",
        **kw: Any,
    ) -> Future[T]:
        """Run :meth:`call` on a thread of the lane; the deadline counts from its start there.

        After :meth:`stop` the future contains :class:`CallsStopped`.
        """
        return self.run(lambda: self.call(operation, function, *args, lane=lane, **kw), lane=lane)

    def run(self, function: Callable[[], T], *, lane: str = "read") -> Future[T]:
        """Run ``function``, which uses :meth:`call` itself, on a thread of the lane."""
        try:
            return self._lanes.get(lane, self._lanes["read"]).submit(function)
        except RuntimeError:
            future: Future[T] = Future()
            future.set_exception(CallsStopped(f"{self.name} is stopping"))
            return future

    def _back_off(self, call: _Call, kind: ErrorKind, error: Exception) -> None:
        pause = max(BACKOFF.pause(call.tries, self._jitter), self._retry_after(error) or 0.0)
        if self.clock() + pause >= call.until:
            raise CallTimeout(
                f"{call.operation} did not succeed within {call.until - call.started:.0f} s"
                f" ({call.tries} tries), last error: {bounded(str(error))}",
                kind,
            ) from error
        if self._wait(self._stopped, pause):
            raise CallsStopped(f"{self.name} is stopping") from error

    # -- bookkeeping

    def _note_success(self, call: _Call, started: float, delay: float) -> None:
        self._answered = self.clock()
        took = self._note_time(call, started)
        self._works(call.operation)
        if call.rate:
            call.rate.succeeded()
        self._log.debug("API call %s in %.3f s after %.3f s delay", call.operation, took, delay)
        metrics.shared().timing(self._metric(call), took * 1000)

    def _note_failure(
        self, call: _Call, started: float, delay: float, error: Exception
    ) -> ErrorKind:
        took = self._note_time(call, started)
        try:
            kind = self.classify(error)
        except Exception:
            self._log.exception("Cannot classify an error of type %s:", type(error).__name__)
            kind = ErrorKind.OTHER
        message = message_of(error)
        if kind is not ErrorKind.TRANSIENT:
            self._answered = self.clock()
        if call.rate and (kind is ErrorKind.THROTTLED or self._overload(error)):
            before = call.rate.pace
            call.rate.throttled(started)
            if call.rate.pace != before:
                self._log.warning(
                    "Provider %s throttles %s; the rate is now %s",
                    self.name,
                    call.operation,
                    call.rate.describe(),
                )
        self._log.debug(
            "API call %s failed (%s) in %.3f s after %.3f s delay: %s",
            call.operation,
            kind.value,
            took,
            delay,
            message,
        )
        metrics.shared().timing(self._metric(call), took * 1000)
        metrics.shared().incr(metrics.API_ERRORS(self.name, call.operation, kind.value))
        now, first = self._wall(), self._failing.get(call.operation)
        noted = LastError(call.operation, kind, message, now, first.since if first else now)
        if kind is not ErrorKind.NOT_FOUND:
            self.last_error = noted
        if kind is ErrorKind.NOT_FOUND and (call.missing_ok or call.lane == "delete"):
            self._works(call.operation)
        elif kind not in _NORMAL:
            # A single failure is not reported; callers report what needs an operator.
            if (
                kind is ErrorKind.TRANSIENT
                and call.operation in self._failing
                and call.operation not in self._reported
            ):
                self._reported.add(call.operation)
                self._log.warning(
                    "Provider %s: %s fails repeatedly (%s): %s",
                    self.name,
                    call.operation,
                    kind.value,
                    message,
                )
            self._failing[call.operation] = noted
        return kind

    def _note_time(self, call: _Call, started: float) -> float:
        """Return the seconds that the attempt took; note an answer that was slow."""
        took, call.sent = self.clock() - started, None
        self._slow[call.operation] = took if call.is_short else 0.0, self._wall()
        return took

    def _works(self, operation: str) -> None:
        if self._failing.pop(operation, None) is not None and operation in self._reported:
            self._reported.discard(operation)
            self._log.info("Provider %s: %s works again", self.name, operation)

    def _metric(self, call: _Call) -> str:
        return metrics.API_CALLS(self.name, call.operation)

    def describe(self) -> dict[str, Any]:
        """Return rates and the last error, for status pages."""
        error = self.last_error
        return {
            "paces": {lane: rate.describe() for lane, rate in self.rates.items()},
            "throttled": any(rate.slowed for rate in self.rates.values()),
            "last_error": None
            if error is None
            else {
                "operation": error.operation,
                "kind": error.kind.value,
                "message": error.message,
                "time": error.when,
            },
        }

    def troubles(self) -> list[str]:
        """Return current problems in lines: failing calls, slow answers and throttled lanes.

        Failures that may concern a single object expire, because the operation may not be called
        again.
        """
        faded, now = self._wall() - FADE, self.clock()
        lines = [
            f"{error.operation} fails ({error.kind.value}) since "
            f"{time.strftime('%H:%M:%S UTC', time.gmtime(error.since))}:"
            f" {' '.join(error.message.split())[:300]}"
            for error in list(self._failing.values())
            if error.kind not in _FADING or error.when > faded
        ]
        times = [
            (took, operation)
            for operation, (took, when) in self._slow.copy().items()
            if when > faded
        ]
        times += [
            (now - (call.sent or now), call.operation)
            for call in list(self._under_way.values())
            if call.is_short
        ]
        took, operation = max(times, default=(0.0, ""))
        if took >= SLOW:
            lines.append(f"calls take more than {took // SLOW * SLOW:g} s ({operation})")
        lines += [
            f"throttled: {lane} calls at {rate.describe()}"
            for lane, rate in self.rates.items()
            if rate.slowed
        ]
        return lines

    def stop(self) -> None:
        """End all waits and timers, discard queued calls; running ones end by their time-outs."""
        self._stopped.set()
        self.timers.stop()
        for rate in self.rates.values():
            rate.stop()
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    def silent(self, since: float) -> bool:
        """Return whether calls are pending and the cloud has not answered any since ``since``."""
        return bool(self._under_way) and self._answered < since

    def pause(self, seconds: float) -> bool:
        """Wait this many seconds; return True as soon as the provider stops."""
        return self._wait(self._stopped, seconds)

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()
