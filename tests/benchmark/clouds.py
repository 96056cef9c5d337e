#!/usr/bin/env python3
"""Measures the drivers gce, azure and ibmvpc against their clouds' stand-ins, alone or alongside
another release.

  python -m tests.benchmark.clouds [--other PYTHON] [--only gce azure] [--nodes 10] [--burst 100]

Figures: from a machine that runs (BOOT seconds after it was asked for) to its ready node; from a
machine that no longer exists to the end of its record; API calls per node, in turn and in a
burst, tokens not counted; a burst: until all are ready, alongside until all machines run; calls a
minute while those are ready. The other release is redirected from the public hosts to the stand-in
(tests/benchmark/redirected).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

from tests import REPOSITORY
from tests.benchmark.harness import Bench, Server, log, percentile
from tests.benchmark.run import load_tool
from tests.support.clouds.scene import SCENES, CloudScene

BOOT, ENDING = 3.0, 1.0
HOSTS = {
    "gce": ("https://compute.googleapis.com", "https://www.googleapis.com"),
    "azure": ("https://login.microsoftonline.com", "https://management.azure.com"),
    "ibmvpc": (),
}


def calls(scene: CloudScene) -> int:
    return sum(1 for request in scene.proxy.requests if "token" not in request.path)


def single(bench: Bench, scene: CloudScene) -> tuple[float, float]:
    """Seconds from running to ready, and from gone to the end of the record."""
    ids = [bench.zuul.submit(["small"])]
    ready = bench.zuul.wait(ids, 120)
    machine = scene.cloud.history[-1]
    late = ready - (machine.made + BOOT)
    gone = bench.zuul.wait_gone(bench.zuul.use(ids), 120)
    return late, gone - machine.gone


def measure(
    bench: Bench, scene: CloudScene, args: argparse.Namespace, other: bool
) -> dict[str, float]:
    scene.cloud.boot, scene.cloud.ending = BOOT, ENDING
    provider = scene.provider(rate=100)
    if other:
        # What it does not know.
        for key in ("rate",) if scene.driver == "gce" else ():
            provider.pop(key)
        if scene.driver == "gce":
            provider.pop("object-storage")
            provider.pop("host-key-checking")
            provider["pools"][0]["host-key-checking"] = False
        provider["pools"][0]["max-servers"] = 1000
    bench.start({"labels": [{"name": "small"}], "providers": [provider]})
    single(bench, scene)
    before = calls(scene)
    found = [single(bench, scene) for _ in range(args.nodes)]
    result = {
        "running to ready, median s": percentile([late for late, _ in found], 0.5),
        "gone to record gone, median s": percentile([late for _, late in found], 0.5),
        "API calls per node": (calls(scene) - before) / args.nodes,
    }
    if args.burst:
        before, began, old = calls(scene), time.monotonic(), len(scene.cloud.history)
        ids = bench.zuul.submit_many([["small"]] * args.burst)
        ended = bench.zuul.wait(ids, 600)
        runs = max(machine.made for machine in scene.cloud.history[old:]) + BOOT
        result[f"{args.burst} at once, ready after s"] = ended - began
        result[f"{args.burst} at once, beside the cloud's time"] = (ended - began) / (runs - began)
        used = calls(scene)
        time.sleep(args.rest)
        result[f"{args.burst} nodes at rest, API calls a minute"] = (
            (calls(scene) - used) / args.rest * 60
        )
        before += calls(scene) - used
        bench.zuul.wait_gone(bench.zuul.use(ids), 600)
        result[f"{args.burst} at once, API calls per node"] = (calls(scene) - before) / args.burst
    bench.launcher.stop()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument("--only", nargs="*", default=[kind.driver for kind in SCENES])
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument(
        "--rest", type=float, default=60, help="seconds in which calls at rest are counted"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-bench-"))
    tool: Any = load_tool()
    figures: dict[str, dict[str, float]] = {}
    try:
        server = Server(tool, work / "zk")
        for kind in [each for each in SCENES if each.driver in args.only]:
            for release, python in {
                "ours": sys.executable,
                **({"other": args.other} if args.other else {}),
            }.items():
                scene = kind(work / f"{kind.driver}-{release}")
                bench = Bench(server, python, work, release)
                bench.environment |= scene.environment()
                if release == "other":
                    bench.environment |= {
                        "PYTHONPATH": str(REPOSITORY / "tests" / "benchmark" / "redirected"),
                        "NODEPOOL_BENCHMARK_HOSTS": " ".join(
                            f"{host}={scene.cloud.url}" for host in HOSTS[kind.driver]
                        ),
                        "HTTPLIB2_CA_CERTS": scene.cloud.ca,
                    }
                    if kind.driver == "azure":
                        scene.cloud.resource = "https://management.azure.com/"
                        scene.cloud.any_skus, scene.cloud.shouts = True, False
                try:
                    for name, value in measure(bench, scene, args, release == "other").items():
                        log(f"{kind.driver}, {release}: {name} {value:.3f}")
                        figures.setdefault(f"{kind.driver}: {name}", {})[release] = value
                except Exception as error:
                    log(f"{kind.driver}, {release}: {error!r}; {scene.cloud.mistakes[:3]}")
                finally:
                    if hasattr(bench, "zuul"):
                        bench.close()
                    scene.cloud.close()
    finally:
        tool.stop(work / "zk")
        shutil.rmtree(work, ignore_errors=True)
    for name, values in figures.items():
        print(
            f"{name:55}" + "".join(f"  {release} {value:.3f}" for release, value in values.items())
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
