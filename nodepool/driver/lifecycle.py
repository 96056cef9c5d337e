"""Starting, replacing and stopping the providers of a configuration (DRV-4)."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from nodepool.base import threads
from nodepool.base.problems import REMEDIES, Problem, one_line
from nodepool.config.model import Config, ProviderConfig
from nodepool.driver import Drivers, purpose
from nodepool.driver.provider import Provider
from nodepool.exceptions import FOREIGN
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds for running launches at a stop; the same when their cloud does not answer at all; and for
#: the threads that wait.
LAUNCH_GRACE, SILENT_GRACE, SILENT_JOIN = 5.0, 0.8, 0.2
#: Seconds that a reload waits for providers to start.
START_GRACE = 2.0
#: Reason for a provider that is not active yet.
STARTING = "it is still starting; no action is needed"


def get_provider(provider_config: ProviderConfig) -> Provider:
    """Return a new provider that is not started."""
    return Drivers.get(provider_config.driver.name or "").getProvider(provider_config)


def provider_problems(config: Config) -> list[Problem]:
    """Return problems of running providers: refusals of clouds, unusable hosts and labels."""
    found: list[Problem] = []
    for name, manager in sorted(config.provider_managers.items()):
        try:
            if manager.cloud_calls is not None:
                found += [
                    Problem(line, name, help=REMEDIES["calls"])
                    for line in manager.cloud_calls.troubles()
                ]
            if sold_out := manager.sold_out_offers():
                found.append(Problem(f"sold out: {sold_out}", name, help=REMEDIES["sold-out"]))
        except Exception as error:  # a driver may raise anything
            found.append(
                Problem(one_line(f"its driver cannot report its problems: {error!r}"), name)
            )
        try:
            found += [
                Problem(one_line(f"host {host.get('problem') or host.get('name')}"), name)
                for host in manager.describeHosts()
                if not host.get("usable")
            ]
        except Exception as error:  # a driver may raise anything
            found.append(Problem(one_line(f"cannot read the state of its hosts: {error!r}"), name))
        if manager.leak_search_stopped is not None:
            found.append(Problem(one_line(manager.leak_search_stopped), name))
        found += manager.label_problems.listed()
    return found


def is_stopping(manager: Provider) -> bool:
    """Return whether the provider still finishes its launches after its `stop`."""
    return manager.stop_thread is not None and manager.stop_thread.is_alive()


def is_silent(manager: Provider, since: float) -> bool:
    """Return whether cloud calls are pending without any answer ``since`` then (monotonic s)."""
    return manager.cloud_calls is not None and manager.cloud_calls.silent(since)


def started(config: ProviderConfig, zk_conn: ZooKeeper, only_images: bool) -> Provider:
    """Return a new, started provider; its exceptions are logged."""
    try:
        context = contextvars.copy_context()
        context.run(purpose.images_only.set, only_images)
        manager = context.run(get_provider, config)
        manager.start(zk_conn)
    except FOREIGN:
        ProviderManager.log.exception("Error starting provider %s", config.name)
        raise
    return manager


def call(manager: Provider, method: str) -> None:
    """Call a life cycle method of a provider, logging exceptions."""
    try:
        getattr(manager, method)()
    except FOREIGN:
        ProviderManager.log.exception("Error in %s of provider %s:", method, manager.provider.name)


class Starts:
    """Starts the providers of one daemon on separate threads: a slow one blocks no others.

    :param started: called (on such a thread) when a provider that a reload has not waited for has
        started, or failed to.
    """

    def __init__(self, started: Callable[[], Any] = lambda: None) -> None:
        self._started = started
        #: Starts that a reload did not wait for, by the provider's name.
        self._slow: dict[str, tuple[ProviderConfig, Future[Provider]]] = {}

    def is_starting(self, name: str) -> bool:
        """Return whether the provider is still starting after a reload; the old one is idle."""
        return name in self._slow

    def start(
        self,
        wanted: list[ProviderConfig],
        zk_conn: ZooKeeper,
        only_images: bool,
        grace: float | None,
    ) -> list[tuple[ProviderConfig, Future[Provider] | None]]:
        """Return each configuration with its provider or exception, or None (still starting).

        One that is still starting is returned by the next call that has an equal configuration; a
        call without one stops it.

        :param grace: seconds to wait; None: until all have started.
        """
        futures: list[tuple[ProviderConfig, Future[Provider]]] = []
        for config in wanted:
            slow = self._slow.pop(config.name, None)
            if slow is None or slow[0] != config:
                self._drop(slow)
                lane = threads.shared().lane(f"start-provider-{config.name}", 1)
                slow = config, lane.submit(started, config, zk_conn, only_images)
            futures.append(slow)
        self.stop()
        done, _starting = wait([future for _config, future in futures], grace)
        for config, future in futures:
            if future not in done:
                self._slow[config.name] = config, future
                future.add_done_callback(lambda _future: self._started())
        return [(config, future if future in done else None) for config, future in futures]

    def stop(self) -> None:
        """Stop slow providers of a reload as soon as they have started. From any thread."""
        for slow in list(self._slow.values()):
            self._drop(slow)
        self._slow.clear()

    @staticmethod
    def _drop(slow: tuple[ProviderConfig, Future[Provider]] | None) -> None:
        """Stop a provider that is no longer needed once it has started."""

        def stop(future: Future[Provider]) -> None:
            if future.exception() is None:
                call(future.result(), "stop")

        if slow is not None:
            slow[1].add_done_callback(stop)


class ProviderManager:
    """Starts, replaces and stops providers; has class methods only."""

    log = logging.getLogger("nodepool.ProviderManager")

    @classmethod
    def reconfigure(
        cls,
        old_config: Config | None,
        new_config: Config,
        zk_conn: ZooKeeper,
        only_image_manager: bool = False,
        retire: Callable[[Provider], object] | None = None,
        starts: Starts | None = None,
    ) -> None:
        """Fill ``new_config.provider_managers``.

        :param retire: stops a provider that was replaced or removed; default: immediately.
        :param starts: starts them; a reload waits `START_GRACE` seconds for it; default: for all of
            them.

        Equal providers are kept; changed ones are idled, replaced and then stopped; those that
        vanished are idled and stopped.  One that does not start is logged and skipped.  A changed
        one keeps its previous configuration, idle, while its successor is starting.
        """
        # At the first start a label without a provider would have its requests fail.
        grace = START_GRACE if starts is not None and old_config is not None else None
        starts = starts or Starts()
        running = dict(old_config.provider_managers) if old_config is not None else {}
        wanted: list[ProviderConfig] = []
        for config in new_config.providers.values():
            if only_image_manager and not config.manage_images:
                continue
            manager = running.get(config.name)
            if (
                manager is not None
                and manager.provider == config
                and not starts.is_starting(config.name)
            ):
                cls.log.debug("Keeping provider %s", config.name)
                new_config.provider_managers[config.name] = running.pop(config.name)
                continue
            if manager is not None:
                cls.log.info("Provider %s has changed; restarting it", config.name)
            wanted.append(config)
        for name, manager in running.items():
            if name not in new_config.providers:
                cls.log.info("Provider %s is not configured any more; stopping it", name)
            call(manager, "idle")
        for config, future in starts.start(wanted, zk_conn, only_image_manager, grace):
            cls._take(new_config, config.name, future, running)
        for manager in running.values():
            if retire is not None:
                retire(manager)
            else:
                call(manager, "stop")

    @staticmethod
    def _take(
        new_config: Config, name: str, future: Future[Provider] | None, running: dict[str, Provider]
    ) -> None:
        """Record the result of a start; the old provider stays until its successor has started."""
        if future is not None and (error := future.exception()) is not None:
            new_config.provider_failures[name] = one_line(error) or type(error).__name__
        elif future is not None:
            new_config.provider_managers[name] = future.result()
        elif name in running:
            new_config.provider_managers[name] = running.pop(name)
            new_config.provider_errors[name] = STARTING
        else:
            new_config.provider_failures[name] = STARTING

    @classmethod
    def stop_all(cls, managers: list[Provider], since: float, deadline: float) -> bool:
        """Stop providers in parallel and wait; return whether a cloud has been silent since.

        Short launches may finish; longer ones are left to the next start.

        :param since: when the stop began (this and the deadline: monotonic seconds).
        """
        for manager in managers:
            call(manager, "idle")
        joiners = []
        for manager in managers:
            thread = threading.Thread(
                target=cls._stop,
                args=(manager,),
                daemon=True,
                name=f"Thread-stop-{manager.provider.name}",
            )
            thread.start()
            joiners.append((manager, thread))
        now = time.monotonic()
        left: set[int] = set()
        for grace, silent_only in ((min(SILENT_GRACE, LAUNCH_GRACE), True), (LAUNCH_GRACE, False)):
            for manager, thread in joiners:
                if id(manager) in left or not hasattr(manager, "abandon"):
                    continue
                thread.join(max(0.0, now + grace - time.monotonic()))
                if thread.is_alive() and (not silent_only or is_silent(manager, since)):
                    cls.log.info(
                        "Leaving unfinished launches of provider %s to the next start",
                        manager.provider.name,
                    )
                    manager.abandon()
                    left.add(id(manager))
        for manager, thread in joiners:
            thread.join(
                max(0.1, SILENT_JOIN if is_silent(manager, since) else deadline - time.monotonic())
            )
        return any(is_silent(manager, since) for manager in managers)

    @classmethod
    def _stop(cls, manager: Provider) -> None:
        call(manager, "stop")
        call(manager, "join")

    @classmethod
    def stopProviders(cls, config: Config) -> None:
        """Stop all and wait for each."""
        for manager in config.provider_managers.values():
            call(manager, "stop")
        for manager in config.provider_managers.values():
            call(manager, "join")
