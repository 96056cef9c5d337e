"""What is measured: each scenario takes a Bench and returns figures by name."""

from __future__ import annotations

import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Callable
from statistics import median
from typing import Any

from tests.benchmark.harness import Bench, percentile
from tests.support import ports

Figures = dict[str, float]


def instant(count: int = 1, labels: list[str] | None = None, **pool: Any) -> dict[str, Any]:
    """A configuration with instant providers that all offer the same labels.

    One of these, *idle*, is that of nodes that no request wants.
    """
    labels = [*(labels or ["small"]), "idle"]
    return {
        "labels": [{"name": label} for label in labels],
        "providers": [
            {
                "name": f"p{i}",
                "driver": "instant",
                "pools": [{"name": "main", "labels": labels, **pool}],
            }
            for i in range(count)
        ],
    }


def fake(count: int, servers: int, min_ready: int = 0) -> dict[str, Any]:
    """Cloud-like providers: the fake driver, whose servers become active after 0.1 s."""
    return {
        "labels": [{"name": "small", "min-ready": min_ready}],
        "providers": [
            {
                "name": f"fake-{i}",
                "cloud": "fake",
                "rate": 0.0001,
                "cloud-images": [{"name": "Fake Precise"}],
                "pools": [
                    {
                        "name": "main",
                        "max-servers": servers,
                        "labels": [
                            {"name": "small", "cloud-image": "Fake Precise", "min-ram": 8192}
                        ],
                    }
                ],
            }
            for i in range(count)
        ],
    }


def ready_node(bench: Bench, samples: int = 20) -> Figures:
    """One request, a ready node waits."""
    bench.start(instant())
    zuul = bench.zuul
    times = []
    for _ in range(samples):
        zuul.create_nodes(1, type=["small"])
        time.sleep(0.3)
        request = zuul.submit(["small"])
        zuul.wait([request])
        times.append(zuul.latency(request))
        zuul.wait_gone(zuul.use([request]))
    return {"ready node: median ms": median(times), "ready node: 99th ms": percentile(times, 0.99)}


def launched(bench: Bench, count: int = 200, outstanding: int = 10) -> Figures:
    """One request after the other, ten outstanding, each node launched."""
    bench.start(instant())
    zuul = bench.zuul
    pending: list[str] = []
    times: list[float] = []
    for _ in range(count):
        pending.append(zuul.submit(["small"]))
        if len(pending) >= outstanding:
            first = pending.pop(0)
            zuul.wait([first])
            times.append(zuul.latency(first))
            zuul.use([first])
    zuul.wait(pending)
    return {"launched, 10 outstanding: median ms": median(times)}


def burst(bench: Bench) -> Figures:
    """All concurrently; then the nodes are used and deleted."""
    return _burst(bench, instant(), "burst")


def classic(count: int = 1) -> dict[str, Any]:
    """Providers of the `test` driver, written as for 11.0.0: no state machine, its launches
    block on ZooKeeper.
    """
    return {
        "labels": [{"name": "small"}],
        "providers": [
            {"name": f"p{i}", "driver": "test", "pools": [{"name": "main", "labels": ["small"]}]}
            for i in range(count)
        ],
    }


def classic_burst(bench: Bench) -> Figures:
    """The same through the classic handlers."""
    return _burst(bench, classic(), "classic")


def classic_threads(bench: Bench, count: int = 500) -> Figures:
    """Threads of the launcher after a burst for twenty pools of a classic driver."""
    bench.start(classic(20))
    start = time.monotonic()
    end = bench.zuul.wait(bench.zuul.submit_many([["small"]] * count))
    return {
        "classic, 20 pools: requests/s": count / (end - start),
        "classic, 20 pools: threads": bench.launcher.threads(),
    }


def _burst(bench: Bench, config: dict[str, Any], name: str, count: int = 1000) -> Figures:
    bench.start(config)
    zuul = bench.zuul
    zuul.wait(warm := [zuul.submit(["small"])])
    zuul.wait_gone(zuul.use(warm))
    counters, reads, updates, cpu = (
        bench.server.counters(),
        zuul.reads,
        zuul.updates,
        bench.launcher.cpu(),
    )
    start = time.monotonic()
    ids = zuul.submit_many([["small"]] * count)
    end = zuul.wait(ids)
    threads = bench.launcher.threads()
    zuul.wait_gone(zuul.use(ids))
    time.sleep(0.5)
    used = bench.launcher.cpu() - cpu
    after = bench.server.counters()
    return {
        f"{name}: requests/s": count / (end - start),
        f"{name}: CPU ms per node": used / count * 1000,
        f"{name}: transactions per node": (
            after["update"] - counters["update"] - (zuul.updates - updates)
        )
        / count,
        f"{name}: reads per node": (after["read"] - counters["read"] - (zuul.reads - reads))
        / count,
        f"{name}: threads": threads,
    }


def cloud_burst(bench: Bench) -> Figures:
    """The burst over twenty cloud-like providers that together have a server for each request."""
    return _burst(bench, fake(20, 20), "burst over 20 clouds", 400)


def metastatic(bench: Bench, count: int = 500) -> Figures:
    """Slots over backing nodes of 64 slots."""
    config = instant(labels=["backing"])
    config["labels"].append({"name": "slot"})
    config["providers"].append(
        {
            "name": "meta",
            "driver": "metastatic",
            "pools": [
                {
                    "name": "main",
                    "labels": [
                        {"name": "slot", "backing-label": "backing", "max-parallel-jobs": 64}
                    ],
                }
            ],
        }
    )
    bench.start(config)
    start = time.monotonic()
    end = bench.zuul.wait(bench.zuul.submit_many([["slot"]] * count))
    return {"500 metastatic slots: s": end - start}


def many_providers(bench: Bench, count: int = 500) -> Figures:
    """Twenty providers with the same five labels."""
    labels = [f"label{i}" for i in range(5)]
    bench.start(instant(20, labels))
    start = time.monotonic()
    end = bench.zuul.wait(bench.zuul.submit_many([[labels[i % 5]] for i in range(count)]))
    return {"500 requests, 20 providers: s": end - start}


def clouds(bench: Bench, count: int = 200) -> Figures:
    """Ten cloud-like providers of 20 servers."""
    bench.start(fake(10, 20))
    start = time.monotonic()
    end = bench.zuul.wait(bench.zuul.submit_many([["small"]] * count))
    return {"200 requests, 10 clouds: s": end - start}


def steady(bench: Bench, idle: int = 10_000, rate: float = 10.0, seconds: float = 15.0) -> Figures:
    """A steady stream alongside idle nodes."""
    bench.start(instant())
    zuul = bench.zuul
    name = f"{rate:g}/s beside {idle} idle"
    figures: Figures = {}
    if idle:
        zuul.create_nodes(idle)
        time.sleep(8.0)
        cpu, start = bench.launcher.cpu(), time.monotonic()
        time.sleep(60.0)  # with all that is done once a minute
        figures[f"idle CPU beside {idle} nodes: %"] = (
            (bench.launcher.cpu() - cpu) / (time.monotonic() - start) * 100
        )
        figures[f"memory with {idle} nodes: MB"] = bench.launcher.memory()
    zuul.wait(warm := [zuul.submit(["small"])])
    zuul.use(warm)
    cpu, start = bench.launcher.cpu(), time.monotonic()
    ids: list[str] = []
    open_ids: list[str] = []
    while time.monotonic() - start < seconds:
        request = zuul.submit(["small"])
        ids.append(request)
        open_ids.append(request)
        finished = [i for i in open_ids if i in zuul.ended]
        if finished:
            zuul.use(finished)
            open_ids = [i for i in open_ids if i not in finished]
        time.sleep(max(0.0, start + len(ids) / rate - time.monotonic()))
    zuul.wait(ids)
    zuul.use(open_ids)
    time.sleep(1.0)
    figures[f"{name}: median ms"] = median(zuul.latency(i) for i in ids)
    figures[f"{name}: CPU ms per node"] = (bench.launcher.cpu() - cpu) / len(ids) * 1000
    return figures


def unservable(bench: Bench, count: int = 2000, pools: int = 20) -> Figures:
    """Requests that wait for full pools."""
    bench.start(instant(pools, **{"max-servers": 1}))
    zuul = bench.zuul
    zuul.wait(zuul.submit_many([["small"]] * pools))
    zuul.submit_many([["small"]] * count)
    time.sleep(8.0)
    cpu, start = bench.launcher.cpu(), time.monotonic()
    time.sleep(10.0)
    return {
        "2000 waiting, 20 pools: CPU %": (bench.launcher.cpu() - cpu)
        / (time.monotonic() - start)
        * 100
    }


def memory(bench: Bench) -> Figures:
    """Two providers at rest."""
    bench.start(fake(2, 10))
    time.sleep(3.0)
    return {"memory, 2 providers: MB": bench.launcher.memory()}


def restart(bench: Bench, nodes: int = 500, waiting: int = 250) -> Figures:
    """SIGKILL with nodes in all states and requests waiting, then a new process."""
    bench.start(instant(4, **{"max-servers": 200}), timeout=4.0)
    zuul = bench.zuul
    first = zuul.submit_many([["small"]] * (nodes // 2))
    zuul.wait(first)
    states = ("ready", "hold", "used", "in-use", "building", "deleting", "failed", "aborted")
    each = nodes // 2 // len(states)
    made = {state: zuul.create_nodes(each, state=state, external_id=None) for state in states}
    doomed = [
        i for state, ids in made.items() if state not in ("ready", "hold") for i in ids
    ] + zuul.use(first[:100])
    ids = zuul.submit_many([["small"]] * waiting)
    time.sleep(0.15)
    bench.launcher.kill()
    time.sleep(0.5)
    done = sum(1 for i in ids if i in zuul.ended)
    start = time.monotonic()
    bench.run_launcher()
    end = zuul.wait(ids)
    later = sorted(zuul.ended[i][0] for i in ids if zuul.ended[i][0] > start)
    zuul.wait_gone(doomed)
    return {
        "restart: first decision s": (later[0] if later else end) - start,
        "restart: all served s": end - start,
        "restart: served before the kill": float(done),
    }


def urgent(bench: Bench, waiting: int = 2000) -> Figures:
    """A full provider, thousands waiting, then an urgent request and capacity."""
    bench.start(instant(1, **{"max-servers": 20}))
    zuul = bench.zuul
    first = zuul.submit_many([["small"]] * 20)
    zuul.wait(first)
    zuul.submit_many([["small"]] * waiting, priority="300")
    time.sleep(6.0)
    request = zuul.submit(["small"], priority="100")
    time.sleep(0.3)
    start = time.monotonic()
    # The one paused for quota comes first; the urgent one is served with the next free capacity.
    zuul.use(first[:2])
    zuul.wait([request], timeout=120)
    return {"urgent among 2000: ms": (zuul.ended[request][0] - start) * 1000}


def large(bench: Bench, nodes: int = 50_000, waiting: int = 20_000) -> Figures:
    """A launcher starts alongside idle nodes of one pool and requests for another one, which is
    full; a third one has nothing to do.
    """
    port = ports.reserve()
    bench.environment["NODEPOOL_BENCHMARK_WEB"] = str(port)
    config = instant(3)
    config["labels"] += [{"name": "full"}, {"name": "quick"}]
    config["providers"][1]["pools"][0] |= {"labels": ["full"], "max-servers": 1}
    config["providers"][2]["pools"][0] |= {"labels": ["quick"]}
    bench.start(config)
    zuul = bench.zuul
    zuul.wait([zuul.submit(["full"])])
    bench.launcher.stop()
    for _ in range(nodes // 5000):
        zuul.create_nodes(5000)
    for _ in range(waiting // 5000):
        zuul.submit_many([["full"]] * 5000)
    start = time.monotonic()
    bench.run_launcher()
    while not answers(port, "/ready", 120):
        time.sleep(0.05)
    figures = {
        "start beside 50000: s": time.monotonic() - start,
        "start beside 50000: CPU s": bench.launcher.cpu(),
    }
    time.sleep(20.0)
    cpu, start = bench.launcher.cpu(), time.monotonic()
    time.sleep(60.0)
    used = bench.launcher.cpu() - cpu
    figures["idle beside 50000: CPU %"] = used / (time.monotonic() - start) * 100
    figures["memory beside 50000: MB"] = bench.launcher.memory()
    times = []
    for _ in range(10):
        request = zuul.submit(["quick"], priority="100")
        zuul.wait([request])
        times.append(zuul.latency(request))
        zuul.use([request])
        time.sleep(0.2)
    figures["urgent at an idle pool beside 50000: median ms"] = median(times)
    figures["urgent at an idle pool beside 50000: most ms"] = max(times)
    for path in ("/node-list", "/api/v1/overview"):
        start = time.monotonic()
        assert answers(port, path, 120)
        figures[f"{path} of 50000: s"] = time.monotonic() - start
    start = time.monotonic()
    subprocess.run(
        [pathlib.Path(bench.python).with_name("nodepool"), "-c", bench.config_path, "list"],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    figures["nodepool list of 50000: s"] = time.monotonic() - start
    return figures


def answers(port: int, path: str, timeout: float) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout) as answer:
            answer.read()
            return True
    except OSError:
        return False


def static_pressure(bench: Bench, hosts: int, waiting: int = 2000, slots: int = 50) -> Figures:
    """All slots of static hosts are in use, thousands wait; then all slots become free together."""
    bench.start(
        {
            "labels": [{"name": "small"}],
            "providers": [
                {
                    "name": "static",
                    "driver": "static",
                    "pools": [
                        {
                            "name": "main",
                            "nodes": [
                                {
                                    "name": f"fake-host-{i}",
                                    "labels": ["small"],
                                    "max-parallel-jobs": slots // hosts,
                                }
                                for i in range(hosts)
                            ],
                        }
                    ],
                }
            ],
        }
    )
    zuul = bench.zuul
    first = zuul.submit_many([["small"]] * slots)
    zuul.wait(first)
    crowd = zuul.submit_many([["small"]] * waiting, priority="300")
    time.sleep(4.0)
    urgent = zuul.submit(["small"], priority="100")
    time.sleep(0.5)
    cpu, before, reads, updates = (
        bench.launcher.cpu(),
        bench.server.counters(),
        zuul.reads,
        zuul.updates,
    )
    zuul.use(first)
    start = zuul.used_at
    zuul.wait_any(crowd, slots - 1)
    zuul.wait([urgent])
    ends = sorted(zuul.ended[i][0] for i in [*crowd, urgent] if i in zuul.ended)
    time.sleep(0.5)
    after = bench.server.counters()
    name = f"{slots} static slots of {hosts} host{'s' if hosts > 1 else ''}"
    return {
        f"{name}: all in use again, ms": (ends[slots - 1] - start) * 1000,
        f"{name}: urgent, ms": (zuul.ended[urgent][0] - start) * 1000,
        f"{name}: CPU ms per node": (bench.launcher.cpu() - cpu) / slots * 1000,
        f"{name}: transactions per node": (
            after["update"] - before["update"] - (zuul.updates - updates)
        )
        / slots,
        f"{name}: reads per node": (after["read"] - before["read"] - (zuul.reads - reads)) / slots,
    }


SCENARIOS: dict[str, Callable[[Bench], Figures]] = {
    "ready": ready_node,
    "launched": launched,
    "burst": burst,
    "classic": classic_burst,
    "classic-threads": classic_threads,
    "metastatic": metastatic,
    "providers": many_providers,
    "clouds": clouds,
    "cloud-burst": cloud_burst,
    "steady": lambda bench: steady(bench, 0),
    "idle10000": steady,
    "unservable": unservable,
    "idle50000": large,
    "memory": memory,
    "restart": restart,
    "urgent": urgent,
    "static-pressure": lambda bench: static_pressure(bench, 50),
    "static-pressure-one-host": lambda bench: static_pressure(bench, 1),
}
