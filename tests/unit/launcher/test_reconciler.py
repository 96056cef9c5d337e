"""Which nodes are checked, and nodes that expire unused: a problem while it repeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.driver.backing.records import METASTATIC
from nodepool.launcher.nodes import reconciler
from nodepool.launcher.nodes.reconciler import DELETABLE, UNUSED, NodeReconciler
from nodepool.zk import paths
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.records import HOLD, INIT, READY, TESTING, Node
from tests.support.clock import HandClock


class Expiring:
    """A reconciler whose ready nodes expire when the test lets them."""

    def __init__(self, min_ready: int, age: int) -> None:
        self.clock, label = HandClock(), SimpleNamespace(min_ready=min_ready, max_ready_age=age)
        zk = SimpleNamespace(
            feed=None, change_unlocked=lambda _seen, _changed, written: written(None)
        )
        state: Any = SimpleNamespace(
            clock=self.clock, config=SimpleNamespace(labels={"a": label}), zk=zk
        )
        self.nodes = NodeReconciler(state, lambda: 1.0)
        self.problems = self.nodes.problems

    def expire(self, *labels: str, reason: str = UNUSED) -> None:
        node = Node("0000000001")
        node.type = list(labels)
        self.nodes.discard(node, reason)


def test_third_round_of_expired_nodes_is_a_problem_until_it_is_long_ago() -> None:
    made = Expiring(2, 3600)
    for number in range(6):
        assert made.problems() == []
        made.expire("a", "removed")
        made.expire("a", reason="its instance does not exist")
        made.clock.now += 3600 * (number % 2)
    (problem,) = made.problems()
    assert (
        problem.text
        == "6 ready nodes of label a expired unused within 4 h (max-ready-age 1 h) and were "
        "replaced"
    )
    assert problem.help == "raise `max-ready-age` of the label, or lower its `min-ready`"
    made.clock.now += 3600
    assert made.problems() == []


def test_nodes_that_are_not_launched_again_are_no_problem() -> None:
    made = Expiring(0, 3600)
    for _ in range(20):
        made.expire("a")
    assert made.problems() == []


def stat_of(node_id: str) -> Any:
    return SimpleNamespace(version=0, czxid=int(node_id), mzxid=int(node_id))


def node_of(number: int, **values: Any) -> Node:
    node = Node(f"{number:010}")
    node.provider, node.type, node.state = "cloud", ["plain"], READY
    for name, value in values.items():
        setattr(node, name, value)
    return node


VARIANTS: list[dict[str, Any]] = [
    {},
    {"requestor": "NodePool:min-ready"},
    {"requestor": f"{METASTATIC}cloud"},
    {"requestor": VERIFIER},
    {"requestor": VERIFIER, "allocated_to": "100-1"},
    {"allocated_to": "100-1"},
    {"allocated_to": "100-2"},
    {"type": ["aging"]},
    {"type": ["plain", "aging"]},
    {"type": ["unknown"]},
    *({"state": state} for state in sorted(DELETABLE | {HOLD, INIT, TESTING})),
]


@pytest.mark.spec("every node with a step to do is found also without an event")
@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("locked", [False, True])
def test_check_of_all_nodes_omits_only_those_without_a_step(
    monkeypatch: pytest.MonkeyPatch, drained: bool, locked: bool
) -> None:
    nodes = {f"{number:010}": node_of(number, **one) for number, one in enumerate(VARIANTS)}
    drain = SimpleNamespace(keep_idle=False)
    client: Any = None
    tree = NodeTree(client)
    tree.empty.add("0000000100")
    for node_id, node in nodes.items():
        tree.store_own([node_id], paths.node(node_id), node, stat_of(node_id))
        if locked:
            name = "0123456789abcdef__lock__0000000000"
            tree.appeared([node_id, "lock", name], f"{paths.node_lock(node_id)}/{name}")
    state: Any = SimpleNamespace(
        clock=HandClock(),
        server_time=SimpleNamespace(ahead=lambda: 0.0),
        zk=SimpleNamespace(node_tree=tree, connected=True, synced=True, feed=None),
        config=SimpleNamespace(
            labels={
                "plain": SimpleNamespace(max_ready_age=0),
                "aging": SimpleNamespace(max_ready_age=3600),
            },
            providers={"cloud": None},
            provider_managers={"cloud": object()},
            max_hold_age=3600,
        ),
        drains=SimpleNamespace(
            all=lambda: [drain] if drained else [], of_node=lambda _node: drain if drained else None
        ),
    )
    made = NodeReconciler(state, lambda: 1.0)
    steps: list[str | None] = []
    for name in ("discard", "_change", "_delete", "_init"):
        monkeypatch.setattr(made, name, lambda node, *_args, **_kw: steps.append(node.id))
    monkeypatch.setattr(made, "_request_missing", lambda request: request == "100-2")
    monkeypatch.setattr(reconciler, "shown", lambda _drain: "drained")
    checked: list[str] = []
    monkeypatch.setattr(made.queue, "add_all", checked.extend)
    made.check_all()
    for node_id in nodes:
        steps.clear()
        if made.reconcile(node_id) is not None or steps:
            assert node_id in checked, VARIANTS[int(node_id)]
    assert "0000000100" in checked
    assert ("0000000000" in checked) == (drained and not locked)
    assert len(checked) == 1 if locked else len(checked) > 10
    checked.clear()
    state.config = None
    made.check_all()
    assert checked == []
