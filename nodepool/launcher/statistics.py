"""Gauges (CLI-7.3 to CLI-7.5, LAU-20)."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.config.model import ProviderConfig
from nodepool.exceptions import FOREIGN
from nodepool.launcher.report import Reporter
from nodepool.launcher.requests.assignment import Assignment
from nodepool.launcher.state import LauncherState
from nodepool.launcher.usage_log import UsageLog
from nodepool.metrics.launches import normalize_statsd_name
from nodepool.reasons import Code
from nodepool.zk import paths
from nodepool.zk.connection.protocol import BROKEN
from nodepool.zk.history import HistoryWriter
from nodepool.zk.records import Node

STATES = sorted(Node.VALID_STATES)
#: Minimum seconds between two reports, and maximum seconds between two complete ones.
INTERVAL, COMPLETE_INTERVAL = 1.0, 60.0
INTERNAL_INTERVAL = 10.0
#: Minimum seconds between two reports if one is urgent.
SHORTEST = 0.2
#: Seconds after the start until the history is read for charts.
RECALL_AFTER = 5.0
#: A longer queue is warned about, at most once in this many seconds.
QUEUE_WARNING, WARNING_INTERVAL = 1024, 60.0


class StatsWorker(threading.Thread):
    """Reports limits and internals of this process and, if elected, cluster statistics."""

    log = logging.getLogger("nodepool.StatsWorker")

    def __init__(
        self,
        state: LauncherState,
        assignment: Assignment,
        publish_problems: Callable[[], None],
        reporter: Reporter,
        history: HistoryWriter,
        usage_log: UsageLog,
    ) -> None:
        super().__init__(name="StatsWorker", daemon=True)
        self.state = state
        self.assignment = assignment
        self._reporter = reporter
        self._history = history
        self._event, self._at_once = threading.Event(), threading.Event()
        self._stopping = False
        self.elected = False
        self._step_down = threading.Event()
        self._election: Any = None
        self._election_thread: threading.Thread | None = None
        self._sent: dict[str, float] = {}
        self._complete_at = 0.0
        self._warned: dict[str, float] = {}
        #: What is done at most once a second, at least after each change; and what is done every 10
        #: s.
        self._parts: dict[str, Callable[[], Any]] = {
            "publishing problems": publish_problems,
            "publishing the report": reporter.publish,
            "publishing the configuration": reporter.publish_config,
            "writing history": lambda: history.flush(self.state.zk.kazoo_client, self.elected),
            "standing for election": self._stand_for_election,
            "reporting": self._report,
        }
        self._rare_parts: dict[str, Callable[[], Any]] = {
            "reporting internals": self._internals,
            "sampling for charts": reporter.sample,
            "exporting usage": lambda: usage_log.check(self.elected),
        }
        #: The last logged error of each failing part.
        self._errors: dict[str, str] = {}

    def wake(self, at_once: bool = False) -> None:
        if at_once:
            self._at_once.set()
        self._event.set()

    def stop(self) -> None:
        self._stopping = True
        self.wake(at_once=True)
        if self._election is not None:
            self._election.cancel()

    def session_lost(self) -> None:
        """Forget the election, which was held in that session."""
        self.elected = False
        self._step_down.set()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._election_thread is not None:
            self._election_thread.join(timeout)

    def run(self) -> None:
        internals_at = 0.0
        # Not immediately: a starting launcher has more important work.
        recall_at = self.state.clock.monotonic() + RECALL_AFTER
        while not self._stopping:
            now = self.state.clock.monotonic()
            try:
                if self.state.zk.connected:
                    self._safely(self._parts)
                    if now >= internals_at:
                        internals_at = now + INTERNAL_INTERVAL
                        self._safely(self._rare_parts)
                    if now >= recall_at:
                        recall_at = math.inf
                        self._safely({"reading history": self._reporter.recall})
            except BROKEN as error:
                self.log.warning("Cannot send cluster statistics: %r", error)
            # At most once a second; nothing changes without an event except the internals.
            if not self._stopping:
                seconds = internals_at - self.state.clock.monotonic()
                self._event.wait(
                    max(
                        0.1,
                        min(seconds, self._reporter.seconds_left(bool(self.assignment.waiting()))),
                    )
                )
                self._event.clear()
            left = INTERVAL - (self.state.clock.monotonic() - now)
            if left > 0 and not self._stopping:
                if self._at_once.wait(left):
                    self.state.stopped.wait(SHORTEST)
                self._at_once.clear()
        if self.state.zk is not None and self.state.zk.connected:
            try:
                self._history.flush(self.state.zk.kazoo_client, self.elected, at_once=True)
            except KazooException as error:
                self.log.debug("Cannot write the last events: %r", error)
        # Not earlier: the next elected launcher has not seen all of these events.
        self._step_down.set()

    def _safely(self, parts: Mapping[str, Callable[[], Any]]) -> None:
        """Call functions; log the error of each once, so that the others run.

        :raises KazooException: the connection is broken; no other part can work either.
        """
        for what, function in parts.items():
            try:
                function()
            except BROKEN:
                raise
            except FOREIGN as error:
                if self._errors.get(what) != repr(error):
                    self._errors[what] = repr(error)
                    self.log.exception("Error %s:", what)
            else:
                self._errors.pop(what, None)

    # -- election

    def _stand_for_election(self) -> None:
        if self._election_thread is not None and self._election_thread.is_alive():
            return
        self._election = self.state.zk.kazoo_client.Election(
            f"{paths.ELECTIONS}/stats", f"{hostnames.short()}-{os.getpid()}"
        )
        # Before the lock is acquired: the session may be lost immediately after.
        self._step_down.clear()
        self._election_thread = threading.Thread(
            target=self._run_election, name="ThreadPoolExecutor-election", daemon=True
        )
        self._election_thread.start()

    def _run_election(self) -> None:
        try:
            self._election.run(self._won)
        except Exception as error:
            self.log.debug("Election ended: %r", error)

    def _won(self) -> None:
        self.log.info("Won the election for statistics")
        self.elected = True
        self._sent.clear()
        self.wake()
        if not self._stopping:
            self._step_down.wait()
        self.elected = False

    # -- reports

    def _report(self) -> None:
        now = self.state.clock.monotonic()
        if now >= self._complete_at:
            self._complete_at = now + COMPLETE_INTERVAL
            self._sent.clear()
        values: dict[str, float] = {}
        self._limits(values)
        if self.elected and self.state.zk.synced:
            self._cluster(values)
        self.state.statsd.keep("launcher", values)
        for name, value in values.items():
            if self._sent.get(name) != value:
                self.state.statsd.gauge(name, value)
                self._sent[name] = value

    def _limits(self, values: dict[str, float]) -> None:
        config = self.state.config
        if config is None:
            return
        for provider in config.providers.values():
            self._safely(
                {
                    f"reporting limits of provider {provider.name}": functools.partial(
                        self._limit, provider, values
                    )
                }
            )
        for tenant, limits in config.tenant_resource_limits.items():
            for name, limit in limits.items():
                if limit != math.inf:
                    values[
                        metrics.TENANT_LIMIT(
                            normalize_statsd_name(tenant), normalize_statsd_name(name)
                        )
                    ] = limit

    @staticmethod
    def _limit(provider: ProviderConfig, values: dict[str, float]) -> None:
        total = sum(pool.max_servers for pool in provider.pools.values())
        if total != math.inf:
            values[metrics.MAX_SERVERS(provider.name)] = total

    def _cluster(self, values: dict[str, float]) -> None:
        zk = self.state.zk
        pools = zk.getRegisteredPools()
        tree = zk.node_tree
        with tree.lock:
            for state in STATES:
                values[metrics.NODES(state)] = tree.counted.states[state]
            for metric, names, counted in (
                (
                    metrics.PROVIDER_NODES,
                    {pool.provider_name for pool in pools},
                    tree.counted.providers,
                ),
                (
                    metrics.LABEL_NODES,
                    {label for pool in pools for label in pool.supported_labels},
                    tree.counted.labels,
                ),
            ):
                for name, state in itertools.product(names | set(counted), STATES):
                    values[metric(name, state)] = counted.get(name or "", Counter[str]())[state]
        with zk.request_tree.lock:
            sets = [(key, count) for key, count in zk.request_tree.label_sets.items() if count]
        for pool in pools:
            if pool.name:
                values[metrics.ADDRESSABLE_REQUESTS(pool.provider_name, pool.name)] = sum(
                    count for key, count in sets if key <= pool.labels
                )

    def _internals(self) -> None:
        zk = self.state.zk
        queues = {"client.connection_queue": len(zk.kazoo_client._queue)}
        for name, tree in (
            ("node_cache", zk.node_tree),
            ("request_cache", zk.request_tree),
            ("image_cache", zk.image_tree),
        ):
            queues[f"{name}.event_queue"] = len(tree._deferred)
            queues[f"{name}.playback_queue"] = max(0, tree._outstanding)
        host, statsd = hostnames.short(), self.state.statsd
        for name, length in queues.items():
            statsd.gauge(metrics.ZOOKEEPER_QUEUE(host, name), length)
        statsd.gauge(metrics.REQUESTS_WAITING(host), self.assignment.waiting())
        waiting = self.assignment.waiting_for()
        for code in Code:
            statsd.gauge(metrics.REQUESTS_WAITING_FOR(host, code.word), waiting[code])
        self._ask_mirror_lag(host)
        self.warn_about_queues(queues, self.state.clock.monotonic())

    def _ask_mirror_lag(self, host: str) -> None:
        """Measure the delay of the mirror without waiting.

        Answers and watch events arrive in one order: this answer is as late as the events.
        """
        clock, statsd = self.state.clock, self.state.statsd
        began = clock.monotonic()

        def answered(_answer: object) -> None:
            statsd.timing(metrics.MIRROR_LAG(host), (clock.monotonic() - began) * 1000)

        self.state.zk.kazoo_client.exists_async("/nodepool").rawlink(answered)

    def warn_about_queues(self, queues: dict[str, int], now: float) -> None:
        """Warn about growing queues, at most once a minute each: this launcher is too slow."""
        for name, length in queues.items():
            if (
                length > QUEUE_WARNING
                and now - self._warned.get(name, -WARNING_INTERVAL) >= WARNING_INTERVAL
            ):
                self._warned[name] = now
                self.log.warning(
                    "The queue %s has %s entries; this launcher is too slow to process changes of "
                    "ZooKeeper",
                    name,
                    length,
                )
