"""No pool keeps a request that another could serve, and no two requests keep each other's nodes
(LAU-4 to LAU-6).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.launcher.requests import moves
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider, reason_for

# The fake cloud makes SDK exceptions in a way that SDK 5 will not know any more.
pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")

ALPHA, BETA = (
    provider("fake-alpha", pool={"max-servers": 2}),
    provider("fake-beta", pool={"max-servers": 6}),
)


def served_by(bench: LauncherBench, *ids: str) -> list[str]:
    """Wait until all are fulfilled; the provider of each node, sorted."""
    return sorted(
        bench.node(node_id).provider
        for i in ids
        for node_id in bench.wait_request(i, "fulfilled")["nodes"]
    )


def paused(pool: Any, name: str) -> bool:
    return bool(pool.getPoolWorkers(name)[0].paused_handlers)


@pytest.mark.spec(
    "issue 11, users 5 hoarding: eight at once are served at once by a pool of two and one of six"
)
@pytest.mark.parametrize("launchers", [1, 2])
def test_all_that_fit_are_served_immediately(bench: LauncherBench, launchers: int) -> None:
    if launchers == 1:
        bench.start(config(ALPHA, BETA))
    else:
        for name, entry in (("one.yaml", ALPHA), ("two.yaml", BETA)):
            bench.start(config(entry), name=name)
        wait_for(lambda: all(len(p.zk.getRegisteredPools()) == 2 for p in bench.pools))
    ids = [bench.submit("fake-label") for _ in range(8)]
    assert served_by(bench, *ids) == ["fake-alpha"] * 2 + ["fake-beta"] * 6
    # Nobody has capacity: as in 11.0.0 it is pending somewhere, and is served by whoever has
    # capacity first.
    ninth = bench.submit("fake-label")
    bench.wait_request(ninth, "pending")
    bench.use_up(
        next(
            i for i in ids if bench.node(bench.zuul.request(i)["nodes"][0]).provider == "fake-beta"
        )
    )
    assert served_by(bench, ninth) == ["fake-beta"]


@pytest.mark.spec(
    "issue 11, users 5 hoarding: a request that waits at a full pool goes to one that gets room, "
    "nodes and all"
)
def test_a_paused_request_moves_to_a_pool_with_capacity(bench: LauncherBench) -> None:
    pool = bench.start(config(ALPHA, BETA))
    held = {
        name: [
            bench.ready_node(name, "main", "fake-label", state="hold", resources={"instances": 1})
            for _ in range(count)
        ]
        for name, count in (("fake-alpha", 1), ("fake-beta", 6))
    }
    bench.wait_nodes(7)
    waiting = bench.submit("fake-label", "fake-label")
    bench.wait_request(waiting, "pending")
    wait_for(lambda: paused(pool, "fake-alpha") or paused(pool, "fake-beta"))
    if paused(pool, "fake-alpha"):
        bench.wait_nodes(1, state="ready", allocated_to=waiting)
        first, second = "fake-beta", "fake-alpha"
    else:
        first, second = "fake-alpha", "fake-beta"
    bench.zuul.write_node(held[first].pop().id, state="used")
    if first == "fake-beta":
        bench.zuul.write_node(held[first].pop().id, state="used")
    assert served_by(bench, waiting) == [first] * 2
    assert not paused(pool, second)
    wait_for(
        lambda: not any(p.paused for p in bench.zk.getRegisteredPools()),
        what="open again for everybody",
    )


@pytest.mark.spec(
    "LAU-4: a request waits a while for a better pool before a worse one has it, but not for ever"
)
def test_a_request_does_not_wait_for_ever_for_a_better_pool(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.requests.moves.PATIENCE", 0.5)
    bench.start(
        config(
            provider("fake-better", priority=1, pool={"max-servers": 1}),
            provider("fake-worse", priority=2),
        )
    )
    assert served_by(bench, bench.submit("fake-label")) == ["fake-better"]
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    assert served_by(bench, waiting) == ["fake-worse"]


@pytest.mark.spec(
    "LAU-4: a request that was sent for by a worse pool goes there, although its nodes make the "
    "better one look open"
)
@pytest.mark.parametrize("names", [("fake-worse", "fake-worst"), ("fake-worst", "fake-worse")])
def test_a_request_with_nodes_moves_to_the_best_pool_with_capacity(
    bench: LauncherBench, names: tuple[str, str]
) -> None:
    priorities = {"fake-worse": 2, "fake-worst": 3}
    others = [provider(name, priority=priorities[name]) for name in names]
    pool = bench.start(
        config(provider("fake-better", priority=1, pool={"max-servers": 2}), *others)
    )
    bench.ready_node("fake-better", "main", "fake-label", state="hold", resources={"instances": 1})
    bench.wait_nodes(1)
    waiting = bench.submit("fake-label", "fake-label")
    wait_for(
        lambda: paused(pool, "fake-better"),
        what="a request that holds one node and waits for another",
    )
    since = time.monotonic()
    assert served_by(bench, waiting) == ["fake-worse"] * 2
    assert time.monotonic() - since < moves.PATIENCE + 5


@pytest.mark.spec(
    "issue 11, users 5 hoarding: a request waits here for a pool of another launcher that gets room"
)
def test_a_paused_request_moves_to_another_launcher(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.requests.moves.OTHERS_TURN", 0.5)
    one = bench.start(config(provider("fake-one", pool={"max-servers": 1})), name="one.yaml")
    first, _nodes = bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    bench.start(config(provider("fake-two", pool={"max-servers": 1})), name="two.yaml")
    assert served_by(bench, waiting) == ["fake-two"]
    assert not paused(one, "fake-one")
    assert bench.zuul.request(first)["state"] == "fulfilled"


@pytest.mark.spec(
    "issue 11, B15: two paused requests with half of their nodes each: the worse one gives way"
)
@pytest.mark.parametrize("pools", [1, 2])
def test_paused_requests_do_not_hold_each_others_nodes(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, pools: int
) -> None:
    """In one pool, or in two of one provider."""
    # In the order of those that are in force. Tries that are refused are at last further apart than
    # a standstill and the ticks of two pools, whatever their phases are; who yields rests until
    # the other one has tried again.
    monkeypatch.setattr("nodepool.launcher.requests.moves.STANDSTILL", 0.5)
    monkeypatch.setattr("nodepool.launcher.requests.moves.LONG_REST", 8.0)
    monkeypatch.setattr("nodepool.driver.statemachine.stage.REFUSED", Backoff(0.1, 3.0))
    names = ["main", "other"][:pools]
    bench.quota(instances=8)
    pool = bench.start(config(provider(pools=[{"name": n, "labels": [f"l-{n}"]} for n in names])))
    adapter, cloud, gate = (
        bench.adapter("fake-provider"),
        bench.cloud("fake-provider"),
        threading.Event(),
    )
    original, lock, made = adapter._createServer, threading.Lock(), {"100": 0, "200": 0}

    def create(hostname: str, *args: Any, **options: Any) -> Any:
        """At first there is capacity for two nodes of each request, afterwards for four
        altogether.
        """
        priority = bench.node(hostname[2:]).allocated_to[:3]
        assert gate.wait(10)
        with lock:
            if (made[priority] == 2 and made != {"100": 2, "200": 2}) or len(
                cloud._server_list
            ) >= 4:
                raise RuntimeError("Quota exceeded")
            if made != {"100": 2, "200": 2}:
                made[priority] += 1
            return original(hostname, *args, **options)

    monkeypatch.setattr(adapter, "_createServer", create)
    better = bench.submit(*[f"l-{names[0]}"] * 4, priority="100")
    worse = bench.submit(*[f"l-{names[-1]}"] * 4, priority="200")
    for request_id in (better, worse):
        bench.wait_request(request_id, "pending")
    bench.wait_nodes(8)
    gate.set()
    bench.wait_request(better, "fulfilled", timeout=30)
    assert bench.zuul.request(worse)["state"] in ("requested", "pending")
    bench.use_up(better)
    bench.wait_request(worse, "fulfilled", timeout=30)
    assert pool.getReadiness()[0]


@pytest.mark.spec(
    "issue 11, B5: a full static pool of better priority overflows to a cloud, of this launcher or "
    "another"
)
@pytest.mark.parametrize("launchers", [1, 2])
def test_a_full_static_pool_overflows(bench: LauncherBench, launchers: int) -> None:
    hosts = {
        "name": "static",
        "driver": "static",
        "priority": 10,
        "pools": [
            {
                "name": "main",
                "nodes": [
                    {
                        "name": "fake-host-1",
                        "labels": ["both"],
                        "host-key-checking": False,
                        "connection-type": "winrm",
                    }
                ],
            }
        ],
    }
    cloud = provider("fake-cloud", labels=["both"], priority=20)
    if launchers == 1:
        bench.start({**config(cloud), "providers": [hosts, cloud]})
    else:
        bench.start({"labels": [{"name": "both"}], "providers": [hosts]}, name="one.yaml")
        bench.start(config(cloud), name="two.yaml")
        wait_for(lambda: all(len(p.zk.getRegisteredPools()) == 2 for p in bench.pools))
    bench.wait_nodes(1, state="ready")
    first = bench.submit("both")
    assert served_by(bench, first) == ["static"]
    assert served_by(bench, bench.submit("both"), bench.submit("both")) == ["fake-cloud"] * 2
    bench.zuul.give_back(*bench.zuul.accept(first))
    bench.wait_nodes(1, provider="static", state="ready")
    wait_for(
        lambda: not any(p.paused for p in bench.zk.getRegisteredPools()),
        what="open again for everybody",
    )
    assert served_by(bench, bench.submit("both")) == ["static"]


def test_label_without_capacity_closes_a_static_pool_for_that_label_only(
    bench: LauncherBench,
) -> None:
    def host(name: str, label: str) -> dict[str, Any]:
        return {
            "name": name,
            "labels": [label],
            "host-key-checking": False,
            "connection-type": "winrm",
        }

    hosts = [host("fake-host-a", "a"), *(host(f"fake-host-b{i}", "b") for i in range(3))]
    static = {
        "name": "static",
        "driver": "static",
        "priority": 10,
        "pools": [{"name": "main", "nodes": hosts}],
    }
    bench.start({"labels": [{"name": "a"}, {"name": "b"}], "providers": [static]}, name="one.yaml")
    two = bench.start(config(provider("fake-cloud", labels=["b"], priority=50)), name="two.yaml")
    bench.wait_nodes(4, state="ready")
    assert served_by(bench, bench.submit("a")) == ["static"]
    bench.submit("a")  # waits for its host

    def registered() -> Any:
        return next((p for p in two.zk.getRegisteredPools() if p.provider_name == "static"), None)

    wait_for(lambda: registered().full_labels == {"a"}, what="the full label published")
    assert not registered().paused
    assert served_by(bench, *(bench.submit("b") for _ in range(3))) == ["static"] * 3
    # All labels are full: everything goes elsewhere, also requests that a launcher of 11.0.0
    # serves.
    assert served_by(bench, bench.submit("b")) == ["fake-cloud"]
    wait_for(lambda: registered().paused, what="paused published")


def open_pool_elsewhere(bench: LauncherBench) -> Any:
    """A pool of another launcher that looks open and takes nothing, as one of 11.0.0 whose
    static nodes are all in use.
    """
    from nodepool.zk.components import PoolComponent

    (pool,) = bench.pools
    theirs = PoolComponent(bench.zk.client, "elsewhere")
    theirs.content.update(
        id="theirs",
        name="main",
        provider_name="p",
        state="running",
        supported_labels=["fake-label"],
    )
    theirs.register()
    wait_for(lambda: len(pool.zk.getRegisteredPools()) == 2)
    return theirs


@pytest.mark.spec(
    "issue 11, users 5 hoarding: room promised to a request that goes elsewhere is free at once"
)
def test_a_promise_to_a_lost_request(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("requests.assignment.OTHERS_TURN", "pools.worker.FORGET"):
        monkeypatch.setattr(f"nodepool.launcher.{name}", 60.0)
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    theirs = open_pool_elsewhere(bench)
    submit, held = pool.zk.writer.submit, []  # type: ignore[var-annotated]
    monkeypatch.setattr(
        pool.zk.writer, "submit", lambda *args: submit(*args) if held else held.append(args)
    )
    lost = bench.submit("fake-label")
    wait_for(lambda: held)
    second = bench.submit("fake-label")
    wait_for(lambda: "another launcher can serve it" in reason_for(pool.assignment, second))
    bench.zuul.cancel(lost)
    submit(*held[0])
    bench.wait_request(second, "fulfilled")
    theirs.unregister()


@pytest.mark.spec(
    "issue 11, users 5 hoarding: what a pool of another launcher does not take is kept after a "
    "while"
)
def test_another_launcher_that_does_not_take_it(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.requests.assignment.OTHERS_TURN", 0.5)
    pool = bench.start(
        config(provider("fake-one", labels=["fake-label", "idle"], pool={"max-servers": 1}))
    )
    theirs = open_pool_elsewhere(bench)
    _first, (idle,) = bench.fulfilled("idle")
    bench.zuul.cancel(_first)
    wait_for(lambda: bench.node(idle.id).allocated_to is None)
    # It is kept at last, and capacity is freed for it.
    waiting = bench.submit("fake-label")
    wait_for(lambda: "another launcher can serve it" in reason_for(pool.assignment, waiting))
    assert served_by(bench, waiting) == ["fake-one"]
    assert idle.id not in bench.zk.getNodes()
    theirs.unregister()


@pytest.mark.spec(
    "issue 11, A1: a driver that raises when it is asked whether it could serve a waiting request "
    "stops nobody"
)
@pytest.mark.parametrize("where", ["getRequestHandler", "labelReady"])
def test_a_driver_that_raises_when_it_is_asked(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pool = bench.start(
        config(
            provider("fake-one", pool={"max-servers": 1}),
            provider("fake-two", pool={"max-servers": 1}),
            provider("fake-three", labels=["other"]),
        )
    )
    first, second = bench.fulfilled("fake-label")[0], bench.fulfilled("fake-label")[0]
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    name = next(n for n in ("fake-one", "fake-two") if paused(pool, n))
    other = {"fake-one": "fake-two", "fake-two": "fake-one"}[name]
    asked: list[int] = []

    def fail(*_args: Any) -> None:
        asked.append(1)
        raise RuntimeError("induced")

    with monkeypatch.context() as patch:
        patch.setattr(pool.getProviderManager(other), where, fail)
        bench.use_up(
            next(
                i
                for i in (first, second)
                if bench.node(bench.zuul.request(i)["nodes"][0]).provider == other
            )
        )
        wait_for(lambda: asked)
        bench.fulfilled("other")
        assert bench.zuul.request(waiting)["state"] == "pending"
    bench.use_up(next(i for i in (first, second) if bench.zuul.request(i) is not None))
    bench.wait_request(waiting, "fulfilled")


@pytest.mark.spec(
    "issue 11, B15: so do requests of two launchers in one pool, also when the other one is of "
    "11.0.0"
)
def test_a_request_gives_way_to_one_of_another_launcher(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nodepool.driver")
    monkeypatch.setattr("nodepool.launcher.requests.moves.STANDSTILL", 0.5)
    pool = bench.start(config(provider(pool={"max-servers": 3})))
    # Theirs is pending, locked, and has one of two nodes.
    theirs = bench.submit("fake-label", "fake-label", priority="100", state="pending")
    directory = f"/nodepool/requests-lock/{theirs}"
    bench.zuul.client.ensure_path(directory)
    bench.zuul.client.create(f"{directory}/{'b' * 32}__lock__", ephemeral=True, sequence=True)
    for values in ({"allocated_to": theirs}, {"state": "hold"}):
        node = bench.ready_node(
            "fake-provider", "main", "fake-label", resources={"instances": 1}, **values
        )
        bench.zuul.lock(node.id)
    bench.wait_nodes(2)
    ours = bench.submit("fake-label", "fake-label")
    bench.wait_request(ours, "pending")
    wait_for(
        lambda: f"Releasing request and nodes: request {theirs}, which comes first" in caplog.text
    )
    bench.wait_request(ours, "requested", "pending")
    bench.zuul.give_back(*list(bench.zuul.locks))
    bench.zuul.cancel(theirs)
    bench.wait_request(ours, "fulfilled")
    assert not paused(pool, "fake-provider")
