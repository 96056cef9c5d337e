"""Metrics as Prometheus text: dotted names become a family with labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nodepool.metrics import Metrics, Snapshot

_RESULT = r"(?P<result>ready|error\.[^.]+)"
_STATE = r"(?P<state>[^.]+)"


@dataclass(frozen=True)
class Pattern:
    regex: re.Pattern[str]
    family: str
    help: str


def _pattern(regex: str, family: str, text: str) -> Pattern:
    return Pattern(re.compile(regex + r"\Z"), family, text)


# First match wins.  Provider, label and image names may contain dots.
PATTERNS = (
    _pattern(rf"nodepool\.nodes\.{_STATE}", "nodepool_nodes", "Nodes by state"),
    _pattern(rf"nodepool\.provider\.(?P<provider>.+)\.nodes\.{_STATE}", "nodepool_provider_nodes",
             "Nodes by provider and state"),
    _pattern(rf"nodepool\.label\.(?P<label>.+)\.nodes\.{_STATE}", "nodepool_label_nodes",
             "Nodes by label and state"),
    _pattern(r"nodepool\.provider\.(?P<provider>.+)\.pool\.(?P<pool>.+)\.addressable_requests",
             "nodepool_pool_addressable_requests", "Requests whose labels the pool offers"),
    _pattern(r"nodepool\.provider\.(?P<provider>.+)\.max_servers", "nodepool_provider_max_servers",
             "Limit of servers over the provider's pools"),
    _pattern(r"nodepool\.provider\.(?P<provider>.+)\.leaked\.(?P<kind>[^.]+)", "nodepool_leaked_resources",
             "Leaked resources that were removed"),
    _pattern(r"nodepool\.provider\.(?P<provider>.+)\.api\.(?P<operation>[^.]+)\.error\.(?P<kind>[^.]+)",
             "nodepool_provider_api_errors", "Failed calls of the provider's API by kind of error"),
    _pattern(r"nodepool\.provider\.(?P<provider>.+)\.api\.(?P<operation>[^.]+)", "nodepool_provider_api",
             "Calls of the provider's API, failed ones included"),
    _pattern(r"nodepool\.tenant_limits\.(?P<tenant>[^.]+)\.(?P<limit>[^.]+)", "nodepool_tenant_limit",
             "Resource limit of the tenant"),
    _pattern(r"nodepool\.launcher\.(?P<host>.+)\.zk\.(?P<queue>[^.]+\.[^.]+)", "nodepool_zookeeper_queue",
             "Length of a queue between ZooKeeper and this launcher"),
    _pattern(r"nodepool\.launcher\.(?P<host>.+)\.found_by_resync", "nodepool_launcher_found_by_resync",
             "Requests that were found by the regular look at everything, not by an event: defects"),
    _pattern(rf"nodepool\.launch\.requestor\.(?P<requestor>[^.]+)\.{_RESULT}", "nodepool_requestor_launches",
             "Launch attempts by requestor and result"),
    _pattern(rf"nodepool\.launch\.provider\.(?P<provider>.+?)\.{_RESULT}", "nodepool_provider_launches",
             "Launch attempts by provider and result"),
    _pattern(rf"nodepool\.launch\.{_RESULT}", "nodepool_launches", "Launch attempts by result"),
    _pattern(r"nodepool\.dib_image_build\.(?P<image>.+)\.status\.rc", "nodepool_image_build_exit_status",
             "Exit status of the last build"),
    _pattern(r"nodepool\.dib_image_build\.(?P<image>.+)\.status\.last_build", "nodepool_image_last_build_timestamp",
             "UNIX time of the last build"),
    _pattern(r"nodepool\.dib_image_build\.(?P<image>.+)\.status\.duration", "nodepool_image_build",
             "Builds of the image"),
    _pattern(r"nodepool\.dib_image_build\.(?P<image>.+)\.(?P<format>[^.]+)\.size", "nodepool_image_size_bytes",
             "Disk usage of the built image"),
    _pattern(r"nodepool\.image_update\.(?P<image>.+)\.(?P<provider>[^.]+)", "nodepool_image_uploads",
             "Finished image uploads"),
    _pattern(r"nodepool\.image_build_requests", "nodepool_image_build_requests",
             "Images with a pending build request"),
    _pattern(r"nodepool\.image\.(?P<image>.+)\.image_build_requests", "nodepool_image_build_requested",
             "1 when a build of the image is requested"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.provider\.(?P<provider>.+)\.upload\.state",
             "nodepool_builder_upload_state", "0 idle, 2 uploading, 3 paused"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.build\.state", "nodepool_builder_build_state",
             "0 idle, 1 building, 3 paused"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.provider\.(?P<provider>.+)\.upload\.bytes_sent",
             "nodepool_builder_upload_sent_bytes", "Sent of the running upload"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.provider\.(?P<provider>.+)\.upload\.rate",
             "nodepool_builder_upload_bytes_per_second", "Rate of the running upload"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.build\.phase", "nodepool_builder_build_phase",
             "Phase of the running build, 0 when none runs"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.build\.elapsed",
             "nodepool_builder_build_elapsed_seconds", "Time that the running build has taken"),
    _pattern(r"nodepool\.builder\.(?P<host>.+?)\.image\.(?P<image>.+)\.build\.expected",
             "nodepool_builder_build_expected_seconds", "Time that earlier builds of the image took; 0: not known"),
    _pattern(r"nodepool\.builder\.(?P<host>.+)\.config_stale", "nodepool_builder_config_stale",
             "1 while the configuration file cannot be used"),
    _pattern(r"nodepool\.builder\.(?P<host>.+)\.current_builds", "nodepool_builder_current_builds",
             "Builds going on"),
    _pattern(r"nodepool\.builder\.(?P<host>.+)\.current_uploads", "nodepool_builder_current_uploads",
             "Uploads going on"),
    _pattern(r"nodepool\.builder\.(?P<host>.+)\.build_workers", "nodepool_builder_build_workers", "Build workers"),
    _pattern(r"nodepool\.builder\.(?P<host>.+)\.upload_workers", "nodepool_builder_upload_workers",
             "Upload workers"),
)

_ZONE_FAMILY = "nodepool_zone_launches"


@dataclass(frozen=True)
class Series:
    family: str
    help: str
    labels: tuple[tuple[str, str], ...]


def parse(name: str) -> Series:
    """Family and labels of a dotted name; an unknown name becomes a family without labels."""
    for pattern in PATTERNS:
        match = pattern.regex.match(name)
        if match:
            return Series(pattern.family, pattern.help, tuple(match.groupdict().items()))
    return Series(re.sub(r"[^a-zA-Z0-9_]", "_", name), name, ())


def split_zones(series: dict[str, Series]) -> dict[str, Series]:
    """Tell ``<provider>.<az>`` from ``<provider>``: a zone's series always has one of its provider beside it."""
    providers = {dict(s.labels)["provider"] for s in series.values() if s.family == "nodepool_provider_launches"}
    result = {}
    for name, one in series.items():
        labels = dict(one.labels)
        if one.family == "nodepool_provider_launches":
            parts = labels["provider"].split(".")
            # The longest prefix that is itself a provider.
            for end in range(len(parts) - 1, 0, -1):
                prefix = ".".join(parts[:end])
                if prefix in providers:
                    zone = (("provider", prefix), ("az", ".".join(parts[end:])), ("result", labels["result"]))
                    one = Series(_ZONE_FAMILY, "Launch attempts by provider, zone and result", zone)
                    break
        result[name] = one
    return result


class NodepoolCollector:
    """Turns a snapshot into metric families at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._parsed: dict[str, Series] = {}

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import metrics_core

        snapshot = self._metrics.snapshot()
        series = split_zones(self._series(snapshot))
        yield from self._families(
            metrics_core.GaugeMetricFamily, "", ((series[n], v) for n, v in snapshot.gauges.items())
        )
        yield from self._families(
            metrics_core.CounterMetricFamily, "", ((series[n], v) for n, v in snapshot.counters.items())
        )
        yield from self._families(
            metrics_core.SummaryMetricFamily,
            "_duration_seconds",
            ((series[n], (count, total / 1000)) for n, (count, total) in snapshot.timers.items()),
        )
        dropped = metrics_core.CounterMetricFamily(
            "nodepool_statsd_dropped", "Values not sent to statsd because the queue was full"
        )
        dropped.add_metric((), self._metrics.dropped)
        yield dropped

    def _series(self, snapshot: Snapshot) -> dict[str, Series]:
        names = snapshot.gauges.keys() | snapshot.counters.keys() | snapshot.timers.keys()
        for name in names - self._parsed.keys():
            self._parsed[name] = parse(name)
        for name in self._parsed.keys() - names:
            del self._parsed[name]
        return {name: self._parsed[name] for name in sorted(names)}

    @staticmethod
    def _families(factory: Any, suffix: str, values: Iterable[tuple[Series, Any]]) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for series, value in values:
            # Two names may look alike once escaped; a scrape with doubles would be refused as a whole.
            if (series.family, series.labels) in seen or (isinstance(value, float) and math.isnan(value)):
                continue
            seen.add((series.family, series.labels))
            family = families.get(series.family)
            if family is None:
                labels = [name for name, _ in series.labels]
                family = families[series.family] = factory(series.family + suffix, series.help, labels=labels)
            label_values = [text for _, text in series.labels]
            if isinstance(value, tuple):
                family.add_metric(label_values, *value)
            else:
                family.add_metric(label_values, value)
        yield from families.values()


class Exposition:
    """The text for ``/metrics``; the library is loaded at the first scrape, because it is large."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry: Any = None

    def render(self) -> bytes:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        if self._registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
            registry.register(NodepoolCollector(self._metrics))
            self._registry = registry
        return generate_latest(self._registry)
