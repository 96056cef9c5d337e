"""The driver ``azure`` in the conformance suite."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.support.clouds.azure import GROUP, LOCATION, NETWORK, AzureCloud
from tests.support.clouds.under_test import PLANNED, StandInUnderTest
from tests.support.fault_proxy import Action, reply


class Azure(StandInUnderTest):
    cloud: AzureCloud
    busy: Action = staticmethod(
        reply(429, '{"error": {"code": "TooManyRequests", "message": "later"}}', "application/json")
    )

    def provider(self) -> dict[str, Any]:
        return {
            "name": PROVIDER,
            "driver": "azure",
            "location": LOCATION,
            "resource-group": GROUP,
            "resource-group-location": LOCATION,
            "auth-path": str(self.cloud.auth_path),
            "network": NETWORK,
            "rate": 100,
            "host-key-checking": False,
            "cloud-images": [
                {
                    "name": "image",
                    "username": "zuul",
                    "key": "ssh-rsa AAAA",
                    "image-reference": {
                        "sku": "s",
                        "publisher": "p",
                        "offer": "o",
                        "version": "latest",
                    },
                }
            ],
            "pools": [
                {
                    "name": "main",
                    "labels": [
                        {
                            "name": LABEL,
                            "cloud-image": "image",
                            "hardware-profile": {"vm-size": "Standard_B1ls"},
                        }
                    ],
                }
            ],
        }

    def limit(self, instances: int | None) -> None:
        super().limit(instances)
        self.cloud.limits["virtualMachines"] = 1000 if instances is None else instances

    def halt(self, instance: str) -> None:
        """A spot machine is evicted: it is deleted."""
        self.remove(instance)

    def metadata(self, instance: str) -> dict[str, str]:
        return dict(self.machine(instance).body["tags"])

    def stray(self, metadata: dict[str, str]) -> str:
        self._strays += 1
        body = {
            "location": LOCATION,
            "tags": metadata,
            "properties": {"hardwareProfile": {"vmSize": "Standard_B1ls"}},
        }
        return self.cloud.new_machine(f"stray-{self._strays}", body).id


@pytest.fixture
def azure(tmp_path: pathlib.Path) -> Iterator[CloudUnderTest]:
    made = Azure(AzureCloud(tmp_path / "azure"))
    try:
        yield made
    finally:
        made.close()


class TestAzure(DriverConformance):
    @pytest.fixture
    def cloud(self, azure: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return azure


class TestAzureCrashes(CrashConformance):
    STATES = PLANNED

    @pytest.fixture
    def cloud(self, azure: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return azure
