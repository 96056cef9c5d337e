"""A real OpenStack for tests, each of its services behind a proxy that counts calls and makes
faults (tools/openstack).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.fault_proxy import FaultProxy, Request

SERVICES = ("identity", "compute", "network", "image", "block-storage")
#: Read now: tests change the environment.
_GIVEN = os.environ.get("OS_CLIENT_CONFIG_FILE") if os.environ.get("NODEPOOL_OPENSTACK") else None
_clouds: dict[str, Any] = {}
_connections: dict[str, Any] = {}
_state: set[str] = set()
_directories: list[pathlib.Path] = []


def clouds() -> dict[str, Any]:
    """Contents of the clouds.yaml of a running cloud: that of the environment, else one started
    for this run.
    """
    if _clouds:
        return _clouds
    path = _GIVEN or _start()
    _clouds.update(yaml.safe_load(pathlib.Path(path).read_text())["clouds"])
    return _clouds


def _start() -> str:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        tool = importlib.import_module("cloud.cluster")
    finally:
        sys.path.pop(0)
    missing = [name for name, program in tool.PACKAGES.items() if not os.path.exists(program)]
    if os.geteuid() != 0:
        pytest.skip("needs root to start an OpenStack (or one that runs, see tools/openstack run)")
    if missing or not (tool.VENV / "installed.txt").exists():
        pytest.skip("no OpenStack is installed here: run tools/openstack install")
    if "failed" in _state:
        pytest.fail("the OpenStack of this run did not start, see the first test that wanted it")
    _state.add("failed")
    directory = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-test-openstack-"))
    cloud = tool.Cloud(directory)
    _directories.append(directory)

    def stop() -> None:
        cloud.down()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(stop)
    path = str(cloud.up()["clouds"])
    _state.discard("failed")
    return path


def directory() -> pathlib.Path:
    """Where the cloud of :func:`clouds` keeps what it has."""
    clouds()
    return _directories[0] if _directories else pathlib.Path(os.environ["NODEPOOL_OPENSTACK"])


def connection(name: str = "test") -> Any:
    """An SDK connection straight to the cloud."""
    import openstack

    if name not in _connections:
        path = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-test-clouds-")) / "clouds.yaml"
        path.write_text(yaml.safe_dump({"clouds": clouds()}))
        try:
            config = openstack.config.OpenStackConfig(config_files=[str(path)])
            _connections[name] = openstack.connection.Connection(config=config.get_one(name))
        finally:
            shutil.rmtree(path.parent)
        atexit.register(_connections[name].close)
    return _connections[name]


class OpenStackCloud:
    """The cloud as one test sees it: ``entry`` is for clouds.yaml and leads through the proxies."""

    def __init__(self) -> None:
        self.sdk = connection()
        self.admin = connection("admin")
        self.proxies: dict[str, FaultProxy] = {}
        self.entry: dict[str, Any] = copy.deepcopy(clouds()["test"])
        # The addresses are chosen by what the cloud says of its networks, as on most sites.
        self.entry["networks"] = []
        for service in SERVICES:
            url = urllib.parse.urlsplit(
                self.entry["auth"]["auth_url"]
                if service == "identity"
                else self.sdk.session.get_endpoint(service_type=service)
            )
            assert url.hostname
            proxy = self.proxies[service] = FaultProxy((url.hostname, url.port or 80))
            through = f"{proxy.url}{url.path}"
            if service == "identity":
                self.entry["auth"]["auth_url"] = through
                self.entry["identity_endpoint_override"] = through
            else:
                self.entry[f"{service.replace('-', '_')}_endpoint_override"] = through

    @property
    def compute(self) -> FaultProxy:
        return self.proxies["compute"]

    @property
    def network(self) -> FaultProxy:
        return self.proxies["network"]

    @property
    def image(self) -> FaultProxy:
        return self.proxies["image"]

    # -- calls

    def calls(self, *services: str) -> Counter[str]:
        """Calls so far, as ``compute GET /servers/{id}``; without version documents and tokens."""
        found: Counter[str] = Counter()
        for service in services or SERVICES[1:]:
            proxy = self.proxies[service]
            with proxy._lock:
                requests = list(proxy.requests)
            found.update(
                f"{service} {shape(request)}" for request in requests if not _is_discovery(request)
            )
        return found

    def forget_calls(self) -> None:
        for proxy in self.proxies.values():
            with proxy._lock:
                proxy.requests.clear()

    # -- content

    def servers(self) -> list[dict[str, Any]]:
        """Servers, without those that are listed as deleted for a moment."""
        listed = self.sdk.compute.get("/servers/detail").json()["servers"]
        return [server for server in listed if server["status"] != "DELETED"]

    def server(self, server_id: str, microversion: str | None = None) -> dict[str, Any]:
        answer = self.sdk.compute.get(f"/servers/{server_id}", microversion=microversion)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["server"])

    def floating_ips(self) -> list[Any]:
        return list(self.sdk.network.ips(project_id=self.sdk.session.get_project_id()))

    def volumes(self) -> list[Any]:
        return list(self.sdk.block_storage.volumes())

    def images(self) -> list[Any]:
        return [image for image in self.sdk.image.images() if image.name != "base"]

    def network_id(self, name: str) -> str:
        return str(self.sdk.network.find_network(name, ignore_missing=False).id)

    @contextlib.contextmanager
    def quota(self, **limits: int) -> Iterator[None]:
        """Other limits of the project: ``instances``, ``cores``, ``ram``, or of volumes:
        ``volumes``, ``gigabytes``.
        """
        project = self.sdk.session.get_project_id()
        proxy = (
            self.admin.block_storage
            if set(limits) & {"volumes", "gigabytes"}
            else self.admin.compute
        )
        url = f"/os-quota-sets/{project}"
        before = proxy.get(url).json()["quota_set"]
        self._set_quota(proxy, url, limits)
        try:
            yield
        finally:
            self._set_quota(proxy, url, {name: before[name] for name in limits})

    @staticmethod
    def _set_quota(proxy: Any, url: str, limits: dict[str, int]) -> None:
        volumes = bool(set(limits) & {"volumes", "gigabytes"})
        answer = proxy.put(
            url, json={"quota_set": {**limits, **({} if volumes else {"force": True})}}
        )
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def stopped(self, process: str) -> Iterator[None]:
        """One process of the cloud, such as ``nova-compute``, does nothing for a while."""
        pid = json.loads((directory() / "state.json").read_text())["pids"][process][0]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def clean(self) -> None:
        """Remove what the test left."""
        for server in self.servers():
            self.sdk.compute.delete(f"/servers/{server['id']}")
        wait_for(lambda: not self.servers(), 60, "no server left")
        for ip in self.floating_ips():
            self.sdk.network.delete_ip(ip)
        for image in self.images():
            if image.is_protected:
                self.sdk.image.update_image(image, is_protected=False)
            self.sdk.image.delete_image(image)
        for volume in self.volumes():
            if volume.status in ("available", "error"):
                self.sdk.block_storage.delete_volume(volume)
        for group in self.sdk.compute.server_groups():
            self.sdk.compute.delete_server_group(group)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()


def shape(request: Request) -> str:
    """Method and path with ids replaced."""
    path = urllib.parse.urlsplit(request.path).path
    parts = []
    for part in path.split("/"):
        plain = part.replace("-", "")
        parts.append(
            "{id}" if len(plain) == 32 and all(c in "0123456789abcdef" for c in plain) else part
        )
    while len(parts) > 1 and (
        parts[1] in ("v2", "v2.0", "v2.1", "v3") or (parts[1] == "{id}" and len(parts) > 2)
    ):
        del parts[1]
    return f"{request.method} {'/'.join(parts)}"


def _is_discovery(request: Request) -> bool:
    return shape(request) in ("GET /", "GET ")


def make_cloud() -> Iterator[OpenStackCloud]:
    cloud = OpenStackCloud()
    try:
        cloud.clean()
        yield cloud
    finally:
        cloud.close()
        cloud.clean()
