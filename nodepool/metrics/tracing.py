"""OpenTelemetry traces (extra ``tracing``): spans of served requests and their launches.

Zuul stores the context of its span in ``requestor_data``; our spans are its children. The
environment variables of OpenTelemetry enable it: nothing is sent without
``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nodepool.base import optional
from nodepool.base.problems import one_line
from nodepool.version import get_version_string

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "nodepool-launcher"
CLOSE_LIMIT = 2.0
"""Seconds for sending the rest at the end."""
FINAL = ("fulfilled", "removed")
"""Results after which this launcher does not process the request again."""
MOST = 10_000
"""Requests whose spans are kept."""
LONGEST = 30 * 24 * 3600.0
"""Seconds: the creation time of an allegedly older request is not credible."""

log = logging.getLogger("nodepool.Tracing")


def _harmless(method: Callable[..., str | None]) -> Callable[..., str | None]:
    """Suppress errors, whatever a record contains: they concern only this trace."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> str | None:
        try:
            return method(*args, **options)
        except Exception:
            log.exception("Cannot record a trace:")
            return None

    return call


class Tracer:
    """Creates spans; a thread of the library sends them, and drops what it cannot send."""

    def __init__(
        self,
        exporter: Any,
        clock: Callable[[], float] = time.time,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = exporter
        self._clock = clock
        self._lock = threading.Lock()
        #: Of current and recent requests: a launch may end after its request.
        self._spans: dict[str, Any] = {}
        self._ended: dict[str, Any] = {}
        names = {"service.version": get_version_string()}
        if not env.get("OTEL_SERVICE_NAME"):
            names["service.name"] = SERVICE
        self._provider = TracerProvider(resource=Resource.create(names))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nodepool", get_version_string())

    # -- what has happened

    @_harmless
    def launch_ended(
        self,
        request: Any,
        node: Any,
        provider: str,
        result: str,
        seconds: float,
        steps: Iterable[tuple[float, str]] = (),
    ) -> str | None:
        """Record the end of an attempt to create a node, or of the whole launch.

        :param request: the NodeRequest that it was for; None: for none.
        :param steps: UNIX times, and what began then.
        :returns: the trace's id, if it is recorded.
        """
        from opentelemetry import trace

        now = self._clock()
        context = (
            None if request is None else trace.set_span_in_context(self._span(request, late=True))
        )
        attributes = {
            "nodepool.node": node.id,
            "nodepool.provider": provider,
            "nodepool.label": ",".join(node.type),
            "nodepool.result": result,
            "nodepool.az": node.az,
            "nodepool.external_id": node.external_id,
        }
        span = self._tracer.start_span(
            "launch",
            context,
            attributes=_known(attributes),
            start_time=_nanoseconds(now - max(0.0, seconds)),
        )
        for when, text in steps:
            span.add_event(text, timestamp=_nanoseconds(when))
        _end(span, result, result == "ready", now)
        return _trace_id(span)

    @_harmless
    def request_ended(self, request: Any, result: str, provider: str, pool: str) -> str | None:
        """Record that this launcher has finished with a request; unserved ones get no span.

        :returns: the trace's id, if it is recorded.
        """
        with self._lock:
            known = request.id in self._spans
        if not known and result != "fulfilled":
            return None
        span = self._span(request)
        with self._lock:
            self._spans.pop(request.id, None)
            if result in FINAL:
                _keep(self._ended, request.id, span)
        span.set_attributes(
            _known(
                {
                    "nodepool.provider": provider,
                    "nodepool.pool": pool,
                    "nodepool.result": result,
                    "nodepool.nodes": ",".join(map(str, request.nodes)),
                }
            )
        )
        _end(span, result, result in ("fulfilled", "returned", "removed"), self._clock())
        return _trace_id(span)

    def _span(self, request: Any, late: bool = False) -> Any:
        """Return the span of a request.

        :param late: also return the span of a request that has ended for good.
        """
        with self._lock:
            span = self._spans.get(request.id) or (self._ended.get(request.id) if late else None)
            if span is None:
                now = self._clock()
                created = request.created_time
                if created is None and request.stat is not None:  # such as one for min-ready
                    created = request.stat.ctime / 1000
                believed = isinstance(created, (int, float)) and now - LONGEST < created <= now
                attributes = {
                    "nodepool.request": request.id,
                    "nodepool.labels": ",".join(map(str, request.node_types)),
                    "nodepool.requestor": request.requestor,
                    "nodepool.tenant": request.tenant_name,
                    "nodepool.event_id": request.event_id,
                }
                span = self._tracer.start_span(
                    "request",
                    parent_context(request.requestor_data),
                    attributes=_known(attributes),
                    start_time=_nanoseconds(created if believed else now),
                )
                _keep(self._spans, request.id, span)
            return span

    def close(self) -> None:
        """Send what is queued and end the thread within the deadline.

        The library itself has no time limit for servers that do not answer.
        """
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(CLOSE_LIMIT)
        if ending.is_alive():
            # Running exports have their own deadline; nothing is retried or started after it.
            self._exporter.shutdown()


def _keep(spans: dict[str, Any], request_id: str, span: object) -> None:
    """Store the span; the oldest one is removed if there are too many."""
    spans[request_id] = span
    if len(spans) > MOST:
        del spans[next(iter(spans))]


def parent_context(data: object) -> Any:
    """Return the span of Zuul in ``requestor_data`` as a context; None if it has no valid one."""
    from opentelemetry import trace

    info = data.get("span_info") if isinstance(data, Mapping) else None
    if not isinstance(info, Mapping):
        return None
    trace_id, span_id = _identifier(info.get("trace_id"), 128), _identifier(info.get("span_id"), 64)
    if not trace_id or not span_id:
        return None
    there = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(there))


def _identifier(value: object, bits: int) -> int | None:
    """Return an integer from a number or its hexadecimal form; None if invalid or too large."""
    if isinstance(value, str):
        try:
            value = int(value[: bits // 4 + 1], 16)
        except ValueError:
            return None
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << bits
        else None
    )


def _known(attributes: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in attributes.items() if value not in (None, "")}


def _nanoseconds(when: float) -> int:
    return int(when * 1e9)


def _end(span: Any, result: str, good: bool, now: float) -> None:
    from opentelemetry.trace import Status, StatusCode

    if not good:
        span.set_status(Status(StatusCode.ERROR, result))
    span.end(_nanoseconds(now))


def _trace_id(span: Any) -> str | None:
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


_current: Tracer | None = None


def start(env: Mapping[str, str] = os.environ) -> None:
    """Start tracing if the environment asks for it; log why it cannot be started."""
    global _current
    wanted = next((name for name in VARIABLES if env.get(name)), None)
    if wanted is None or _current is not None:
        return
    absent = optional.missing(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))
    if absent is not None:
        log.error("Tracing is disabled although %s is set: it requires %s", wanted, absent)
        return
    if (
        env.get(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        )
        != "http/protobuf"
    ):
        log.warning(
            "Traces are sent as http/protobuf; this release does not support other OpenTelemetry "
            "protocols"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        _current = Tracer(OTLPSpanExporter(), env=env)
    except Exception as error:  # raised for a variable that the library does not understand
        log.error("Tracing is disabled: %s", one_line(error))
        return
    log.info("Sending traces to %s", env[wanted])


def current() -> Tracer | None:
    """Return the tracer; None if tracing is disabled."""
    return _current


def stop() -> None:
    global _current
    tracer, _current = _current, None
    if tracer is not None:
        try:
            tracer.close()
        except Exception:
            log.exception("Cannot send the last traces:")
