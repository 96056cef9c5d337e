"""The driver ``fake`` in the conformance suite."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import DriverConformance


class FakeCloud(CloudUnderTest):
    """It is a part of the launcher; one object for all adapters of a test."""

    def __init__(self, tmp: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from nodepool.driver.fake.adapter import FakeOpenStackCloud

        self.allowed: float = 20
        self.sold = False
        test = self

        class Cloud(FakeOpenStackCloud):
            @staticmethod
            def _get_quota() -> tuple[float, float, float]:
                return 1000, test.allowed, 1000000

            def create_server(self, name: str = "", **kwargs: Any) -> Any:
                test.check()
                if test.sold:
                    raise RuntimeError(
                        "No valid host was found. There are not enough hosts available."
                    )
                return super().create_server(name, **kwargs)

            def list_servers(self, **kwargs: Any) -> list[Any]:
                test.check()
                return super().list_servers(**kwargs)

            def delete_server(self, name_or_id: str, **kwargs: Any) -> bool:
                test.check()
                return super().delete_server(name_or_id, **kwargs)

        self.cloud = Cloud()
        self.broken = False
        self.asked = 0
        monkeypatch.setattr(
            "nodepool.driver.fake.adapter.FakeAdapter.fake_cloud", lambda: self.cloud
        )
        path = tmp / "clouds.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "clouds": {
                        "fake": {
                            "auth": {
                                "username": "fake",
                                "password": "fake",
                                "project_id": "fake",
                                "auth_url": "http://fake",
                            }
                        }
                    }
                }
            )
        )
        monkeypatch.delenv("OS_CLIENT_CONFIG_FILE", raising=False)
        monkeypatch.setattr("openstack.config.loader.CONFIG_FILES", [str(path)])

    def check(self) -> None:
        if self.broken:
            self.asked += 1
            raise ConnectionError("the fake cloud is down")

    def provider(self) -> dict[str, Any]:
        return {
            "name": PROVIDER,
            "driver": "fake",
            "cloud": "fake",
            "rate": 0.0001,
            "cloud-images": [{"name": "image", "image-name": "Fake Precise", "username": "zuul"}],
            "pools": [
                {
                    "name": "main",
                    "labels": [{"name": LABEL, "cloud-image": "image", "min-ram": 8192}],
                }
            ],
        }

    def instances(self) -> set[str]:
        return {server.id for server in list(self.cloud._server_list) if server.status != "DELETED"}

    def metadata(self, instance: str) -> dict[str, str]:
        return dict(self.cloud._server_list.by_id(instance).metadata)

    def remove(self, instance: str) -> None:
        with self.cloud._lock:
            self.cloud._server_list[:] = [
                server for server in self.cloud._server_list if server.id != instance
            ]

    def halt(self, instance: str) -> None:
        self.cloud._server_list.by_id(instance).status = "SHUTOFF"

    def limit(self, instances: int | None) -> None:
        self.allowed = -1 if instances is None else instances

    def sold_out(self, yes: bool) -> None:
        self.sold = yes

    def down(self, yes: bool) -> None:
        self.broken = yes

    def unanswered(self) -> int:
        return self.asked

    def pause(self, yes: bool) -> None:
        self.cloud.pause_creates = yes
        if not yes:
            for server in list(self.cloud._server_list):
                server.event.set()

    def stray(self, metadata: dict[str, str]) -> str:
        server = self.cloud._make_server("stray", self.cloud._azs[0], {"meta": metadata})
        with self.cloud._lock:
            self.cloud._server_list.append(server)
        return str(server.id)


class TestFake(DriverConformance):
    @pytest.fixture
    def cloud(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
        cloud = FakeCloud(tmp_path, monkeypatch)
        yield cloud
        cloud.close()
