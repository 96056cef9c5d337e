"""Providers without a cloud: state machine drivers whose machines are timers."""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from typing import Any

from nodepool.config.model import Config, ProviderConfig
from nodepool.driver import statemachine
from nodepool.driver.fake import FakeDriver
from nodepool.driver.openstack import OpenStackDriver
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.registry import Drivers
from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.lab.whatif.assumptions import Assumptions

#: Drivers that need no cloud.
UNCHANGED = frozenset({"metastatic", "static"})

_log = logging.getLogger("nodepool.whatif")


class _AnyCloud:
    """Stands for what clouds.yaml has about a cloud."""

    def __init__(self, name: object) -> None:
        self.name = name
        self.config = {"image_format": "qcow2"}


class _AnyClouds:
    def get_one(self, cloud: object = None, **_more: object) -> _AnyCloud:
        return _AnyCloud(cloud)


def need_no_clouds() -> None:
    """Load OpenStack providers without the SDK and clouds.yaml from now on, in this process."""
    replaced: dict[str, Any] = {
        "_readClouds": lambda _self: _AnyClouds(),
        "_cloudFiles": lambda _self: [],
    }
    for driver in (OpenStackDriver, FakeDriver):
        for name, function in replaced.items():
            setattr(driver, name, function)


class TimerMachine(statemachine.StateMachine):
    """Complete after some seconds."""

    def __init__(
        self, external_id: str, seconds: float, instance: statemachine.Instance | None
    ) -> None:
        super().__init__()
        self._planned_id = external_id
        self._seconds = seconds
        self._instance = instance

    def advance(self) -> statemachine.Instance | None:
        if self.state == self.START:
            self.state, self.external_id = "waiting", self._planned_id
            self.next_wake = time.monotonic() + self._seconds
        elif not self.complete and time.monotonic() >= (self.next_wake or 0.0):
            self.state, self.complete = "complete", True
            return self._instance
        return None


class TimerInstance(statemachine.Instance):
    def __init__(self, external_id: str, needs: dict[str, float]) -> None:
        super().__init__()
        self.ready = True
        self.external_id = external_id
        self.interface_ip = self.public_ipv4 = "192.0.2.1"
        self.cloud = "simulated"
        self._needs = needs

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(**self._needs)


class TimerAdapter(statemachine.Adapter):
    """Machines that never fail, in a cloud with the quota of the assumptions."""

    def __init__(
        self, provider_config: ProviderConfig, assumptions: Assumptions, choice: random.Random
    ) -> None:
        self._name = provider_config.name
        self._driver = provider_config.driver.name
        self._assumptions = assumptions
        self._random = choice
        self._numbers = itertools.count(1)

    def getCreateStateMachine(
        self,
        hostname: str,
        label: Any,
        image_external_id: object,
        metadata: dict[str, str],
        request: object,
        az: str | None,
        log: object,
    ) -> TimerMachine:
        external_id = f"{self._name}-{next(self._numbers)}"
        seconds = self._assumptions.launch_seconds(label.name, self._driver or "", self._random)
        return TimerMachine(
            external_id, seconds, TimerInstance(external_id, self._assumptions.needs(label))
        )

    def getDeleteStateMachine(self, external_id: str, log: object) -> TimerMachine:
        return TimerMachine(external_id, self._assumptions.delete_seconds(self._random), None)

    def listInstances(self) -> list[Any]:
        return []

    def listResources(self) -> list[Any]:
        return []

    def getQuotaLimits(self) -> QuotaInformation:
        return QuotaInformation(default=math.inf, **self._assumptions.quotas.get(self._name, {}))

    def getQuotaForLabel(self, label: object) -> QuotaInformation:
        return QuotaInformation(**self._assumptions.needs(label))


class TimerProvider(StateMachineProvider):
    """Advances machines only at the times that they ask for."""

    MAXIMUM_SLEEP = 3600.0


def get_provider(
    provider_config: ProviderConfig, assumptions: Assumptions, choice: random.Random
) -> Any:
    """Return a new, not started provider for the configuration of any driver."""
    _check_no_host_keys(provider_config)
    if provider_config.driver.name in UNCHANGED:
        return Drivers.get(provider_config.driver.name).getProvider(provider_config)
    return TimerProvider(TimerAdapter(provider_config, assumptions, choice), provider_config)


def _check_no_host_keys(provider_config: ProviderConfig) -> None:
    """Disable the check of host keys: no machine answers."""
    for pool in provider_config.pools.values():
        for label in pool.labels.values() if isinstance(pool.labels, dict) else ():
            label.host_key_checking = False
        for node in getattr(pool, "nodes", None) or ():
            node["host-key-checking"] = False


def unknown_sizes(config: Config, assumptions: Assumptions) -> list[str]:
    """Return a sentence for each label whose pool limits a resource of unknown amount."""
    found = []
    for provider in config.providers.values():
        quota = set(assumptions.quotas.get(provider.name, {}))
        for pool in provider.pools.values():
            limited = quota | {
                name
                for name in ("cores", "ram")
                if getattr(pool, f"max_{name}", None) not in (None, math.inf)
            }
            labels = pool.labels.values() if isinstance(pool.labels, dict) else ()
            unknown = {
                label.name: sorted(limited - assumptions.needs(label).keys()) for label in labels
            }
            found += [
                f"provider {provider.name}: label {name}: {', '.join(resources)} of a node unknown"
                for name, resources in unknown.items()
                if resources
            ]
    return found
