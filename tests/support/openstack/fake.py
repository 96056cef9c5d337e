"""The OpenStack driver over the fake cloud, without launcher and ZooKeeper."""

from __future__ import annotations

import logging
import types
from typing import Any

from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.driver.fake.objects import Dummy
from tests.conftest import wait_for

LOG = logging.getLogger("nodepool.test")
METADATA = {
    "nodepool_node_id": "1",
    "nodepool_pool_name": "main",
    "nodepool_provider_name": "cloud-1",
}
ADDRESS = "203.0.113.9"


class Request:
    def getSafeAttributes(self) -> Any:
        return types.SimpleNamespace(tenant_name=None, id="100-0")


class FloatingCloud(FakeOpenStackCloud):
    """A cloud whose servers need a floating IP."""

    def _has_floating_ips(self) -> bool:
        return True

    def _needs_floating_ip(self, server: Any, nat_destination: Any = None) -> bool:
        return True

    def create_floating_ip(self, server: Any, **kwargs: Any) -> Dummy:
        address = Dummy(
            "Fip",
            id="fip",
            floating_ip_address=ADDRESS,
            fixed_ip_address="fake",
            status="ACTIVE",
            port_id="port",
        )
        self._floating_ip_list.append(address)
        return address


def adapter_over(cloud: FakeOpenStackCloud, provider: Any) -> FakeAdapter:
    return type("Adapter", (FakeAdapter,), {"fake_cloud": staticmethod(lambda: cloud)})(provider)  # type: ignore[no-any-return]


def create(
    adapter: FakeAdapter, label: Any, image: Any = "fake-image-id", az: str | None = None
) -> Any:
    return adapter.getCreateStateMachine("np1", label, image, dict(METADATA), Request(), az, LOG)


def advance(machine: Any, seconds: float = 10.0) -> Any:
    """Until complete; an exception of the machine comes through."""
    result: Any = None

    def complete() -> bool:
        nonlocal result
        result = machine.advance()
        return bool(machine.complete)

    wait_for(complete, seconds, f"a machine that goes on from state {machine.state}")
    return result


def advance_until(machine: Any, state: str, seconds: float = 10.0) -> None:
    wait_for(lambda: machine.advance() or machine.state == state, seconds, f"state {state}")
