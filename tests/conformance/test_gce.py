"""The driver ``gce`` in the conformance suite."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.support.clouds.gce import FAMILY, PROJECT, REGION, ZONES, GoogleCloud
from tests.support.clouds.under_test import PLANNED, StandInUnderTest
from tests.support.fault_proxy import Action, reply


class Google(StandInUnderTest):
    cloud: GoogleCloud
    busy: Action = staticmethod(
        reply(429, '{"error": {"code": 429, "errors": [{"reason": "rateLimitExceeded"}]}}')
    )

    def provider(self) -> dict[str, Any]:
        return {
            "name": PROVIDER,
            "driver": "gce",
            "project": PROJECT,
            "region": REGION,
            "zone": ZONES[0],
            "rate": 100,
            "host-key-checking": False,
            "cloud-images": [
                {
                    "name": "image",
                    "image-project": "images",
                    "image-family": FAMILY,
                    "username": "zuul",
                }
            ],
            "pools": [
                {
                    "name": "main",
                    "labels": [
                        {"name": LABEL, "cloud-image": "image", "instance-type": "n1-standard-1"}
                    ],
                }
            ],
        }

    def limit(self, instances: int | None) -> None:
        super().limit(instances)
        self.cloud.quotas["INSTANCES"] = 1000 if instances is None else instances

    def metadata(self, instance: str) -> dict[str, str]:
        return {
            item["key"]: item["value"] for item in self.machine(instance).body["metadata"]["items"]
        }

    def stray(self, metadata: dict[str, str]) -> str:
        self._strays += 1
        body = {
            "name": f"stray-{self._strays}",
            "machineType": "zones/z/machineTypes/n1-standard-1",
            "metadata": {
                "items": [{"key": key, "value": value} for key, value in metadata.items()]
            },
            "networkInterfaces": [{}],
        }
        return self.cloud.new_machine(body["name"], body, ZONES[0]).id


@pytest.fixture
def google(tmp_path: pathlib.Path) -> Iterator[CloudUnderTest]:
    made = Google(GoogleCloud(tmp_path / "google"))
    try:
        yield made
    finally:
        made.close()


class TestGce(DriverConformance):
    @pytest.fixture
    def cloud(self, google: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return google


class TestGceCrashes(CrashConformance):
    STATES = PLANNED

    @pytest.fixture
    def cloud(self, google: CloudUnderTest) -> CloudUnderTest:  # type: ignore[override]
        return google
