"""The driver ``openstack`` in the conformance suite, against a real OpenStack."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.conftest import wait_for
from tests.support.fault_proxy import Fault, Forward, Reply, Request, html
from tests.support.openstack.cloud import OpenStackCloud, make_cloud
from tests.support.openstack.scene import label, provider

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]


class Real(CloudUnderTest):
    outside = True
    patience = 60.0

    def __init__(self, cloud: OpenStackCloud, tmp: pathlib.Path) -> None:
        self.openstack = cloud
        self._clouds = tmp / "clouds.yaml"
        self._clouds.write_text(yaml.safe_dump({"clouds": {"test": cloud.entry}}))
        self._clouds.chmod(0o600)
        self._undo = contextlib.ExitStack()
        self._quota = self._undo.enter_context(contextlib.ExitStack())
        self._room = self._undo.enter_context(contextlib.ExitStack())
        self._faults: list[Fault] = []
        self._throttling: Fault | None = None
        self._paused = False
        cloud.compute.fail(
            lambda request: (
                self._paused and request.method == "GET" and "/servers/" in request.path
            ),
            self._building,
            math.inf,
        )

    @staticmethod
    def _building(request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        answer.body = answer.body.replace(b'"status": "ACTIVE"', b'"status": "BUILD"')
        return answer

    def provider(self) -> dict[str, Any]:
        return provider(label(LABEL), name=PROVIDER, launch_retries=3)

    def environment(self) -> dict[str, str]:
        return {"OS_CLIENT_CONFIG_FILE": str(self._clouds)}

    def instances(self) -> set[str]:
        return {
            server["id"]
            for server in self.openstack.servers()
            if server["OS-EXT-STS:task_state"] != "deleting"
        }

    def metadata(self, instance: str) -> dict[str, str]:
        return dict(self.openstack.server(instance)["metadata"])

    def remove(self, instance: str) -> None:
        self.openstack.sdk.compute.delete(f"/servers/{instance}")
        wait_for(
            lambda: instance not in {server["id"] for server in self.openstack.servers()},
            self.patience,
            "its end",
        )

    def halt(self, instance: str) -> None:
        self.openstack.sdk.compute.post(f"/servers/{instance}/action", json={"os-stop": None})
        wait_for(
            lambda: self.openstack.server(instance)["status"] == "SHUTOFF",
            self.patience,
            "a server that is off",
        )

    def limit(self, instances: int | None) -> None:
        self._quota.close()
        if instances is not None:
            self._quota.enter_context(self.openstack.quota(instances=instances))

    def sold_out(self, yes: bool) -> None:
        """The only hypervisor takes no more servers."""
        self._room.close()
        if yes:
            admin = self.openstack.admin.compute
            service = next(
                found["id"]
                for found in admin.get("/os-services", microversion="2.53").json()["services"]
                if found["binary"] == "nova-compute"
            )

            def turn(status: str) -> None:
                answer = admin.put(
                    f"/os-services/{service}", json={"status": status}, microversion="2.53"
                )
                assert answer.status_code == 200, answer.text

            turn("disabled")
            self._room.callback(turn, "enabled")

    def down(self, yes: bool) -> None:
        if yes:
            self._faults = [
                proxy.fail(lambda _request: True, html(502), math.inf)
                for proxy in self.openstack.proxies.values()
            ]
        else:
            for fault in self._faults:
                fault.left = 0

    def unanswered(self) -> int:
        return sum(fault.used for fault in self._faults)

    def throttle(self, calls: int) -> int:
        def refuse(_request: Request, _forward: Forward) -> Reply:
            return Reply(
                429,
                b'{"overLimit": {"message": "slow down", "code": 429}}',
                [("Content-Type", "application/json"), ("Retry-After", "1")],
            )

        self._throttling = self.openstack.compute.fail(lambda _request: True, refuse, calls)
        return calls

    def throttled(self) -> int:
        return self._throttling.used if self._throttling is not None else 0

    def pause(self, yes: bool) -> None:
        self._paused = yes

    def stray(self, metadata: dict[str, str]) -> str:
        sdk = self.openstack.sdk
        answer = sdk.compute.post(
            "/servers",
            json={
                "server": {
                    "name": "stray",
                    "imageRef": sdk.image.find_image("base").id,
                    "flavorRef": sdk.compute.find_flavor("tiny").id,
                    "networks": [{"uuid": self.openstack.network_id("private")}],
                    "metadata": metadata,
                }
            },
        )
        assert answer.status_code == 202, answer.text
        server: str = answer.json()["server"]["id"]
        wait_for(
            lambda: self.openstack.server(server)["status"] == "ACTIVE",
            self.patience,
            "an active server",
        )
        return server

    def close(self) -> None:
        self._undo.close()


@pytest.fixture
def real(tmp_path: pathlib.Path) -> Iterator[Real]:
    for openstack in make_cloud():
        cloud = Real(openstack, tmp_path)
        try:
            yield cloud
        finally:
            cloud.close()


class TestOpenStack(DriverConformance):
    @pytest.fixture
    def cloud(self, real: Real) -> Real:
        return real


class TestOpenStackCrashes(CrashConformance):
    @pytest.fixture
    def cloud(self, real: Real) -> Real:
        return real
