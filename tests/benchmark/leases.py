"""Leases: granted and returned through the API, and held. The launcher, ZooKeeper and the
clients share the machine.
"""

from __future__ import annotations

import subprocess
import threading
import time
from statistics import median

from nodepool.client import Pool
from tests.benchmark.harness import Bench
from tests.benchmark.scenarios import Figures, instant

#: Figure -> (limit, whether smaller is better).
LEASE_TARGETS: dict[str, tuple[float, bool]] = {
    "leases granted and returned per s": (150, False),
    "ready node alongside leases: ratio of medians": (1.2, True),
    "1000 leases held: CPU %": (0.5, True),
    "1000 leases held: more ZooKeeper operations per minute": (2, True),
}
#: Leases per second while Zuul asks for ready nodes.
RATE = 150.0
BODY = {"labels": ["small"], "for": 600, "wait": 30}


class Borrower(threading.Thread):
    """Leases a node and returns it, again and again, with the calls of our client."""

    def __init__(self, path: str, stop: threading.Event) -> None:
        super().__init__(name="borrower", daemon=True)
        self.pool = Pool(f"unix://{path}")
        self.stopping = stop
        self.count = 0
        #: Leases per second; None: as many as possible.
        self.rate: float | None = None
        self.error = ""

    def run(self) -> None:
        due = 0.0
        try:
            while not self.stopping.is_set():
                lease = self.pool.call("POST", "/leases", BODY)
                assert lease["state"] == "held", lease
                self.pool.call("DELETE", f"/leases/{lease['id']}")
                self.count += 1
                if self.rate is not None:
                    due = max(due + 1 / self.rate, time.monotonic() - 1 / self.rate)
                    self.stopping.wait(max(0.0, due - time.monotonic()))
        except Exception as error:
            self.error = str(error)


def _latencies(bench: Bench, samples: int) -> list[float]:
    """Milliseconds of requests for a ready node of a separate label."""
    times = []
    for _ in range(samples):
        bench.zuul.create_nodes(1, type=["idle"])
        time.sleep(0.2)
        request = bench.zuul.submit(["idle"])
        bench.zuul.wait([request])
        times.append(bench.zuul.latency(request))
        bench.zuul.wait_gone(bench.zuul.use([request]))
    return times


def leases(bench: Bench, borrowers: int = 8, seconds: float = 10.0, samples: int = 30) -> Figures:
    """Grant and return as many leases as possible, then `RATE` while Zuul asks for ready nodes;
    the launcher has one core.
    """
    path = str(bench.work / "api.sock")
    bench.environment["NODEPOOL_BENCHMARK_SOCKET"] = path
    bench.start(instant())
    subprocess.run(
        ["taskset", "-a", "-p", "-c", "0", str(bench.launcher.process.pid)],
        check=True,
        capture_output=True,
    )
    _latencies(bench, 3)
    alone = _latencies(bench, samples)
    stop = threading.Event()
    threads = [Borrower(path, stop) for _ in range(borrowers)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    before, cpu, began = (
        sum(thread.count for thread in threads),
        bench.launcher.cpu(),
        time.monotonic(),
    )
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    done, used = sum(thread.count for thread in threads) - before, bench.launcher.cpu() - cpu
    for thread in threads:
        thread.rate = RATE / borrowers
    time.sleep(1)
    before, began = sum(thread.count for thread in threads), time.monotonic()
    beside = _latencies(bench, samples)
    rate = (sum(thread.count for thread in threads) - before) / (time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join(60)
    errors = [thread.error for thread in threads if thread.error]
    if errors:
        raise RuntimeError(errors[0])
    return {
        "leases granted and returned per s": done / elapsed,
        "leases: CPU ms each, in the launcher": used / done * 1000,
        "leases: cores of the launcher": used / elapsed,
        "leases alongside per s": rate,
        "ready node alone: median ms": median(alone),
        "ready node alongside leases: median ms": median(beside),
        "ready node alongside leases: ratio of medians": median(beside) / median(alone),
    }


def held(bench: Bench, count: int = 1000, seconds: float = 30.0) -> Figures:
    """Leases that only exist, compared with the launcher before."""
    bench.start(instant())
    time.sleep(15)

    def measured() -> tuple[float, float]:
        cpu, operations = bench.launcher.cpu(), sum(bench.server.counters().values())
        time.sleep(seconds)
        more = sum(bench.server.counters().values()) - operations
        return (bench.launcher.cpu() - cpu) / seconds * 100, more / seconds * 60

    without = measured()
    terms = {"lease": {"v": 1, "owner": "bench", "via": "bench", "created": time.time(), "size": 1}}
    bench.zuul.create_nodes(
        count, state="hold", hold_expiration=86400, allocated_to="200-0000000001", user_data=terms
    )
    time.sleep(15)
    found = measured()
    return {
        "1000 leases held: CPU %": found[0],
        "1000 leases held: more ZooKeeper operations per minute": found[1] - without[1],
    }


LEASE_SCENARIOS = {"leases": leases, "leases-held": held}
