"""Starting, replacing and stopping the providers of a configuration (DRV-4)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodepool.base.problems import Problem, TellsTroubles, one_line
from nodepool.config.model import Config, ProviderConfig
from nodepool.driver import Drivers, purpose
from nodepool.driver.provider import Provider
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds that running launches may take at a stop; when their cloud does not answer at all; that threads have which wait for it.
LAUNCH_GRACE, SILENT_GRACE, SILENT_JOIN = 5.0, 0.8, 0.2


def get_provider(provider_config: Any) -> Any:
    """A new, not started provider."""
    return Drivers.get(provider_config.driver.name).getProvider(provider_config)


def provider_problems(config: Config) -> list[Problem]:
    """Return what the clouds of running providers refuse, and which of their hosts and labels do not work."""
    found: list[Problem] = []
    for name, manager in sorted(config.provider_managers.items()):
        told_by = manager if isinstance(manager, TellsTroubles) else manager.cloud_calls
        if told_by is not None:
            try:
                found += [Problem(line, name) for line in told_by.troubles()]
            except Exception as error:  # a driver may raise anything
                found.append(Problem(one_line(f"its driver cannot tell its troubles: {error!r}"), name))
        try:
            found += [
                Problem(one_line(f"host {host.get('problem') or host.get('name')}"), name)
                for host in manager.describeHosts()
                if not host.get("usable")
            ]
        except Exception as error:  # same as above
            found.append(Problem(one_line(f"cannot read the state of its hosts: {error!r}"), name))
        stopped = getattr(manager, "leak_search_stopped", None)
        if isinstance(stopped, str):
            found.append(Problem(one_line(stopped), name))
        if manager.label_problems is not None:
            found += manager.label_problems.listed()
    return found


def is_silent(manager: Provider, since: float) -> bool:
    """Whether calls to the provider's cloud wait for answers and none has come ``since`` then (monotonic seconds)."""
    return manager.cloud_calls is not None and manager.cloud_calls.silent(since)


class ProviderManager:
    """Class methods only."""

    log = logging.getLogger("nodepool.ProviderManager")

    @classmethod
    def reconfigure(
        cls,
        old_config: Any,
        new_config: Any,
        zk_conn: ZooKeeper,
        only_image_manager: bool = False,
        retire: Callable[[Any], Any] | None = None,
    ) -> None:
        """Fill ``new_config.provider_managers``.

        :param retire: stops a provider that was replaced or removed; default: at once.

        Equal providers are kept; changed ones are told to idle, replaced and then stopped; those that vanished are
        idled and stopped.  One that does not start is logged and left out.
        """
        running = dict(old_config.provider_managers) if old_config is not None else {}
        replaced: list[Any] = []
        wanted: list[Any] = []
        for config in new_config.providers.values():
            if only_image_manager and not config.manage_images:
                continue
            manager = running.pop(config.name, None)
            if manager is not None and manager.provider == config:
                cls.log.debug("Keeping provider %s", config.name)
                new_config.provider_managers[config.name] = manager
                continue
            if manager is not None:
                cls.log.info("Provider %s has changed; starting it anew", config.name)
                cls._call(manager, "idle")
                replaced.append(manager)
            wanted.append(config)
        for name, manager in running.items():
            cls.log.info("Provider %s is not configured any more; stopping it", name)
            cls._call(manager, "idle")
            replaced.append(manager)
        cls._start_all(wanted, new_config, zk_conn, only_image_manager)
        for manager in replaced:
            if retire is not None:
                retire(manager)
            else:
                cls._call(manager, "stop")

    @classmethod
    def _start_all(cls, wanted: list[Any], new_config: Config, zk_conn: ZooKeeper, only_images: bool) -> None:
        """Failures go to ``provider_failures``. At the same time: one that is slow to start does not hold up the others."""
        if not wanted:
            return
        if len(wanted) == 1:
            started = [cls._start(wanted[0], zk_conn, only_images)]
        else:
            with ThreadPoolExecutor(min(16, len(wanted)), thread_name_prefix="start-providers") as pool:
                started = list(pool.map(lambda config: cls._start(config, zk_conn, only_images), wanted))
        for config, manager in zip(wanted, started, strict=True):
            if isinstance(manager, Exception):
                new_config.provider_failures[config.name] = one_line(manager) or type(manager).__name__
            else:
                new_config.provider_managers[config.name] = manager

    @classmethod
    def _start(cls, config: ProviderConfig, zk_conn: ZooKeeper, only_images: bool) -> Any:
        try:
            with purpose.making(only_images):
                manager = get_provider(config)
            manager.start(zk_conn)
        except Exception as error:
            cls.log.exception("Error starting provider %s", config.name)
            return error
        return manager

    @classmethod
    def _call(cls, manager: Provider, method: str) -> None:
        try:
            getattr(manager, method)()
        except Exception:
            cls.log.exception("Error in %s of provider %s:", method, manager.provider.name)

    @classmethod
    def stop_all(cls, managers: list[Any], since: float, deadline: float) -> bool:
        """Stop them and wait for them, all at the same time. True: a cloud has not answered since the stop began.

        Short launches may finish; longer ones are left to the next start.

        :param since: when the stop began (this and the deadline: monotonic seconds).
        """
        for manager in managers:
            cls._call(manager, "idle")
        joiners = []
        for manager in managers:
            thread = threading.Thread(target=cls._stop, args=(manager,), daemon=True, name=f"Thread-stop-{manager.provider.name}")
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
                    cls.log.info("Leaving unfinished launches of provider %s to the next start", manager.provider.name)
                    manager.abandon()
                    left.add(id(manager))
        for manager, thread in joiners:
            thread.join(max(0.1, SILENT_JOIN if is_silent(manager, since) else deadline - time.monotonic()))
        return any(is_silent(manager, since) for manager in managers)

    @classmethod
    def _stop(cls, manager: Provider) -> None:
        cls._call(manager, "stop")
        cls._call(manager, "join")

    @classmethod
    def stopProviders(cls, config: Config) -> None:
        """Stop all and wait for each."""
        for manager in config.provider_managers.values():
            cls._call(manager, "stop")
        for manager in config.provider_managers.values():
            cls._call(manager, "join")
