"""SIGKILL of the launcher around each write to ZooKeeper, and in each state of a node that has a
volume and a floating IP.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cloud import LABEL, PROVIDER
from tests.conformance.suite import CrashConformance
from tests.conformance.test_openstack import Real
from tests.integration.openstack.test_crashes import left_in
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import label, provider

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(400)]


class Everything(Real):
    def provider(self) -> dict[str, Any]:
        return provider(
            label(LABEL, boot_from_volume=True, volume_size=1),
            name=PROVIDER,
            launch_retries=3,
            pool={"auto-floating-ip": True},
        )

    def instances(self) -> set[str]:
        """All that has to go: servers, ports, volumes, floating IPs."""
        return {
            f"{kind} {name}" for kind, things in left_in(self.openstack).items() for name in things
        }


class TestCrashes(CrashConformance):
    @pytest.fixture
    def cloud(
        self, openstack_cloud: OpenStackCloud, tmp_path: pathlib.Path
    ) -> Iterator[Everything]:
        cloud = Everything(openstack_cloud, tmp_path)
        yield cloud
        cloud.close()
