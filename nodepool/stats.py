"""Launch statistics, under the name that drivers import (DRV-13)."""

from nodepool.metrics.launches import StatsClient, StatsReporter, get_client, normalize_statsd_name

__all__ = ["StatsClient", "StatsReporter", "get_client", "normalize_statsd_name"]
