"""The driver ``ibmvpc`` in the conformance suite."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.support.clouds.ibm import REGION, VPC, ZONES, IbmCloud
from tests.support.clouds.under_test import PLANNED, StandInUnderTest
from tests.support.fault_proxy import Action, reply


class Ibm(StandInUnderTest):
    cloud: IbmCloud
    busy: Action = staticmethod(
        reply(
            429,
            '{"errors": [{"code": "too_many_requests", "message": "later"}]}',
            "application/json",
        )
    )

    def provider(self) -> dict[str, Any]:
        return {
            "name": PROVIDER,
            "driver": "ibmvpc",
            "vpc": VPC,
            "region": REGION,
            "zone": ZONES[0],
            "subnet": f"net-{ZONES[0]}",
            "credentials-file": str(self.cloud.credentials),
            "public-ipv4": True,
            "rate": 100,
            "host-key-checking": False,
            "cloud-images": [
                {"name": "image", "username": "root", "keys": ["zuul"], "image-name": "debian-1"}
            ],
            "pools": [
                {
                    "name": "main",
                    "labels": [{"name": LABEL, "cloud-image": "image", "profile": "cx2-2x4"}],
                }
            ],
        }

    def metadata(self, instance: str) -> dict[str, str]:
        """Names show it: of the group, provider and pool, of the server, the node."""
        machine = self.machine(instance)
        _, provider, pool = machine.facts["group"]["name"].split("_")
        node = machine.name.removeprefix("np")
        return {
            "nodepool_provider_name": provider,
            "nodepool_pool_name": pool,
            "nodepool_node_id": node,
        }

    def stray(self, metadata: dict[str, str]) -> str:
        group = f"np_{metadata['nodepool_provider_name']}_{metadata['nodepool_pool_name']}"
        key = f"g-{group}"
        self.cloud.groups[key] = group
        body = {"profile": {"name": "cx2-2x4"}}
        machine = self.cloud.new_machine(f"np{metadata['nodepool_node_id']}", body, ZONES[0])
        machine.facts["group"] = {"id": key, "name": group}
        return machine.id


@pytest.fixture
def ibm(tmp_path: pathlib.Path) -> Iterator[CloudUnderTest]:
    made = Ibm(IbmCloud(tmp_path / "ibm"))
    try:
        yield made
        assert {each["name"] for each in made.cloud.addresses.values()} <= {
            each.name for each in made.cloud.machines
        }
    finally:
        made.close()


class TestIbmvpc(DriverConformance):
    @pytest.fixture
    def cloud(self, ibm: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return ibm


class TestIbmvpcCrashes(CrashConformance):
    STATES = PLANNED

    @pytest.fixture
    def cloud(self, ibm: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return ibm
