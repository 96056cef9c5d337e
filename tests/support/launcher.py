"""A bench around a whole launcher: Zuul's side is played by a separate ZooKeeper client."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.launcher.requests.assignment import Assignment
from nodepool.reasons import render
from tests.conftest import Chroot, wait_for

CLOUDS = {
    "clouds": {
        name: {
            "auth": {
                "username": "user",
                "password": "secret",
                "project_name": "project",
                "auth_url": "http://localhost/",
            },
            **({"image_format": fmt} if fmt else {}),
        }
        for name, fmt in (
            ("fake", None),
            ("fake-vhd", "vhd"),
            ("fake-qcow2", "qcow2"),
            ("fake-raw", "raw"),
        )
    }
}

#: What Zuul puts into a request when it submits it (ZK-5).
ZUUL_SYSTEM = "0123456789abcdef0123456789abcdef"
ENDED = ("fulfilled", "failed")


class Zuul:
    """Submits requests and uses nodes as Zuul does, writing plain JSON."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.locks: dict[str, str] = {}

    def _get(self, path: str) -> tuple[Any, Any]:
        from kazoo.exceptions import NoNodeError

        try:
            data, stat = self.client.get(path)
        except NoNodeError:
            return None, None
        return (json.loads(data) if data else {}), stat

    def submit(self, *labels: str, priority: str = "200", **fields: Any) -> str:
        now = time.time()
        record = {
            "requestor_data": {
                "build_set_uuid": "bs",
                "tenant_name": "t",
                "pipeline_name": "check",
                "job_name": "j",
            },
            "node_types": list(labels),
            "requestor": ZUUL_SYSTEM,
            "created_time": now,
            "provider": None,
            "state": "requested",
            "state_time": now,
            "relative_priority": 0,
            "event_id": "event",
            "tenant_name": None,
            **fields,
        }
        path = self.client.create(
            f"/nodepool/requests/{priority}-",
            json.dumps(record).encode(),
            sequence=True,
            makepath=True,
        )
        return str(path).rsplit("/", 1)[1]

    def request(self, request_id: str) -> Any:
        """The record, or None."""
        return self._get(f"/nodepool/requests/{request_id}")[0]

    def node(self, node_id: str) -> Any:
        """The record, or None."""
        return self._get(f"/nodepool/nodes/{node_id}")[0]

    def write_node(self, node_id: str, **values: Any) -> None:
        path = f"/nodepool/nodes/{node_id}"
        record, _stat = self._get(path)
        assert record is not None, f"node {node_id} is gone"
        self.client.set(
            path,
            json.dumps({**record, "state_time": time.time(), "id": node_id, **values}).encode(),
        )

    def contenders(self, node_id: str) -> list[str]:
        from kazoo.exceptions import NoNodeError

        try:
            return list(self.client.get_children(f"/nodepool/nodes/{node_id}/lock"))
        except NoNodeError:
            return []

    def lock(self, node_id: str) -> None:
        directory = f"/nodepool/nodes/{node_id}/lock"
        self.client.ensure_path(directory)
        self.locks[node_id] = self.client.create(
            f"{directory}/{'a' * 32}__lock__", ephemeral=True, sequence=True
        )

    def unlock(self, node_id: str) -> None:
        self.client.delete(self.locks.pop(node_id))

    def cancel(self, request_id: str) -> None:
        self.client.delete(f"/nodepool/requests/{request_id}")

    def accept(self, request_id: str) -> list[str]:
        """Check and lock the nodes, remove the request, start to use them."""
        request = self.request(request_id)
        assert request is not None and request["state"] == "fulfilled", request
        for node_id in request["nodes"]:
            node = self.node(node_id)
            assert node is not None and node["allocated_to"] == request_id, node
            self.lock(node_id)
        self.cancel(request_id)
        for node_id in request["nodes"]:
            self.write_node(
                node_id, state="in-use", user_data={"zuul_system": ZUUL_SYSTEM, "project_name": "p"}
            )
        return list(request["nodes"])

    def give_back(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.write_node(node_id, state="used")
            self.unlock(node_id)


class StatsdReceiver:
    """Collects statsd lines from UDP."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.lines: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statsd-receiver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                self._stop.wait(0.05)
                continue
            self.lines += data.decode().split("\n")

    def last(self, name: str) -> str | None:
        """The latest ``value|type`` of a name."""
        return next(
            (line[len(name) + 1 :] for line in reversed(self.lines) if line.startswith(f"{name}:")),
            None,
        )

    def wait_any(self, name: str, timeout: float = 10) -> str:
        """Return the latest ``value|type`` of a name; wait for the first one."""
        self.wait_line(re.escape(name) + ":.*", timeout)
        return self.last(name) or ""

    def wait_line(self, pattern: str, timeout: float = 10) -> None:
        """Wait until a whole line matches the regular expression."""
        wait_for(lambda: any(re.fullmatch(pattern, line) for line in self.lines), timeout, pattern)

    def wait(self, name: str, value: str, timeout: float = 10) -> None:
        wait_for(
            lambda: f"{name}:{value}" in self.lines,
            timeout,
            f"{name}:{value}, have {self.last(name)},",
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.socket.close()


class LauncherBench:
    """Configuration, launchers, requests, nodes and the fake cloud of one test."""

    def __init__(
        self, chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        from nodepool.zk.zookeeper import ZooKeeper

        self.chroot = chroot
        self.monkeypatch = monkeypatch
        self.tmp = tmp_path
        self.pools: list[Any] = []
        self.zk: Any = ZooKeeper(chroot.connect(), enable_cache=False)
        self.zuul = Zuul(chroot.connect().client)
        self.write_clouds(CLOUDS)
        # Launches that hang on purpose need not be waited for at the end.
        monkeypatch.setattr("nodepool.driver.lifecycle.LAUNCH_GRACE", 0.3)

    # -- configuration

    def write_clouds(self, clouds: dict[str, Any]) -> None:
        path = self.tmp / "clouds.yaml"
        path.write_text(yaml.safe_dump(clouds))
        self.monkeypatch.delenv("OS_CLIENT_CONFIG_FILE", raising=False)
        self.monkeypatch.setattr("openstack.config.loader.CONFIG_FILES", [str(path)])

    def config(self, text: str | dict[str, Any], name: str = "nodepool.yaml") -> str:
        return self.chroot.config(text, name)

    def quota(
        self,
        cores: float = 100,
        instances: float = 20,
        ram: float = 1000000,
        volumes: float = 100,
        gigabytes: float = 1000000,
    ) -> None:
        """What the fake clouds allow from now on."""
        cloud = "nodepool.driver.fake.adapter.FakeOpenStackCloud"
        self.monkeypatch.setattr(
            f"{cloud}._get_quota", staticmethod(lambda: (cores, instances, ram))
        )
        self.monkeypatch.setattr(
            f"{cloud}._get_volume_quota", staticmethod(lambda: (volumes, gigabytes))
        )

    def use_cloud(self, factory: Any) -> None:
        self.monkeypatch.setattr("nodepool.driver.fake.adapter.FakeAdapter.fake_cloud", factory)

    # -- launchers

    def make(
        self,
        config: str | dict[str, Any],
        secure: str | None = None,
        name: str = "nodepool.yaml",
        cleanup_interval: float | None = 1,
        delete_interval: float | None = 0.2,
        **options: Any,
    ) -> Any:
        """Return a launcher that has not started; intervals that are None are those of the
        product.
        """
        from nodepool.launcher import NodePool

        pool = NodePool(secure, self.config(config, name), **options)
        if cleanup_interval is not None:
            pool.cleanup_interval = cleanup_interval
        if delete_interval is not None:
            pool.delete_interval = delete_interval
        self.pools.append(pool)
        return pool

    def start(self, config: str | dict[str, Any], **options: Any) -> Any:
        """A launcher whose pools are all registered."""
        pool = self.make(config, **options)
        pool.start()
        self.wait_ready(pool)
        return pool

    def wait_ready(self, pool: Any) -> None:
        wait_for(lambda: pool.ready, what="launcher ready")
        wait_for(
            lambda: pool.state.workers.keys() <= {p.id for p in pool.zk.getRegisteredPools()},
            what="all pools registered",
        )

    def stop(self, pool: Any) -> None:
        self.pools.remove(pool)
        pool.stop()

    def adapter(self, provider: str, pool: Any = None) -> Any:
        return (pool or self.pools[0]).getProviderManager(provider).adapter

    def cloud(self, provider: str, pool: Any = None) -> Any:
        return self.adapter(provider, pool)._getClient()

    def resume_creates(self, provider: str) -> None:
        """Let the creations continue that ``pause_creates`` stopped."""
        cloud = self.cloud(provider)
        cloud.pause_creates = False
        for server in cloud.list_servers():
            server.event.set()

    def servers(self, provider: str, pool: Any = None) -> list[Any]:
        return list(self.adapter(provider, pool)._listServers())

    # -- requests and nodes

    def submit(self, *labels: str, **fields: Any) -> str:
        return self.zuul.submit(*labels, **fields)

    def wait_request(self, request_id: str, *states: str, timeout: float = 15) -> dict[str, Any]:
        wanted = states or ENDED

        def reached() -> dict[str, Any] | None:
            record = self.zuul.request(request_id)
            assert record is not None, f"request {request_id} is gone"
            if record["state"] in ENDED and record["state"] not in wanted:
                raise AssertionError(f"request {request_id} is {record}")
            return record if record["state"] in wanted else None

        return dict(wait_for(reached, timeout, f"request {request_id} in {wanted}"))

    def fulfilled(self, *labels: str, **fields: Any) -> tuple[str, list[Any]]:
        """Submit and wait; the request id and its nodes."""
        request_id = self.submit(*labels, **fields)
        record = self.wait_request(request_id, "fulfilled")
        return request_id, [self.node(i) for i in record["nodes"]]

    def node(self, node_id: str) -> Any:
        node = self.zk.getNode(node_id)
        assert node is not None, f"node {node_id} is gone"
        return node

    def nodes(self, **values: Any) -> list[Any]:
        """Nodes whose attributes have these values."""
        return [
            n
            for n in self.zk.nodeIterator(cached=False)
            if all(getattr(n, key) == value for key, value in values.items())
        ]

    def wait_nodes(self, count: int, timeout: float = 15, **values: Any) -> list[Any]:
        found: list[Any] = []

        def reached() -> bool:
            found[:] = self.nodes(**values)
            return len(found) == count

        wait_for(reached, timeout, f"{count} nodes with {values}, have {found},")
        return found

    def wait_gone(self, *node_ids: str, timeout: float = 15) -> None:
        wait_for(
            lambda: not set(node_ids) & set(self.zk.getNodes()), timeout, f"nodes {node_ids} gone"
        )

    def use_up(self, *request_ids: str) -> None:
        """Zuul takes the nodes of the requests and returns them used; waits until they no longer
        exist.
        """
        for request_id in request_ids:
            node_ids = self.zuul.accept(request_id)
            self.zuul.give_back(*node_ids)
            self.wait_gone(*node_ids)

    def ready_node(self, provider: str, pool: str | None, label: str | None, **values: Any) -> Any:
        """An idle node record without anything behind it."""
        from nodepool.zk import zookeeper as zk

        node = zk.Node()
        node.state = zk.READY
        node.provider, node.pool, node.launcher = provider, pool, "bench"
        node.type = [label] if label else []
        for key, value in values.items():
            setattr(node, key, value)
        self.zk.storeNode(node)
        return node

    # -- images, as the builder would leave them

    def store_image(
        self, image: str, provider: str, external_id: str = "fake-image-id", **values: Any
    ) -> Any:
        from nodepool.zk import zookeeper as zk

        build = zk.ImageBuild(image)
        build.state, build.formats, build.builder = zk.READY, ["qcow2"], "bench"
        build.builder_id = "builder-1"
        build_id = self.zk.storeBuild(image, build)
        upload = zk.ImageUpload(build_id, provider, image)
        upload.state, upload.external_id, upload.format = zk.READY, external_id, "qcow2"
        upload.external_name, upload.username, upload.python_path = f"{image}-1", "zuul", "auto"
        for key, value in values.items():
            setattr(upload, key, value)
        self.zk.storeImageUpload(image, build_id, provider, upload)
        return upload

    def close(self) -> None:
        for pool in self.pools:
            pool.stop()


def reason_for(assignment: Assignment, request_id: str) -> str:
    """Return why a request waits; empty if it does not wait there."""
    return next(
        (
            render(reasons)
            for name, _labels, _state, reasons in assignment.explain()
            if name == request_id
        ),
        "",
    )


def expire_session(pool: Any) -> None:
    """Let the server end the launcher's session, as after a long silence."""
    from kazoo.client import KazooClient

    kazoo = pool.zk.kazoo_client
    other = KazooClient(
        hosts=",".join(f"{h}:{p}" for h, p in kazoo.hosts),
        client_id=kazoo.client_id,
        use_ssl=kazoo.use_ssl,
        certfile=kazoo.certfile,
        keyfile=kazoo.keyfile,
        ca=kazoo.ca,
    )
    other.start(10)
    other.stop()
    other.close()


def make_statsd(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatsdReceiver]:
    receiver = StatsdReceiver()
    monkeypatch.setenv("STATSD_HOST", "127.0.0.1")
    monkeypatch.setenv("STATSD_PORT", str(receiver.port))
    try:
        yield receiver
    finally:
        receiver.close()


def make_bench(
    chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[LauncherBench]:
    bench = LauncherBench(chroot, monkeypatch, tmp_path)
    try:
        yield bench
    finally:
        bench.close()


def provider(
    name: str = "fake-provider",
    /,
    *,
    labels: Any = None,
    pool: Any = None,
    label: Any = None,
    pools: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A fake provider with one pool; every label is a ``Fake Precise`` cloud image of 4 cores
    and 8192 MiB.
    """

    def entries(names: list[str]) -> list[dict[str, Any]]:
        return [
            {"name": n, "cloud-image": "fake-image", "min-ram": 8192, **(label or {})}
            for n in names
        ]

    if pools is None:
        pools = [{"name": "main", "labels": entries(labels or ["fake-label"]), **(pool or {})}]
    else:
        pools = [
            {
                **p,
                "labels": entries(p["labels"]) if isinstance(p["labels"][0], str) else p["labels"],
            }
            for p in pools
        ]
    return {
        "name": name,
        "cloud": "fake",
        "rate": 0.0001,
        "cloud-images": [{"name": "fake-image", "image-name": "Fake Precise", "username": "zuul"}],
        "pools": pools,
        **options,
    }


def config(*providers: dict[str, Any], labels: Any = None, **options: Any) -> dict[str, Any]:
    """A configuration whose labels are those of the providers; ``labels`` adds options to them."""
    names: dict[str, dict[str, Any]] = {name: {} for name in labels or {}}
    for entry in providers:
        for pool in entry["pools"]:
            for item in pool["labels"]:
                names.setdefault(item if isinstance(item, str) else item["name"], {})
    return {
        "labels": [{"name": n, **((labels or {}).get(n, {}))} for n in names],
        "providers": list(providers),
        **options,
    }
