#!/usr/bin/env python3
"""Measures the driver openstack against the real cloud of tools/openstack, alone or alongside
another release.

  tools/openstack run -- .venv/bin/python -m tests.benchmark.openstack_driver [--other PYTHON]
  [--nodes 10] [--burst 100]

Figures: calls of the API per node launched and deleted one by one; from ACTIVE in the cloud to
ready in ZooKeeper, in seconds (the cloud is checked ten times a second); and a burst: until all
are ready, alongside until all are ACTIVE.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import yaml

from tests.benchmark.harness import Bench, Server, log, percentile
from tests.benchmark.run import load_tool
from tests.support.openstack.cloud import OpenStackCloud

POLL = 0.1


class ActiveTimes:
    """Notes when each server was first seen ACTIVE, past the proxies that count."""

    def __init__(self, cloud: OpenStackCloud) -> None:
        self.cloud = cloud
        self.when: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="active-times", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            try:
                servers = self.cloud.servers()
            except KeyError:
                continue  # too much for the cloud just now
            for server in servers:
                if server["status"] == "ACTIVE":
                    self.when.setdefault(server["name"], time.monotonic())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def config() -> dict[str, Any]:
    return {
        "labels": [{"name": "small"}],
        "providers": [
            {
                "name": "cloud-1",
                "driver": "openstack",
                "cloud": "test",
                "rate": 0,
                "port-cleanup-interval": 0,
                "launch-retries": 3,
                "cloud-images": [{"name": "base", "username": "zuul"}],
                "pools": [
                    {
                        "name": "main",
                        "networks": ["private"],
                        "auto-floating-ip": False,
                        "host-key-checking": False,
                        "labels": [{"name": "small", "cloud-image": "base", "flavor-name": "tiny"}],
                    }
                ],
            }
        ],
    }


def measure(bench: Bench, cloud: OpenStackCloud, nodes: int, burst: int) -> dict[str, float]:
    (bench.work / "clouds.yaml").write_text(yaml.safe_dump({"clouds": {"test": cloud.entry}}))
    bench.start(config())
    zuul, result = bench.zuul, {}
    for _ in range(3):
        single(bench)
    active = ActiveTimes(cloud)
    late: list[float] = []
    try:
        cloud.forget_calls()
        for _ in range(nodes):
            node_id, ready = single(bench)
            late.append(ready - active.when[f"np{node_id}"])
        calls = cloud.calls()
        result["calls per node"] = calls.total() / nodes
        log(f"{bench.name}: {dict(calls)}")
        result["ACTIVE to ready, median s"] = percentile(late, 0.5)
        result["ACTIVE to ready, longest s"] = max(late)
        if burst:
            cloud.forget_calls()
            began = time.monotonic()
            ids = zuul.submit_many([["small"]] * burst)
            ended = zuul.wait(ids, 600)
            names = [f"np{node}" for node in zuul.nodes(ids)]
            last = max(active.when.get(name, ended) for name in names)
            result[f"{burst} at once, ready after s"] = ended - began
            result[f"{burst} at once, beside the cloud's time"] = (ended - began) / (last - began)
            zuul.wait_gone(zuul.use(ids), 600)
            result[f"{burst} at once, calls per node"] = cloud.calls().total() / burst
    finally:
        active.close()
    return result


def single(bench: Bench) -> tuple[str, float]:
    """One node from request to removal: its id, and when it was ready."""
    ids = [bench.zuul.submit(["small"])]
    ready = bench.zuul.wait(ids, 120)
    (node_id,) = bench.zuul.use(ids)
    bench.zuul.wait_gone([node_id], 120)
    return node_id, ready


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-bench-"))
    tool: Any = load_tool()
    figures: dict[str, dict[str, float]] = {}
    cloud = OpenStackCloud()
    cloud.entry["networks"] = [{"name": "private", "default_interface": True}]
    try:
        server = Server(tool, work / "zk")
        with cloud.quota(instances=-1, cores=-1, ram=-1):
            for release, python in {
                "ours": sys.executable,
                **({"other": args.other} if args.other else {}),
            }.items():
                bench = Bench(server, python, work, release)
                if release != "ours":
                    bench.environment["PYTHONPATH"] = ""
                try:
                    for name, value in measure(bench, cloud, args.nodes, args.burst).items():
                        log(f"{release}: {name} {value:.2f}")
                        figures.setdefault(name, {})[release] = value
                finally:
                    if hasattr(bench, "launcher"):
                        bench.close()
                    cloud.clean()
    finally:
        cloud.close()
        tool.stop(work / "zk")
        shutil.rmtree(work, ignore_errors=True)
    for name, values in figures.items():
        print(
            f"{name:45}" + "".join(f"  {release} {value:.2f}" for release, value in values.items())
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
