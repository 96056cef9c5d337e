"""Promises: resources of nodes that this process is about to store.

They are not part of any record yet. Without them, two decisions between a write and its appearance in the mirror would
use the same quota.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

from nodepool.base.amounts import exact


class Reservations:
    """Sums of promised resources by provider, pool and tenant; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Any, tuple[str | None, str | None, str | None, dict[str, float]]] = {}
        self._provider: dict[str | None, Counter[str]] = defaultdict(Counter)
        self._pool: dict[tuple[str | None, str | None], Counter[str]] = defaultdict(Counter)
        self._tenant: dict[str | None, Counter[str]] = defaultdict(Counter)

    def _apply(self, entry: tuple[str | None, str | None, str | None, dict[str, float]], sign: int) -> None:
        provider, pool, tenant, resources = entry
        targets: list[Counter[str]] = []
        if provider is not None:
            targets += [self._provider[provider], self._pool[(provider, pool)]]
        if tenant is not None:
            targets.append(self._tenant[tenant])
        for name, amount in resources.items():
            for target in targets:
                target[name] = exact(target[name] + sign * amount)

    def reserve(
        self, key: Hashable, provider: str | None, pool: str | None, tenant: str | None, resources: Mapping[str, float]
    ) -> None:
        """Promise resources under ``key``; replaces an earlier promise under it."""
        entry = (provider, pool, tenant, {k: v for k, v in resources.items() if v})
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self._apply(old, -1)
            self._entries[key] = entry
            self._apply(entry, 1)

    def release(self, key: Hashable) -> None:
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self._apply(old, -1)

    def provider(self, provider: str, pool: str | None = None) -> dict[str, float]:
        with self._lock:
            if pool is None:
                return dict(self._provider[provider]) if provider in self._provider else {}
            key = (provider, pool)
            return dict(self._pool[key]) if key in self._pool else {}

    def tenant(self, tenant: str) -> dict[str, float]:
        with self._lock:
            return dict(self._tenant[tenant]) if tenant in self._tenant else {}
