"""What runs on the create loop of a provider, and what elsewhere (LAU-10)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.base.clock import SYSTEM
from nodepool.base.problems import LabelProblems
from nodepool.driver.statemachine.launcher import StateMachineNodeLauncher
from nodepool.driver.statemachine.loop import MachineLoop
from nodepool.driver.statemachine.model import StateMachine
from nodepool.exceptions import OfferRefusedException, QuotaException
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle
from tests.conftest import wait_for


class Healthy(StateMachine):
    """A launch under way; counts its passes."""

    passes = 0

    def advance(self) -> None:
        self.passes += 1


class Refused(StateMachine):
    def advance(self) -> None:
        raise RuntimeError("HTTP 400")


class Adapter:
    """The second attempt of label "bad" has to ask the cloud, which is slow."""

    def __init__(self) -> None:
        self.healthy = Healthy()
        self.asked_by: list[str] = []
        self.answered = threading.Event()

    def plannedExternalId(self, _label: Any, _node_id: str) -> None:
        return None

    def getCreateStateMachine(self, _hostname: str, label: Any, *_args: Any) -> StateMachine:
        if label.name == "good":
            return self.healthy
        self.asked_by.append(threading.current_thread().name)
        if len(self.asked_by) == 2:
            assert self.answered.wait(20)
        return Refused()


class Manager:
    MAXIMUM_SLEEP = 0.01

    clock = SYSTEM

    def __init__(self, quick: bool) -> None:
        self.starts_quickly = quick
        self.adapter = Adapter()
        self.label_problems = LabelProblems("p")
        self.nodescan_worker = SimpleNamespace(removeRequest=lambda _request: None)
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="start")
        self.start_executor = self.executor.submit
        self.create_loop = MachineLoop("create-loop", logging.getLogger("test"))
        self.create_loop.start()

    def note_start(self, _seconds: float) -> None:
        """Stays as it is."""

    def quotaNeededByLabel(self, *_args: Any) -> Any:
        return SimpleNamespace(get_resources=dict)

    def launch(self, name: str, prepare: bool = False) -> StateMachineNodeLauncher:
        image = SimpleNamespace(
            name="i",
            username="",
            python_path="",
            shell_type="",
            connection_port=22,
            connection_type="ssh",
        )
        label = SimpleNamespace(name=name, diskimage=None, cloud_image=image)
        handler: Any = SimpleNamespace(
            pw=SimpleNamespace(
                nodepool=SimpleNamespace(
                    statsd=None,
                    launch_failures=SimpleNamespace(
                        failed=lambda *_args: False, succeeded=lambda *_args: None
                    ),
                ),
                progress=lambda _handler: None,
            ),
            manager=self,
            zk=SimpleNamespace(
                storeNode=lambda _node: None, feed=None, cluster=SimpleNamespace(id="")
            ),
            launchesComplete=lambda: True,
            request=SimpleNamespace(event_id="e", id="r", requestor="x"),
            pool=SimpleNamespace(name="pool", labels={name: label}),
        )
        node = zk.Node("0001")
        node.type, node.state, node.provider = [name], zk.BUILDING, "p"
        launcher = StateMachineNodeLauncher(
            handler, node, SimpleNamespace(name="p", launch_retries=3, launch_timeout=100)
        )
        if prepare:
            launcher.prepare()
        launcher.launch()
        return launcher


@pytest.fixture(params=[False, True], ids=["first on a thread", "first on the loop"])
def manager(request: pytest.FixtureRequest) -> Iterator[Manager]:
    manager = Manager(request.param)
    yield manager
    manager.adapter.answered.set()
    manager.create_loop.stop(drain=False)
    manager.create_loop.join(20)
    manager.executor.shutdown()


@pytest.mark.spec("LAU-10: neither loop may block on slow calls")
def test_further_attempts_do_not_hold_up_other_launches(manager: Manager) -> None:
    adapter = manager.adapter
    manager.launch("good")
    wait_for(lambda: adapter.healthy.passes)
    bad = manager.launch("bad")
    wait_for(lambda: len(adapter.asked_by) == 2, what="the second attempt")
    passes = adapter.healthy.passes
    wait_for(lambda: adapter.healthy.passes > passes + 5, 5, "the healthy launch goes on")
    assert not bad.complete
    adapter.answered.set()
    wait_for(lambda: bad.complete, what="the end of the bad launch")
    assert (bad.node.state, bad.attempts) == (zk.FAILED, 3)
    assert all(name.startswith("start") for name in adapter.asked_by[1:])


@pytest.mark.parametrize(("refusals", "most", "attempts"), [(5, 9, 8), (99, 2, 5)])
def test_refused_offers_use_up_no_attempt_up_to_a_limit(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, refusals: int, most: int, attempts: int
) -> None:
    """Afterwards three attempts fail for another reason, or the refusals count as attempts."""
    monkeypatch.setattr("nodepool.driver.statemachine.launcher.MOST_REFUSED", most)
    manager.adapter.answered.set()
    left = [OfferRefusedException("sold out; another offer will be tried")] * refusals

    def advance(_machine: Refused) -> None:
        raise left.pop() if left else RuntimeError("HTTP 400")

    monkeypatch.setattr(Refused, "advance", advance)
    launcher = manager.launch("bad")
    wait_for(lambda: launcher.complete, what="the end of the launch")
    assert (launcher.node.state, launcher.attempts) == (zk.FAILED, attempts)


@pytest.mark.parametrize("errors", [1, 4])
def test_a_node_that_could_not_be_filled_is_filled_by_its_launch(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, errors: int
) -> None:
    """Its request and the other nodes continue; an error that stays ends each attempt."""
    left = [KeyError("flavor")] * errors

    def needed(*_args: Any) -> Any:
        if left:
            raise left.pop()
        return SimpleNamespace(get_resources=dict)

    monkeypatch.setattr(manager, "quotaNeededByLabel", needed)
    launcher = manager.launch("good", prepare=True)
    if errors == 1:
        wait_for(lambda: manager.adapter.healthy.passes)
        assert launcher.attempts == 1 and launcher.node.image_id == "i"
    else:
        wait_for(lambda: launcher.complete)
        assert (launcher.node.state, launcher.attempts, left) == (zk.FAILED, 3, [])


class Observed(zk.Node):
    """What a reader would find at the moment at which the state is written."""

    seen: tuple[Any, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and value in (zk.READY, zk.ABORTED):
            self.__dict__["seen"] = (value, self.unsaved)
        super().__setattr__(name, value)


@pytest.mark.spec(
    "LAU-7.4: a request is fulfilled together with the state of its nodes, however close they come"
)
@pytest.mark.parametrize("state", [zk.READY, zk.ABORTED])
def test_who_sees_the_end_of_a_launch_knows_that_it_is_to_be_written(
    manager: Manager, state: str
) -> None:
    """The pool checks all nodes of a request when one is ready; another may become ready at
    that moment.
    """
    launcher = manager.launch("good")
    node = Observed("0002")
    node.type, node.state = ["good"], zk.BUILDING
    launcher.node = node
    launcher._end(state, None, save=True)
    assert node.seen == (state, True)


class Short(StateMachine):
    """A machine that was created before the quota refused the rest."""

    def advance(self) -> None:
        self.external_id = "i-1"
        raise QuotaException("no address left")


def test_machine_that_exists_when_the_quota_refuses_the_rest_is_known_for_its_deletion(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "invalidateQuotaCache", lambda: None, raising=False)
    monkeypatch.setattr(
        manager, "refusals", SimpleNamespace(failed=lambda *_args, **_options: None), raising=False
    )
    monkeypatch.setattr(manager.adapter, "healthy", Short())
    launcher = manager.launch("good")
    wait_for(lambda: launcher.complete)
    assert (launcher.node.state, launcher.node.external_id) == (zk.ABORTED, "i-1")


def test_id_of_a_machine_is_written_again_if_zookeeper_did_not_take_it(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def submit(txn: Any, then: Any) -> None:
        written.append(txn.record)
        then(None, ConnectionLoss()) if len(written) == 1 else then([], None)

    class Transaction(SimpleNamespace):
        def check(self, _path: str) -> None: ...

        def set(self, _path: str, _data: bytes, tree: Any, record: zk.Node) -> None:
            self.record = record.external_id

    monkeypatch.setattr("nodepool.driver.statemachine.launcher.Txn", lambda _client: Transaction())
    launcher = manager.launch("good")
    wait_for(lambda: manager.adapter.healthy.passes)
    client = {
        "kazoo_client": None,
        "node_tree": None,
        "_nodePath": str,
        "writer": SimpleNamespace(submit=submit),
    }
    vars(launcher.zk).update(client)
    launcher.node.lock = LockHandle("/lock", "/lock/1", 1)
    manager.adapter.healthy.external_id = "i-1"
    launcher.wake()
    wait_for(lambda: written == ["i-1", "i-1"], what="the second attempt")
