"""Metrics as Prometheus text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nodepool.metrics.client import BUCKETS, Timer
from nodepool.metrics.series import Definition, Series
from nodepool.texts import printable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nodepool.metrics.client import Metrics


class NodepoolCollector:
    """Converts a snapshot into metric families at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import metrics_core

        snapshot = self._metrics.snapshot()
        yield from self._families(metrics_core.GaugeMetricFamily, "", snapshot.gauges)
        yield from self._families(metrics_core.CounterMetricFamily, "", snapshot.counters)
        yield from self._families(
            metrics_core.HistogramMetricFamily,
            "_duration_seconds",
            {stat: _histogram(timer) for stat, timer in snapshot.timers.items()},
        )
        dropped = metrics_core.CounterMetricFamily(
            "nodepool_statsd_dropped", "Values not sent to statsd because the queue was full"
        )
        dropped.add_metric((), self._metrics.dropped)
        yield dropped

    @staticmethod
    def _families(
        factory: Callable[..., Any], suffix: str, values: Mapping[str, Any]
    ) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for stat, value in sorted(values.items()):
            series = stat if isinstance(stat, Series) else _foreign(stat)
            name, labels = series.definition.family, series.labels
            # Escaped names may collide; Prometheus would reject a scrape with duplicates.
            if (name, labels) in seen or (isinstance(value, float) and math.isnan(value)):
                continue
            seen.add((name, labels))
            if name not in families:
                families[name] = factory(
                    name + suffix, series.definition.help, labels=series.definition.labels
                )
            families[name].add_metric(
                [printable(text) for _, text in labels],
                *(value if isinstance(value, tuple) else (value,)),
            )
        yield from families.values()


def _histogram(timer: Timer) -> tuple[list[list[Any]], float]:
    """Return cumulative counts by upper bound, some with an exemplar, and the sum in seconds."""
    from prometheus_client.samples import Exemplar

    ends = [*map(str, BUCKETS), "+Inf"]
    classes: list[list[Any]] = [
        [end, n] for end, n in zip(ends, itertools.accumulate(timer.classes), strict=True)
    ]
    for index, example in timer.examples.items():
        classes[index].append(
            Exemplar({"trace_id": example.trace_id}, example.seconds, example.when)
        )
    return classes, timer.total / 1000


def _foreign(stat: str) -> Series:
    """Return a family without labels for a name of an external driver."""
    return Definition(
        re.sub(r"[{}%]", "_", stat), re.sub(r"[^a-zA-Z0-9_]|^(?=\d)", "_", stat), stat
    )()


class Exposition:
    """Renders ``/metrics``; the library, which is large, is loaded at the first scrape."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry: Any = None

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the text and its type: OpenMetrics if accepted, else the older format.

        Only OpenMetrics has exemplars.

        :param accept: header of the request.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        from prometheus_client.openmetrics import exposition

        if self._registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
            registry.register(NodepoolCollector(self._metrics))
            self._registry = registry
        if "application/openmetrics-text" in (accept or ""):
            text = exposition.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return text, exposition.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), self.content_type
