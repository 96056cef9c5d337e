"""The static driver in a whole launcher (STA-6, LAU-21)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool import exceptions, nodeutils
from nodepool.driver.static import provider as static_provider
from nodepool.driver.static import slots
from nodepool.zk.zookeeper import FULFILLED, READY, REQUESTED, Node
from tests.conftest import Chroot, wait_for
from tests.support.deadline import limit
from tests.support.driver_scene import DriverBench
from tests.support.ports import reserve
from tests.support.sshd import SSHServer, ssh_server


@pytest.fixture
def bench(zk_chroot: Chroot) -> Iterator[DriverBench]:
    bench = DriverBench(zk_chroot)
    yield bench
    bench.stop()


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519", "rsa"]) as server:
        yield server


def host(name: str = "fake-host-1", labels: Any = "a", **options: Any) -> dict[str, Any]:
    return {"name": name, "labels": labels, **options}


def config(*hosts: dict[str, Any], **pool: Any) -> dict[str, Any]:
    return {
        "labels": [{"name": name} for name in "abcd"],
        "providers": [
            {
                "name": "static",
                "driver": "static",
                "pools": [{"name": "main", "nodes": list(hosts), **pool}],
            }
        ],
    }


@pytest.mark.spec("LAU-21.160: every field of a registered node as in 17, attributes from the pool")
@pytest.mark.spec("STA-6.2: registration sets all fields of section 2")
def test_registered_node_has_all_fields(bench: DriverBench) -> None:
    bench.start(
        config(
            host(username="zuul", **{"connection-port": 22022}), **{"node-attributes": {"k": "v"}}
        )
    )
    (node,) = bench.wait_nodes("a")
    assert node.external_id == node.hostname == node.interface_ip == "fake-host-1"
    assert (node.provider, node.pool, node.launcher) == ("static", "main", "static driver")
    assert (node.type, node.slot, node.attributes) == (["a"], 0, {"k": "v"})
    assert (node.username, node.connection_port, node.connection_type) == ("zuul", 22022, "ssh")
    assert (node.python_path, node.shell_type) == ("auto", None)
    assert node.host_keys == ["ssh-rsa FAKEKEY"]
    assert (node.az, node.cloud, node.region, node.image_id, node.resources) == (None,) * 5
    assert (node.public_ipv4, node.public_ipv6) == (None, None)


def test_registration_of_a_real_host(bench: DriverBench, sshd: SSHServer) -> None:
    bench.start(config(host("localhost", username="root", **{"connection-port": sshd.port})))
    (node,) = bench.wait_nodes("a")
    assert sorted(node.host_keys) == sorted(sshd.host_keys)
    assert "127.0.0.1" in (node.public_ipv4, "127.0.0.1" if node.public_ipv6 == "::1" else None)


def test_configured_keys_must_be_among_those_offered(bench: DriverBench, sshd: SSHServer) -> None:
    options = {"connection-port": sshd.port}
    bench.start(
        config(
            host("127.0.0.1", "a", **options, **{"host-key": sshd.host_keys[0]}),
            host(
                "127.0.0.1",
                "b",
                username="other",
                **options,
                **{"host-key": [sshd.host_keys[0], "ssh-rsa no"]},
            ),
        )
    )
    (node,) = bench.wait_nodes("a")
    assert len(node.host_keys) == 2, "all scanned keys"
    time.sleep(0.2)
    bench.wait_nodes("b", 0)


@pytest.mark.spec("LAU-21.161: a used node is re-registered at once, without the cleanup worker")
@pytest.mark.spec("LAU-21.162, LAU-21.183: kept over re-registration")
@pytest.mark.spec("LAU-21.179: the request gets the existing node; after use it is back")
@pytest.mark.spec(
    "STA-6.3: registered again without the periodic cleanup, same slot, path and shell type"
)
def test_used_node_is_registered_again_in_its_slot(bench: DriverBench) -> None:
    bench.start(
        config(host(**{"python-path": "/usr/bin/py", "shell-type": "cmd"})), cleanup_interval=60
    )
    (before,) = bench.wait_nodes("a")
    (node,) = bench.get("a")
    assert node.id == before.id
    bench.give_back(node)
    bench.wait_gone(node.id)
    (after,) = bench.wait_nodes("a", timeout=5)
    assert after.id != before.id
    assert (after.slot, after.python_path, after.shell_type) == (0, "/usr/bin/py", "cmd")


@pytest.mark.spec("LAU-21.163: same host with different users are independent nodes")
@pytest.mark.spec("STA-6.4: same host under two user names = two hosts")
def test_one_address_with_two_users_is_two_hosts(bench: DriverBench) -> None:
    bench.start(config(host(), host(labels="b", username="zuul-2")))
    bench.wait_nodes("a")
    (node,) = bench.wait_nodes("b")
    assert node.username == "zuul-2"
    (used,) = bench.get("b")
    bench.give_back(used)
    bench.wait_gone(used.id)
    (node,) = bench.wait_nodes("b")
    assert node.username == "zuul-2"
    bench.wait_nodes("a")


@pytest.mark.spec("LAU-21.164: does not prevent others from registering")
@pytest.mark.spec("STA-6.5: an unresolvable host does not prevent others")
def test_unresolvable_and_unreachable(bench: DriverBench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nodeutils.nodescan

    def scan(ip: str, *args: Any, **kw: Any) -> list[str]:
        if "bad" in ip:
            raise exceptions.ConnectionTimeoutException("no such host")
        return real(ip, *args, **kw)

    monkeypatch.setattr(nodeutils, "nodescan", scan)
    unreachable = host("127.0.0.1", "d", timeout=1, **{"connection-port": reserve()})
    bench.start(config(host("bad-host", "b"), unreachable, host()))
    bench.wait_nodes("a", timeout=5)
    assert bench.nodes("b") == []
    assert bench.nodes("d") == []


def test_name_that_cannot_exist_is_reported_without_a_traceback(
    bench: DriverBench, caplog: pytest.LogCaptureFixture
) -> None:
    unchecked = {"host-key-checking": False}
    bench.start(
        config(host("a" * 300, "b"), host("a" * 300, "c", username="x", **unchecked), host())
    )
    bench.wait_nodes("a")

    def reported() -> bool:
        found = [each for each in caplog.records if "cannot be registered now" in each.message]
        return len(found) == 2

    wait_for(reported, what="both hosts reported")
    assert not any(each.exc_info for each in caplog.records if "Error" in each.message)
    assert bench.nodes("b") == bench.nodes("c") == []


@pytest.mark.spec("LAU-21.165, LAU-21.166")
@pytest.mark.spec("LAU-21.167, LAU-21.168")
@pytest.mark.spec("STA-6.6: adding, removing, raising, lowering")
def test_hosts_and_slots_follow_the_configuration(bench: DriverBench) -> None:
    bench.start(config(host()))
    (first,) = bench.wait_nodes("a")
    bench.reconfigure(config(host(), host("fake-host-2")))
    _wait_places(bench, ("fake-host-1", 0), ("fake-host-2", 0))
    bench.reconfigure(config(host(**{"max-parallel-jobs": 3})))
    _wait_places(bench, ("fake-host-1", 0), ("fake-host-1", 1), ("fake-host-1", 2))
    bench.reconfigure(config(host()))
    _wait_places(bench, ("fake-host-1", 0))
    assert [node.id for node in bench.wait_nodes("a")] == [first.id], "slot 0 stayed"


def _wait_places(bench: DriverBench, *places: tuple[str, int]) -> None:
    wait_for(
        lambda: sorted((node.hostname, node.slot) for node in bench.nodes("a")) == sorted(places)
    )


def test_surplus_slot_in_use_is_left_to_run_out(bench: DriverBench) -> None:
    pool = bench.start(config(host(**{"max-parallel-jobs": 2})))
    bench.wait_nodes("a", 2)
    one, two = bench.get("a", "a")
    last = one if one.slot == 1 else two
    other = two if last is one else one
    before = pool.state.config
    bench.reconfigure(config(host()))
    wait_for(lambda: pool.state.config is not before, what="the new configuration")
    bench.give_back(other)
    bench.wait_nodes("a", 1)
    bench.give_back(last)
    bench.wait_gone(last.id)
    _wait_places(bench, ("fake-host-1", 0))


@pytest.mark.spec("LAU-21.169: labels, user, port, type changed in config arrive in the node")
@pytest.mark.spec("STA-6.7: changing labels in place keeps the node id")
def test_update_in_place(bench: DriverBench) -> None:
    bench.start(config(host()))
    (before,) = bench.wait_nodes("a")
    bench.reconfigure(config(host(labels=["b", "c"]), **{"node-attributes": {"zone": "x"}}))
    (node,) = bench.wait_nodes("b")
    assert (node.id, node.type, node.attributes) == (before.id, ["b", "c"], {"zone": "x"})
    bench.wait_nodes("a", 0)
    other = {"connection-port": 5986, "connection-type": "winrm", "username": "admin"}
    bench.reconfigure(config(host(labels="b", **other)))
    node = wait_for(lambda: next((n for n in bench.wait_nodes("b") if n.username == "admin"), None))
    assert node.id != before.id
    assert (node.connection_port, node.connection_type, node.host_keys) == (5986, "winrm", [])
    bench.wait_gone(before.id)


@pytest.mark.spec("LAU-21.170: changes made while down are applied in place, same id")
@pytest.mark.spec("STA-6.7: changes across a restart keep the node id")
def test_update_at_start(bench: DriverBench) -> None:
    old = Node()
    old.state = READY
    old.provider, old.pool, old.launcher, old.type = "static", "main", "static driver", "d"
    old.hostname = old.interface_ip = old.external_id = "fake-host-1"
    bench.zk.storeNode(old)
    bench.start(config(host(labels=["a", "b"])))
    (node,) = bench.wait_nodes("a")
    assert node.id == old.id
    assert node.type == ["a", "b"]
    assert node.host_keys == ["ssh-rsa FAKEKEY"]


@pytest.mark.spec("LAU-21.171: node lists all its labels")
@pytest.mark.spec(
    "LAU-21.174: accepting a node takes all its labels off the label quota in one pass"
)
@pytest.mark.spec("LAU-21.173: waits requested and undeclined while others are served")
@pytest.mark.spec("STA-6.10: label quota is reduced for all labels of a taken node")
@pytest.mark.spec("STA-6.9: a waiting request stays REQUESTED, undeclined, and is served")
@pytest.mark.spec("STA-6.8: multi-label nodes carry all labels")
def test_multi_label_and_waiting(bench: DriverBench) -> None:
    bench.start(config(host(labels=["a", "b"]), host("fake-host-2", "c")))
    (node,) = bench.wait_nodes("a")
    assert node.type == ["a", "b"]
    first, second = bench.submit("a"), bench.submit("b")
    (used,) = bench.accept(first)
    (other,) = bench.get("c")
    waiting = bench.zk.getNodeRequest(second.id or "")
    assert waiting is not None
    assert (waiting.state, waiting.declined_by) == (REQUESTED, [])
    bench.give_back(used)
    (again,) = bench.accept(second)
    assert again.hostname == "fake-host-1"
    bench.give_back(again, other)


@pytest.mark.spec("LAU-21.172: max-parallel-jobs 2 gives two nodes; used node deleted and back")
def test_max_parallel_jobs_gives_that_many_nodes(bench: DriverBench) -> None:
    bench.start(config(host(**{"max-parallel-jobs": 2})))
    bench.wait_nodes("a", 2)
    (node,) = bench.get("a")
    bench.wait_nodes("a", 1)
    bench.give_back(node)
    bench.wait_gone(node.id)
    assert sorted(n.slot for n in bench.wait_nodes("a", 2) if n.slot is not None) == [0, 1]


@pytest.mark.spec("LAU-21.175")
@pytest.mark.spec("STA-6.11: an allocated READY node is left alone by the cleanup")
def test_allocated_ready_nodes_are_unchanged(bench: DriverBench) -> None:
    bench.start(config(host()), cleanup_interval=0.2, delete_interval=0.2)
    bench.wait_nodes("a")
    first = bench.submit("a")
    found = bench.wait_state(first, FULFILLED)
    second = bench.submit("a")
    time.sleep(1)
    node = bench.zk.getNode(found.nodes[0])
    assert node is not None
    assert (node.state, node.allocated_to) == (READY, first.id)
    assert bench.state(second) == REQUESTED
    assert len(bench.nodes(state=None)) == 1


@pytest.mark.spec("LAU-21.176: waiting requests are served by priority, then sequence")
@pytest.mark.spec("STA-6.12: by priority, then order of submission")
def test_requests_are_served_by_priority_and_age(bench: DriverBench) -> None:
    bench.start(config(host()))
    bench.wait_nodes("a")
    (node,) = bench.get("a")
    late = bench.submit("a", priority="300")
    normal = bench.submit("a", priority="200")
    urgent = bench.submit("a", priority="100")
    normal2 = bench.submit("a", priority="200")
    for expected in (urgent, normal, normal2, late):
        time.sleep(0.1)
        bench.give_back(node)
        (node,) = bench.accept(expected)


@pytest.mark.spec("LAU-21.177: request over two labels fulfilled with two nodes")
@pytest.mark.spec("STA-6.13: a two-label request gets two nodes")
def test_two_labels_in_one_request(bench: DriverBench) -> None:
    bench.start(config(host(), host("fake-host-2", "b")))
    bench.wait_nodes("a")
    bench.wait_nodes("b")
    one, two = bench.get("b", "a")
    assert [one.type, two.type] == [["b"], ["a"]]
    bench.give_back(one, two)
    bench.wait_nodes("a")


@pytest.mark.spec("LAU-21.178: static and cloud providers work side by side")
@pytest.mark.spec("STA-6.13: static and cloud providers side by side")
def test_two_providers_concurrently(bench: DriverBench) -> None:
    content = config(host())
    content["labels"].append({"name": "cloudy"})
    content["providers"].append(
        {"name": "other", "driver": "test", "pools": [{"name": "main", "labels": ["cloudy"]}]}
    )
    bench.start(content)
    bench.wait_nodes("a")
    (launched,) = bench.get("cloudy")
    (static,) = bench.get("a")
    assert (launched.provider, static.provider) == ("other", "static")
    bench.give_back(launched, static)
    bench.wait_gone(launched.id)
    bench.wait_nodes("a")


@pytest.mark.spec(
    "STA-6.14: failing its liveness check it is removed; a new node serves the request"
)
@pytest.mark.spec("LAU-21.180, LAU-21.181")
def test_host_that_fails_its_liveness_check_is_replaced(
    bench: DriverBench, sshd: SSHServer
) -> None:
    with ssh_server(kinds=["ed25519"]) as flaky:
        bench.start(
            config(
                host("127.0.0.1", "a", timeout=1, **{"connection-port": flaky.port}),
                host("127.0.0.1", "b", timeout=1, **{"connection-port": sshd.port}),
            ),
            cleanup_interval=1,
        )
        (before,) = bench.wait_nodes("a")
        bench.wait_nodes("b")
        flaky.pause()
        offline = bench.submit("a")
        (other,) = bench.get("b")
        bench.wait_gone(before.id)
        waiting = bench.zk.getNodeRequest(offline.id or "")
        assert waiting is not None
        assert waiting.declined_by == []
        assert bench.wait_state(offline, REQUESTED)
        flaky.restart()
        (node,) = bench.accept(offline)
        assert node.id != before.id
        bench.give_back(node, other)


def test_node_whose_host_has_other_keys_is_registered_again_before_it_is_assigned(
    bench: DriverBench,
) -> None:
    with ssh_server(kinds=["ed25519"]) as server, ssh_server(kinds=["ecdsa"]) as other:
        bench.start(config(host("127.0.0.1", "a", timeout=5, **{"connection-port": server.port})))
        (before,) = bench.wait_nodes("a")
        assert before.host_keys == server.host_keys
        server.pause()
        (server.folder / "host_ed25519").write_bytes(
            (other.folder / "host_ecdsa").read_bytes()
        )  # it was installed again
        server.restart()
        (node,) = bench.get("a")
        assert node.id != before.id and node.host_keys == other.host_keys
        bench.give_back(node)


@pytest.mark.spec("LAU-21.182: off -> no scan at all")
@pytest.mark.spec("STA-6.15: with host-key-checking off no scan is ever made")
def test_no_checking_no_scan(bench: DriverBench, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []

    def scan(ip: str, **kw: Any) -> list[str]:
        scans.append(ip)
        return ["ssh-rsa SCANNED"]

    monkeypatch.setattr(nodeutils, "nodescan", scan)
    bench.start(config(host(**{"host-key-checking": False, "host-key": "ssh-rsa GIVEN"})))
    (node,) = bench.wait_nodes("a")
    assert node.host_keys == ["ssh-rsa GIVEN"]
    (used,) = bench.get("a")
    bench.give_back(used)
    bench.wait_gone(used.id)
    bench.wait_nodes("a")
    assert scans == []
    bench.reconfigure(config(host(**{"host-key": "ssh-rsa SCANNED"})))
    wait_for(lambda: bench.wait_nodes("a")[0].host_keys == ["ssh-rsa SCANNED"])
    assert scans


@pytest.mark.spec("LAU-21.184: record deleted behind our back is registered again")
@pytest.mark.spec("STA-6.16: a znode that disappears is registered again by the cleanup")
def test_vanished_record_is_registered_again(bench: DriverBench) -> None:
    bench.start(config(host(**{"max-parallel-jobs": 2})), cleanup_interval=0.5)
    one, _two = bench.wait_nodes("a", 2)
    bench.zk.deleteRawNode(one.id or "")
    bench.wait_gone(one.id)
    assert sorted(node.slot for node in bench.wait_nodes("a", 2) if node.slot is not None) == [0, 1]


@pytest.mark.spec("STA-4: a dead host must not delay the others")
def test_dead_hosts_do_not_delay_others(
    bench: DriverBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nodeutils.nodescan

    def scan(ip: str, *args: Any, **kw: Any) -> list[str]:
        if "dead" in ip:
            time.sleep(2)
            raise exceptions.ConnectionTimeoutException("dead")
        return real(ip, *args, **kw)

    monkeypatch.setattr(nodeutils, "nodescan", scan)
    bench.start(
        config(*[host(f"dead-{number}", "d") for number in range(8)], host()), cleanup_interval=0.3
    )
    bench.wait_nodes("a", timeout=5)
    started = time.monotonic()
    for _ in range(3):
        (node,) = bench.get("a")
        bench.give_back(node)
        bench.wait_gone(node.id)
        bench.wait_nodes("a")
    assert time.monotonic() - started < limit(3)


def test_launchers_with_different_nodes_of_a_provider_report_it(bench: DriverBench) -> None:
    """Each deregisters what is not in its own file, and the other one registers it again."""
    bench.start(config(host("fake-host-1"), host("fake-host-2")), cleanup_interval=0.2)
    bench.wait_nodes("a", 2)
    other = bench.start(config(host("fake-host-1", "b")), name="other.yaml", cleanup_interval=0.2)

    def problems() -> str:
        found = [problem.text for pool in bench.pools for problem in pool.problems()]
        return "\n".join(found)

    wait_for(lambda: "fake-host-2 port 22 is deregistered again and again" in problems())
    wait_for(lambda: "fake-host-1 port 22 is registered for b, but this file has a" in problems())
    assert "write the same nodes of the provider in the files of all launchers" in problems()
    bench.pools.remove(other)
    other.stop()
    bench.reconfigure(config(host("fake-host-1"), host("fake-host-2"), host("fake-host-3")))
    bench.wait_nodes("a", 3)
    wait_for(lambda: "host" not in problems())


def test_node_that_was_locked_when_its_host_changed_is_updated_later(
    bench: DriverBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(config(host()), cleanup_interval=0.2)
    (node,) = bench.wait_nodes("a")
    bench.zk.lockNode(node, blocking=False)
    bench.reconfigure(config(host(labels="b")))
    wait_for(lambda: caplog.text.count("is locked; skipping it for now") >= 3)
    assert not [problem.text for pool in bench.pools for problem in pool.problems()]
    bench.zk.unlockNode(node)
    (updated,) = bench.wait_nodes("b")
    assert updated.id == node.id


def test_two_launchers_register_each_slot_once(
    bench: DriverBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second record of a slot would hand the machine out twice."""
    registered: Counter[tuple[str, int]] = Counter()

    def count(template: Node, slot: int) -> Node:
        registered[str(template.hostname), slot] += 1
        return slots.in_slot(template, slot)

    monkeypatch.setattr(static_provider, "in_slot", count)
    content = config(
        *(host(f"fake-host-{number}", **{"max-parallel-jobs": 2}) for number in range(6))
    )
    for name in ("one.yaml", "two.yaml"):
        bench.start(content, name=name, cleanup_interval=60)
    rounds = 4
    for _ in range(rounds):
        bench.wait_nodes("a", 12)
        nodes = [
            node
            for request in [bench.submit("a") for _ in range(12)]
            for node in bench.accept(request)
        ]
        bench.give_back(*nodes)
        for node in nodes:
            bench.wait_gone(node.id)
    bench.wait_nodes("a", 12)
    assert set(registered.values()) == {rounds + 1}
    assert len(registered) == 12

    def marks() -> list[str]:
        return [
            name
            for name in bench.zk.kazoo_client.get_children("/nodepool/elections")
            if name.startswith("static")
        ]

    wait_for(lambda: not marks(), what="the last mark to be dropped")
