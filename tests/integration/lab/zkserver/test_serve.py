"""The server as a process, on sockets."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kazoo.client import KazooClient

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.conftest import load_tool, wait_for


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tls")
    load_tool("zookeeper").make_certificates(directory)
    return directory


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    command = [sys.executable, "-m", "nodepool.lab.zkserver", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline() or "{}")
        finally:
            process.kill()


def test_nodes_are_stored_over_tls_and_survive_sigkill(
    certificates: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    keys = [
        f"--tls-{name}={certificates / file}"
        for name, file in (("cert", "server.pem"), ("key", "server.key"), ("ca", "ca.pem"))
    ]
    arguments = ["--tls-port=0", *keys, f"--directory={tmp_path / 'data'}"]

    def connect(port: int) -> Any:
        client = ZooKeeperClient(
            f"127.0.0.1:{port}",
            timeout=10,
            tls_cert=str(certificates / "client.pem"),
            tls_key=str(certificates / "client.key"),
            tls_ca=str(certificates / "ca.pem"),
        )
        client.connect(timeout=20)
        return client

    from nodepool.zk.records import Node

    with serving(*arguments) as (process, ports):
        client = connect(ports["tls_port"])
        zk = ZooKeeper(client)
        node = Node()
        node.state = "ready"
        zk.createNodes([node])
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        client.disconnect()
    with serving(*arguments) as (process, ports):
        client = connect(ports["tls_port"])
        zk = ZooKeeper(client)
        assert wait_for(lambda: zk.getCachedNode(node.id)).state == "ready"
        client.disconnect()
        process.terminate()
        assert process.wait(10) == 0


def test_client_without_certificate_is_refused(certificates: pathlib.Path) -> None:
    keys = [
        f"--tls-{name}={certificates / file}"
        for name, file in (("cert", "server.pem"), ("key", "server.key"), ("ca", "ca.pem"))
    ]
    with serving("--tls-port=0", *keys) as (_process, ports):
        client = KazooClient(
            f"127.0.0.1:{ports['tls_port']}", use_ssl=True, verify_certs=False, timeout=2
        )
        with pytest.raises(client.handler.timeout_exception):
            client.start(timeout=2)
        client.stop()
        client.close()


def test_kazoo_recipes_work_without_tls() -> None:
    with serving("--port=0") as (_process, ports):
        clients = [KazooClient(f"127.0.0.1:{ports['port']}") for _ in range(2)]
        for client in clients:
            client.start(timeout=10)
        first, second = (client.Lock("/lock") for client in clients)
        assert first.acquire(timeout=10) and not second.acquire(blocking=False)
        clients[0].stop()
        assert second.acquire(timeout=10)
        counter = clients[1].Counter("/counter")
        counter += 5
        assert counter.value == 5
        for client in clients:
            client.stop()
            client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_addresses_that_other_machines_reach_are_refused_without_the_flag(host: str) -> None:
    with serving("--port=0", f"--host={host}") as (process, ports):
        _out, error = process.communicate(timeout=20)
        assert process.returncode == 1 and ports == {}
        assert f"{host} can be reached from other machines" in error and "--anywhere" in error


def test_all_addresses_are_served_with_the_flag() -> None:
    with serving("--port=0", "--host=0.0.0.0", "--anywhere") as (process, ports):
        assert ports["port"] > 0
        process.terminate()
        assert process.wait(10) == 0
