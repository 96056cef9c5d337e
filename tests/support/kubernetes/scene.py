"""A launcher with providers of containers, and their configuration."""

from __future__ import annotations

import base64
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Chroot, wait_for
from tests.support.driver_scene import DriverBench
from tests.support.kubernetes.cluster import CONTEXT, KubernetesCluster, Server, running


@pytest.fixture(scope="session")
def kubernetes_server() -> Iterator[tuple[pathlib.Path, str, str]]:
    with running() as found:
        yield found


@pytest.fixture
def cluster(kubernetes_server: tuple[pathlib.Path, str, str]) -> Iterator[KubernetesCluster]:
    made = KubernetesCluster(*kubernetes_server)
    try:
        yield made
    finally:
        made.close()


class Scene:
    """Names of the provider and its pool are those of one test."""

    def __init__(
        self,
        chroot: Chroot,
        cluster: KubernetesCluster,
        monkeypatch: pytest.MonkeyPatch,
        tmp: pathlib.Path,
    ) -> None:
        self.cluster = cluster
        self.bench = DriverBench(chroot)
        self.tmp = tmp
        self.pool = f"p{os.urandom(4).hex()}"
        self.name = f"kube-{self.pool}"
        self.kubeconfig = cluster.kubeconfig(tmp)
        monkeypatch.setenv("KUBECONFIG", self.kubeconfig)
        monkeypatch.setattr("nodepool.driver.lifecycle.LAUNCH_GRACE", 0.3)

    def label(self, name: str = "pod", kind: str = "pod", **options: Any) -> dict[str, Any]:
        more = {"image": "an/image"} if kind == "pod" and "spec" not in options else {}
        return {"name": name, "type": kind, **more, **options}

    def config(
        self,
        *labels: dict[str, Any],
        pool: dict[str, Any] | None = None,
        min_ready: int = 0,
        top: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        made = list(labels) or [self.label()]
        provider = {
            "name": self.name,
            "driver": "kubernetes",
            "context": CONTEXT,
            "pools": [{"name": self.pool, "labels": made, **(pool or {})}],
            **options,
        }
        names = [{"name": each["name"], "min-ready": min_ready} for each in made]
        return {"labels": names, "providers": [provider], **(top or {})}

    def start(self, *labels: dict[str, Any], **options: Any) -> Any:
        pool = self.bench.start(
            self.config(*labels, **options), cleanup_interval=0.5, delete_interval=0.2
        )
        wait_for(lambda: pool.ready, 30, "a ready launcher")
        return pool

    def namespaces(self) -> dict[str, Any]:
        return self.cluster.namespaces(f"{self.pool}-")

    def as_zuul(self, node: Any) -> Server:
        """What Zuul can do with the record of a node."""
        port = node.connection_port
        ca = self.tmp / f"ca-{node.id}.crt"
        ca.write_bytes(base64.b64decode(port["ca_crt"]))
        return Server(port["host"], str(ca), port["token"])


@pytest.fixture
def scene(
    zk_chroot: Chroot,
    cluster: KubernetesCluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> Iterator[Scene]:
    made = Scene(zk_chroot, cluster, monkeypatch, tmp_path)
    try:
        yield made
    finally:
        made.bench.stop()
        made.bench.zk.disconnect()
