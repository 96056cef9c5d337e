"""The crash table of leases, with a launcher of ours and one of 11.0.0 (spec: lease, sections 3 and
5).

Both run in separate processes, with a driver whose machines appear immediately.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from nodepool.lease import Lease, LeaseError, Leases, LeaseState, Reason, Terms
from nodepool.zk.records import DELETING, FULFILLED, READY, USED, Node
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, make_chroot, wait_for
from tests.integration.lease import asker
from tests.support.embedded import Server
from tests.support.launcher import Zuul
from tests.support.others import SERVE, configuration, running

#: Seconds in which both releases delete what was returned, and free what was allocated to a request
#: that no longer exists.
SOON = 40.0
#: The same when it ended automatically: 11.0.0 looks each minute.
LATE = 90.0
ALICE = Terms("alice", "unix:1000", "debug #12")


class Launcher:
    """A launcher that can be killed, paused and started again."""

    def __init__(self, python: str, config: str, log: pathlib.Path) -> None:
        self._command, self._log = [python, SERVE, config], log
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self._process = self._stack.enter_context(running(self._command, self._log))

    def kill(self) -> None:
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        try:
            wait_for(self._is_stopped, what="each thread is stopped")
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        threads = pathlib.Path(f"/proc/{self._process.pid}/task").iterdir()
        return {
            (thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads
        } == {"T"}


class Scene:
    """A launcher, and what clients see."""

    def __init__(self, chroot: Chroot, python: str, folder: pathlib.Path) -> None:
        self.chroot, self.folder = chroot, folder
        self.config = chroot.config(configuration(), timeout=4.0)
        self.launcher = Launcher(python, self.config, folder / "launcher.log")
        self.connect()

    def connect(self) -> None:
        self.zk = ZooKeeper(self.chroot.connect(), enable_cache=False)
        self.zuul = Zuul(self.chroot.connect().client)
        self.leases = Leases(self.zk)

    def disconnect(self) -> None:
        for client in self.chroot.clients:
            client.disconnect()
        self.chroot.clients.clear()

    def ready(self, count: int = 2) -> tuple[str, list[str]]:
        """Ask for a lease and wait until its nodes are ready; return its id and theirs."""
        lease_id = self.leases.ask(["small"] * count, ALICE).id
        wait_for(
            lambda: self.zk.getNodeRequest(lease_id).state == FULFILLED,
            SOON,
            f"nodes of {lease_id}",
        )
        return lease_id, self.zk.getNodeRequest(lease_id).nodes

    def held(self, count: int = 2) -> Lease:
        return self.leases.hand_over(self.ready(count)[0], 600)

    def allocated(self, lease_id: str) -> list[Node]:
        return [node for node in self.zk.readNodes() if node.allocated_to == lease_id]

    def wait_free(self, lease_id: str) -> None:
        """Wait until nothing is left of a lease that nobody got; its nodes can be used again."""
        wait_for(
            lambda: self.zk.getNodeRequest(lease_id) is None, SOON, f"end of the request {lease_id}"
        )
        wait_for(lambda: not self.allocated(lease_id), SOON, f"end of the allocation to {lease_id}")

    def wait_gone(self, *node_ids: str, timeout: float = SOON) -> None:
        wait_for(
            lambda: not set(node_ids) & set(self.zk.getNodes()), timeout, f"deletion of {node_ids}"
        )

    @contextmanager
    def asker(self, moment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """Let a process ask for a lease, and wait at a moment; it is killed at the end of the
        block.
        """
        zookeeper = [self.chroot.connection, self.chroot.ca, self.chroot.cert, self.chroot.key]
        command = [sys.executable, asker.__file__, *zookeeper, moment]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with running(command, self.folder / "asker.log", **pipes) as process:
            assert process.stdout is not None
            lease_id = process.stdout.readline().strip()
            assert lease_id, (self.folder / "asker.log").read_text()
            yield process, lease_id

    def impatient_holder(self) -> list[str]:
        """Return a command that holds a lease and renews it twice a second."""
        program = (
            "import sys; from nodepool.cmd import nodepoolcmd; from nodepool.cmd.commands import "
            "lease;"
            "lease.RENEW_EVERY = lease.RETRY = 0.5; sys.exit(nodepoolcmd.main(sys.argv[1:]))"
        )
        return [
            sys.executable,
            "-c",
            program,
            "-c",
            self.config,
            "lease",
            "small",
            "--",
            "sleep",
            "120",
        ]

    def wait_renewed(self, more_than: int = 0) -> Lease:
        """Wait until the only lease was renewed more often."""

        def renewed() -> Lease | None:
            leases = self.leases.all()
            return leases[0] if len(leases) == 1 and leases[0].terms.renewed > more_than else None

        found: Lease = wait_for(renewed, SOON, "a renewal")
        return found


@pytest.fixture(scope="module", params=["ours", pytest.param("11.0.0", marks=pytest.mark.full)])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    python = sys.executable if request.param == "ours" else request.getfixturevalue("others")
    folder = tmp_path_factory.mktemp("launcher")
    for chroot in make_chroot(folder):
        scene = Scene(chroot, python, folder)
        yield scene
        scene.launcher.kill()


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    yield shared
    for lease in shared.leases.all():
        with suppress(LeaseError):
            shared.leases.give_back(lease.id)


def refused(reason: Reason, call: Callable[[], object]) -> None:
    with pytest.raises(LeaseError) as caught:
        call()
    assert caught.value.reason is reason, caught.value


@pytest.mark.parametrize("moment", ["waiting", "fulfilled", "locked"])
def test_lease_of_an_asker_that_dies_before_the_transaction_is_deleted(
    scene: Scene, moment: str
) -> None:
    with scene.asker(moment) as (_process, lease_id):
        pass
    scene.wait_free(lease_id)
    assert scene.leases.all() == []
    wait_for(
        lambda: not any(scene.zuul.contenders(node) for node in scene.zk.getNodes()),
        SOON,
        "end of all locks",
    )


def test_lease_of_an_asker_that_dies_after_the_transaction_is_found_by_its_key(
    scene: Scene,
) -> None:
    with scene.asker("written") as (_process, lease_id):
        pass
    again = scene.leases.ask(asker.LABELS, asker.TERMS)
    assert (again.id, again.state, len(again.nodes)) == (lease_id, LeaseState.HELD, 2)
    nodes = [node.id or "" for node in again.nodes]
    wait_for(lambda: not any(map(scene.zuul.contenders, nodes)), SOON, "end of the locks")
    assert scene.leases.renew(lease_id, 3600).terms.renewed == 1
    assert scene.leases.give_back(lease_id)
    scene.wait_gone(*nodes)


def test_asker_that_sleeps_longer_than_its_session_gets_nothing(scene: Scene) -> None:
    """It is stopped between locking and the transaction; its nodes belong to others when it
    continues.
    """
    with scene.asker("locked") as (process, lease_id):
        process.send_signal(signal.SIGSTOP)
        scene.wait_free(lease_id)
        nodes = {node.id for node in scene.held().nodes}
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for(lambda: process.poll() is not None, SOON, "end of the asker")
        assert process.returncode == 1
    assert "LeaseError" in (scene.folder / "asker.log").read_text()
    [lease] = scene.leases.all()
    assert {node.id for node in lease.nodes} == nodes and lease.id != lease_id


@pytest.mark.timeout(300)
def test_holder_that_sleeps_longer_than_its_lease_stops_its_command(scene: Scene) -> None:
    command = scene.impatient_holder()
    log = scene.folder / "paused-holder.log"
    with running(command, log, stdout=subprocess.PIPE) as holder:
        lease = scene.wait_renewed()
        holder.send_signal(signal.SIGSTOP)
        node = lease.nodes[0].id or ""
        wait_for(lambda: not scene.zuul.contenders(node), SOON, "end of the lock of a renewal")
        scene.zuul.write_node(node, state_time=time.time() - 3600)
        scene.wait_gone(node, timeout=LATE)
        holder.send_signal(signal.SIGCONT)
        wait_for(lambda: holder.poll() is not None, SOON, "end of the holder")
    assert (holder.returncode, "has ended" in log.read_text()) == (6, True)


@pytest.mark.timeout(300)
def test_lease_of_a_killed_holder_ends_at_its_end(scene: Scene) -> None:
    """The command that holds an attached lease is killed; nobody can renew the lease in its last
    seconds.
    """
    command = [
        sys.executable,
        "-m",
        "nodepool.cmd.nodepoolcmd",
        "-c",
        scene.config,
        "lease",
        "small",
    ]
    with running(command, scene.folder / "holder.log", stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert "until this command ends" in holder.stdout.readline(), (
            scene.folder / "holder.log"
        ).read_text()
    [lease] = scene.leases.all()
    [node] = lease.nodes
    assert (
        lease.state is LeaseState.HELD
        and lease.ends is not None
        and lease.ends <= time.time() + 120
    )
    with scene.launcher.paused():
        scene.zuul.write_node(node.id or "", hold_expiration=14)
        refused(Reason.TOO_LATE, lambda: scene.leases.renew(lease.id, 600))
        scene.zuul.write_node(node.id or "", hold_expiration=120, state_time=time.time() - 120)
    scene.wait_gone(node.id or "", timeout=LATE)
    refused(Reason.ENDED, lambda: scene.leases.renew(lease.id, 600))


def test_lease_survives_the_death_of_the_launcher(scene: Scene) -> None:
    """It is handed over, renewed and returned while there is no launcher."""
    older = scene.held(1)
    lease_id, nodes = scene.ready()
    scene.launcher.kill()
    lease = scene.leases.hand_over(lease_id, 600)
    assert lease.state is LeaseState.HELD and scene.leases.renew(older.id, 3600).terms.renewed == 1
    scene.launcher.start()
    # The launcher has begun to work when it serves a request.
    other = scene.held(1)
    assert {found.id for found in scene.leases.all()} == {older.id, lease_id, other.id}
    scene.launcher.kill()
    assert scene.leases.give_back(lease_id)
    scene.launcher.start()
    scene.wait_gone(*nodes)


def test_lease_that_is_returned_twice_is_returned_once(scene: Scene) -> None:
    lease = scene.held()
    nodes = [node.id or "" for node in lease.nodes]
    with scene.launcher.paused():
        assert [scene.leases.give_back(lease.id) for _ in range(2)] == [True, False]
        assert [scene.zuul.node(node)["state"] for node in nodes] == [USED, USED]
    scene.wait_gone(*nodes)
    assert not scene.leases.give_back(lease.id)


def test_lease_continues_without_a_node_that_is_deleted(scene: Scene) -> None:
    lease = scene.held()
    deleted, left = (node.id or "" for node in lease.nodes)
    scene.zuul.write_node(deleted, state=DELETING)
    scene.wait_gone(deleted)
    found = scene.leases.renew(lease.id, 3600)
    assert ([node.id for node in found.nodes], found.lost) == ([left], 1)
    scene.zuul.write_node(left, state=DELETING)
    scene.wait_gone(left)
    refused(Reason.ENDED, lambda: scene.leases.renew(lease.id, 3600))
    assert not scene.leases.give_back(lease.id)


def test_nothing_is_handed_over_if_a_node_changes_meanwhile(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_id, nodes = scene.ready()
    run = scene.zk.writer.run

    def interfere(txn: Any) -> Any:
        scene.zuul.write_node(nodes[1], comment="somebody was here")
        return run(txn)

    monkeypatch.setattr(scene.zk.writer, "run", interfere)
    refused(Reason.UNAVAILABLE, lambda: scene.leases.hand_over(lease_id, 600))
    scene.wait_free(lease_id)
    assert scene.leases.all() == []


def test_nothing_is_handed_over_if_a_node_is_locked_by_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.lease.leases.HAND_OVER_LOCK", 0.2)
    lease_id, nodes = scene.ready()
    scene.zuul.lock(nodes[1])
    refused(Reason.UNAVAILABLE, lambda: scene.leases.hand_over(lease_id, 600))
    wait_for(lambda: len(scene.allocated(lease_id)) == 1, SOON, "the other node is free")
    [node] = scene.allocated(lease_id)
    assert (node.id, node.state) == (nodes[1], READY)
    scene.zuul.unlock(nodes[1])
    scene.wait_free(lease_id)


def test_nothing_is_handed_over_if_a_node_was_deleted(scene: Scene) -> None:
    lease_id, nodes = scene.ready()
    scene.zuul.write_node(nodes[0], state=DELETING)
    scene.wait_gone(nodes[0])
    refused(Reason.ENDED, lambda: scene.leases.hand_over(lease_id, 600))
    scene.wait_free(lease_id)
    assert scene.leases.all() == []


def test_nothing_is_handed_over_if_the_request_is_canceled(scene: Scene) -> None:
    lease_id, _nodes = scene.ready()
    scene.zuul.cancel(lease_id)
    refused(Reason.NOT_FOUND, lambda: scene.leases.hand_over(lease_id, 600))
    scene.wait_free(lease_id)


@pytest.mark.full
def test_lease_survives_a_change_of_the_release_and_back(
    zk_chroot: Chroot, others: str, tmp_path: pathlib.Path
) -> None:
    scene = Scene(zk_chroot, others, tmp_path)
    leases = [scene.held()]
    for python in (sys.executable, others, None):
        scene.launcher.kill()
        if python is not None:
            scene.launcher = Launcher(python, scene.config, tmp_path / "launcher.log")
            leases.append(scene.held(1))
        assert {lease.id for lease in scene.leases.all()} == {lease.id for lease in leases}
    assert all(scene.leases.give_back(lease.id) for lease in leases)
    scene.launcher.start()
    scene.wait_gone(*scene.zk.getNodes())
    scene.launcher.kill()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", ["ours", "11.0.0"])
def test_lease_and_its_holder_survive_the_absence_of_zookeeper(
    release: str, others: str, tmp_path: pathlib.Path
) -> None:
    server = Server(tmp_path)
    files = server.client_files()
    chroot = Chroot(
        f"127.0.0.1:{server.port}", "/t", files["ca"], files["cert"], files["key"], tmp_path
    )
    chroot.connect().client.ensure_path("/")
    scene = Scene(chroot, sys.executable if release == "ours" else others, tmp_path)
    ends = scene.held(1)
    [overdue] = [node.id or "" for node in ends.nodes]
    log = tmp_path / "holder.log"
    try:
        with running(scene.impatient_holder(), log, stdout=subprocess.PIPE) as holder:
            wait_for(
                lambda: [lease.state for lease in scene.leases.all()] == [LeaseState.HELD] * 2,
                SOON,
                "the lease",
            )
            scene.zuul.write_node(overdue, hold_expiration=5)
            end = time.time() + 5
            scene.disconnect()
            server.kill()
            wait_for(lambda: time.time() > end, SOON, "the end of one lease, and of all sessions")
            server.start()
            scene.connect()
            scene.wait_gone(overdue, timeout=LATE)
            lease = scene.wait_renewed()
            scene.wait_renewed(lease.terms.renewed)
            assert holder.poll() is None, log.read_text()
            holder.terminate()
            wait_for(lambda: holder.poll() is not None, SOON, "end of the holder")
        assert scene.leases.all() == []
        scene.wait_gone(*scene.zk.getNodes())
    finally:
        scene.launcher.kill()
        scene.disconnect()
        server.kill()
