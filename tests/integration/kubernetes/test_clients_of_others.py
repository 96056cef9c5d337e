"""Tests of others put clients of their own in the place of ours (KUB-12, OSH-11): the launcher works with those."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Chroot, wait_for
from tests.support.driver_scene import DriverBench


class Thing:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Core:
    """Methods of the package ``kubernetes``; answers have attributes."""

    def __init__(self) -> None:
        self.namespaces: list[Any] = []
        self.pods: list[dict[str, Any]] = []
        self.api_client = Thing(configuration=Thing(host="http://localhost:8080", verify_ssl=False))

    def list_namespace(self) -> Any:
        return Thing(items=self.namespaces)

    def create_namespace(self, body: dict[str, Any]) -> Any:
        found = Thing(metadata=Thing(name=body["metadata"]["name"], labels=body["metadata"].get("labels")))
        self.namespaces.append(found)
        return found

    def read_namespace(self, name: str) -> Any:
        return next(each for each in self.namespaces if each.metadata.name == name)

    def delete_namespace(self, name: str, body: Any) -> None:
        self.namespaces.remove(self.read_namespace(name))

    def create_namespaced_service_account(self, namespace: str, body: dict[str, Any]) -> Any:
        return Thing()

    def read_namespaced_service_account(self, user: str, namespace: str) -> Any:
        return Thing(secrets=[Thing(name="fake")])

    def read_namespaced_secret(self, name: str, namespace: str) -> Any:
        return Thing(data={"ca.crt": "ZmFrZS1jYQ==", "token": base64.b64encode(b"fake-token").decode()})

    def create_namespaced_pod(self, namespace: str, body: dict[str, Any]) -> Any:
        self.pods.append(body)
        return Thing()

    def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        if not any(each["metadata"]["name"] == name for each in self.pods):
            raise RuntimeError("no such pod")
        return Thing(status=Thing(phase="Running"), spec=Thing(node_name="k8s-default-pool"))

    def list_namespaced_pod(self, namespace: str) -> Any:
        return Thing(items=[Thing(metadata=Thing(name=each["metadata"]["name"])) for each in self.pods])

    def delete_namespaced_pod(self, name: str, namespace: str) -> None:
        self.pods = [each for each in self.pods if each["metadata"]["name"] != name]


class Kubernetes(Core):
    def create_namespaced_secret(self, namespace: str, body: dict[str, Any]) -> Any:
        return Thing()

    def create_namespaced_role(self, namespace: str, body: dict[str, Any]) -> None:
        pass

    create_namespaced_role_binding = create_namespaced_role


class Dynamic:
    """OpenShift's second client."""

    def __init__(self, core: Core) -> None:
        self.configuration = core.api_client.configuration
        self.resources = self
        self._core = core

    def get(self, api_version: str, kind: str) -> Any:
        core = self._core
        if kind == "Project":
            return Thing(
                get=lambda name=None: core.list_namespace() if name is None else core.read_namespace(name),
                delete=lambda name: core.delete_namespace(name, None),
            )
        return Thing(create=lambda body, namespace=None: core.create_namespace(body) if kind == "ProjectRequest" else None)


@pytest.fixture
def bench(zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverBench]:
    monkeypatch.setattr("nodepool.driver.lifecycle.LAUNCH_GRACE", 0.3)
    made = DriverBench(zk_chroot)
    try:
        yield made
    finally:
        made.stop()
        made.zk.disconnect()


@pytest.mark.spec("KUB-12, OSH-11")
@pytest.mark.parametrize(
    ("driver", "kind", "connection"),
    [
        ("kubernetes", "pod", "kubectl"),
        ("kubernetes", "namespace", "namespace"),
        ("openshift", "pod", "kubectl"),
        ("openshift", "project", "project"),
        ("openshiftpods", None, "kubectl"),
    ],
)
def test_whole_life(bench: DriverBench, monkeypatch: pytest.MonkeyPatch, driver: str, kind: str | None, connection: str) -> None:
    core = Kubernetes() if driver == "kubernetes" else Core()
    second = core if driver == "kubernetes" else Dynamic(core)
    given = ("openshift-token", None, core, second if driver == "openshift" else second if driver == "kubernetes" else None)
    module = importlib.import_module(f"nodepool.driver.{driver}.provider")
    monkeypatch.setattr(module, "get_client", lambda log, context, constructor=None: given)
    label = {"name": "one", "image": "an/image", **({"type": kind} if kind else {})}
    provider = {"name": "p", "driver": driver, "context": "admin.local", "pools": [{"name": "main", "labels": [label]}]}
    pool = bench.start({"labels": [{"name": "one"}], "providers": [provider]}, cleanup_interval=0.5, delete_interval=0.2)
    wait_for(lambda: pool.ready, 30, "a ready launcher")
    (node,) = bench.get("one")
    assert node.connection_type == connection and node.cloud == "admin.local"
    port = node.connection_port
    assert port["token"] == ("openshift-token" if driver == "openshiftpods" else "fake-token")
    assert port["host"] == "http://localhost:8080" and port["skiptls"] is True
    assert node.host_id == ("k8s-default-pool" if connection == "kubectl" and driver != "openshift" else None)
    bench.give_back(node)
    bench.wait_gone(node.id)
    assert core.namespaces == []
    if driver == "openshiftpods":
        assert core.pods == []
