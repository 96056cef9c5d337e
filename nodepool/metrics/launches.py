"""Statistics client and launch statistics (DRV-10, CLI-7.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nodepool import metrics
from nodepool.metrics import tracing

if TYPE_CHECKING:
    import datetime

_ESCAPE = str.maketrans(".:", "__")


class StatsClient(Protocol):
    """The methods of a statsd client that are used.

    :class:`nodepool.metrics.Metrics` and ``statsd.StatsClient`` have them.
    """

    def incr(self, stat: str, count: float = 1, rate: float = 1) -> None: ...

    def gauge(self, stat: str, value: float, rate: float = 1, delta: bool = False) -> None: ...

    def timing(self, stat: str, delta: float | datetime.timedelta, rate: float = 1) -> None: ...

    def pipeline(self) -> Any: ...


def get_client() -> metrics.Metrics | None:
    """Return the statsd client; None unless ``STATSD_HOST`` or ``STATSD_PORT`` is set."""
    client = metrics.shared()
    return client if client.address else None


def normalize_statsd_name(name: str) -> str:
    """Replace characters that have a meaning in statsd names."""
    return name.translate(_ESCAPE)


class StatsReporter:
    """Mix-in of launchers; requires ``provider_config``, ``node`` and ``handler``."""

    provider_config: Any
    node: Any
    handler: Any

    def __init__(self, statsd_client: StatsClient | None) -> None:
        self._statsd = statsd_client
        #: UNIX time and the step that began then; only recorded if there are traces.
        self.trace_steps: list[tuple[float, str]] = []

    def recordLaunchStats(self, subkey: str, dt: float) -> None:
        """Count a finished launch attempt; ``subkey`` is its result, ``dt`` its duration in ms."""
        provider = self.provider_config.name
        request = getattr(self.handler, "request", None)
        tracer = tracing.current()
        trace = (
            tracer.launch_ended(request, self.node, provider, subkey, dt / 1000, self.trace_steps)
            if tracer
            else None
        )
        self.trace_steps = []
        if self._statsd is None:
            return
        keys = [metrics.LAUNCHES(subkey), metrics.PROVIDER_LAUNCHES(provider, subkey)]
        if self.node.az:
            keys.append(metrics.ZONE_LAUNCHES(provider, self.node.az, subkey))
        requestor = request.requestor if request is not None else None
        if requestor:
            keys.append(metrics.REQUESTOR_LAUNCHES(normalize_statsd_name(requestor), subkey))
        keys += [metrics.LABEL_LAUNCHES(label, subkey) for label in self.node.type[:1]]
        if self.node.tenant_name:
            keys.append(
                metrics.TENANT_LAUNCHES(normalize_statsd_name(self.node.tenant_name), subkey)
            )
        for key in keys:
            self._statsd.timing(key, dt)
            self._statsd.incr(key)
        if trace and isinstance(self._statsd, metrics.Metrics):
            for key in keys[:2]:
                self._statsd.exemplar(key, dt, trace)
