"""Backing nodes are probed while they are idle: a launcher, ZooKeeper and sshd."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.protocol.serialization import SetData

from nodepool.driver.fake.cloud import FakeOpenStackCloud
from nodepool.launcher.nodes import probes
from nodepool.zk.writer import Txn
from tests.conftest import wait_for
from tests.support.interference import NODES, OtherClient
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider
from tests.support.sshd import SSHServer, ssh_server

REASON = "its probe failed twice: "


@pytest.fixture
def sshd(monkeypatch: pytest.MonkeyPatch) -> Iterator[SSHServer]:
    """All machines of the cloud."""
    make = FakeOpenStackCloud._make_server

    def reachable(*args: Any) -> Any:
        server = make(*args)
        server["addresses"] = {"public": [{"version": 4, "addr": "127.0.0.1"}]}
        server["public_v4"] = server["private_v4"] = server["interface_ip"] = "127.0.0.1"
        return server

    monkeypatch.setattr(FakeOpenStackCloud, "_make_server", reachable)
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    monkeypatch.setattr(probes, "PAUSE", 0.6)
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


def setup(sshd: SSHServer, min_ready: int = 0, **probe: Any) -> dict[str, Any]:
    image = {"name": "fake-image", "image-name": "Fake Precise", "connection-port": sshd.port}
    label = {"name": "small", "backing-label": "big", "max-parallel-jobs": 2, "grace-time": 3600}
    slots = {"name": "meta", "driver": "metastatic", "pools": [{"name": "main", "labels": [label]}]}
    interval = {"probe": {"interval": 1, **probe}}
    return config(
        provider(labels=["big"], **{"cloud-images": [image], "boot-timeout": 120}),
        slots,
        labels={"big": interval, "small": {**interval, "min-ready": min_ready}},
    )


def marks_failed(txn: Txn) -> str | None:
    """Return the path of a backing node that gets no more nodes."""
    found = [each for each in txn.operations if isinstance(each, SetData)]
    paths = [each.path for each in found if rb"\"failed\": true" in each.data]
    return txn.client.unchroot(paths[0]) if paths else None


def get(bench: LauncherBench) -> Any:
    request_id, _nodes = bench.fulfilled("small")
    (node_id,) = bench.zuul.accept(request_id)
    return bench.node(node_id)


def end(bench: LauncherBench, node: Any) -> None:
    bench.zuul.give_back(node.id)
    bench.wait_gone(node.id)


def test_idle_backing_node_that_is_dead_is_replaced_with_the_reason(
    bench: LauncherBench, sshd: SSHServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = bench.start(setup(sshd))
    node = get(bench)
    dead = node.driver_data["backing_node"]
    end(bench, node)
    sshd.pause()
    bench.wait_gone(dead)
    (event,) = [
        event
        for event in pool.feed.since(0)[0]
        if event["type"] == "node-reconciled" and event["node"] == dead
    ]
    assert event["what"] == "Retiring backing" and event["reason"].startswith(REASON)
    assert "Connection refused" in event["reason"]
    sshd.restart()
    node = get(bench)
    assert node.driver_data["backing_node"] != dead
    end(bench, node)


def test_backing_node_of_a_dead_idle_slot_keeps_its_jobs_and_gets_no_more_nodes(
    bench: LauncherBench, sshd: SSHServer
) -> None:
    pool = bench.start(setup(sshd, min_ready=1))
    used = get(bench)
    dead = used.driver_data["backing_node"]
    idle = wait_for(
        lambda: next(iter(bench.nodes(provider="meta", state="ready")), None), what="idle slot"
    )
    assert idle.driver_data["backing_node"] == dead
    sshd.pause()
    bench.wait_gone(idle.id)
    assert bench.node(used.id).state == "in-use"
    record = bench.node(dead)
    assert record.state == "in-use" and json.loads(record.user_data)["failed"] is True
    found = [str(each) for each in pool.problems() if f"{dead} (backing node)" in str(each)]
    assert len(found) == 1 and f"gets no more nodes: {REASON}" in found[0]
    sshd.restart()
    other = get(bench)
    assert other.driver_data["backing_node"] != dead
    end(bench, used)
    bench.wait_gone(dead)


def test_slot_that_is_assigned_meanwhile_is_not_undone(
    bench: LauncherBench, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(setup(sshd))
    node = get(bench)
    backing = node.driver_data["backing_node"]
    other = OtherClient(bench.chroot.connect().client, monkeypatch)

    def assign(path: str) -> None:
        data = json.loads(other.read(path)["user_data"])
        data["allocations"] = {"0": "0000009999"}
        other.write(path, user_data=json.dumps(data))

    late = other.before(marks_failed, assign)
    end(bench, node)
    sshd.pause()
    assert late.refused() == NODES + backing
    found = json.loads(bench.node(backing).user_data)
    assert found["allocations"] == {"0": "0000009999"}


def test_backing_node_is_probed_after_its_use_and_not_meanwhile(
    bench: LauncherBench, sshd: SSHServer, statsd: StatsdReceiver, tmp_path: pathlib.Path
) -> None:
    ran = tmp_path / "ran"
    command = {"method": "command", "command": f"touch '{ran}'"}
    pool = bench.start(setup(sshd, **command, **{"ssh-key": str(sshd.client_key)}))
    node = get(bench)
    backing = node.driver_data["backing_node"]

    def postponed() -> bool:
        return pool.probes._due.get(backing, (1.0, 1.0))[0] == 0.0

    wait_for(postponed, what="the probe is due")
    ran.unlink(missing_ok=True)
    assert backing not in pool.probes._probes
    end(bench, node)
    wait_for(ran.exists, what="the command")
    statsd.wait_any("nodepool.provider.fake-provider.probe.ok")
    assert bench.node(backing).state == "in-use"
