"""NodePool: creates, connects and stops all parts of the launcher (LAU-1 and LAU-15)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kazoo.exceptions import KazooException, NoAuthError

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.base.clock import MOST_SKEW
from nodepool.base.problems import LOG, REMEDIES, Problem, as_record_list, image_problems, one_line
from nodepool.config.live.changes import applied_message
from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.config.model import Config, ProviderConfig
from nodepool.driver.lifecycle import (
    SILENT_JOIN,
    ProviderManager,
    Starts,
    call,
    is_stopping,
    provider_problems,
)
from nodepool.driver.provider import Provider
from nodepool.exceptions import FOREIGN, NOT_PERMITTED
from nodepool.launcher.cleanup import CleanupWorker
from nodepool.launcher.events import LauncherEvents
from nodepool.launcher.nodes.probes import NodeProbes
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.nodes.rotation import RotationReconciler
from nodepool.launcher.pool import Pool
from nodepool.launcher.pools.worker import PoolWorker
from nodepool.launcher.report import Reporter
from nodepool.launcher.requests.assignment import Assignment
from nodepool.launcher.requests.minready import MinReady
from nodepool.launcher.state import LauncherState
from nodepool.launcher.statistics import StatsWorker
from nodepool.launcher.trends import Trends
from nodepool.launcher.usage_log import UsageLog
from nodepool.launcher.verification import Verification
from nodepool.process.parts import Group, Part
from nodepool.process.program import collect_garbage_rarely
from nodepool.process.watchdog import Watchdog
from nodepool.reasons import Code, Reason, because
from nodepool.status.causes import derived_problems
from nodepool.status.once import Once
from nodepool.zk import ZooKeeperClient, paths
from nodepool.zk.components import LauncherComponent
from nodepool.zk.history import HistoryWriter
from nodepool.zk.mirror.feed import Feed
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import RecordError
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds for an orderly stop.
STOP_TIMEOUT = 9.0
#: Seconds to wait for a complete mirror before work starts.
SYNC_TIMEOUT = 60.0
#: Seconds until the next start after one that ZooKeeper has refused.
REFUSED = 10.0


def bad_records(trees: Iterable[Tree[Any]]) -> list[Problem]:
    """Return unusable records, which are ignored until an operator repairs or deletes them."""
    found: list[Problem] = []
    for tree in trees:
        with tree.lock:
            unfit = sorted(tree.unfit.items()) if isinstance(tree, NodeTree) else []
            bad = sorted(tree.bad.items())
        found += [
            Problem(
                one_line(
                    f"Node {node_id} is not assigned to requests: {reason}; delete it with "
                    f"`nodepool delete {node_id}`"
                )
            )
            for node_id, reason in unfit
        ]
        found += [
            Problem(
                one_line(
                    f"ZooKeeper record {path} is ignored until it is repaired or removed: {reason}"
                )
            )
            for path, reason in bad
        ]
    return found


class NodePool(threading.Thread):
    """The launcher.

    :param securefile: path of the secure configuration file, or None.
    :param configfile: path of the configuration file.
    :param watermark_sleep: kept for callers of 11.0.0; changes are noticed by events.
    """

    log = logging.getLogger("nodepool.NodePool")
    #: Seconds after which the lock directory of a deleted request is removed; see
    #: ``nodepool.launcher.LOCK_CLEANUP``.
    lock_cleanup: Callable[[], float]
    #: Seconds; may be changed at any time.
    cleanup_interval: float = 60
    delete_interval: float = 5

    def __init__(
        self,
        securefile: str | None,
        configfile: str,
        watermark_sleep: float = 1,
        *,
        all_read: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(name="NodePool", daemon=True)
        self.securefile = securefile
        self.configfile = configfile
        self.watermark_sleep = watermark_sleep
        self.state = LauncherState()
        #: Workers of the configured pools by provider and pool; ``a-b`` may be pool b of a, or
        #: belong to provider a-b.
        self._pool_threads: dict[tuple[str, str], PoolWorker] = {}
        self.statsd = self.state.statsd
        self.statsd.setAddress(metrics.statsd_address(os.environ))
        self.ready = False
        #: Called at the start when all records have been read.
        self._all_read = all_read
        #: File that stores the ZooKeeper session, so that the next process can end it if we are
        #: killed.
        self.session_file: str | None = None
        self.stopped = self.state.stopped
        self.config_state = ConfigFileStatus(
            (configfile, securefile),
            self.log,
            lambda stale: self.statsd.gauge(metrics.LAUNCHER_CONFIG_STALE(), stale),
            ["zookeeper-servers"],
        )
        self._wake = threading.Event()
        self._starts = Starts(self._provider_started)
        self._leaving: list[PoolWorker] = []
        #: Replaced and removed providers that finish their launches.
        self._retired: list[Provider] = []
        #: The connection to ZooKeeper, also while it is being established.
        self._client: ZooKeeperClient | None = None
        self._component: LauncherComponent | None = None
        #: Since when (UNIX seconds) each current problem is known.
        self._problems_since: dict[Problem, float] = {}
        # Each part with its dependencies; each is a thread or has threads, except for the events.
        self.assignment = Assignment(self.state)
        self.node_reconciler = NodeReconciler(self.state, lambda: self.delete_interval)
        self.probes = NodeProbes(self.state, self.node_reconciler)
        self.min_ready = MinReady(self.state)
        self.cleanup = CleanupWorker(
            self.state,
            self.node_reconciler,
            lambda: self.cleanup_interval,
            lambda: self.lock_cleanup(),
        )
        self.rotation = RotationReconciler(self.state, self.node_reconciler)
        self.trends = Trends(self.state.clock)
        self.feed = Feed()
        self.feed.subscribe(self.trends.count)
        self.history = HistoryWriter(self.feed)
        self.reporter = Reporter(
            self.state, self.trends, self.explain, self.getReadiness, self._config_files
        )
        self.usage_log = UsageLog(self.state)
        self.statistics = StatsWorker(
            self.state,
            self.assignment,
            self.publish_problems,
            self.reporter,
            self.history,
            self.usage_log,
        )
        self.verification = Verification(self.state)
        self.events = LauncherEvents(
            self.state,
            self.assignment,
            self.node_reconciler,
            self.probes,
            self.min_ready,
            self.cleanup,
            self.statistics,
            self.feed,
            self.verification,
        )
        workers: list[
            StatsWorker
            | NodeReconciler
            | NodeProbes
            | CleanupWorker
            | MinReady
            | RotationReconciler
            | Assignment
            | Verification
        ] = [
            self.verification,
            self.statistics,
            self.node_reconciler,
            self.probes,
            self.cleanup,
            self.min_ready,
            self.rotation,
            self.assignment,
        ]
        #: What runs. The main loop starts what depends on the configuration, then the workers.
        self._parts = Group(
            STOP_TIMEOUT,
            Part("connection", join=self._disconnect, least=5.0),
            Part("usage log", stop=self.usage_log.stop, join=self.usage_log.join),
            Part("pools", stop=self._stop_pools, join=self._join_pools, least=1.0),
            Part("providers", stop=self._stop_providers),
            *(Part(each.name, each.start, each.stop, each.join) for each in workers),
            Part("starts of providers", stop=self._starts.stop),
            Part("configuration files", stop=self.config_state.stop),
            Part("main loop", stop=self._join_main_loop),
        )
        #: Watches the required threads; the service ends the process if one of them has ended.
        self.watchdog = Watchdog()
        for thread in (
            self,
            self.assignment,
            self.min_ready,
            self.cleanup,
            self.statistics,
            self.verification,
            *self.node_reconciler.threads,
            *self.probes.threads,
            *self.rotation.threads,
        ):
            self.watchdog.guard(thread)

    # -- queries

    @property
    def config(self) -> Config:
        """Return the configuration in force; None until there is one."""
        return self.state.config

    @property
    def zk(self) -> ZooKeeper:
        return self.state.zk

    @property
    def _delete_thread(self) -> threading.Thread:
        return self.node_reconciler.threads[0]

    def getZK(self) -> Any:
        return self.zk

    def getProviderManager(self, name: str) -> Any:
        """Return the running provider.

        :raises KeyError: there is none of this name.
        """
        return self.config.provider_managers[name]

    def getPoolWorkers(self, provider_name: str) -> list[Pool]:
        return self.state.getPoolWorkers(provider_name)

    def explain(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]:
        """Return (request, labels, state, reasons) of each request that this launcher processes."""
        rows = self.assignment.explain()
        for request_id, handler in list(self.state.handlers.items()):
            if handler.paused or (
                handler.shortage and not handler.nodeset
            ):  # also while it is being returned
                reason = because(Code.PAUSED, why=handler.shortage or "no quota")
            else:  # a handler that only checks is about to return its request, or to launch
                reason = because(Code.LAUNCHING if handler.accepted else Code.NOT_LOOKED_AT)
            reason = reason.at(handler.pw.capacity.label)
            rows.append(
                (
                    request_id,
                    tuple(handler.request.node_types),
                    str(handler.request.state),
                    (reason,),
                )
            )
        return sorted(rows, key=lambda row: row[0])

    def getReadiness(self) -> tuple[bool, list[str]]:
        """Return whether the launcher can work, and current problems."""
        details = []
        if not self.ready:
            details.append("starting: the first pass is not complete")
        if self.zk is None or not self.zk.connected:
            details.append("ZooKeeper: not connected")
        elif not self.zk.synced:
            details.append("ZooKeeper: its content is being read")
        details += self.watchdog.ended
        ready = not details
        details += self.config_state.describe()
        details += [str(problem) for problem in self.problems()]
        if self.zk is not None:  # the mirror, which also answers without ZooKeeper
            details += [str(problem) for problem in image_problems(self.zk.progress_tree.data())]
        if ready:
            details += [str(problem) for problem in derived_problems(Once(self.zk))]
        return ready, details

    def problems(self) -> list[Problem]:
        """Return current problems of configured providers and of records in ZooKeeper."""
        records = bad_records(self.zk.trees) if self.zk is not None else []
        config = self.config
        if config is None:
            return records
        reasons = {**config.provider_failures, **config.provider_errors}
        found = [
            Problem(f"not running: {reasons[name]}", name)
            if name in reasons
            else Problem("not running", name, help=LOG)
            for name in config.providers_not_running
        ]
        found += [
            Problem(f"uses its last valid configuration: {reason}", name)
            for name, reason in config.provider_errors.items()
            if name in config.providers
        ]
        ahead = self.state.server_time.ahead()
        if abs(ahead) > MOST_SKEW:
            text = (
                f"the clock of this launcher is {abs(ahead):.0f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of ZooKeeper"
            )
            found.append(
                Problem(
                    text, help="synchronize the clocks of launchers and ZooKeeper servers (NTP)"
                )
            )
        stopped = self.state.launch_failures.problems(config)
        named = {(problem.provider, problem.label) for problem in stopped}
        found += stopped
        found += [
            # The last launch is part of the other one, which has another remedy.
            problem
            for problem in provider_problems(config)
            if (problem.provider, problem.label) not in named
            or problem.help not in (REMEDIES["launch"], REMEDIES["scan"])
        ]
        for part in (
            self.node_reconciler,
            self.probes,
            self.rotation,
            self.verification,
            self.usage_log,
        ):
            found += part.problems()
        return found + records

    def _config_files(self) -> dict[str, Any]:
        """Return the paths of the files, and why they are not in force, for the report."""
        state = self.config_state
        return {
            "file": self.configfile,
            "secure": self.securefile,
            "stale_since": state.stale_since,
            "error": state.error,
            "warnings": state.warnings,
        }

    def shown_config(self) -> dict[str, Any] | None:
        """Return the configuration in force for the pages, without possible secrets.

        Includes the files and their errors.
        """
        if self.config is None:
            return None
        return {
            **self.reporter.config(),
            **self.reporter.config_files(),
            "not_running": self.reporter.not_running(),
        }

    def publish_problems(self) -> None:
        """Publish the problems in our component record if they have changed."""
        if self._component is not None:
            now = self.state.clock.time()
            self._problems_since = {
                problem: self._problems_since.get(problem, now) for problem in self.problems()
            }
            found = [
                replace(problem, since=round(since, 3))
                for problem, since in self._problems_since.items()
            ]
            self._component.update(problems=as_record_list(found))

    # -- configuration

    def loadConfig(self) -> Any:
        """Read the files.

        :raises ConfigurationError: they cannot be used.
        """
        return self.config_state.load()

    def updateConfig(self) -> None:
        """Apply changed files; invalid ones leave the running configuration in force."""
        self.config_state.update(self.config, self._apply)

    def _apply(self, config: Config) -> None:
        if self.zk is None:
            self._connect(config)
            if self.stopped.is_set():
                return
        else:
            self.zk.resetHosts(config.zookeeper_servers)
        old = self.config
        if old is not None:
            self._keep_unusable(old, config)
        self.log.info("%s", applied_message(old, config, self.configfile))
        replaced: list[Provider] = []
        ProviderManager.reconfigure(
            old, config, self.zk, retire=replaced.append, starts=self._starts
        )
        if old is not None:
            self._keep_former(old, config)
        config.providers_not_running = []
        for name in list(config.providers):
            if name not in config.provider_managers:
                config.providers_not_running.append(name)
                provider = config.providers.pop(name)
                with contextlib.suppress(*FOREIGN):  # raised by a driver's configuration
                    config.not_running_labels[name] = sorted(
                        {str(one) for p in provider.pools.values() for one in p.labels}
                    )
        for name, reason in config.provider_errors.items():
            if name in config.providers:
                self.log.error("Provider %s uses its last valid configuration: %s", name, reason)
                continue
            config.providers_not_running.append(name)
            self.log.error("Provider %s is disabled: %s", name, reason)
        self.state.config = config
        # Only now: whoever finds that one of them has ended finds its successor.
        for manager in replaced:
            call(manager, "stop")
        self._retired = [manager for manager in [*self._retired, *replaced] if is_stopping(manager)]
        self._update_workers()
        self.assignment.wake(recheck=True)
        self.min_ready.wake()
        self.cleanup.wake()
        self.verification.wake()
        self.rotation.check_all()
        if self.ready and self.zk.synced:  # at a start, all nodes are checked by _start_workers
            self.node_reconciler.check_all()
            self.probes.check_all()

    def _provider_started(self) -> None:
        """Apply the configuration again, because a provider has started or failed to start.

        The reload did not wait for it.
        """
        self.config_state.apply_again()
        self._wake.set()

    @classmethod
    def _keep_unusable(cls, old: Config, config: Config) -> None:
        """Keep the previous entry of a running provider whose new one cannot be used.

        For example because a driver or a library is missing.
        """
        for name in config.provider_errors:
            if name in old.providers and name not in config.providers:
                cls._keep(old.providers[name], config)

    @classmethod
    def _keep_former(cls, old: Config, config: Config) -> None:
        """Keep the previous entry of a running provider while its successor is starting."""
        for name, manager in config.provider_managers.items():
            new = config.providers[name]
            if name in config.provider_errors and manager.provider != new:
                for label in config.labels.values():
                    label.pools = [
                        pool
                        for pool in label.pools
                        if all(pool is not other for other in new.pools.values())
                    ]
                cls._keep(old.providers[name], config)

    @staticmethod
    def _keep(provider: ProviderConfig, config: Config) -> None:
        config.providers[provider.name] = provider
        for pool in provider.pools.values():
            for label in set(pool.labels) & set(config.labels):
                config.labels[label].pools.append(pool)

    def _update_workers(self) -> None:
        wanted = {(p.name, pool) for p in self.config.providers.values() for pool in p.pools}
        for key, worker in list(self._pool_threads.items()):
            if key not in wanted:
                self.log.info("Pool %s is no longer configured", worker.label)
                worker.retire()
                self._leaving.append(worker)
                del self._pool_threads[key]
            elif not worker.is_alive() and worker.ident is not None:
                self.log.error("The worker of pool %s has died; restarting it", worker.label)
                worker.stop()
                del self._pool_threads[key]
            else:
                worker.refresh()
        new = {
            key: PoolWorker(self.state, self.assignment, *key, self.cleanup.lost.check_soon)
            for key in sorted(wanted - self._pool_threads.keys())
        }
        self._pool_threads.update(new)
        self.state.workers = {w.launcher_id: w for w in self._pool_threads.values()}
        for worker in new.values():
            self.watchdog.guard(worker, may_end=lambda worker=worker: not worker.running)  # type: ignore[misc]
            worker.start()
        self._leaving = [w for w in self._leaving if w.is_alive()]

    # -- start

    def _connect(self, config: Config) -> None:
        report = functools.partial(self.watchdog.report, "of the connection to ZooKeeper")
        client = ZooKeeperClient.from_config(config, self.session_file, report)
        zk = ZooKeeper(client)
        self.events.attach(zk)
        self.rotation.attach(zk)
        self._client = client
        if self.stopped.is_set():
            client.stop_connecting.set()
        try:
            client.connect()
            self.state.zk = zk
            if not zk.wait_synced(SYNC_TIMEOUT):
                self.log.warning(
                    "The mirror of ZooKeeper is not complete after %.0f s; waiting until it is",
                    SYNC_TIMEOUT,
                )
            try:
                self.state.note_cluster()
            except (
                KazooException,
                RecordError,
            ) as error:  # repeated and reported by the leak searches
                self.log.warning("Cannot record a point of history in %s: %r", paths.CLUSTER, error)
            self._component = LauncherComponent(client, hostnames.short())
            self._component.register()
        except TimeoutError:
            return
        except Exception:
            # The next start creates another client: this one, and its events, must end first.
            self.state.zk = self._component = None  # type: ignore[assignment]
            client.state_listeners.clear()
            zk.disconnect()
            raise

    def run(self) -> None:
        collect_garbage_rarely()
        self.config_state.watch(self._wake.set)
        while not self.stopped.is_set():
            try:
                self.updateConfig()
                if self.config is not None and not self.ready and not self.stopped.is_set():
                    self._start_workers()
            except NoAuthError:
                self.log.error("The launcher cannot proceed: %s", NOT_PERMITTED)
                self.stopped.wait(REFUSED)
            except Exception:
                self.log.exception("Error in the main loop:")
                self._wake.wait(1.0)
            # The watcher wakes us; missing files and failed starts are checked again.
            self._wake.wait(30.0 if self.ready and self.config_state.error is None else 1.0)
            self._wake.clear()

    def _start_workers(self) -> None:
        self._all_read()
        self._parts.start()
        if self._component is not None:
            self._component.state = LauncherComponent.RUNNING
        self.events.all_synced()
        self.ready = True
        self.log.info("The launcher is ready")

    # -- stop

    def stop(self) -> None:
        """Stop everything in order, within 10 s; ZooKeeper keeps unfinished requests."""
        self.watchdog.release()
        self.stopped.set()
        self.ready = False
        self._wake.set()
        if self._client is not None:
            self._client.stop_connecting.set()
        self._parts.stop()
        self.statsd.setAddress(None)

    def _join_main_loop(self) -> None:
        if self.is_alive():
            self.join()

    def _stop_providers(self) -> None:
        """Stop the providers while the pools still process the ends of their launches."""
        for pool in self._pools():
            pool.running = False
        providers = (
            [] if self.config is None else [*self.config.provider_managers.values(), *self._retired]
        )
        deadline = self._parts.deadline
        if ProviderManager.stop_all(providers, deadline - STOP_TIMEOUT, deadline - 2.0):
            # Threads that wait for a cloud lose nothing; the others are quick.
            self._parts.deadline = min(deadline, time.monotonic() + SILENT_JOIN)

    def _stop_pools(self) -> None:
        for pool in self._pools():
            pool.stop()

    def _join_pools(self) -> None:
        for pool in self._pools():
            if pool.ident is not None:
                pool.join()

    def _pools(self) -> list[PoolWorker]:
        return [*self._pool_threads.values(), *self._leaving]

    def _disconnect(self) -> None:
        self.reporter.withdraw()
        if self._component is not None:
            self._component.unregister()
        if self.zk is not None:
            self.zk.disconnect()
        elif self._client is not None:
            self._client.disconnect()
