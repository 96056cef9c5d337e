"""Sums of resources: of stored nodes, and promises for nodes that are about to be stored.

Promises are not part of any record yet. Without them, two decisions between a write and its
appearance in the mirror would use the same quota.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

from nodepool.base.amounts import exact

K = TypeVar("K", bound=Hashable)


class Sums(Generic[K]):
    """Sums of amounts by provider, pool and tenant, without zeros; not thread-safe."""

    def __init__(self) -> None:
        #: By provider, and by (provider, pool).
        self.places: dict[object, Counter[K]] = defaultdict(Counter)
        self.tenants: dict[str, Counter[K]] = defaultdict(Counter)

    def add(
        self,
        provider: str | None,
        pool: str | None,
        tenant: str | None,
        amounts: Mapping[K, float],
        sign: int,
    ) -> None:
        targets: list[Counter[K]] = []
        if provider is not None:
            targets += [self.places[provider], self.places[provider, pool]]
        if tenant is not None:
            targets.append(self.tenants[tenant])
        for target in targets:
            for name, amount in amounts.items():
                target[name] = exact(target[name] + sign * amount)
                if not target[name]:
                    del target[name]
        if tenant is not None and not self.tenants[tenant]:
            del self.tenants[tenant]

    def of(self, provider: str, pool: str | None = None) -> dict[K, float]:
        return dict(self.places.get(provider if pool is None else (provider, pool), ()))


class Reservations:
    """Sums of promised resources by provider, pool and tenant; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[Any, tuple[str | None, str | None, str | None, dict[str, float]]] = {}
        self._sums: Sums[str] = Sums()

    def reserve(
        self,
        key: Hashable,
        provider: str | None,
        pool: str | None,
        tenant: str | None,
        resources: Mapping[str, float],
    ) -> None:
        """Promise resources under ``key``; replaces an earlier promise under it."""
        with self._lock:
            self.release(key)
            self._entries[key] = (provider, pool, tenant, dict(resources))
            self._sums.add(provider, pool, tenant, resources, 1)

    def release(self, key: Hashable) -> None:
        with self._lock:
            if key in self._entries:
                self._sums.add(*self._entries.pop(key), -1)

    def provider(self, provider: str, pool: str | None = None) -> dict[str, float]:
        with self._lock:
            return self._sums.of(provider, pool)

    def tenant(self, tenant: str) -> dict[str, float]:
        with self._lock:
            return dict(self._sums.tenants.get(tenant, ()))
