"""EC2 by moto behind a proxy that counts calls and lets instances take a while to boot;
scenarios of tests.benchmark.run.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from statistics import median
from typing import Any

from tests.benchmark.harness import Bench
from tests.benchmark.scenarios import instant
from tests.support.aws.cloud import AwsCloud
from tests.support.fault_proxy import Forward, Reply, Request, hang

Figures = dict[str, float]
#: Seconds from the call that starts an instance until it is shown as running.
BOOT = 3.0
_SHOWN = re.compile(
    rb"<instanceId>(i-\w+)</instanceId>((?:(?!<instanceId>).)*?)<code>16</code>(\s*)<name>running</"
    rb"name>",
    re.DOTALL,
)

AWS_TARGETS: dict[str, tuple[float, bool]] = {
    "EC2 node: running to ready, median ms": (500, True),
    "100 EC2 nodes at once: of the cloud's own time": (1.5, True),
    "230 EC2 deletions asked for: s": (5, True),
    "ready node beside a hanging EC2: of alone": (1.3, True),
}


class Ec2:
    """A fresh account."""

    def __init__(self, bench: Bench) -> None:
        self.cloud = AwsCloud()
        self.begun: dict[bytes, float] = {}
        self.ends: dict[bytes, float] = {}
        self.cloud.proxy.fail("RunInstances", self._run, math.inf)
        self.cloud.proxy.fail("DescribeInstances", self._describe, math.inf)
        self.cloud.proxy.fail("TerminateInstances", self._terminate, math.inf)
        bench.environment.update(self.cloud.environment())

    def _run(self, request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        for instance in re.findall(rb"<instanceId>(i-\w+)</instanceId>", answer.body):
            self.begun[instance] = time.monotonic()
        answer.body = self._young(answer.body)
        return answer

    def _describe(self, request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        answer.body = self._young(answer.body)
        return answer

    def _terminate(self, request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        for key, value in request.params.items():
            if key.startswith("InstanceId."):
                self.ends[value.encode()] = time.monotonic()
        return answer

    def _young(self, body: bytes) -> bytes:
        now = time.monotonic()

        def shown(found: re.Match[bytes]) -> bytes:
            if now - self.begun.get(found[1], 0.0) >= BOOT:
                return found[0]
            return (
                b"<instanceId>%s</instanceId>%s<code>0</code>%s<name>pending</name>"
                % found.groups()
            )

        return _SHOWN.sub(shown, body)

    def config(self, servers: int, *more: dict[str, Any]) -> dict[str, Any]:
        provider = self.cloud.provider(
            self.cloud.label("small"), pool={"max-servers": servers}, rate=100
        )
        return {"labels": [{"name": "small"}, {"name": "idle"}], "providers": [provider, *more]}

    def calls(self) -> int:
        return len(self.cloud.proxy.requests)

    def close(self) -> None:
        self.cloud.close()


def _instances(bench: Bench, ids: list[str]) -> list[bytes]:
    kazoo = bench.zuul.kazoo
    assert kazoo is not None
    found = []
    for node in bench.zuul.nodes(ids):
        external = json.loads(kazoo.get(f"/nodepool/nodes/{node}")[0])["external_id"]
        found.append((external["instance"] if isinstance(external, dict) else external).encode())
    return found


def nodes(bench: Bench, count: int = 40, outstanding: int = 10) -> Figures:
    """One request after the other, ten outstanding; each node is used and deleted."""
    ec2 = Ec2(bench)
    try:
        bench.start(ec2.config(100))
        zuul, before = bench.zuul, ec2.calls()
        pending: list[str] = []
        waits: list[float] = []
        used: list[str] = []
        for number in range(count + outstanding):
            if number < count:
                pending.append(zuul.submit(["small"]))
            if number >= outstanding:
                first = pending.pop(0)
                zuul.wait([first])
                (instance,) = _instances(bench, [first])
                waits.append((zuul.ended[first][0] - ec2.begun[instance] - BOOT) * 1000)
                used += zuul.use([first])
        zuul.wait_gone(used)
        return {
            "EC2 calls per node, 40 one after the other": (ec2.calls() - before) / count,
            "EC2 node: running to ready, median ms": median(waits),
        }
    finally:
        ec2.close()


def at_once(bench: Bench, count: int = 100, deletions: int = 230) -> Figures:
    """All together; then more of them, all returned together."""
    ec2 = Ec2(bench)
    try:
        bench.start(ec2.config(300))
        zuul = bench.zuul
        ids = zuul.submit_many([["small"]] * count)
        end = zuul.wait(ids)
        instances = _instances(bench, ids)
        own = max(ec2.begun[i] for i in instances) + BOOT - min(zuul.submitted[i] for i in ids)
        more = zuul.submit_many([["small"]] * (deletions - count))
        zuul.wait(more)
        started = time.monotonic()
        gone = zuul.use(ids + more)
        asked = threading.Event()
        deadline = started + 200
        while len(ec2.ends) < deletions and time.monotonic() < deadline:
            asked.wait(0.05)
        assert len(ec2.ends) >= deletions, f"{len(ec2.ends)} of {deletions} deletions"
        zuul.wait_gone(gone)
        return {
            "100 EC2 nodes at once: of the cloud's own time": (
                end - min(zuul.submitted[i] for i in ids)
            )
            / own,
            "230 EC2 deletions asked for: s": max(ec2.ends.values()) - started,
        }
    finally:
        ec2.close()


def hanging(bench: Bench, samples: int = 20) -> Figures:
    """Nodes of an instant provider, alone and while the API of EC2 does not answer."""
    ec2 = Ec2(bench)
    healed = threading.Event()
    try:
        other = instant(labels=["other"])
        config = ec2.config(100, *other["providers"])
        config["labels"].append({"name": "other"})
        bench.start(config)
        zuul = bench.zuul

        def latencies() -> list[float]:
            found = []
            for _ in range(samples):
                request = zuul.submit(["other"])
                zuul.wait([request])
                found.append(zuul.latency(request))
                zuul.wait_gone(zuul.use([request]))
            return found

        alone = median(latencies())
        ec2.cloud.proxy.fail(lambda _request: True, hang(healed), math.inf)
        ec2.cloud.proxy._faults.insert(0, ec2.cloud.proxy._faults.pop())
        zuul.submit_many([["small"]] * 5)
        beside = median(latencies())
        return {"ready node beside a hanging EC2: of alone": beside / alone}
    finally:
        healed.set()
        ec2.close()


AWS_SCENARIOS = {"aws-nodes": nodes, "aws-at-once": at_once, "aws-hanging": hanging}
