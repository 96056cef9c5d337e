#!/usr/bin/env python3
"""Measures the driver kubernetes against the real API server of tools/kubernetes, alone or
alongside another release.

  python -m tests.benchmark.kubernetes_driver [--other PYTHON] [--nodes 10] [--burst 200] [--idle
  500]

Figures: from request to ready of a pod that runs 0.3 s after it was placed, and of a namespace;
from the end of a namespace in the cluster to that of its record; API calls per pod node, created
and deleted, watches not counted; a burst: until all are ready, alongside until all pods run; calls
a minute and CPU with idle ready pods.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import ssl
import sys
import tempfile
import threading
import time
import urllib.request
from typing import Any

import yaml

from tests.benchmark.harness import Bench, Server, log, percentile
from tests.benchmark.run import load_tool
from tests.support.kubernetes import cluster as support

RUNS_AFTER = "300ms"
IDLE_SECONDS = 60.0


class Times:
    """When pods came to run, and namespaces no longer existed: by a watch of our own, past the
    proxy that counts.
    """

    def __init__(self, admin: support.Server) -> None:
        self.ran: dict[str, float] = {}
        self.gone: dict[str, float] = {}
        self._admin = admin
        self._answers: list[Any] = []
        self._threads = [
            threading.Thread(
                target=self._watch, args=(plural,), name=f"watch-{plural}", daemon=True
            )
            for plural in ("pods", "namespaces")
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self, plural: str) -> None:
        url = f"{self._admin.url}/api/v1/{plural}?watch=1"
        request = urllib.request.Request(
            url, headers={"Authorization": f"Bearer {self._admin.token}"}
        )
        with urllib.request.urlopen(
            request, context=ssl.create_default_context(cafile=self._admin.ca)
        ) as answer:
            for line in answer:
                now, event = time.monotonic(), json.loads(line)
                metadata = event["object"]["metadata"]
                if plural == "pods" and event["object"]["status"].get("phase") == "Running":
                    self.ran.setdefault(metadata["namespace"], now)
                elif plural == "namespaces" and event["type"] == "DELETED":
                    self.gone[metadata["name"]] = now


def config(context: str, idle: int = 0) -> dict[str, Any]:
    labels = [
        {
            "name": "pod",
            "type": "pod",
            "image": "an/image",
            "annotations": {"test/runs-after": RUNS_AFTER},
        },
        {"name": "space", "type": "namespace"},
    ]
    provider = {
        "name": "kube",
        "driver": "kubernetes",
        "context": context,
        "pools": [{"name": "main", "labels": labels}],
    }
    return {
        "labels": [{"name": "pod", "min-ready": idle}, {"name": "space"}],
        "providers": [provider],
    }


def single(bench: Bench, label: str) -> tuple[str, float, float]:
    """One node from request to removal: its id, seconds to ready, and when its record no longer
    existed.
    """
    began = time.monotonic()
    ids = [bench.zuul.submit([label])]
    ready = bench.zuul.wait(ids, 120)
    (node_id,) = bench.zuul.use(ids)
    return node_id, ready - began, bench.zuul.wait_gone([node_id], 120) or time.monotonic()


def calls(cluster: support.KubernetesCluster) -> int:
    return sum(1 for request in cluster.proxy.requests if "watch=" not in request.path)


def measure(
    bench: Bench, cluster: support.KubernetesCluster, args: argparse.Namespace, times: Times
) -> dict[str, float]:
    result: dict[str, float] = {}
    kubeconfig = pathlib.Path(bench.environment["KUBECONFIG"])
    user = {"token": cluster.token}
    # The proxy counts, and is slow.
    for url in (cluster.proxy.url, cluster.admin.url):
        kubeconfig.write_text(yaml.safe_dump(support.kubeconfig(url, cluster.ca, user)))
        bench.start(config(support.CONTEXT))
        single(bench, "pod")
        if url == cluster.proxy.url:
            before = calls(cluster)
            for _ in range(args.nodes):
                single(bench, "pod")
            result["API calls per pod node"] = (calls(cluster) - before) / args.nodes
            bench.launcher.stop()
    found = [single(bench, "pod") for _ in range(args.nodes)]
    result["pod: request to ready, median s"] = percentile(
        [took for _id, took, _ended in found], 0.5
    )
    late = [ended - times.gone[f"main-{node_id}"] for node_id, _took, ended in found]
    result["namespace gone to record gone, median s"] = percentile(late, 0.5)
    result["namespace: request to ready, median s"] = percentile(
        [single(bench, "space")[1] for _ in range(args.nodes)], 0.5
    )
    if args.burst:
        began = time.monotonic()
        ids = bench.zuul.submit_many([["pod"]] * args.burst)
        ended = bench.zuul.wait(ids, 600)
        last = max(times.ran[f"main-{node}"] for node in bench.zuul.nodes(ids))
        result[f"{args.burst} at once, ready after s"] = ended - began
        result[f"{args.burst} at once, beside the server's time"] = (ended - began) / (last - began)
        bench.zuul.wait_gone(bench.zuul.use(ids), 600)
    bench.launcher.stop()
    if args.idle:
        result |= idle(bench, cluster, args.idle, kubeconfig, times)
    return result


def idle(
    bench: Bench,
    cluster: support.KubernetesCluster,
    count: int,
    kubeconfig: pathlib.Path,
    times: Times,
) -> dict[str, float]:
    user = {"token": cluster.token}
    kubeconfig.write_text(yaml.safe_dump(support.kubeconfig(cluster.proxy.url, cluster.ca, user)))
    before, deadline = len(times.ran), time.monotonic() + 900
    bench.start(config(support.CONTEXT, count))
    while len(times.ran) < before + count and time.monotonic() < deadline:
        time.sleep(1)
    time.sleep(10)
    made, used = calls(cluster), bench.launcher.cpu()
    time.sleep(IDLE_SECONDS)
    result = {
        f"{count} idle: API calls a minute": (calls(cluster) - made) * 60 / IDLE_SECONDS,
        f"{count} idle: CPU %": (bench.launcher.cpu() - used) * 100 / IDLE_SECONDS,
    }
    bench.launcher.stop()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--burst", type=int, default=200)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-bench-"))
    tool: Any = load_tool()
    figures: dict[str, dict[str, float]] = {}
    try:
        server = Server(tool, work / "zk")
        for release, python in {
            "ours": sys.executable,
            **({"other": args.other} if args.other else {}),
        }.items():
            # A cluster for each: what the one before has left behind is still being deleted.
            with support.running() as found:
                cluster = support.KubernetesCluster(*found)
                times = Times(cluster.admin)
                bench = Bench(server, python, work, release)
                bench.environment["KUBECONFIG"] = str(work / f"kubeconfig-{release}")
                if release != "ours":
                    bench.environment["PYTHONPATH"] = ""
                try:
                    for name, value in measure(bench, cluster, args, times).items():
                        log(f"{release}: {name} {value:.3f}")
                        figures.setdefault(name, {})[release] = value
                finally:
                    if hasattr(bench, "zuul"):
                        bench.close()
                    cluster.close()
    finally:
        tool.stop(work / "zk")
        shutil.rmtree(work, ignore_errors=True)
    for name, values in figures.items():
        print(
            f"{name:45}" + "".join(f"  {release} {value:.3f}" for release, value in values.items())
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
