"""The providers of the builder: one of each in the process, and none stopped while somebody uses it (builder.md 16)."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nodepool.provider_manager import ProviderManager, is_silent


class ImageManagers:
    """Providers that manage images; replaced ones are stopped when their last user is done."""

    log = logging.getLogger("nodepool.ProviderManager")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()
        self._retired: dict[int, Any] = {}

    def reconfigure(self, old: Any, new: Any, zk: Any) -> None:
        """Fill ``new.provider_managers``."""
        ProviderManager.reconfigure(old, new, zk, only_image_manager=True, retire=self._retire)

    @contextmanager
    def use(self, config: Any, provider_name: str) -> Iterator[Any]:
        """The running provider of this configuration, or None; it is not stopped before the end of the block."""
        with self._lock:
            manager = config.provider_managers.get(provider_name)
            if manager is not None:
                self._users[id(manager)] += 1
        try:
            yield manager
        finally:
            if manager is not None:
                self._release(manager)

    def _release(self, manager: Any) -> None:
        with self._lock:
            self._users[id(manager)] -= 1
            if self._users[id(manager)] > 0:
                return
            del self._users[id(manager)]
            retired = self._retired.pop(id(manager), None)
        if retired is not None:
            ProviderManager._call(retired, "stop")

    def _retire(self, manager: Any) -> None:
        with self._lock:
            if self._users[id(manager)] > 0:
                self._retired[id(manager)] = manager
                self.log.info("Provider %s is replaced; the old one ends after its last upload", manager.provider.name)
                return
        ProviderManager._call(manager, "stop")

    def any_silent(self, config: Any, since: float) -> bool:
        """Whether a cloud owes answers and has given none ``since`` then (monotonic seconds)."""
        managers = [] if config is None else list(config.provider_managers.values())
        with self._lock:
            managers += self._retired.values()
        return any(is_silent(manager, since) for manager in managers)

    def stop(self, config: Any, timeout: float) -> None:
        """Stop all and wait for them, at most ``timeout`` seconds in all."""
        managers = [] if config is None else list(config.provider_managers.values())
        with self._lock:
            managers += self._retired.values()
            self._retired.clear()
        deadline = time.monotonic() + timeout
        threads = []
        for manager in managers:
            ProviderManager._call(manager, "stop")
            thread = threading.Thread(target=ProviderManager._call, args=(manager, "join"), daemon=True,
                                      name=f"Thread-stop-{manager.provider.name}")
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
