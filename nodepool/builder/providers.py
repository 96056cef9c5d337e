"""The builder's providers: one each per process; none is stopped while in use (BLD-16)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nodepool.config.model import Config
from nodepool.driver.lifecycle import ProviderManager, call, is_silent
from nodepool.driver.provider import Provider
from nodepool.zk.zookeeper import ZooKeeper


class ImageManagers:
    """Providers that manage images; replaced ones are stopped when their last user is done."""

    log = logging.getLogger("nodepool.ProviderManager")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()
        self._retired: dict[int, Provider] = {}

    def reconfigure(self, old: Config | None, new: Config, zk: ZooKeeper) -> None:
        """Set ``new.provider_managers``."""
        ProviderManager.reconfigure(old, new, zk, only_image_manager=True, retire=self._retire)

    @contextmanager
    def use(self, config: Config, provider_name: str) -> Iterator[Provider | None]:
        """Return the running provider of this configuration, or None; it runs during the block."""
        with self._lock:
            manager = config.provider_managers.get(provider_name)
            if manager is not None:
                self._users[id(manager)] += 1
        try:
            yield manager
        finally:
            if manager is not None:
                self._release(manager)

    def _release(self, manager: Provider) -> None:
        with self._lock:
            self._users[id(manager)] -= 1
            if self._users[id(manager)] > 0:
                return
            del self._users[id(manager)]
            retired = self._retired.pop(id(manager), None)
        if retired is not None:
            call(retired, "stop")

    def _retire(self, manager: Provider) -> None:
        with self._lock:
            if self._users[id(manager)] > 0:
                self._retired[id(manager)] = manager
                self.log.info(
                    "Provider %s is replaced; the previous one stops after its last upload",
                    manager.provider.name,
                )
                return
        call(manager, "stop")

    def _all(self, config: Config) -> list[Provider]:
        with self._lock:
            return [
                *([] if config is None else config.provider_managers.values()),
                *self._retired.values(),
            ]

    def any_silent(self, config: Config, since: float) -> bool:
        """Return whether a cloud has not answered any pending call ``since`` (monotonic
        seconds).
        """
        return any(is_silent(manager, since) for manager in self._all(config))

    def stop(self, config: Config, since: float, deadline: float) -> None:
        """Stop all and wait for them, see :meth:`ProviderManager.stop_all`."""
        ProviderManager.stop_all(self._all(config), since, deadline)
