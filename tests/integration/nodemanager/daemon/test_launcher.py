"""Slivers as nodes: a whole launcher with the driver ``nodemanager`` (NM-C.8)."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import subprocess
import time
import xmlrpc.client
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.exceptions import RemoteException
from nodepool.status import cluster
from nodepool.status.explain import explain
from nodepool.zk.history import HistoryReader
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench
from tests.support.node_ids import spend_node_ids
from tests.support.nodemanager.fake_host import CAPACITY, fake_host
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def config(nm: NmDaemon, *others: NmDaemon, **options: Any) -> dict[str, Any]:
    label = {
        "name": "small",
        "cloud-image": "host",
        "ram": 128,
        "cpus": 0.1,
        "disk": 1,
        **options.pop("label", {}),
    }
    return {
        "labels": [{"name": "small"}],
        "providers": [
            {
                "name": "metal",
                "driver": "nodemanager",
                "ssh-keys": nm.key.with_suffix(".pub").read_text(),
                "hosts": [
                    {"name": f"h{n}", "url": d.client.url} for n, d in enumerate((nm, *others))
                ],
                "cloud-images": [{"name": "host"}],
                "pools": [{"name": "main", "max-servers": 10, "labels": [label]}],
                **options,
            }
        ],
    }


def log_in(nm: NmDaemon, node: dict[str, Any], tmp_path: pathlib.Path) -> str:
    known = tmp_path / f"known-{node['connection_port']}"
    known.write_text(
        "".join(
            f"[{node['interface_ip']}]:{node['connection_port']} {key}\n"
            for key in node["host_keys"]
        )
    )
    done = subprocess.run(
        [
            "ssh",
            "-i",
            str(nm.key),
            "-p",
            str(node["connection_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            f"UserKnownHostsFile={known}",
            "-o",
            "StrictHostKeyChecking=yes",
            f"{node['username']}@{node['interface_ip']}",
            "hostname",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.spec("NM-C.9.9: Launcher end to end with a Zuul client")
def test_from_request_to_login_and_back(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    pool = bench.start(config(nm))
    request = bench.zuul.submit("small", "small")
    wait_for(lambda: bench.zuul.request(request)["state"] in ("fulfilled", "failed"), 30)
    nodes = [bench.zuul.node(i) for i in bench.zuul.accept(request)]
    for node in nodes:
        assert (
            node["external_id"]["host"] == "h0"
            and node["host_id"] == "h0"
            and node["cloud"] == "metal"
        )
        assert (
            node["username"] == "root" and node["connection_port"] >= nm.first_port and node["slot"]
        )
        assert node["resources"]["ram"] == 128 and node["resources"]["instances"] == 1
        assert log_in(nm, node, tmp_path).startswith("np")

    def hosts() -> list[dict[str, Any]]:
        return cluster.hosts(pool.zk).rows

    # What the pages show of hosts.
    wait_for(
        lambda: [row for row in hosts() if "slivers 2/" in (row["used"] or "")],
        30,
        "the slivers are counted",
    )
    (host,) = hosts()
    assert (host["host"], host["provider"], host["state"], host["problem"]) == (
        "h0",
        "metal",
        "usable",
        None,
    )
    assert host["nodes"] == sorted(bench.zuul.locks)
    assert len({log_in(nm, node, tmp_path) for node in nodes}) == 2
    metadata = {s["name"]: s["metadata"] for s in nm.client.call("ListSlivers")}
    assert (
        all(m["nodepool_provider_name"] == "metal" for m in metadata.values())
        and len(metadata) == 2
    )
    bench.zuul.give_back(*list(bench.zuul.locks))
    wait_for(lambda: nm.client.call("ListSlivers") == [], 30, "the slivers to go")


def test_launcher_runs_a_program_on_a_node_without_ssh(bench: LauncherBench, nm: NmDaemon) -> None:
    pool = bench.start(config(nm))
    request = bench.zuul.submit("small")
    bench.wait_request(request, "fulfilled", timeout=30)
    (node_id,) = bench.zuul.accept(request)
    node = pool.zk.getNode(node_id)
    provider = pool.getProviderManager("metal")
    running = provider.execute(node, ["sh", "-c", "cat; hostname; exit 3"], {"A": "b"})
    assert running is not None
    running.write(b"input\n", 10)
    running.write(b"", 10)
    data = b""
    while (found := running.read(20)) is not None:
        data += found[1]
    running.close()
    assert (data.decode(), running.status) == (f"input\nnp{node_id}\n", 3)
    with pytest.raises(RemoteException, match="no such program"):
        provider.execute(node, ["no-such-program"])
    node.external_id = {"host": "elsewhere", "sliver": "s"}
    with pytest.raises(RemoteException, match="host elsewhere is not known at present"):
        provider.execute(node, ["true"])
    bench.zuul.give_back(node_id)


def test_quota_makes_requests_wait(bench: LauncherBench, nm: NmDaemon) -> None:
    cores = nm.client.call("GetCapacity")["cores"]
    bench.start(config(nm, label={"cpus": cores * 0.6}))
    first = bench.zuul.submit("small")
    wait_for(lambda: bench.zuul.request(first)["state"] == "fulfilled", 30)
    second = bench.zuul.submit("small")
    nodes = bench.zuul.accept(first)
    time.sleep(0)
    assert bench.zuul.request(second)["state"] in ("requested", "pending")
    bench.zuul.give_back(*nodes)
    wait_for(lambda: bench.zuul.request(second)["state"] == "fulfilled", 30)


@pytest.mark.spec("NM-C.8: metadata -> leak cleanup works unchanged")
def test_only_leaked_slivers_of_the_provider_are_deleted(
    bench: LauncherBench, nm: NmDaemon
) -> None:
    spend_node_ids(bench.zk)
    nm.put(
        "np0000000099",
        metadata={
            "nodepool_provider_name": "metal",
            "nodepool_node_id": "0000000099",
            "nodepool_pool_name": "main",
        },
    )
    nm.put("foreign", metadata={"nodepool_provider_name": "another"})
    bench.start(config(nm))
    wait_for(
        lambda: [s["name"] for s in nm.client.call("ListSlivers")] == ["foreign"],
        30,
        "the leak to go",
    )


@pytest.mark.spec("NM-C.8: placement spread and pack")
@pytest.mark.parametrize("placement,expected", [("spread", {"h0", "h1"}), ("pack", {"h0"})])
def test_placement_spreads_or_packs_slivers(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path, placement: str, expected: set[str]
) -> None:
    other = NmDaemon(tmp_path, 1)
    other.start()
    try:
        bench.start(config(nm, other, placement=placement, label={"cpus": 0.3}))
        requests = []
        for _ in range(2):
            requests.append(bench.zuul.submit("small"))
            wait_for(lambda: bench.zuul.request(requests[-1])["state"] == "fulfilled", 30)
        nodes = [bench.zuul.node(bench.zuul.accept(r)[0]) for r in requests]
        hosts = {n["external_id"]["host"] for n in nodes}
        assert len(hosts) == len(expected)
        bench.zuul.give_back(*bench.zuul.locks)
        wait_for(
            lambda: nm.client.call("ListSlivers") == other.client.call("ListSlivers") == [], 30
        )
    finally:
        other.clean()


def test_host_that_is_down(bench: LauncherBench, nm: NmDaemon) -> None:
    """Requests are served by the others; nothing of the living host is taken for leaked or gone."""
    settings = config(nm)
    settings["providers"][0]["hosts"].append({"name": "dead", "url": "unix:/does/not/exist"})
    pool = bench.start(settings)
    request = bench.zuul.submit("small")
    wait_for(lambda: bench.zuul.request(request)["state"] == "fulfilled", 30)
    told = wait_for(
        lambda: {row["host"]: row for row in cluster.hosts(pool.zk).rows},
        30,
        "what is told of hosts",
    )
    assert told["dead"]["state"] == "not usable" and "does/not/exist" in told["dead"]["problem"]
    nodes = bench.zuul.accept(request)
    bench.zuul.give_back(*nodes)
    wait_for(lambda: nm.client.call("ListSlivers") == [], 30)


#: What hosts may answer that are older, newer, broken or hostile.
ODD_ANSWERS: dict[str, dict[str, Any]] = {
    "empty": {"GetCapacity": {}},
    "texts": {"GetCapacity": {**CAPACITY, "memory": "lots", "allocated": [1, 2]}},
    "list": {"GetCapacity": [1]},
    "nan": {"GetCapacity": {**CAPACITY, "cpu": math.nan, "memory": math.inf}},
    "negative": {
        "GetCapacity": {
            **CAPACITY,
            "allocated": {"slivers": -5, "cpu": -1, "memory": -1, "disk": -1},
        }
    },
    "group": {"GetCapacity": {**CAPACITY, "group": [1]}},
    "nameless": {"GetCapacity": CAPACITY, "ListSlivers": [{"state": "ready"}]},
    "items": {
        "GetCapacity": CAPACITY,
        "ListSlivers": ["x"],
        "PutRecord": {"name": "other", "state": "ready"},
    },
    "record": {"GetCapacity": CAPACITY, "ListSlivers": [], "PutRecord": "x"},
    "fault": {"GetCapacity": xmlrpc.client.Fault(104, "\x1b[31m\nforged line")},
    "fault-types": {"GetCapacity": CAPACITY, "PutRecord": xmlrpc.client.Fault([], {})},  # type: ignore[arg-type]
    "bytes": {"GetCapacity": b"\x00\xff" * 100},
}


def test_host_with_odd_answers_harms_no_request(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    """Requests are served by the good host; the odd ones are reported."""
    settings = config(nm, placement="spread")
    with contextlib.ExitStack() as stack:
        for name, answers in ODD_ANSWERS.items():
            url = stack.enter_context(fake_host(tmp_path / f"{name}.socket", answers))
            settings["providers"][0]["hosts"].append({"name": name, "url": url})
        pool = bench.start(settings)
        requests = [bench.zuul.submit("small") for _ in range(3)]
        for request in requests:
            bench.wait_request(request, "fulfilled", timeout=60)
        nodes = [bench.zuul.node(bench.zuul.accept(request)[0]) for request in requests]
        assert {node["external_id"]["host"] for node in nodes} == {"h0"}
        limits = bench.adapter("metal", pool).getQuotaLimits().get_resources()
        assert all(0 < limits[name] < 1e9 for name in ("cores", "instances", "ram", "disk"))
        rows = {row["host"]: row for row in cluster.hosts(pool.zk).rows}
        assert "cores" in rows["empty"]["problem"] and rows["empty"]["state"] == "not usable"
        bench.zuul.give_back(*list(bench.zuul.locks))
        wait_for(lambda: nm.client.call("ListSlivers") == [], 30, "the slivers to go")


def of_node(zk: Any, node_id: str, kind: str) -> list[dict[str, Any]]:
    events = HistoryReader().read(zk.kazoo_client, "node", node_id)
    return [event for event in events if event["type"] == kind]


@pytest.mark.spec("issue 49, 1 and 2: usage and kills are in the history, also after kill -9")
def test_usage_and_kills_are_in_the_history(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    pool = bench.start(config(nm))
    request = bench.zuul.submit("small")
    wait_for(lambda: bench.zuul.request(request)["state"] in ("fulfilled", "failed"), 30)
    [node_id] = bench.zuul.accept(request)
    name = bench.zuul.node(node_id)["external_id"]["sliver"]
    nm.ssh(name, "exec python3 -c 'x = [bytearray(1 << 20) for _ in range(4096)]'", check=False)
    wait_for(lambda: of_node(pool.zk, node_id, "node-killed"), 30, "the kill")
    text = explain(pool.zk, "node", node_id, HistoryReader()).text()
    assert re.search(r"process \d+ \(python3[^)]*\) was killed: .* limit of 128 MiB", text), text
    bench.zuul.give_back(node_id)
    wait_for(lambda: of_node(pool.zk, node_id, "node-usage"), 30, "the usage")
    [usage] = of_node(pool.zk, node_id, "node-usage")
    assert usage["complete"] and usage["oom_kills"] == 1
    assert usage["cpu_usec"] > 0 and usage["memory_limit"] == 128 << 20
    assert (usage["provider"], usage["host"]) == ("metal", "h0")
    text = explain(pool.zk, "node", node_id, HistoryReader()).text()
    assert re.search(r"used [\d.]+ s of CPU in .* of 128 MiB memory .*kills for memory: 1", text)
    # What it has stored it confirms, and only that.
    wait_for(lambda: nm.client.call("WaitEvents", "metal", 0, 0, 0) == [], 30, "confirmation")
