"""Several hosts of the driver ``nodemanager``: found by announcements, hanging, gone, full
(NM-C.8).
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import signal
import socket
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.driver.nodemanager.host import HostError
from nodepool.zk import zookeeper as zk
from tests.conftest import Chroot, wait_for
from tests.integration.nodemanager.daemon.test_launcher import config
from tests.support.authority import Authority
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


@contextlib.contextmanager
def second(tmp_path: pathlib.Path, **options: Any) -> Iterator[NmDaemon]:
    daemon = NmDaemon(tmp_path, 1, **options)
    daemon.start()
    try:
        yield daemon
    finally:
        if daemon.process is not None and daemon.process.poll() is not None:
            daemon.start()
        daemon.clean()


def launch(bench: LauncherBench, count: int = 1, timeout: float = 40) -> list[dict[str, Any]]:
    """This many nodes in use, one request each."""
    requests = [bench.zuul.submit("small") for _ in range(count)]
    for request in requests:
        bench.wait_request(request, "fulfilled", timeout=timeout)
    return [
        {**bench.zuul.node(i), "id": i} for request in requests for i in bench.zuul.accept(request)
    ]


def names(daemon: NmDaemon) -> list[str]:
    return sorted(s["name"] for s in daemon.client.call("ListSlivers"))


def sources(chroot: Chroot) -> dict[str, Any]:
    host, port = chroot.hosts.rsplit(":", 1)
    return {
        "sources": [
            {
                "zookeeper": {
                    "servers": [{"host": host, "port": int(port), "chroot": chroot.chroot}],
                    "timeout": 5,
                    "tls": {"cert": chroot.cert, "key": chroot.key, "ca": chroot.ca},
                }
            }
        ]
    }


def discovering(nm: NmDaemon, **options: Any) -> dict[str, Any]:
    settings = config(nm, **options)
    del settings["providers"][0]["hosts"]
    settings["providers"][0]["discover"] = True
    return settings


@pytest.mark.spec(
    "NM-C.8: discover: true, hosts from ZooKeeper; hosts that vanish are left out at once"
)
def test_hosts_are_discovered_in_zookeeper(
    bench: LauncherBench, zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    first = NmDaemon(tmp_path, 0, **sources(zk_chroot))
    first.start()
    try:
        pool = bench.start(discovering(first))
        adapter = bench.adapter("metal", pool)
        wait_for(
            lambda: adapter.hosts.get("host0") is not None and adapter.hosts.get("host0").usable
        )
        (node,) = launch(bench)
        assert node["external_id"]["host"] == "host0"
        assert adapter.getAZs() == [None]
        with second(tmp_path, **sources(zk_chroot), **{"host-group": "rack1"}) as other:
            wait_for(
                lambda: adapter.hosts.get("host1") is not None and adapter.hosts.get("host1").usable
            )
            assert adapter.getAZs() == ["rack1", None]
            both = adapter.getQuotaLimits().get_resources()["instances"]
            assert both == 240
            assert first.stop() == 0  # its announcement ends with its session
            wait_for(lambda: adapter.hosts.get("host0").gone)
            assert adapter.getQuotaLimits().get_resources()["instances"] == 120
            others = launch(bench, 2)
            assert {n["external_id"]["host"] for n in others} == {"host1"} and {
                n["az"] for n in others
            } == {"rack1"}
            assert bench.zuul.node(node["id"])["state"] == "in-use"  # left to its lease
            other.stop()
            other.write_config(**{"host-group": "rack2"})
            other.start()
            wait_for(lambda: adapter.getAZs() == ["rack2"], what="the new group")
            bench.zuul.give_back(*[n["id"] for n in others])
            wait_for(lambda: names(other) == [], 30)
        first.start()
        wait_for(lambda: adapter.hosts.get("host0").usable)
        bench.zuul.give_back(node["id"])
        wait_for(lambda: names(first) == [], 30)
    finally:
        first.clean()


def test_announcement_of_another_host_or_a_broken_one(
    bench: LauncherBench, zk_chroot: Chroot, nm: NmDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """A Unix socket here is not that of a host that announces the same path elsewhere."""
    client = zk_chroot.connect().client
    client.create(
        "/nodemanager/hosts/elsewhere", f'{{"api": "{nm.client.url}"}}'.encode(), makepath=True
    )
    client.create("/nodemanager/hosts/broken", b"{", makepath=True)
    client.create("/nodemanager/hosts/plain", b'{"api": "http://127.0.0.1:812"}', makepath=True)
    pool = bench.start(discovering(nm))
    hosts = bench.adapter("metal", pool).hosts
    wait_for(
        lambda: (
            hosts.get("elsewhere") is not None
            and "is host host0, not elsewhere" in hosts.problems()
        )
    )
    assert not hosts.get("elsewhere").usable and hosts.get("broken") is hosts.get("plain") is None
    assert "Ignoring /nodemanager/hosts/broken" in caplog.text and "api must be" in caplog.text


@pytest.mark.spec("NM-C.5: TLS for launchers: mutual certificates")
def test_discovered_over_tls(
    bench: LauncherBench, zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "IP:127.0.0.1")
    client_cert, client_key = authority.issue("nl01")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tls = {
        "cert": cert,
        "key": key,
        "ca": authority.cert,
        "port": port,
        "address": "127.0.0.1",
        "controllers": ["nl01"],
    }
    daemon = NmDaemon(tmp_path, 0, api={"tcp": 0, "tls": tls}, **sources(zk_chroot))
    daemon.start()
    try:
        pool = bench.start(
            discovering(
                daemon,
                **{"ca-cert": authority.cert, "client-cert": client_cert, "client-key": client_key},
            )
        )
        hosts = bench.adapter("metal", pool).hosts
        wait_for(
            lambda: hosts.get("host0") is not None and hosts.get("host0").usable,
            what=f"host0; {hosts.problems()}",
        )
        (node,) = launch(bench)
        assert node["external_id"]["host"] == "host0"
        bench.zuul.give_back(node["id"])
        wait_for(lambda: names(daemon) == [], 30)
    finally:
        daemon.clean()


@pytest.mark.spec("NM-C.8: a hanging host does not delay nodes of others")
def test_hanging_host_does_not_delay_nodes_of_others(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    with second(tmp_path) as other:
        pool = bench.start(config(nm, other, **{"launch-timeout": 60}))
        nodes = launch(bench, 2)
        by_host = {n["external_id"]["host"]: n["id"] for n in nodes}
        assert by_host.keys() == {"h0", "h1"}
        assert nm.process is not None
        nm.process.send_signal(signal.SIGSTOP)
        # Deletion on the hanging host, and what was sent there, hold up nothing.
        bench.zuul.give_back(by_host["h0"], by_host["h1"])
        wait_for(lambda: bench.zuul.node(by_host["h1"]) is None, 8, "the other host's node to go")
        started = time.monotonic()
        nodes = launch(bench, 4)
        assert {n["external_id"]["host"] for n in nodes} == {"h1"}
        assert time.monotonic() - started < limit(20)
        started = time.monotonic()
        more = launch(bench, 2)  # by now it is known
        assert time.monotonic() - started < limit(5)
        nm.process.send_signal(signal.SIGCONT)
        wait_for(lambda: names(nm) == [], 40, "what the hanging host has kept to go")
        wait_for(lambda: bench.adapter("metal", pool).hosts.get("h0").usable)
        bench.zuul.give_back(*[n["id"] for n in nodes + more])
        wait_for(lambda: names(other) == [], 30)


def test_stop_while_a_host_hangs(bench: LauncherBench, nm: NmDaemon) -> None:
    pool = bench.start(config(nm))
    assert nm.process is not None
    nm.process.send_signal(signal.SIGSTOP)
    bench.zuul.submit("small")
    wait_for(lambda: bench.nodes(state=zk.BUILDING))
    wait_for(lambda: bench.nodes()[0].external_id, what="the call to be under way")
    adapter = bench.adapter("metal", pool)
    started = time.monotonic()
    assert (
        adapter.getQuotaLimits().get_resources()["instances"] == 120
        and list(adapter.listInstances()) == []
    )
    assert time.monotonic() - started < limit(3)
    started = time.monotonic()
    bench.stop(pool)
    assert time.monotonic() - started < limit(5)
    nm.process.send_signal(signal.SIGCONT)
    # The call that it had before it hung may still be carried out; nothing of that comes after a
    # new start.
    nm.stop()
    nm.start()


def test_launch_waits_for_a_host(bench: LauncherBench, nm: NmDaemon) -> None:
    """A node manager that is away for a moment fails no request."""
    bench.start(config(nm))
    nm.stop(signal.SIGKILL)
    request = bench.zuul.submit("small")
    wait_for(lambda: bench.nodes(state=zk.BUILDING))
    nm.start()
    bench.wait_request(request, "fulfilled", timeout=30)
    bench.zuul.give_back(*bench.zuul.accept(request))
    wait_for(lambda: names(nm) == [], 30)


@pytest.mark.spec("NM-C.8: unreachable host at deletion: retry, then leave to the lease")
def test_deletion_on_a_host_that_is_away(
    bench: LauncherBench, nm: NmDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.nodemanager.machines.GIVE_UP", 1.5)
    bench.start(config(nm))
    (node,) = launch(bench)
    nm.stop()
    bench.zuul.give_back(node["id"])
    wait_for(lambda: bench.zuul.node(node["id"]) is None, 20, "the record to go")
    nm.start()
    assert nm.client.call("ListSlivers")
    wait_for(lambda: names(nm) == [], 30, "the clean-up of leaks")


@pytest.mark.spec("NM-C.8: unknown sliver = already deleted")
def test_sliver_that_somebody_deleted(bench: LauncherBench, nm: NmDaemon) -> None:
    bench.start(config(nm))
    (node,) = launch(bench)
    nm.delete(node["external_id"]["sliver"])
    bench.zuul.give_back(node["id"])
    wait_for(lambda: bench.zuul.node(node["id"]) is None, 10, "the record to go")


@pytest.mark.spec(
    "NM-C.8: metadata stored in the record: leak cleanup after SIGKILL of the launcher"
)
def test_killed_before_the_external_id_was_saved(bench: LauncherBench, nm: NmDaemon) -> None:
    node = zk.Node()
    node.state, node.provider, node.pool, node.launcher, node.type = (
        zk.BUILDING,
        "metal",
        "main",
        "killed",
        ["small"],
    )
    bench.zk.storeNode(node)
    nm.put(
        f"np{node.id}",
        metadata={
            "nodepool_provider_name": "metal",
            "nodepool_node_id": node.id,
            "nodepool_pool_name": "main",
        },
    )
    bench.start(config(nm))
    wait_for(
        lambda: bench.zuul.node(node.id) is None and names(nm) == [], 30, "record and sliver to go"
    )


def test_name_that_exists_already(bench: LauncherBench, nm: NmDaemon) -> None:
    """Of an attempt whose end nobody saw: the same record again is fine."""
    nm.put(
        "np0000000000",
        metadata={"nodepool_provider_name": "metal", "nodepool_node_id": "0000000000"},
    )
    bench.start(config(nm), cleanup_interval=60)
    (node,) = launch(bench)
    assert node["external_id"]["sliver"] == "np0000000000" and names(nm) == ["np0000000000"]
    assert nm.client.call("GetRecord", "np0000000000")["metadata"]["nodepool_pool_name"] == "main"
    bench.zuul.give_back(node["id"])
    wait_for(lambda: names(nm) == [], 30)


@pytest.mark.spec("NM-C.6: leases are renewed by the launcher's periodic pass")
def test_launcher_renews_leases(bench: LauncherBench, nm: NmDaemon) -> None:
    bench.start(config(nm, **{"lease-time": 300}))
    (node,) = launch(bench)
    name = node["external_id"]["sliver"]
    left = nm.client.call("GetRecord", name)["expiry"] - time.time()
    assert 280 < left <= 300
    nm.put("foreign", metadata={"nodepool_provider_name": "another"}, expiry=int(time.time()) + 100)
    nm.client.call("RenewSliver", name, int(time.time()) + 100)
    wait_for(
        lambda: nm.client.call("GetRecord", name)["expiry"] - time.time() > 200, 15, "the renewal"
    )
    assert nm.client.call("GetRecord", "foreign")["expiry"] - time.time() < limit(101)
    nm.client.call("RenewSliver", name, int(time.time()) + 2**24)
    bench.zuul.give_back(node["id"])
    wait_for(lambda: names(nm) == ["foreign"], 30)


@pytest.mark.spec(
    "NM-C.8: host-level fit is checked again at placement, failure there = quota error"
)
def test_capacity_in_pieces_makes_a_request_wait(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cores = nm.client.call("GetCapacity")["cores"]
    with second(tmp_path) as other:
        bench.start(config(nm, other, label={"cpus": cores * 0.6}))
        nodes = launch(bench, 2)
        assert {n["external_id"]["host"] for n in nodes} == {"h0", "h1"}
        third = bench.zuul.submit("small")  # there is capacity for it in the sum, but on no host
        wait_for(lambda: "due to quota failure" in caplog.text, what="the refusal of both hosts")
        assert bench.zuul.request(third)["state"] == "pending"
        bench.zuul.give_back(nodes[0]["id"])
        bench.wait_request(third, "fulfilled", timeout=40)
        bench.zuul.give_back(nodes[1]["id"], *bench.zuul.accept(third))
        wait_for(lambda: names(nm) == names(other) == [], 30)


def test_label_that_fits_on_no_host_fails(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    cores = nm.client.call("GetCapacity")["cores"]
    with second(tmp_path) as other:
        bench.start(config(nm, other, label={"cpus": cores * 0.97}))
        bench.wait_request(bench.zuul.submit("small"), "failed", timeout=30)
        assert "too large for every host: h0 has" in caplog.text


@pytest.mark.spec("NM-C.8: max-cores, max-ram")
@pytest.mark.parametrize("limit", [{"max-ram": 200}, {"max-cores": 0.15}])
def test_limits_of_the_pool(bench: LauncherBench, nm: NmDaemon, limit: dict[str, Any]) -> None:
    settings = config(nm)
    settings["providers"][0]["pools"][0] |= limit
    pool = bench.start(settings)
    (node,) = launch(bench)
    second_request = bench.zuul.submit("small")
    wait_for(
        lambda: pool.state.workers and any(w.paused for w in pool.state.workers.values()),
        what="the pool to pause",
    )
    assert names(nm) == [node["external_id"]["sliver"]]
    bench.zuul.give_back(node["id"])
    bench.wait_request(second_request, "fulfilled", timeout=30)
    bench.zuul.give_back(*bench.zuul.accept(second_request))
    wait_for(lambda: names(nm) == [], 30)


@pytest.mark.spec(
    "NM-C.8: uploadImage = stream tar to hosts; labelReady: at least one host has the image"
)
def test_images_are_uploaded_to_hosts_and_deleted(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = tmp_path / "tree"
    for name in ("bin", "etc", "usr/bin"):
        (tree / name).mkdir(parents=True)
    (tree / "bin/sh").touch(mode=0o755)
    image = tmp_path / "image.tar"
    with tarfile.open(image, "w") as archive:
        archive.add(tree, ".")
    with second(tmp_path) as other:
        settings = config(nm, other)
        settings["providers"][0]["hosts"].append({"name": "dead", "url": "unix:/does/not/exist"})
        settings["providers"][0]["cloud-images"].append({"name": "up", "root": "image:up-1"})
        pool = bench.start(settings)
        adapter = bench.adapter("metal", pool)
        provider = adapter.provider
        label = provider.pools["main"].labels["small"]
        assert adapter.labelReady(label)
        adapter.hosts._hosts.pop("dead").stop()  # the first answers count
        label.cloud_image = provider.cloud_images["up"]
        assert not adapter.labelReady(label)
        assert adapter.uploadImage(None, "up-1", str(image)) == "up-1"
        assert nm.client.images() == other.client.images() == ["up-1"]
        wait_for(lambda: adapter.labelReady(label))
        # One that hangs is omitted, and the deletion there stays to be done.
        assert other.process is not None
        other.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        adapter.uploadImage(None, "up-2", str(image))
        assert time.monotonic() - started < limit(15)
        assert (
            nm.client.images() == ["up-1", "up-2"] and "up-2 was not accepted by h1" in caplog.text
        )
        with pytest.raises(HostError, match="up-1 was not deleted on h1"):
            adapter.deleteImage("up-1")
        other.process.send_signal(signal.SIGCONT)
        for name in ("up-1", "up-2"):
            adapter.deleteImage(name)
        assert nm.client.images() == other.client.images() == []
        with pytest.raises(HostError, match="was not accepted by h0"):
            adapter.uploadImage(None, "../x", str(image))


def test_hosts_that_join_later_get_the_images(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    image = tmp_path / "image.tar"
    with tarfile.open(image, "w") as archive:
        for name in ("etc", "bin", "usr"):
            archive.add(tmp_path, name, recursive=False)
        archive.add("/bin/true", "bin/sh")
    for name in ("up-1", "of-nobody"):
        with image.open("rb") as stream:
            nm.client.put_image(name, stream)
    with second(tmp_path) as other:
        settings = config(nm, other)
        settings["diskimages"] = [{"name": "img", "elements": ["x"], "formats": ["tar"]}]
        settings["providers"][0]["diskimages"] = [{"name": "img"}]
        bench.store_image("img", "metal", "up-1", format="tar")
        bench.start(settings, cleanup_interval=0.5)
        wait_for(lambda: other.client.images() == ["up-1"], 30, "the image on the second host")
        copy = tmp_path / "copy.tar"
        with copy.open("wb") as stream:
            other.client.get_image("up-1", stream)
        assert copy.read_bytes() == image.read_bytes()


def test_ready_nodes_whose_slivers_do_not_run_go(bench: LauncherBench, nm: NmDaemon) -> None:
    settings = config(nm)
    settings["labels"][0]["min-ready"] = 2
    bench.start(settings, cleanup_interval=0.5)
    stopped, deleted = bench.wait_nodes(2, timeout=40, state="ready")
    nm.client.call("Stop", stopped.external_id["sliver"])
    nm.client.call("DeleteSliver", deleted.external_id["sliver"])
    bench.wait_gone(stopped.id, deleted.id, timeout=30)
    again = bench.wait_nodes(2, timeout=40, state="ready")
    assert names(nm) == sorted(node.external_id["sliver"] for node in again)


def test_new_sliver_is_not_missing_although_an_older_list_is_known(
    bench: LauncherBench, nm: NmDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.nodemanager.host.LIST_TTL", 600.0)
    adapter = bench.adapter("metal", bench.start(config(nm), cleanup_interval=60))
    assert list(adapter.listInstances()) == []
    nm.put("new")
    assert adapter.findMissingInstances([{"host": "h0", "sliver": "new"}]) == []


@pytest.mark.spec("NM-C.8: console log; notifyNodescanFailure: one Stop/Start, else let it fail")
def test_console_and_restart(
    bench: LauncherBench, nm: NmDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    adapter = bench.adapter("metal", bench.start(config(nm)))
    (node,) = launch(bench)
    where = node["external_id"]
    assert isinstance(adapter.getConsoleLog(None, where), str)
    assert adapter.getConsoleLog(None, {"host": "nowhere", "sliver": "x"}) is None
    before = nm.client.call("GetRecord", where["sliver"])["since"]
    adapter.notifyNodescanFailure(None, where)
    wait_for(
        lambda: (
            (r := nm.client.call("GetRecord", where["sliver"]))["state"] == "ready"
            and r["since"] > before
        ),
        20,
    )
    after = nm.client.call("GetRecord", where["sliver"])["since"]
    adapter.notifyNodescanFailure(None, where)  # once only
    assert nm.process is not None
    nm.process.send_signal(signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{nm.process.pid}/task")
    wait_for(
        lambda: all(" (stopped)" in (task / "status").read_text() for task in tasks.iterdir()),
        20,
        "threads to stand still",
    )
    started = time.monotonic()
    assert adapter.getConsoleLog(None, where) is None
    assert time.monotonic() - started < limit(4)
    nm.process.send_signal(signal.SIGCONT)
    assert nm.client.call("GetRecord", where["sliver"])["since"] == after
    bench.zuul.give_back(node["id"])
    wait_for(lambda: names(nm) == [], 30)


@pytest.mark.spec(
    "issue 12, 3: listing has no side effects: alien-image-list renews, spreads and deletes nothing"
)
def test_a_list_of_alien_images_changes_nothing(
    bench: LauncherBench, nm: NmDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    node = zk.Node()
    node.state, node.provider, node.pool, node.type = zk.READY, "metal", "main", ["small"]
    node.external_id = {"host": "h1", "sliver": "np"}
    bench.zk.storeNode(node)
    ours = {"nodepool_provider_name": "metal", "nodepool_pool_name": "main"}
    expiry = int(time.time()) + 100
    nm.put("stray", metadata={**ours, "nodepool_node_id": node.id}, expiry=expiry)
    nm.put("leaked", metadata={**ours, "nodepool_node_id": "0000009999"}, expiry=expiry)
    before = nm.client.call("ListSlivers")
    for _ in range(2):
        assert nodepoolcmd.main(["-c", bench.config(config(nm)), "alien-image-list"]) == 0
    assert "metal" not in capsys.readouterr().out
    assert names(nm) == ["leaked", "stray"]
    assert (
        [s["expiry"] for s in nm.client.call("ListSlivers")]
        == [s["expiry"] for s in before]
        == [expiry, expiry]
    )


def test_sliver_of_a_lost_history_is_no_stray(bench: LauncherBench, nm: NmDaemon) -> None:
    """After a restore of ZooKeeper another node may get the id of a node that is in use."""
    node = zk.Node()
    node.state, node.provider, node.pool, node.type = zk.HOLD, "metal", "main", ["small"]
    node.external_id = {"host": "another", "sliver": "np"}
    bench.zk.storeNode(node)
    ours = {
        "nodepool_provider_name": "metal",
        "nodepool_pool_name": "main",
        "nodepool_node_id": node.id,
    }
    expiry = int(time.time()) + 1000
    nm.put("in-use", metadata={**ours, "nodepool_node_created": "1500000000000"}, expiry=expiry)
    nm.put("stray", metadata=ours, expiry=expiry)
    provider = bench.start(config(nm)).getProviderManager("metal")
    # Nothing is deleted before an operator has decided.
    wait_for(
        lambda: (
            provider.leak_search_stopped is not None
            and "another node has its id now" in provider.leak_search_stopped
        )
    )
    assert names(nm) == ["in-use", "stray"]
    nm.delete("in-use")
    wait_for(lambda: names(nm) == [], what="the stray sliver is deleted")
