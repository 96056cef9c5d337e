"""Options of the test driver: pools with a plain list of labels."""

from __future__ import annotations

from typing import Any

from nodepool.base.option import REQUIRED, option
from nodepool.config.model import Config
from nodepool.driver import ConfigPool, ProviderConfig


class TestPool(ConfigPool):
    __test__ = False
    ignore_equality = ["provider"]

    provider: TestConfig | None = None
    name: str = option(str, REQUIRED, "part of records and metrics")
    labels: list[str] = option(
        [str], [], "names of labels, whose nodes are ready immediately", convert=list
    )

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)


class TestConfig(ProviderConfig):
    __test__ = False
    _pools: dict[str, ConfigPool] = option(
        [TestPool], {}, "groups of labels", name="pools", stored=False
    )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TestConfig) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def load(self, newconfig: Config) -> None:
        for options in self.provider.get("pools") or []:
            pool = TestPool()
            pool.load(options)
            pool.provider = self
            self._pools[str(pool.name)] = pool
            for label in pool.labels:
                newconfig.labels[label].pools.append(pool)
