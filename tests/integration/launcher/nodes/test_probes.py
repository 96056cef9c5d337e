"""Probes of idle nodes: a real launcher, ZooKeeper and sshd."""

from __future__ import annotations

import copy
import getpass
import logging
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.base.clock import SYSTEM
from nodepool.launcher.nodes import probes
from tests.conftest import wait_for
from tests.support.interference import NODES, OtherClient, creates, sets
from tests.support.launcher import LauncherBench, StatsdReceiver, config, expire_session, provider
from tests.support.ports import reserve
from tests.support.sshd import SSHServer, ssh_server

USER = getpass.getuser()
CONFIG = config(provider(), labels={"fake-label": {"probe": {"interval": 1}}})
PORT = config(provider(), labels={"fake-label": {"probe": {"interval": 1, "method": "port"}}})


@pytest.fixture
def sshd() -> Iterator[SSHServer]:
    with ssh_server() as server:
        yield server


@pytest.fixture
def other(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(bench.chroot.connect().client, monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures and the pauses between them take less than a second."""
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    monkeypatch.setattr(probes, "PAUSE", 0.6)


def idle(bench: LauncherBench, port: int, keys: list[str], **values: Any) -> str:
    given = {
        "interface_ip": "127.0.0.1",
        "connection_type": "ssh",
        "connection_port": port,
        "host_keys": keys,
        **values,
    }
    return str(bench.ready_node("fake-provider", "main", "fake-label", **given).id)


def reason(caplog: pytest.LogCaptureFixture, node_id: str) -> str:
    start = f"Deleting node {node_id}: its probe failed twice: "
    (found,) = [text for text in caplog.messages if text.startswith(start)]
    return found.removeprefix(start)


def suspect(bench: LauncherBench, node_id: str) -> None:
    """Wait until the launcher has locked the node, because its first probe has failed."""
    wait_for(lambda: bench.zuul.contenders(node_id), what=f"node {node_id} locked")


def pass_time(pool: Any, seconds: float, node_id: str) -> None:
    """Let the clock of the launcher jump, and the node be checked."""
    pool.probes.state.clock = SimpleNamespace(
        monotonic=lambda: SYSTEM.monotonic() + seconds, time=SYSTEM.time
    )
    pool.probes.check_soon(node_id)


def test_node_with_its_keys_is_kept_at_the_cost_of_one_connection(
    bench: LauncherBench, sshd: SSHServer, statsd: StatsdReceiver
) -> None:
    bench.start(CONFIG)
    before = sshd.connections()
    node_id = idle(bench, sshd.port, sshd.host_keys)
    statsd.wait_any("nodepool.provider.fake-provider.probe.ok")
    assert sshd.connections() - before <= 2
    assert bench.node(node_id).state == "ready"


def test_recorded_key_of_any_type_is_enough(
    bench: LauncherBench, sshd: SSHServer, statsd: StatsdReceiver
) -> None:
    bench.start(CONFIG)
    (rsa,) = [key for key in sshd.host_keys if key.startswith("ssh-rsa")]
    idle(bench, sshd.port, [rsa])
    statsd.wait_any("nodepool.provider.fake-provider.probe.ok")
    assert statsd.last("nodepool.provider.fake-provider.probe.failed") is None


def test_machine_with_other_keys_is_replaced_and_the_history_has_the_reason(
    bench: LauncherBench,
    sshd: SSHServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "PAUSE", 0.3)
    caplog.set_level(logging.INFO)
    pool = bench.start(CONFIG)
    node_id = idle(bench, sshd.port, ["ssh-ed25519 AAAA"])
    bench.wait_gone(node_id)
    text = reason(caplog, node_id)
    assert text.startswith(f"127.0.0.1 port {sshd.port} has other SSH host keys (ssh-ed25519")
    (event,) = [
        event
        for event in pool.feed.since(0)[0]
        if event["type"] == "node-reconciled" and event["node"] == node_id
    ]
    assert event["reason"] == f"its probe failed twice: {text}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", [CONFIG, PORT], ids=["ssh", "port"])
def test_machine_whose_port_is_closed_is_replaced(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture, text: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    bench.start(text)
    node_id = idle(bench, reserve(), ["ssh-ed25519 AAAA"])
    bench.wait_gone(node_id)
    assert "Connection refused" in reason(caplog, node_id)


def test_node_that_answers_the_second_probe_is_kept_and_unlocked(
    bench: LauncherBench, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    monkeypatch.setattr(probes, "PAUSE", 600.0)
    sshd.pause()
    pool = bench.start(CONFIG)
    node_id = idle(bench, sshd.port, sshd.host_keys)
    suspect(bench, node_id)
    request_id, (other,) = bench.fulfilled("fake-label")
    assert other.id != node_id, "nobody gets a node that may be dead"
    sshd.restart()
    monkeypatch.setattr(probes, "TIMEOUT", 10.0)
    pass_time(pool, 601, node_id)
    wait_for(lambda: not bench.zuul.contenders(node_id), what="unlocked")
    assert bench.node(node_id).state == "ready"
    bench.zuul.cancel(request_id)


def test_node_that_is_assigned_during_its_probe_is_left_to_its_user(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that accepts connections and never answers keeps the probe waiting."""
    import socket

    monkeypatch.setattr(probes, "TIMEOUT", 600.0)
    pool = bench.start(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as peer:
        node_id = idle(bench, peer.getsockname()[1], ["ssh-ed25519 AAAA"])
        wait_for(lambda: node_id in pool.probes._probes, what="probe")
        _request_id, (node,) = bench.fulfilled("fake-label")
        assert node.id == node_id
        wait_for(lambda: not pool.probes._probes, what="end of the probe")
        wait_for(lambda: pool.probes._scans.length() == 0, what="closed connection")
        assert bench.zuul.contenders(node_id) == []


def test_outage_of_the_network_deletes_no_node_and_is_reported_until_it_ends(
    bench: LauncherBench, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.2)
    monkeypatch.setattr(probes, "PAUSE", 3.0)
    sshd.pause()
    pool = bench.start(CONFIG)
    ids = [idle(bench, sshd.port, sshd.host_keys) for _ in range(10)]

    def reported() -> bool:
        found = [problem.text for problem in pool.problems()]
        return any("most idle nodes of provider fake-provider fail" in text for text in found)

    wait_for(reported, what="problem")
    sshd.restart()
    monkeypatch.setattr(probes, "TIMEOUT", 10.0)
    wait_for(lambda: not reported(), what="end of the problem")
    wait_for(
        lambda: not any(bench.zuul.contenders(node_id) for node_id in ids), what="all unlocked"
    )
    assert {node.id for node in bench.nodes(state="ready")} == set(ids)


def test_lost_session_leaves_the_node_as_it_was(
    bench: LauncherBench, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    monkeypatch.setattr(probes, "PAUSE", 600.0)
    pool = bench.start(CONFIG)
    node_id = idle(bench, reserve(), sshd.host_keys)
    suspect(bench, node_id)
    expire_session(pool)
    wait_for(lambda: not bench.zuul.contenders(node_id), what="lock ended with the session")
    assert bench.node(node_id).state == "ready"


def test_node_that_somebody_changes_before_it_is_locked_is_not_locked(
    bench: LauncherBench, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.2)
    bench.start(CONFIG)
    late = other.before(
        creates("__lock__"), lambda path: other.write(path.partition("/lock")[0], state="hold")
    )
    node_id = idle(bench, reserve(), ["ssh-ed25519 AAAA"])
    assert late.refused() == NODES + node_id
    assert bench.zuul.contenders(node_id) == []


def test_node_that_somebody_locks_before_we_do_is_left_to_its_user(
    bench: LauncherBench, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.2)
    bench.start(CONFIG)
    late = other.before(
        creates("__lock__"), lambda path: other.lock(f"{path.partition('/lock')[0]}/lock")
    )
    node_id = idle(bench, reserve(), ["ssh-ed25519 AAAA"])
    assert late.refused() == f"{NODES}{node_id}/lock"
    assert len(bench.zuul.contenders(node_id)) == 1


@pytest.mark.usefixtures("quick")
def test_node_whose_lock_we_have_lost_is_not_replaced(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(CONFIG)
    late = other.before(
        sets(NODES, state="deleting"), lambda path: other.break_lock(f"{path}/lock")
    )
    node_id = idle(bench, reserve(), ["ssh-ed25519 AAAA"])
    assert late.refused().startswith(f"{NODES}{node_id}/lock/")


def test_static_host_with_new_keys_is_registered_again(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PAUSE", 0.3)
    with ssh_server(kinds=["ed25519"]) as one:
        host = {"name": "127.0.0.1", "labels": ["a"], "connection-port": one.port}
        pools = [{"name": "main", "nodes": [host]}]
        text = {
            "labels": [{"name": "a", "probe": {"interval": 1}}],
            "providers": [{"name": "racks", "driver": "static", "pools": pools}],
        }
        bench.start(text)
        (old,) = bench.wait_nodes(1, state="ready")
        assert old.host_keys == one.host_keys
        one.pause()
        with ssh_server(kinds=["rsa"], port=one.port) as two:
            bench.wait_gone(old.id)
            (new,) = bench.wait_nodes(1, state="ready")
            assert new.host_keys == two.host_keys


def test_nodes_of_a_launcher_that_has_ended_are_probed_by_another(
    bench: LauncherBench, sshd: SSHServer, statsd: StatsdReceiver
) -> None:
    first = bench.start(CONFIG, name="one.yaml")
    second = bench.start(CONFIG, name="two.yaml")
    (worker,) = first.state.workers.values()
    node_id = idle(bench, sshd.port, sshd.host_keys, launcher=worker.launcher_id)
    statsd.wait_any("nodepool.provider.fake-provider.probe.ok")
    node = second.zk.getNode(node_id)
    assert first.probes._is_ours(node) and not second.probes._is_ours(node)
    bench.stop(first)
    wait_for(lambda: second.probes._is_ours(node), what="second launcher probes")
    before = sshd.connections()
    wait_for(lambda: sshd.connections() > before, what="probe by the second launcher")


def test_node_without_host_key_checking_is_only_probed_if_its_keys_are_known(
    bench: LauncherBench,
) -> None:
    text = copy.deepcopy(PORT)
    place = text["providers"][0]["pools"][0]
    place["host-key-checking"] = False
    pool = bench.start(text)
    unknown = bench.node(idle(bench, reserve(), [], connection_type="winrm"))
    assert pool.probes._probing(unknown) is None
    known = bench.node(idle(bench, reserve(), ["ssh-ed25519 AAAA"]))
    assert pool.probes._probing(known) is not None
    place["host-key-checking"] = True
    bench.config(text)
    wait_for(lambda: pool.probes._probing(unknown), what="probes with host-key-checking")


def command(sshd: SSHServer, text: str, **options: Any) -> dict[str, Any]:
    """Return the configuration of a label whose nodes are probed with a command."""
    given = {"method": "command", "command": text, "ssh-key": str(sshd.client_key), **options}
    return config(provider(), labels={"fake-label": {"probe": {"interval": 1, **given}}})


def test_node_on_which_the_command_succeeds_is_kept_and_unlocked(
    bench: LauncherBench, sshd: SSHServer, statsd: StatsdReceiver, tmp_path: pathlib.Path
) -> None:
    bench.start(command(sshd, f"id -un > '{tmp_path}/user'"))
    node_id = idle(bench, sshd.port, sshd.host_keys, username=USER)
    statsd.wait_any("nodepool.provider.fake-provider.probe.ok")
    assert (tmp_path / "user").read_text().strip() == USER
    wait_for(lambda: bench.zuul.contenders(node_id) == [], what="unlocked")
    assert bench.node(node_id).state == "ready"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "echo useless; printf 'disk \\033[2Jfull\\n\\n'; exit 3",
            {},
            "its command has ended with status 3: disk \\x1b[2Jfull",
        ),
        ("exit 9", {}, "its command has ended with status 9"),
        # Time for the login.
        ("sleep 600", {"timeout": 8}, "its command has not ended within 8 s"),
        ("head -c 9999999 /dev/zero | tr '\\0' x; exit 1", {}, "its command has ended with"),
    ],
    ids=["last line", "silent", "no end", "endless line"],
)
def test_node_on_which_the_command_fails_is_replaced_with_its_last_line(
    bench: LauncherBench,
    sshd: SSHServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(probes, "PAUSE", 0.3)
    caplog.set_level(logging.INFO)
    bench.start(command(sshd, text, **options))
    node_id = idle(bench, sshd.port, sshd.host_keys, username=USER)
    bench.wait_gone(node_id, timeout=40)
    found = reason(caplog, node_id)
    assert found == said if len(found) < 200 else found.startswith(said) and len(found) < 500


@pytest.mark.parametrize("wrong", ["host key", "user's key"])
def test_node_that_nobody_can_log_in_to_is_replaced(
    bench: LauncherBench,
    sshd: SSHServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    wrong: str,
) -> None:
    monkeypatch.setattr(probes, "PAUSE", 0.3)
    caplog.set_level(logging.INFO)
    keys, ran, other = sshd.host_keys, tmp_path / "ran", tmp_path / "key"
    if wrong == "host key":
        keys, other = [f"{sshd.host_keys[0][:-8]}AAAAAAAA"], sshd.client_key
    else:
        other.write_bytes((sshd.folder / "host_ed25519").read_bytes())
        other.chmod(0o600)
    bench.start(command(sshd, f"touch '{ran}'", **{"ssh-key": str(other)}))
    node_id = idle(bench, sshd.port, keys, username=USER)
    bench.wait_gone(node_id)
    assert reason(caplog, node_id).startswith(f"cannot log in as {USER}: ")
    assert not ran.exists()


@pytest.mark.parametrize("mode", [None, 0o604])
def test_key_that_cannot_be_used_is_a_problem_and_costs_no_node(
    bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path, mode: int | None
) -> None:
    key = tmp_path / "key"
    if mode is not None:
        key.write_bytes(sshd.client_key.read_bytes())
        key.chmod(mode)
    pool = bench.start(command(sshd, "true", **{"ssh-key": str(key)}))
    node_id = idle(bench, sshd.port, sshd.host_keys, username=USER)
    wait_for(pool.probes.problems, what="problem")
    (problem,) = pool.probes.problems()
    text = f"the key {key} (option ssh-key) is open" if mode else f"cannot read the key {key}"
    assert problem.text.startswith(f"idle nodes of label fake-label are not probed: {text}")
    wait_for(lambda: bench.zuul.contenders(node_id) == [], what="unlocked")
    assert bench.node(node_id).state == "ready"
    if mode is not None:
        key.chmod(0o600)
        wait_for(lambda: pool.probes.problems() == [], what="end of the problem")


def test_node_is_locked_while_the_command_runs_so_that_no_job_shares_it(
    bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path
) -> None:
    begun, going_on = tmp_path / "begun", tmp_path / "going on"
    text = f"touch '{begun}'; until [ -e '{going_on}' ]; do sleep 0.1; done"
    bench.start(command(sshd, text, timeout=600))
    node_id = idle(bench, sshd.port, sshd.host_keys, username=USER)
    wait_for(begun.exists, what="the command")
    assert len(bench.zuul.contenders(node_id)) == 1
    _request_id, (node,) = bench.fulfilled("fake-label")
    assert node.id != node_id
    going_on.touch()
    wait_for(lambda: bench.zuul.contenders(node_id) == [], what="unlocked")


@pytest.mark.parametrize("event", ["launcher stops", "node deleted"])
def test_running_command_ends_with_the_launcher_and_with_its_node(
    bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path, event: str
) -> None:
    begun = tmp_path / "begun"
    pool = bench.start(command(sshd, f"touch '{begun}'; sleep 600", timeout=600))
    node_id = idle(bench, sshd.port, sshd.host_keys, username=USER)
    wait_for(begun.exists, what="the command")
    (probe,) = pool.probes._probes.values()
    if event == "launcher stops":
        bench.stop(pool)
    else:
        bench.zk.kazoo_client.delete(f"/nodepool/nodes/{node_id}", recursive=True)
        wait_for(lambda: not pool.probes._probes, what="end of the probe")
        wait_for(lambda: not pool.probes._commands.active, what="end of the program")
    assert probe.programs.stopped and not probe.programs
    assert probe.job is not None and probe.job.done()
