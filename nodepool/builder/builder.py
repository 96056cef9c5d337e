"""NodePoolBuilder: creates, connects and stops the parts of the builder (BLD-1, 2, 16)."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from kazoo.protocol.states import KazooState

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.base.files import remove_unfinished
from nodepool.base.problems import image_problems
from nodepool.builder.building.worker import BuildWorker, fail_interrupted
from nodepool.builder.cleanup.worker import CleanupWorker
from nodepool.builder.machine import build_journal, image_files
from nodepool.builder.state import BuilderState
from nodepool.builder.upload import journal as upload_journal
from nodepool.builder.upload.worker import UploadWorker
from nodepool.builder.worker import Worker
from nodepool.config.live.changes import applied_message
from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.config.model import Config
from nodepool.driver.lifecycle import LAUNCH_GRACE, SILENT_GRACE
from nodepool.exceptions import BuilderError, ConfigurationError
from nodepool.process.parts import Group, Part
from nodepool.process.watchdog import Watchdog
from nodepool.reasons import Reason
from nodepool.zk import ZooKeeperClient
from nodepool.zk.components import BuilderComponent
from nodepool.zk.connection.protocol import BROKEN
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds to wait for a complete mirror before work starts.
SYNC_TIMEOUT = 60.0
#: Seconds between two attempts of a step of the start whose connection broke.
START_PAUSE = 2.0
#: Seconds for workers and providers to end, without the builds that are waited for.
STOP_TIMEOUT = 15.0


class NodePoolBuilder:
    """The builder.

    ``build_interval``, ``upload_interval`` and ``cleanup_interval`` (seconds) may be changed before
    :meth:`start`; work that an event announces does not wait for them.

    :param num_builders: concurrent builds.
    :param num_uploaders: concurrent uploads.
    """

    log = logging.getLogger("nodepool.builder.NodePoolBuilder")

    def __init__(
        self,
        config_path: str,
        secure_path: str | None = None,
        num_builders: int = 1,
        num_uploaders: int = 4,
    ) -> None:
        self._config_path = config_path
        self._num_builders = num_builders
        self._num_uploaders = num_uploaders
        self.build_interval: float = 10
        self.upload_interval: float = 10
        self.cleanup_interval: float = 60
        self._build_workers: list[BuildWorker] = []
        self._upload_workers: list[UploadWorker] = []
        self.state = BuilderState(
            self.check_config,
            building=lambda: [worker.building for worker in self._build_workers],
            uploading=lambda: [worker.current for worker in self._upload_workers],
        )
        self.component_info: BuilderComponent | None = None
        self.statsd = self.state.statsd
        self.statsd.setAddress(metrics.statsd_address(os.environ))
        #: File that stores the ZooKeeper session, so that the next process can end it if we are
        #: killed.
        self.session_file: str | None = None
        self.session_usable = self.state.session_usable
        self.config_state = ConfigFileStatus(
            (config_path, secure_path),
            self.log,
            lambda stale: self.statsd.gauge(metrics.BUILDER_CONFIG_STALE(self.state.fqdn), stale),
            ["zookeeper-servers", "images-dir"],
        )
        self._janitor: CleanupWorker | None = None
        self._parts = Group(STOP_TIMEOUT)
        self._start_cancelled = threading.Event()
        #: What the start waits for; empty if nothing is wrong.
        self._start_problem = ""
        #: Watches the required threads; the service ends the process if one of them has ended.
        self.watchdog = Watchdog()
        self.watchdog.guard(self.state.publisher)
        self._config_lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._running = False

    # -- configuration

    @property
    def config(self) -> Config:
        return self.state.config

    #: The name that test benches use.
    _config = config

    @property
    def zk(self) -> ZooKeeper:
        return self.state.zk

    def check_config(self) -> Config:
        """Apply a changed configuration file; return the configuration in force.

        An invalid file leaves the previous configuration in force.
        """
        with self._config_lock:
            changed = self.config_state.update(self.config, self._apply)
        if changed:
            self._wake_all()
        return self.config

    def _apply(self, config: Config) -> None:
        self.log.info("%s", applied_message(self.config, config, self._config_path))
        if self.zk is not None:
            self.zk.resetHosts(config.zookeeper_servers)
        self.state.managers.reconfigure(self.config, config, self.zk)
        for name, reason in config.provider_errors.items():
            self.log.error(
                "Provider %s is not usable; no images are uploaded or deleted there: %s",
                name,
                reason,
            )
        self.state.config = config

    # -- start

    def start(self) -> None:
        """Start the builder; return when every worker runs.

        :raises BuilderError: it is already running.
        :raises ConfigurationError: the configuration or the image directory cannot be used.
        """
        with self._start_lock:
            if self._running:
                raise BuilderError("Cannot start, already running.")
            config = self.config_state.load()
            self.state.builder_id = image_files.builder_id(config.images_dir)
            try:
                self.state.images_lock = build_journal.acquire_images_dir(config.images_dir)
            except ConfigurationError as error:
                # At its start, another process would treat our builds and uploads as those of a
                # killed builder, as we would treat its builds and uploads, and would delete files
                # of builds that its ZooKeeper does not know.
                if isinstance(error, build_journal.ImagesDirInUse) and not error.by_this_process:
                    raise
                self.log.warning(
                    "%s; this builder does not clean up leftovers of killed builds and uploads",
                    error,
                )
            self.config_state.good()
            try:
                self._start(config)
            except BaseException:
                self._release_images_dir()
                raise
            self._running = True

    def _warn_about_name(self) -> None:
        """Warn if the host name does not resolve: diskimage-builder misreads sudo's complaint."""
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            self.log.warning(
                "The name of this machine, %s, does not resolve (%s): image builds will fail. Add "
                "it to /etc/hosts",
                name,
                error,
            )

    def _start(self, config: Config) -> None:
        self._warn_about_name()
        interrupted = []
        if self.state.images_lock is not None:
            for name in ("", build_journal.JOURNAL, upload_journal.DIRECTORY):
                remove_unfinished(os.path.join(config.images_dir, name))
            interrupted = build_journal.clean_all(config.images_dir, self.log)
        self._make_workers()
        self._connect(config)
        self._apply(config)
        self._repeat(
            lambda: fail_interrupted(self.state, interrupted, self.log),
            "mark interrupted builds as failed",
        )
        self._parts.start()
        assert self.component_info is not None
        self.component_info.state = BuilderComponent.RUNNING

    def _make_workers(self) -> None:
        """Create the workers, which share only the state, and the table of what runs.

        The connection and the providers run before the other parts start.
        """
        state = self.state
        state.forget_failures(self.build_interval, self.upload_interval)
        state.cleanup_interval = self.cleanup_interval
        self._build_workers = [
            BuildWorker(n, state, self.build_interval) for n in range(self._num_builders)
        ]
        self._upload_workers = [
            UploadWorker(n, state, self.upload_interval) for n in range(self._num_uploaders)
        ]
        if self.cleanup_interval > 0:
            self._janitor = CleanupWorker(0, state, self.cleanup_interval)
        for worker in self._workers():
            self.watchdog.guard(worker, may_end=lambda worker=worker: not worker.running)  # type: ignore[misc]
        self._parts = Group(
            STOP_TIMEOUT,
            Part("connection", join=self._disconnect, least=5.0),
            Part("publisher", state.publisher.start, join=state.publisher.stop, least=5.0),
            Part("providers", join=self._stop_providers, least=STOP_TIMEOUT + LAUNCH_GRACE),
            Part(
                "builds", None, self.session_waiters_wake, self._join_builds, threading.TIMEOUT_MAX
            ),
            *(Part(worker.name, worker.start, worker.shutdown) for worker in self._workers()),
            Part(
                "configuration files",
                lambda: self.config_state.watch(self.check_config, self.config.files),
                self.config_state.stop,
            ),
        )

    def _connect(self, config: Config) -> None:
        report = functools.partial(self.watchdog.report, "of the connection to ZooKeeper")
        client = ZooKeeperClient.from_config(config, self.session_file, report)
        self.state.connection = client
        zk = ZooKeeper(client, only_images=True)
        assert zk.image_tree is not None
        for tree in zk.trees:
            tree.sync_listeners.append(self._synced)
        zk.image_tree.listeners.append(lambda _image: self._wake_all())
        client.state_listeners.append(self._state_changed)
        if self._start_cancelled.is_set():
            client.stop_connecting.set()
        client.connect()
        self.state.zk = zk
        if not zk.wait_synced(SYNC_TIMEOUT):
            self.log.warning(
                "The mirror of ZooKeeper is not complete after %.0f s; waiting until it is",
                SYNC_TIMEOUT,
            )
        self.component_info = BuilderComponent(client, hostnames.short())
        # The records of its builds have another name of this machine.
        self.component_info.content["builder_id"] = self.state.builder_id
        self._repeat(self.component_info.register, "register")
        self._synced()

    def _repeat(self, step: Callable[[], object], what: str) -> None:
        """Do a step of the start; again whenever the connection breaks.

        :raises KazooException: it broke, and the start is canceled.
        """
        while True:
            try:
                step()
                break
            except BROKEN as error:
                if self._start_cancelled.is_set():
                    raise
                self._start_problem = f"cannot {what}: {error!r}; retrying"
                self.log.warning("Starting: %s in %g s", self._start_problem, START_PAUSE)
            self._start_cancelled.wait(START_PAUSE)
        self._start_problem = ""

    # -- events (on the connection thread: only wake threads)

    def _state_changed(self, state: str) -> None:
        if state != KazooState.CONNECTED:
            self.session_usable.clear()
        else:
            for worker in self._build_workers:
                worker.session_back()
        self._wake_all()

    def _synced(self) -> None:
        if self.zk is not None and self.zk.synced:
            self.session_usable.set()
            self.state.publisher.renew()
            self._wake_all()

    def _wake_all(self) -> None:
        for worker in self._workers():
            worker.wake()

    def _workers(self) -> list[Worker]:
        janitor = [self._janitor] if self._janitor is not None else []
        return [*self._build_workers, *self._upload_workers, *janitor]

    # -- queries of the web server

    #: A builder serves no pages: it has no events, and neither charts nor a configuration for them.
    feed = trends = None

    @staticmethod
    def shown_config() -> None:
        """Have no configuration to show."""

    def getZK(self) -> ZooKeeper:
        return self.zk

    def getReadiness(self) -> tuple[bool, list[str]]:
        """Return whether the builder can work, and current problems."""
        starting = self._start_problem or "the workers do not run yet"
        details = [] if self._running else [f"starting: {starting}"]
        if not self.session_usable.is_set():
            details.append("ZooKeeper: not connected")
        details += self.watchdog.ended
        ready = not details
        details += self.config_state.describe()
        if self.config is not None:
            details += [
                f"provider {p.name}: not running"
                for p in self.config.providers.values()
                if p.manage_images and p.name not in self.config.provider_managers
            ]
        if self.zk is not None:  # the mirror, which also answers without ZooKeeper
            details += [str(problem) for problem in image_problems(self.zk.progress_tree.data())]
        return ready, details

    def explain(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]:
        """Return nothing: builders serve no node requests."""
        return []

    # -- stop

    def cancel_start(self) -> None:
        """Let a start that waits for ZooKeeper fail; thread-safe."""
        self._start_cancelled.set()
        if self.state.connection is not None:
            self.state.connection.stop_connecting.set()

    def stop(self, finish: bool = True) -> None:
        """Stop all workers.

        Uploads are not waited for: a provider may take hours, and the clean-up finds their
        leftovers.

        :param finish: wait for running builds (up to their time-outs); otherwise end their
            processes within seconds.
        """
        with self._start_lock:
            self._stop(finish)

    def abort_builds(self, reason: str = "the builder is stopping") -> None:
        """End running builds; also for a stop that already waits for them."""
        self.state.stopping_at_once.set()
        for worker in self._build_workers:
            worker.abort(reason)

    def _stop(self, finish: bool) -> None:
        self.watchdog.release()
        if self.state.connection is not None:
            self.state.connection.stop_connecting.set()
        if not finish:
            self.abort_builds()
        self._parts.stop()
        self.session_usable.set()  # do not wait for a session any longer
        self._release_images_dir()
        self.statsd.setAddress(None)
        self._running = False

    def _join_builds(self) -> None:
        for worker in self._build_workers:
            if worker.is_alive():
                worker.join()

    def _stop_providers(self) -> None:
        """Stop the clean-up, which uses the providers, and the providers."""
        now = time.monotonic()
        janitor, managers = self._janitor, self.state.managers
        if janitor is not None and janitor.is_alive():
            janitor.join(SILENT_GRACE)
            if not managers.any_silent(self.config, now):
                janitor.join(STOP_TIMEOUT - SILENT_GRACE)
        managers.stop(self.config, now, now + STOP_TIMEOUT)

    def _disconnect(self) -> None:
        if self.component_info is not None:
            self.component_info.unregister()
            self.component_info = None
        if self.zk is not None:
            self.zk.disconnect()
        elif self.state.connection is not None:
            self.state.connection.disconnect()

    def session_waiters_wake(self) -> None:
        """Wake workers that wait for the session, so that they check whether to end."""
        if not self.session_usable.is_set():
            self.session_usable.set()
            self.session_usable.clear()

    def _release_images_dir(self) -> None:
        lock, self.state.images_lock = self.state.images_lock, None
        if lock is not None:
            lock.close()
