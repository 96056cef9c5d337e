"""State shared by the parts of a launcher, without threads or actions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.base.clock import SYSTEM, Clock, ServerTime
from nodepool.config.model import Config
from nodepool.driver.lifecycle import STARTING
from nodepool.driver.request.base import RequestHandler, RequestHost
from nodepool.launcher.drains import Drains
from nodepool.launcher.failures import LaunchFailures
from nodepool.launcher.pool import Pool
from nodepool.launcher.requests.declines import Declines
from nodepool.metrics.launches import normalize_statsd_name
from nodepool.reasons import Reason
from nodepool.zk.mirror.feed import seconds_between
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper


class LauncherState:
    """The configuration in force, ZooKeeper, the pools, and the handlers of requests."""

    #: None until one has been applied; most parts of a launcher run only afterwards.
    config: Config
    #: None until the first connection has been tried.
    zk: ZooKeeper

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        #: The time of ZooKeeper.
        self.server_time = ServerTime(clock)
        self.config = None  # type: ignore[assignment]
        self.zk = None  # type: ignore[assignment]
        self.statsd: metrics.Metrics = metrics.shared()
        #: Set when everything has to end.
        self.stopped = threading.Event()
        self.identifier = f"{hostnames.short()}-{os.getpid()}"
        self.claims: dict[str | None, object] = {}
        self.declines = Declines(lambda: self.zk, self.statsd)
        self.drains = Drains(lambda: self.zk, lambda: self.config, clock, self.server_time)
        self.launch_failures = LaunchFailures(lambda: self.zk, self.server_time.now)
        #: The configured pools by launcher id; replaced as a whole, before a new one starts.
        self.workers: Mapping[str, Pool] = {}
        #: The handlers of this launcher by the id of their request.
        self.handlers: dict[str, RequestHandler] = {}

    def note_cluster(self) -> None:
        """Record a point of the history of the tree for a new connection, and compare the clocks.

        :raises KazooException: no connection, or no answer in time.
        :raises RecordError: the record is damaged.
        """
        cluster, began = self.zk.cluster, self.clock.monotonic()
        before = cluster.time
        cluster.note()
        if cluster.time != before:
            self.server_time.measured(cluster.time / 1000, began)

    def decline(self, pool: RequestHost, request: NodeRequest, reasons: list[Reason]) -> str | None:
        """Record why a pool declines a request; return all reasons if every pool has declined
        it.
        """
        self.declines.note(request, pool.launcher_id, pool.capacity.label, reasons)
        # Our pools that are just being registered count, too.
        pools = {pool.id for pool in self.zk.getRegisteredPools()} | self.workers.keys()
        if self.is_starting(request.node_types):
            return None
        return self.declines.known(request) if pools <= set(request.declined_by) else None

    def is_starting(self, labels: Iterable[str]) -> bool:
        """Return whether a provider that is still starting offers all these labels."""
        known = self.config.not_running_labels if self.config is not None else {}
        return any(
            self.config.provider_failures.get(name) == STARTING and set(labels) <= set(known[name])
            for name in known
        )

    def getPoolWorkers(self, provider_name: str) -> list[Pool]:
        return [w for w in self.workers.values() if w.provider_name == provider_name]

    def request_fulfilled(
        self, request: NodeRequest, accepted: float | None = None, trace: str | None = None
    ) -> None:
        """Record the waiting time of a fulfilled request.

        :param accepted: UNIX seconds.
        :param trace: id of the trace of the request.
        """
        now = self.clock.time()
        took = (
            None if request.requestor == MIN_READY else seconds_between(request.created_time, now)
        )
        if took is None:
            return
        for step, seconds in (
            ("accept", seconds_between(request.created_time, accepted)),
            ("serve", seconds_between(accepted, now)),
        ):
            if seconds is not None:
                self.statsd.timing(metrics.REQUEST_STEP(hostnames.short(), step), seconds * 1000)
        series = [metrics.LABEL_REQUEST_WAIT(label) for label in set(request.node_types)]
        if request.tenant_name:
            series.append(metrics.TENANT_REQUEST_WAIT(normalize_statsd_name(request.tenant_name)))
        series.append(metrics.REQUEST_WAIT(hostnames.short()))
        for each in series:
            self.statsd.timing(each, took * 1000)
            if trace is not None:
                self.statsd.exemplar(each, took * 1000, trace)
