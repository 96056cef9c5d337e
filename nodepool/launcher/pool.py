"""NodePool: makes, connects and stops all parts of the launcher (launcher.md sections 1 and 15)."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

from nodepool import hostnames, metrics
from nodepool.config.changes import taken_over
from nodepool.config.keeper import ConfigKeeper
from nodepool.driver.statemachine import StateMachineProvider
from nodepool.launcher import helpers
from nodepool.launcher.assignment import Assignment
from nodepool.launcher.cleanup import CleanupWorker
from nodepool.launcher.declines import Declines
from nodepool.launcher.events import LauncherEvents
from nodepool.launcher.minready import MinReady
from nodepool.launcher.nodes import NodeReconciler
from nodepool.launcher.poolworker import PoolWorker
from nodepool.launcher.statistics import StatsWorker
from nodepool.problems import Problem, image_problems, one_line, published
from nodepool.provider_manager import SILENT_JOIN, ProviderManager, provider_problems
from nodepool.reasons import Code, Reason, because
from nodepool.watchdog import Watchdog
from nodepool.zk import ZooKeeperClient
from nodepool.zk.components import LauncherComponent
from nodepool.zk.records import DELETING, Node
from nodepool.zk.tree import Tree
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds for an orderly stop.
STOP_TIMEOUT = 9.0
#: Seconds to wait for a complete mirror before the first work.
SYNC_TIMEOUT = 60.0


class NodeClaims:
    """Free nodes that some handler of this process is about to take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[str | None] = set()

    def claim(self, node_id: str | None) -> bool:
        with self._lock:
            if node_id in self._ids:
                return False
            self._ids.add(node_id)
            return True

    def release(self, node_id: str | None) -> None:
        with self._lock:
            self._ids.discard(node_id)


def bad_records(trees: Iterable[Tree[Any]]) -> list[Problem]:
    """What in ZooKeeper cannot be used and is set aside until somebody mends or removes it."""
    found: list[Problem] = []
    for tree in trees:
        with tree.lock:
            bad = sorted(tree.bad.items())
        found += [Problem(one_line(f"ZooKeeper record {path} is ignored until it is mended or removed: {reason}"))
                  for path, reason in bad]
    return found


class NodePool(threading.Thread):
    """The launcher.

    :param securefile: path of the secure configuration file, or None.
    :param configfile: path of the configuration file.
    :param watermark_sleep: kept for callers of 11.0.0; changes are noticed by events.
    """

    log = logging.getLogger("nodepool.NodePool")

    def __init__(self, securefile: str | None, configfile: str, watermark_sleep: float = 1) -> None:
        super().__init__(name="NodePool", daemon=True)
        self.securefile = securefile
        self.configfile = configfile
        self.watermark_sleep = watermark_sleep
        self.cleanup_interval: float = 60
        self.delete_interval: float = 5
        self.config: Any = None
        self.zk: Any = None
        self.statsd: Any = metrics.shared()
        self.statsd.setAddress(metrics.statsd_address(os.environ))
        self.ready = False
        #: Where the ZooKeeper session is remembered, so that the next process can end it when we are killed.
        self.session_file: str | None = None
        self.stopped = threading.Event()
        self.identifier = f"{hostnames.short()}-{os.getpid()}"
        self.claims = NodeClaims()
        self.common_helpers = threading.BoundedSemaphore(helpers.COMMON)
        self.config_state = ConfigKeeper(
            (configfile, securefile), self.log, lambda stale: self.statsd.gauge(metrics.LAUNCHER_CONFIG_STALE(), stale),
            ["zookeeper-servers"])
        self._wake = threading.Event()
        self._pool_threads: dict[str, PoolWorker] = {}
        self._workers: dict[str, PoolWorker] = {}
        self._leaving: list[PoolWorker] = []
        self._handlers: dict[str, Any] = {}
        self._deletions: queue.SimpleQueue[Node | None] = queue.SimpleQueue()
        self._component: LauncherComponent | None = None
        self._begun = False
        self.declines = Declines(self)
        self.assignment = Assignment(self)
        self.node_reconciler = NodeReconciler(self)
        self.min_ready = MinReady(self)
        self.cleanup = CleanupWorker(self)
        self.statistics = StatsWorker(self)
        self.events = LauncherEvents(self)
        self._delete_thread = threading.Thread(
            target=self._run_deletions, name="DeletedNodeWorker", daemon=True)
        #: Knows the threads without which we serve nothing; who runs us ends the process when one has ended.
        self.watchdog = Watchdog()
        for thread in (self, self.assignment, self.min_ready, self.cleanup, self._delete_thread,
                       *self.node_reconciler.threads):
            self.watchdog.guard(thread)
        self.watchdog.guard(self.statistics, may_end=lambda: self.statsd is None)

    # -- what others ask

    def getZK(self) -> Any:
        return self.zk

    def getProviderManager(self, name: str) -> Any:
        """The running provider.

        :raises KeyError: there is none of this name.
        """
        return self.config.provider_managers[name]

    def getPoolWorkers(self, provider_name: str) -> list[PoolWorker]:
        return [w for w in self.pool_workers() if w.provider_name == provider_name]

    def workers_by_id(self) -> dict[str, PoolWorker]:
        """Running pools by launcher id."""
        return self._workers

    def pool_workers(self) -> list[PoolWorker]:
        return list(self._pool_threads.values())

    def is_handled(self, request_id: str) -> bool:
        return request_id in self._handlers

    def handler_of(self, request_id: str) -> Any:
        """Who deals with the request here; None: nobody."""
        return self._handlers.get(request_id)

    def explain(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]:
        """(request, labels, state, why it is not fulfilled yet) of every request that this launcher deals with."""
        rows = [(i, labels, "requested", reasons) for i, labels, reasons in self.assignment.explain()]
        for request_id, handler in list(self._handlers.items()):
            reason = because(Code.PAUSED, why=handler.shortage or "no quota") if handler.paused else because(Code.LAUNCHING)
            rows.append((request_id, tuple(handler.request.node_types), str(handler.request.state),
                         (reason.at(handler.pw.label),)))
        return sorted(rows, key=lambda row: row[0])

    def getReadiness(self) -> tuple[bool, list[str]]:
        """Whether the launcher can work, and what is not as it should be."""
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
        if self.zk is not None:  # the mirror, which answers without ZooKeeper, too
            details += [str(problem) for problem in image_problems(self.zk.progress_tree.data())]
        return ready, details

    def problems(self) -> list[Problem]:
        """What of the configured providers, and which records in ZooKeeper, cannot be used at present, and why."""
        records = bad_records(self.zk.trees) if self.zk is not None else []
        config = self.config
        if config is None:
            return records
        reasons = {**config.provider_failures, **config.provider_errors}
        found = [Problem(": ".join(["not running", *([reasons[name]] if name in reasons else [])]), name)
                 for name in config.providers_not_running]
        found += [Problem(f"goes on with its last good configuration: {reason}", name)
                  for name, reason in config.provider_errors.items() if name in config.providers]
        return found + provider_problems(config) + self.declines.problems(config) + records

    def publish_problems(self) -> None:
        """Tell everybody, in our component record; written only when something has changed."""
        if self._component is not None:
            self._component.update(problems=published(self.problems()))

    # -- configuration

    def loadConfig(self) -> Any:
        """Read the files.

        :raises ConfigurationError: they cannot be used.
        """
        return self.config_state.load()

    def updateConfig(self) -> None:
        """Read the files again when they have changed; a bad one leaves the running configuration in force."""
        self.config_state.update(self.config, self._apply)

    def _apply(self, config: Any) -> None:
        """Bring a loaded configuration into force."""
        if self.zk is None:
            self._connect(config)
            if self.stopped.is_set():
                return
        else:
            self.zk.resetHosts(config.zookeeper_servers)
        old = self.config
        if old is not None:
            self._keep_unusable(old, config)
        self.log.info("%s", taken_over(old, config, self.configfile))
        replaced: list[Any] = []
        ProviderManager.reconfigure(old, config, self.zk, retire=replaced.append)
        config.providers_not_running = []
        for name in list(config.providers):
            if name not in config.provider_managers:
                config.providers_not_running.append(name)
                del config.providers[name]
        for name, reason in config.provider_errors.items():
            if name in config.providers:
                self.log.error("Provider %s goes on with its last good configuration: %s", name, reason)
                continue
            config.providers_not_running.append(name)
            self.log.error("Provider %s is left out: %s", name, reason)
        self.config = config
        # Only now: whoever finds one of them ended finds its successor.
        for manager in replaced:
            ProviderManager._call(manager, "stop")
        self._update_workers()
        self.assignment.wake(recheck=True)
        self.min_ready.wake()
        self.cleanup.wake()
        if self.zk.synced:
            self.events.look_at_all_nodes()

    @staticmethod
    def _keep_unusable(old: Any, config: Any) -> None:
        """A running provider whose new entry cannot be used (driver or library missing) goes on as it was."""
        for name in config.provider_errors:
            provider = old.providers.get(name)
            if provider is None or name in config.providers:
                continue
            config.providers[name] = provider
            for pool in provider.pools.values():
                for label in set(pool.labels) & set(config.labels):
                    config.labels[label].pools.append(pool)

    def _update_workers(self) -> None:
        wanted = {(p.name, pool) for p in self.config.providers.values() for pool in p.pools}
        for key, worker in list(self._pool_threads.items()):
            if (worker.provider_name, worker.pool_name) not in wanted:
                self.log.info("Pool %s is not configured any more", worker.label)
                worker.leave()
                worker.stop_when_idle()
                self._leaving.append(worker)
                del self._pool_threads[key]
            elif not worker.is_alive() and worker.ident is not None:
                self.log.error("The worker of pool %s has died; starting another", worker.label)
                worker.stop()
                del self._pool_threads[key]
            else:
                worker.refresh()
        for provider_name, pool_name in sorted(wanted):
            key = f"{provider_name}-{pool_name}"
            if key not in self._pool_threads:
                worker = PoolWorker(self, provider_name, pool_name)
                self._pool_threads[key] = worker
                self.watchdog.guard(worker, may_end=lambda worker=worker: not worker.running)  # type: ignore[misc]
                worker.start()
        self._workers = {w.launcher_id: w for w in self._pool_threads.values()}
        self._leaving = [w for w in self._leaving if w.is_alive()]

    # -- start

    def _connect(self, config: Any) -> None:
        client = ZooKeeperClient.from_config(config, self.session_file)
        client.on_thread_end = functools.partial(self.watchdog.report, "of the connection to ZooKeeper")
        zk = ZooKeeper(client)
        self.events.attach(zk)
        self._client = client
        if self.stopped.is_set():
            client.stop_connecting.set()
        try:
            client.connect()
            self.zk = zk
            if not zk.wait_synced(SYNC_TIMEOUT):
                self.log.warning("The mirror of ZooKeeper is not complete after %.0f s; going on when it is", SYNC_TIMEOUT)
            self._component = LauncherComponent(client, hostnames.short())
            self._component.register()
        except TimeoutError:
            return
        except Exception:
            # There will be another client: this one, and what it tells, must end before.
            self.zk = self._component = None
            client.state_listeners.clear()
            zk.disconnect()
            raise

    def run(self) -> None:
        self._begun = True
        self.config_state.watch(self._wake.set)
        while not self.stopped.is_set():
            try:
                self.updateConfig()
                if self.config is not None and not self.ready and not self.stopped.is_set():
                    self._start_workers()
            except Exception:
                self.log.exception("Error in the main loop:")
                self._wake.wait(1.0)
            # The watcher wakes us; a missing file or a failed start is looked at again.
            self._wake.wait(30.0 if self.ready and self.config_state.error is None else 1.0)
            self._wake.clear()

    def _start_workers(self) -> None:
        for worker in (self.assignment, self.min_ready, self.cleanup, self.statistics, self._delete_thread):
            if worker.ident is None:
                worker.start()
        if not self.node_reconciler.is_alive():
            self.node_reconciler.start()
        if self._component is not None:
            self._component.state = LauncherComponent.RUNNING
        self.events.all_synced()
        self.ready = True
        self.log.info("The launcher is ready")

    # -- handlers and deletions

    def handler_started(self, handler: Any) -> None:
        self._handlers[handler.request.id] = handler

    def handler_finished(self, handler: Any) -> None:
        request_id = handler.request.id
        if self._handlers.get(request_id) is handler:
            del self._handlers[request_id]
        self.zk.reservations.release(("tenant", handler))

    def start_deletion(self, node: Node) -> None:
        """The node is locked and marked: its provider deletes it."""
        config = self.config
        manager = config.provider_managers.get(node.provider) if config is not None else None
        if isinstance(manager, StateMachineProvider) and node.state == DELETING:
            self.node_reconciler.begin(node)  # only queues it
        else:
            self._deletions.put(node)

    def _run_deletions(self) -> None:
        while True:
            node = self._deletions.get()
            if node is None:
                return
            self.node_reconciler.begin(node)

    # -- stop

    def stop(self) -> None:
        """Stop everything in order, within 10 s; unfinished requests are picked up again from ZooKeeper."""
        began = time.monotonic()
        deadline = began + STOP_TIMEOUT
        self.watchdog.release()
        self.stopped.set()
        self.ready = False
        self._wake.set()
        client = getattr(self, "_client", None)
        if client is not None:
            client.stop_connecting.set()
        if self._begun and self.is_alive() and threading.current_thread() is not self:
            self.join(max(0.1, deadline - time.monotonic()))
        self.config_state.stop()
        workers: list[Any] = [self.assignment, self.min_ready, self.cleanup, self.node_reconciler, self.statistics]
        for worker in workers:
            worker.stop()
        self._deletions.put(None)
        pools = [*self._pool_threads.values(), *self._leaving]
        for pool in pools:
            pool.running = False
        providers = [] if self.config is None else list(self.config.provider_managers.values())
        if ProviderManager.stop_all(providers, began, deadline - 2.0):
            # Whoever waits for the answer of a cloud does nothing that is lost; the others are quick.
            deadline = min(deadline, time.monotonic() + SILENT_JOIN)
        for pool in pools:
            pool.stop()
        for worker in [*workers, *pools, self._delete_thread]:
            if getattr(worker, "ident", 1) is not None:
                worker.join(max(0.1, deadline - time.monotonic()))
        if self._component is not None:
            self._component.unregister()
        if self.zk is not None:
            self.zk.disconnect()
        elif client is not None and client.client is not None:
            client.disconnect()
        self.statsd.setAddress(None)
