"""Which idle nodes are probed when and by whom, and what follows from a failure."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kazoo.exceptions import NoNodeError, NotEmptyError

from nodepool.config.model import Label, Probing
from nodepool.launcher.nodes import probes
from nodepool.launcher.nodes.probes import AGAIN, MANY, MOST_COMMANDS, PAUSE, WITNESSES, NodeProbes
from nodepool.nodescan import NodescanRequest
from nodepool.version import get_version_string
from nodepool.zk.records import DELETING, READY, Node
from nodepool.zk.writer import TransactionFailed, Txn
from tests.support.clock import HandClock

KEY = "ssh-ed25519 AAAA"
DEAD = TimeoutError("no answer")


class Scene:
    """A launcher's idle nodes; scans end when the test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = HandClock()
        self.nodes: dict[str, Node] = {}
        self.locked: set[str] = set()
        self.scans: dict[str, NodescanRequest] = {}
        self.pools: list[Any] = []
        self.drained: set[str] = set()
        self.announced: list[tuple[str | None, str]] = []
        self.refuse: BaseException | None = None
        self.unlocked: list[str | None] = []
        self.counted: list[str] = []
        self.label = Label()
        self.tree = SimpleNamespace(
            lock=threading.RLock(),
            get=self.nodes.get,
            nodes=self.nodes,
            lock_dirs=set(),
            is_locked=self.locked.__contains__,
            is_changing=lambda _id: False,
            idle={},
            unfit={},
        )
        self.zk = SimpleNamespace(
            connected=True,
            synced=True,
            node_tree=self.tree,
            kazoo_client=SimpleNamespace(full_path=lambda path: path),
            component_tree=SimpleNamespace(registered_pools=lambda: self.pools),
            writer=SimpleNamespace(submit=self.written),
            unlock_soon=self.unlock,
        )
        config = SimpleNamespace(
            labels={"a": self.label},
            providers={"p": None, "q": None},
            provider_managers={"p": None, "q": None},
        )
        self.state: Any = SimpleNamespace(
            clock=self.clock,
            zk=self.zk,
            config=config,
            workers={"ours": None},
            statsd=SimpleNamespace(incr=self.counted.append),
            drains=SimpleNamespace(of_node=lambda node: node.id in self.drained or None),
        )
        reconciler: Any = SimpleNamespace(
            announce=lambda _what, node, reason: self.announced.append((node.id, reason))
        )
        self.probes = NodeProbes(self.state, reconciler)
        scans: Any = SimpleNamespace(
            addRequest=lambda scan: self.scans.update({str(scan.node.id): scan}),
            removeRequest=lambda scan: scan and scan.cleanup(),
        )
        self.probes._scans = scans
        self.pool("ours")

    def pool(self, name: str, version: str | None = None, provider: str = "p") -> None:
        content = {"version": version or get_version_string()}
        self.pools.append(
            SimpleNamespace(id=name, provider_name=provider, name="main", content=content)
        )

    def node(self, number: int = 1, **values: Any) -> str:
        node = Node(f"{number:010}")
        node.state, node.type, node.provider, node.pool = READY, ["a"], "p", "main"
        node.interface_ip, node.connection_type, node.host_keys = "192.0.2.1", "ssh", [KEY]
        for name, value in {
            "launcher": "ours",
            "stat": SimpleNamespace(version=3),
            **values,
        }.items():
            setattr(node, name, value)
        self.nodes[f"{number:010}"] = node
        if (why := node.unfit()) is not None:
            self.tree.unfit[node.id] = why
        self.tree.idle[f"{number:010}"] = node
        return f"{number:010}"

    def written(self, txn: Txn, callback: Callable[..., None]) -> None:
        if self.refuse is not None:
            callback(None, self.refuse)
            return
        for _tree, path, record in txn.records.values():
            record.stat = SimpleNamespace(version=4)
            self.nodes[path.rpartition("/")[2]] = record
        callback([operation.path for operation in txn.operations], None)

    def unlock(self, node: Node) -> None:
        self.unlocked.append(node.lock and node.id)

    def step(self, node_id: str) -> float | None:
        return self.probes.reconcile(node_id)

    def next(self) -> str:
        """Return the node that is due next."""
        node_id = self.probes.queue.get()
        assert node_id is not None
        return node_id

    def begin(self, node_id: str) -> NodescanRequest:
        """Let the next probe of the node be due, and return its connection."""
        left = self.step(node_id)
        assert left is not None and node_id not in self.scans
        self.clock.now += left
        assert self.step(node_id) is None
        return self.scans[node_id]

    def end(self, node_id: str, error: BaseException | None = DEAD, key: str = KEY) -> float | None:
        """Let the connection end, in this way, and the probe do its next step."""
        scan = self.scans.pop(node_id)
        scan.keys[key.split()[0]] = key
        if error is not None:
            scan.fail(error)
        else:
            scan._finish()
        return self.step(node_id)

    def witnesses(self, **ends: Any) -> list[str]:
        """Let all witnesses answer; return them."""
        called = sorted(self.probes._witnesses)
        for node_id in called:
            assert self.step(node_id) is None
            self.end(node_id, **ends)
        return called


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_nodes_that_became_ready_together_are_probed_at_different_times(scene: Scene) -> None:
    firsts = [scene.step(scene.node(number)) or 0.0 for number in range(1000)]
    assert min(firsts) > 0 and max(firsts) <= 1800
    for start in range(0, 1800, 60):
        assert sum(start < first <= start + 60 for first in firsts) <= 2 * 1000 / 30


def test_node_that_answers_is_probed_again_after_the_interval_without_a_lock(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    assert scene.end(node_id, error=None) == pytest.approx(1800)
    assert scene.unlocked == []
    scene.clock.now += 1799.0
    assert scene.step(node_id) == pytest.approx(1)
    assert scene.scans == {}
    assert scene.counted == ["nodepool.provider.p.probe.ok"]


@pytest.mark.parametrize(
    "values",
    [
        {"state": "in-use"},
        {"allocated_to": "200-1"},
        {"host_keys": []},
        {"connection_type": "winrm"},
        {"connection_port": {"cluster": "k"}},
        {"interface_ip": None},
        {"provider": "removed"},
        {"type": ["unknown"]},
        {"host_keys": [7]},
    ],
    ids=str,
)
def test_node_is_not_probed(scene: Scene, values: dict[str, Any]) -> None:
    assert scene.step(scene.node(**values)) is None


def test_interval_of_zero_ends_the_probes_of_a_label(scene: Scene) -> None:
    scene.label.probe = Probing({"interval": 0})
    assert scene.step(scene.node()) is None


def test_changed_interval_is_used_immediately(scene: Scene) -> None:
    node_id = scene.node()
    scene.step(node_id)
    scene.label.probe = Probing({"interval": 2})
    left = scene.step(node_id)
    assert left is not None and left <= 2


def test_method_port_needs_no_key(scene: Scene) -> None:
    scene.label.probe = Probing({"method": "port"})
    node_id = scene.node(host_keys=[], connection_type="winrm")
    assert not scene.begin(node_id).gather_keys
    assert scene.end(node_id, error=None) == pytest.approx(1800)


def test_hosts_whose_keys_the_driver_does_not_read_are_not_probed(scene: Scene) -> None:
    node_id = scene.node()
    manager = SimpleNamespace(checksHost=lambda node: node.id != node_id)
    scene.state.config.provider_managers["p"] = manager
    assert scene.step(node_id) is None
    assert scene.step(scene.node(2)) is not None


def test_locked_node_is_probed_when_it_is_unlocked(scene: Scene) -> None:
    node_id = scene.node()
    scene.clock.now += scene.step(node_id) or 0
    scene.locked.add(node_id)
    assert scene.step(node_id) is None and scene.scans == {}
    scene.locked.clear()
    assert scene.step(node_id) is None and node_id in scene.scans


def test_node_that_an_operator_keeps_on_a_drained_host_is_not_replaced(scene: Scene) -> None:
    node_id = scene.node()
    scene.drained.add(node_id)
    scene.clock.now += scene.step(node_id) or 0
    assert scene.step(node_id) == pytest.approx(1800) and scene.scans == {}


@pytest.mark.parametrize(
    ("launcher", "pools", "ours"),
    [
        ("ours", [], True),
        ("another", [("another", None)], False),
        ("gone", [], True),
        ("static driver", [("a-smaller-one", None)], False),
        ("static driver", [("z-greater-one", None)], True),
        ("gone", [("a-smaller-one", "11.0.0")], True),
        ("old", [("old", "11.0.0")], True),
    ],
    ids=[
        "ours",
        "of another",
        "of one that has ended",
        "static, smaller id",
        "static, greater id",
        "11.0.0 beside us",
        "of 11.0.0",
    ],
)
def test_one_launcher_probes_the_node(
    scene: Scene, launcher: str, pools: list[tuple[str, str | None]], ours: bool
) -> None:
    node_id = scene.node(launcher=launcher)
    for pool in pools:
        scene.pool(*pool)
    scene.clock.now += scene.step(node_id) or 0
    assert scene.step(node_id) == (None if ours else pytest.approx(1800))
    assert (node_id in scene.scans) == ours


def test_node_that_fails_twice_is_replaced_with_the_reason(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    assert scene.end(node_id) == pytest.approx(PAUSE)
    assert scene.announced == []
    scene.clock.now += PAUSE + 1
    assert scene.step(node_id) is None
    scene.end(node_id)
    scene.step(node_id)
    assert scene.nodes[node_id].state == DELETING
    assert scene.announced == [(node_id, "its probe failed twice: no answer")]
    assert scene.unlocked == []  # with the same transaction
    assert scene.counted[-1] == "nodepool.provider.p.probe.replaced"
    assert scene.probes._probes == {}


def test_other_key_is_a_failure_and_one_known_key_is_enough(scene: Scene) -> None:
    node_id = scene.node(host_keys=["ssh-rsa BBBB", KEY])
    scene.begin(node_id)
    assert scene.end(node_id, error=None) == pytest.approx(1800)
    scene.begin(node_id)
    scene.end(node_id, error=None, key="ssh-ed25519 CCCC")
    scene.step(node_id)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    scene.end(node_id, error=None, key="ssh-ed25519 CCCC")
    ((_id, reason),) = scene.announced
    assert reason == (
        "its probe failed twice: 192.0.2.1 port 22 has other SSH host keys (ssh-ed25519) than when "
        "it was launched"
    )


def test_node_that_fails_once_is_kept_and_unlocked(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    scene.end(node_id)
    scene.step(node_id)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    assert scene.end(node_id, error=None) == pytest.approx(1800)
    assert scene.unlocked == [node_id] and scene.announced == []


def test_node_that_is_locked_or_changed_meanwhile_is_left_to_its_user(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    scene.refuse = TransactionFailed(1, NotEmptyError(), "/nodepool/nodes/1/lock")
    scene.end(node_id)
    assert scene.step(node_id) == pytest.approx(PAUSE)  # then it is probed again, if it is idle
    assert scene.announced == [] and scene.unlocked == []


@pytest.mark.parametrize("change", ["allocated", "locked", "deleted"])
def test_probe_ends_when_somebody_takes_the_node(scene: Scene, change: str) -> None:
    node_id = scene.node()
    scan = scene.begin(node_id)
    if change == "locked":
        scene.locked.add(node_id)
    elif change == "deleted":
        del scene.nodes[node_id]
    else:
        scene.node(1, allocated_to="200-1", stat=SimpleNamespace(version=4))
    scene.probes.node_changed(node_id, False)
    assert len(scene.probes.queue) == 1
    scene.step(node_id)
    assert scene.probes._probes == {} and scan._steps.gi_frame is None
    assert scene.unlocked == []


def test_drain_that_begins_during_a_probe_keeps_the_node(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    scene.end(node_id)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    scene.drained.add(node_id)
    scene.end(node_id)
    assert scene.announced == [] and scene.unlocked == [node_id]


def test_node_whose_lock_ended_with_our_session_is_not_written(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    scene.end(node_id)
    scene.step(node_id)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    scene.refuse = TransactionFailed(0, NoNodeError(), "/nodepool/nodes/1/lock/a")
    scene.end(node_id)
    assert scene.announced == [] and scene.nodes[node_id].state == READY
    assert scene.probes._probes == {}


def test_record_that_changes_under_our_lock_is_unlocked_and_not_replaced(scene: Scene) -> None:
    node_id = scene.node()
    scene.begin(node_id)
    scene.end(node_id)
    scene.step(node_id)
    scene.node(1, stat=SimpleNamespace(version=9))
    scene.step(node_id)
    assert scene.unlocked == [node_id] and scene.probes._probes == {}


def fail_twice(scene: Scene, node_id: str, **witnesses: Any) -> list[str]:
    scene.begin(node_id)
    scene.end(node_id)
    called = scene.witnesses(**witnesses)
    scene.step(node_id)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    scene.end(node_id)
    scene.step(node_id)
    return called


def test_no_node_is_replaced_while_most_of_the_provider_fail(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 31)]
    called = fail_twice(scene, ids[0])
    assert len(called) == WITNESSES
    assert scene.announced == [] and ids[0] in scene.unlocked
    (problem,) = scene.probes.problems()
    assert problem.text == "most idle nodes of provider p fail their probes: no answer"
    assert "network" in problem.help
    left = scene.step(ids[0])
    assert left is not None and left <= AGAIN
    scene.clock.now += left
    scene.step(ids[0])
    scene.end(ids[0], error=None)
    assert scene.probes.problems() == []


def test_problem_of_an_outage_ends_when_no_node_fails_any_more(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 31)]
    fail_twice(scene, ids[0])
    assert scene.probes.problems() != []
    scene.clock.now += 3 * AGAIN + 1
    assert scene.probes.problems() == []


def test_dead_node_is_replaced_if_others_of_its_provider_answer(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 31)]
    for number in range(31, 61):
        scene.node(number, provider="q")
    called = fail_twice(scene, ids[0], error=None)
    assert len(called) == WITNESSES and set(called) < set(ids)
    assert [node_id for node_id, _ in scene.announced] == [ids[0]]


def test_small_provider_is_compared_with_the_others(scene: Scene) -> None:
    node_id = scene.node()
    for number in range(31, 61):
        scene.node(number, provider="q")
    assert len(fail_twice(scene, node_id)) == WITNESSES
    assert scene.announced == []


def test_answers_before_the_failure_are_no_evidence_against_an_outage(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 201)]
    for node_id in ids[:100]:
        scene.begin(node_id)
        scene.end(node_id, error=None)
    scene.clock.now += 1
    fail_twice(scene, ids[150])
    assert scene.announced == []


def test_last_nodes_of_an_outage_are_kept_like_the_first(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 4)]
    scene.begin(ids[0])
    scene.end(ids[0])
    for node_id in ids[1:]:
        assert scene.step(node_id) is None
    scene.clock.now += 10
    for node_id in ids[1:]:
        scene.end(node_id)
    for node_id in ids:
        scene.clock.now += 15
        scene.step(node_id)
        scene.end(node_id)
    assert scene.announced == [] and sorted(map(str, scene.unlocked)) == ids


def test_nodes_of_other_launchers_are_witnesses(scene: Scene) -> None:
    scene.pool("another")
    ids = [scene.node(number, launcher="another") for number in range(2, 12)]
    assert len(fail_twice(scene, scene.node(1), error=None)) == WITNESSES
    assert set(scene.probes._due) <= {*ids, "0000000001"}
    assert len(scene.announced) == 1


def test_witness_that_somebody_has_just_locked_is_forgotten(scene: Scene) -> None:
    first, second = scene.node(1), scene.node(2)
    scene.begin(first)
    scene.end(first)
    scene.locked.add(second)
    assert scene.step(second) is None
    assert scene.probes._witnesses == set() and scene.scans == {}


def test_label_whose_idle_nodes_are_replaced_again_and_again_is_a_problem(scene: Scene) -> None:
    ids = [scene.node(number) for number in range(1, 31)]
    for node_id in ids[:MANY]:
        assert scene.probes.problems() == []
        fail_twice(scene, node_id, error=None)
        del scene.tree.idle[node_id]
    (problem,) = scene.probes.problems()
    assert problem.text == (
        "3 idle nodes of label a failed their probes within an hour and were replaced, the last "
        "one: its probe failed twice: no answer"
    )
    scene.clock.now += 7200
    assert scene.probes.problems() == []


def test_connections_at_a_time_are_limited() -> None:
    state: Any = SimpleNamespace(clock=HandClock())
    assert NodeProbes(state, state)._scans.MAX_REQUESTS == probes.MOST


OWNER = "NodePool:metastatic:meta"


def backing(scene: Scene, *users: str, version: int = 3, **data: Any) -> str:
    """Return a backing node with these nodes in its slots."""
    slots = {str(slot): user for slot, user in enumerate(users)}
    text = {"owner": OWNER, "label": "small", "slots": 4, "allocations": slots, **data}
    stat = SimpleNamespace(version=version)
    scene.locked.add("0000000090")  # by its user
    node_id = scene.node(90, state="in-use", user_data=json.dumps(text), stat=stat)
    del scene.tree.idle[node_id]
    return node_id


def slot(scene: Scene, number: int, **values: Any) -> str:
    """Return a node in a slot of the backing node."""
    place = {"backing_node": "0000000090", "slot": number}
    return scene.node(number, driver_data=place, **values)


def test_backing_node_that_fails_twice_gets_no_more_nodes(scene: Scene) -> None:
    node_id = backing(scene)
    fail_twice(scene, node_id)
    assert scene.nodes[node_id].state == "in-use" and scene.unlocked == []
    found = json.loads(scene.nodes[node_id].user_data)
    assert (found["failed"], found["reason"]) == (True, "its probe failed twice: no answer")
    assert (found["owner"], found["slots"]) == (OWNER, 4)
    assert scene.announced == [(node_id, "its probe failed twice: no answer")]
    assert scene.counted[-1] == "nodepool.provider.p.probe.replaced"
    assert scene.step(node_id) is None, "it is not probed any more"


def test_backing_node_is_probed_when_the_last_node_in_its_slots_has_ended(scene: Scene) -> None:
    user = slot(scene, 1, state="in-use")
    node_id = backing(scene, user)
    scene.clock.now += scene.step(node_id) or 0
    assert scene.step(node_id) is None and scene.scans == {}
    del scene.nodes[user]
    scene.probes.node_changed(node_id, True)
    assert len(scene.probes.queue) == 1
    assert scene.step(node_id) is None and node_id in scene.scans
    assert scene.end(node_id, error=None) == pytest.approx(1800)


def test_probe_of_a_backing_node_ends_when_a_slot_is_used(scene: Scene) -> None:
    node_id = backing(scene)
    scan = scene.begin(node_id)
    backing(scene, "0000000001", version=4)
    scene.step(node_id)
    assert scene.probes._probes == {} and scan._steps.gi_frame is None


def test_backing_node_that_is_used_between_two_failures_gets_no_more_nodes(scene: Scene) -> None:
    """Otherwise its jobs, which fail soon, would prevent each second probe."""
    node_id = backing(scene)
    scene.begin(node_id)
    scene.end(node_id)
    backing(scene, "0000000001", version=4)
    scene.step(node_id)
    assert scene.probes._probes == {}
    scene.clock.now += PAUSE
    assert scene.step(node_id) is None
    scene.end(node_id)
    scene.step(node_id)
    assert scene.announced == [(node_id, "its probe failed twice: no answer")]


def test_failure_of_a_backing_node_is_forgotten_when_it_answers_or_after_some_time(
    scene: Scene,
) -> None:
    node_id = backing(scene)
    for seconds, answer in ((PAUSE, None), (AGAIN + 1, DEAD)):
        scene.begin(node_id)
        scene.end(node_id)
        backing(scene, version=scene.nodes[node_id].version + 1)
        scene.step(node_id)
        scene.clock.now += seconds
        assert scene.step(node_id) is None
        scene.end(node_id, error=answer)
        assert scene.announced == []


def test_idle_slot_that_fails_twice_takes_its_backing_node_out_of_use(scene: Scene) -> None:
    first, second = slot(scene, 1), slot(scene, 2)
    used = slot(scene, 3, state="in-use")
    node_id = backing(scene, first, second, used)
    scene.state.config.labels["a"].probe = Probing({})
    scene.begin(first)
    scene.end(first)
    scene.witnesses(error=None)
    scene.step(first)
    scene.clock.now += PAUSE + 1
    scene.step(first)
    scene.end(first)
    scene.step(first)
    scene.step(first)
    reason = "its probe failed twice: no answer"
    assert scene.announced == [(node_id, reason), (first, reason)]
    assert json.loads(scene.nodes[node_id].user_data)["failed"] is True
    assert scene.nodes[first].state == DELETING and scene.nodes[used].state == "in-use"
    assert second in scene.probes._witnesses, "the others are probed now"


@pytest.mark.parametrize(
    "data",
    [
        {"failed": True},
        {"owner": "Zuul"},
        {"owner": 7},
        {"slots": "many"},
        {"slots": math.inf},
        {"allocations": 3},
    ],
    ids=str,
)
def test_node_in_use_that_is_no_usable_backing_node_is_not_probed(
    scene: Scene, data: dict[str, Any]
) -> None:
    assert scene.step(backing(scene, **data)) is None


def test_backing_node_of_a_launcher_that_does_not_know_probes_is_not_probed(scene: Scene) -> None:
    node_id = backing(scene)
    scene.pool("old", "11.0.0", provider="meta")
    assert scene.step(node_id) is None


def test_backing_and_idle_nodes_are_probed_within_an_interval_after_the_synchronization(
    scene: Scene,
) -> None:
    ids = {backing(scene), *(scene.node(number) for number in range(2, 40))}
    scene.probes.check_all()
    scene.probes.check_all()
    assert len(scene.probes.queue) == len(ids), "none is looked at now"
    scene.clock.now += scene.label.probe.interval
    assert {scene.step(scene.next()) for _ in ids} == {None}
    assert scene.scans.keys() == ids


def test_probes_that_wait_for_the_end_of_a_lock_are_checked_at_the_synchronization(
    scene: Scene,
) -> None:
    node_id, other = scene.node(), scene.node(2)
    scene.locked.add(node_id)
    left = scene.step(node_id)
    assert left is not None
    scene.clock.now += left
    assert scene.step(node_id) is None, "it is locked"
    scene.locked.clear()
    scene.probes.check_all()
    assert scene.next() == node_id and len(scene.probes.queue) == 1, other


def test_nodes_are_probed_more_often_with_a_shorter_interval(scene: Scene) -> None:
    node_id = scene.node()
    left = scene.step(node_id)
    assert left is not None
    scene.label.probe = Probing({"interval": scene.label.probe.interval // 100})
    scene.probes.check_all()
    scene.clock.now += scene.label.probe.interval
    again = scene.step(scene.next())
    assert again is not None and again <= scene.label.probe.interval


def test_no_node_is_scheduled_if_no_label_is_probed(scene: Scene) -> None:
    scene.node()
    scene.label.probe = Probing({"interval": 0})
    scene.probes.check_all()
    assert len(scene.probes.queue) == 0


def with_command(scene: Scene) -> list[Future[str | None]]:
    """Let nodes be probed with a command; return the commands that have begun, as they begin."""
    options = {"method": "command", "command": "true", "ssh-key": "/key"}
    scene.label.probe = Probing(options)
    jobs: list[Future[str | None]] = []

    def submit(*_args: Any) -> Future[str | None]:
        jobs.append(Future())
        return jobs[-1]

    scene.probes._commands = cast(Any, SimpleNamespace(submit=submit))
    return jobs


def test_commands_at_a_time_are_limited_and_the_next_begins_when_one_has_ended(
    scene: Scene,
) -> None:
    jobs = with_command(scene)
    ids = [scene.node(number) for number in range(1, MOST_COMMANDS + 2)]
    for node_id in ids:
        scene.step(node_id)
    scene.clock.now += 1800
    for node_id in ids:
        assert scene.step(node_id) is None
    assert len(jobs) == MOST_COMMANDS and ids[-1] not in scene.probes._probes
    queue = scene.probes.queue
    for _ in range(len(queue)):
        queue.done(queue.get() or "")
    jobs[0].set_result(None)
    scene.step(ids[0])
    assert {queue.get() for _ in range(len(queue))} == {ids[0], ids[-1]}
    scene.step(ids[-1])
    assert len(jobs) == MOST_COMMANDS + 1


def test_command_that_fails_twice_replaces_the_node_under_one_lock(scene: Scene) -> None:
    jobs = with_command(scene)
    node_id = scene.node()
    scene.clock.now += scene.step(node_id) or 0
    scene.step(node_id)
    jobs[0].set_result("status 3: full")
    assert scene.step(node_id) == pytest.approx(PAUSE)
    scene.clock.now += PAUSE + 1
    scene.step(node_id)
    jobs[1].set_result("status 3: full")
    scene.step(node_id)
    assert scene.announced == [(node_id, "its probe failed twice: status 3: full")]
    assert scene.unlocked == [] and scene.nodes[node_id].state == DELETING


def test_node_that_cannot_be_locked_for_its_command_is_left_to_its_user(scene: Scene) -> None:
    jobs = with_command(scene)
    node_id = scene.node()
    scene.clock.now += scene.step(node_id) or 0
    scene.refuse = TransactionFailed(1, NotEmptyError(), "/nodepool/nodes/1/lock")
    scene.step(node_id)
    assert scene.step(node_id) == pytest.approx(PAUSE)
    assert jobs == [] and scene.probes._probes == {} and scene.unlocked == []


def test_command_needs_the_address_and_the_keys_of_the_node(scene: Scene) -> None:
    jobs = with_command(scene)
    assert scene.step(scene.node(1, host_keys=[])) is None
    node_id = scene.node(2, interface_ip="a b")
    scene.clock.now += scene.step(node_id) or 0
    assert scene.step(node_id) == pytest.approx(PAUSE)
    assert jobs == [] and scene.counted == ["nodepool.provider.p.probe.failed"]


def test_only_new_idle_nodes_and_those_being_probed_are_checked(scene: Scene) -> None:
    node_id = scene.node()
    scene.probes.node_changed(node_id, False)
    assert len(scene.probes.queue) == 0
    scene.probes.node_changed(node_id, True)
    assert len(scene.probes.queue) == 1
    assert scene.probes.queue.get() == node_id
    scene.step(node_id)
    scene.probes.queue.done(node_id)
    scene.probes.node_changed(node_id, True)
    assert len(scene.probes.queue) == 0


def test_nothing_is_done_without_a_complete_mirror(scene: Scene) -> None:
    node_id = scene.node()
    scene.zk.synced = False
    assert scene.step(node_id) is None and scene.probes._due == {}
