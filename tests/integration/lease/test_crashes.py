"""The crash table of leases, with a launcher of ours and one of 11.0.0 (spec: lease, sections 3 and 5).

Both run in processes of their own, with a driver whose machines appear immediately.
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
from tests.support.launcher import Zuul
from tests.support.others import SERVE, configuration, running

#: Seconds in which both releases delete what was returned, and free what was allocated to a request that is gone.
SOON = 40.0
#: The same when it ended by itself: 11.0.0 looks each minute.
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
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Scene:
    """A launcher, and what clients see."""

    def __init__(self, chroot: Chroot, python: str, folder: pathlib.Path) -> None:
        self.chroot, self.folder = chroot, folder
        self.config = chroot.config(configuration(), timeout=4.0)
        self.launcher = Launcher(python, self.config, folder / "launcher.log")
        self.zk = ZooKeeper(chroot.connect(), enable_cache=False)
        self.zuul = Zuul(chroot.connect().client)
        self.leases = Leases(self.zk)

    def ready(self, count: int = 2) -> tuple[str, list[str]]:
        """Ask for a lease and wait until its nodes are ready; return its id and theirs."""
        lease_id = self.leases.ask(["small"] * count, ALICE).id
        wait_for(lambda: self.zk.getNodeRequest(lease_id).state == FULFILLED, SOON, f"nodes of {lease_id}")
        return lease_id, self.zk.getNodeRequest(lease_id).nodes

    def held(self, count: int = 2) -> Lease:
        return self.leases.hand_over(self.ready(count)[0], 600)

    def allocated(self, lease_id: str) -> list[Node]:
        return [node for node in self.zk.readNodes() if node.allocated_to == lease_id]

    def wait_free(self, lease_id: str) -> None:
        """Wait until nothing is left of a lease that nobody got; its nodes can be used again."""
        wait_for(lambda: self.zk.getNodeRequest(lease_id) is None, SOON, f"end of the request {lease_id}")
        wait_for(lambda: not self.allocated(lease_id), SOON, f"end of the allocation to {lease_id}")

    def wait_gone(self, *node_ids: str, timeout: float = SOON) -> None:
        wait_for(lambda: not set(node_ids) & set(self.zk.getNodes()), timeout, f"deletion of {node_ids}")

    def killed_at(self, moment: str) -> str:
        """Let a process ask for a lease, and kill it at a moment; return the id of the lease."""
        zookeeper = [self.chroot.connection, self.chroot.ca, self.chroot.cert, self.chroot.key]
        command = [sys.executable, "-m", asker.__name__, *zookeeper, moment]
        with running(command, self.folder / "asker.log", stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lease_id = process.stdout.readline().strip()
        assert lease_id, (self.folder / "asker.log").read_text()
        return lease_id


@pytest.fixture(scope="module", params=["ours", pytest.param("11.0.0", marks=pytest.mark.full)])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    python = sys.executable if request.param == "ours" else request.getfixturevalue("others")
    folder = tmp_path_factory.mktemp("launcher")
    for chroot in make_chroot(folder):
        scene = Scene(chroot, python, folder)
        yield scene
        scene.launcher.kill()


@pytest.fixture(autouse=True)
def nothing_is_left(scene: Scene) -> Iterator[None]:
    yield
    for lease in scene.leases.all():
        with suppress(LeaseError):
            scene.leases.give_back(lease.id)


def refused(reason: Reason, call: Callable[[], object]) -> None:
    with pytest.raises(LeaseError) as caught:
        call()
    assert caught.value.reason is reason, caught.value


@pytest.mark.parametrize("moment", ["waiting", "fulfilled", "locked"])
def test_lease_of_an_asker_that_dies_before_the_transaction_is_gone(scene: Scene, moment: str) -> None:
    lease_id = scene.killed_at(moment)
    scene.wait_free(lease_id)
    assert scene.leases.all() == []
    wait_for(lambda: not any(scene.zuul.contenders(node) for node in scene.zk.getNodes()), SOON, "end of all locks")


def test_lease_of_an_asker_that_dies_after_the_transaction_is_found_by_its_key(scene: Scene) -> None:
    lease_id = scene.killed_at("written")
    again = scene.leases.ask(asker.LABELS, asker.TERMS)
    assert (again.id, again.state, len(again.nodes)) == (lease_id, LeaseState.HELD, 2)
    nodes = [node.id or "" for node in again.nodes]
    wait_for(lambda: not any(map(scene.zuul.contenders, nodes)), SOON, "end of the locks")
    assert scene.leases.renew(lease_id, 3600).terms.renewed == 1
    assert scene.leases.give_back(lease_id)
    scene.wait_gone(*nodes)


def test_lease_of_a_killed_holder_ends_at_its_end(scene: Scene) -> None:
    """The command that holds an attached lease is killed; nobody can renew the lease in its last seconds."""
    command = [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "-c", scene.config, "lease", "small"]
    with running(command, scene.folder / "holder.log", stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert "until this command ends" in holder.stdout.readline(), (scene.folder / "holder.log").read_text()
    [lease] = scene.leases.all()
    [node] = lease.nodes
    assert lease.state is LeaseState.HELD and lease.ends is not None and lease.ends <= time.time() + 120
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


def test_lease_goes_on_without_a_node_that_is_deleted(scene: Scene) -> None:
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


def test_nothing_is_handed_over_if_a_node_changes_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    lease_id, nodes = scene.ready()
    run = scene.zk.writer.run

    def interfere(txn: Any) -> Any:
        scene.zuul.write_node(nodes[1], comment="somebody was here")
        return run(txn)

    monkeypatch.setattr(scene.zk.writer, "run", interfere)
    refused(Reason.UNAVAILABLE, lambda: scene.leases.hand_over(lease_id, 600))
    scene.wait_free(lease_id)
    assert scene.leases.all() == []


def test_nothing_is_handed_over_if_a_node_is_locked_by_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.lease.leases.HAND_OVER_LOCK", 0.2)
    lease_id, nodes = scene.ready()
    scene.zuul.lock(nodes[1])
    refused(Reason.UNAVAILABLE, lambda: scene.leases.hand_over(lease_id, 600))
    wait_for(lambda: len(scene.allocated(lease_id)) == 1, SOON, "the other node is free")
    [node] = scene.allocated(lease_id)
    assert (node.id, node.state) == (nodes[1], READY)
    scene.zuul.unlock(nodes[1])
    scene.wait_free(lease_id)


def test_nothing_is_handed_over_if_a_node_is_gone(scene: Scene) -> None:
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
