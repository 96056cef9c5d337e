"""Static hosts that cannot be reached are problems, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nodepool import status
from tests.conftest import Chroot, wait_for
from tests.support.driver_scene import DriverBench
from tests.support.ports import reserve
from tests.support.sshd import ssh_server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)


@pytest.fixture
def static(zk_chroot: Chroot) -> Iterator[DriverBench]:
    bench = DriverBench(zk_chroot)
    yield bench
    bench.stop()


def test_users_5_static_hosts(static: DriverBench) -> None:
    port = reserve()
    with ssh_server(kinds=["ed25519"]) as server:
        hosts = [
            {"name": "127.0.0.1", "labels": "down", "username": "deploy", "connection-port": port},
            {
                "name": "127.0.0.1",
                "labels": "wrong",
                "username": "root",
                "connection-port": server.port,
                "host-key": "ssh-ed25519 AAAAother",
                "timeout": 60,
            },
        ]
        content = {
            "labels": [{"name": "down"}, {"name": "wrong"}],
            "providers": [
                {"name": "static", "driver": "static", "pools": [{"name": "main", "nodes": hosts}]}
            ],
        }
        pool = static.start(content)
        wait_for(lambda: pool.ready, what="ready")
        found = wait_for(
            lambda: len(lines := pool.getReadiness()[1]) == 2 and lines,
            what="both hosts are reported",
        )
        assert pool.getReadiness()[0] is True
        assert any(f"host deploy@127.0.0.1 port {port}" in line for line in found)
        assert any(
            f"host root@127.0.0.1 port {server.port}" in line and "host key" in line
            for line in found
        )
        rows = wait_for(lambda: status.problem_list(static.zk).rows, what="published")
        assert {row["provider"] for row in rows} == {"static"}
        hosts[1]["host-key"] = server.host_keys[0]
        static.reconfigure(content)
        wait_for(
            lambda: len(pool.getReadiness()[1]) == 1, what="the mended one is not told any more"
        )
