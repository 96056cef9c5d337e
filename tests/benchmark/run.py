"""Benchmark of launcher and builder: our release alongside another one, alternating runs on the
same ZooKeeper, ratios printed.

    python -m tests.benchmark.run                                  ours alone
    python -m tests.benchmark.run --other /venv-of-11.0.0/bin/python
    python -m tests.benchmark.run --only burst,ready --runs 3
    python -m tests.benchmark.run --only builder-rest,builder-request

The other release wants a separate virtual environment: pip install nodepool==11.0.0 cachetools
setuptools
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
import traceback
from statistics import median
from typing import Any

from tests.benchmark.aws import AWS_SCENARIOS, AWS_TARGETS
from tests.benchmark.builder import BUILDER_SCENARIOS, BUILDER_TARGETS
from tests.benchmark.harness import HERE, Bench, Server, log
from tests.benchmark.leases import LEASE_SCENARIOS, LEASE_TARGETS
from tests.benchmark.scenarios import SCENARIOS

#: Figure -> (limit, whether smaller is better).
TARGETS: dict[str, tuple[float, bool]] = {
    "ready node: median ms": (15, True),
    "ready node: 99th ms": (30, True),
    "launched, 10 outstanding: median ms": (50, True),
    "burst: requests/s": (320, False),
    "burst: CPU ms per node": (5, True),
    "burst: transactions per node": (7, True),
    "burst: reads per node": (5, True),
    "classic: requests/s": (300, False),
    "classic: CPU ms per node": (3, True),
    "classic: transactions per node": (4, True),
    "classic, 20 pools: threads": (150, True),
    "500 metastatic slots: s": (2.5, True),
    "500 requests, 20 providers: s": (2, True),
    "200 requests, 10 clouds: s": (2, True),
    "burst over 20 clouds: CPU ms per node": (3, True),
    "burst over 20 clouds: threads": (150, True),
    "10/s beside 10000 idle: median ms": (30, True),
    "10/s beside 10000 idle: CPU ms per node": (6, True),
    "idle CPU beside 10000 nodes: %": (0.5, True),
    "memory with 10000 nodes: MB": (250, True),
    "2000 waiting, 20 pools: CPU %": (2, True),
    "memory, 2 providers: MB": (90, True),
    "restart: first decision s": (1, True),
    "restart: all served s": (8, True),
    "urgent among 2000: ms": (100, True),
    "50 static slots of 50 hosts: all in use again, ms": (500, True),
    "50 static slots of 50 hosts: urgent, ms": (50, True),
    "50 static slots of 1 host: all in use again, ms": (500, True),
    "50 static slots of 1 host: urgent, ms": (50, True),
    **BUILDER_TARGETS,
    **AWS_TARGETS,
    **LEASE_TARGETS,
}
ALL_SCENARIOS = {**SCENARIOS, **BUILDER_SCENARIOS, **AWS_SCENARIOS, **LEASE_SCENARIOS}


def load_tool() -> Any:
    loader = importlib.machinery.SourceFileLoader(
        "zookeeper_tool", str(HERE.parent.parent / "tools" / "zookeeper")
    )
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="python of the release to compare with")
    parser.add_argument(
        "--only", help="comma-separated names of scenarios: " + ",".join(ALL_SCENARIOS)
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(ALL_SCENARIOS)
    pythons = {"ours": sys.executable, **({"other": args.other} if args.other else {})}
    work = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-bench-"))
    tool = load_tool()
    figures: dict[str, dict[str, list[float]]] = {}
    failed = False
    try:
        server = Server(tool, work / "zk")
        for name in names:
            for run in range(args.runs):
                for release, python in pythons.items():
                    bench = Bench(server, python, work, f"{name}-{release}")
                    try:
                        result = ALL_SCENARIOS[name](bench)
                    except Exception:
                        failed = True
                        log(f"{name} ({release}, run {run + 1}) failed:\n{traceback.format_exc()}")
                        for log_path in (bench.work / "log").glob("*.log"):
                            log(
                                "end of its log:\n"
                                + "\n".join(log_path.read_text().splitlines()[-15:])
                            )
                        continue
                    finally:
                        if hasattr(bench, "launcher"):
                            bench.close()
                    log(
                        f"{name} {release}: "
                        + ", ".join(f"{k} = {v:.2f}" for k, v in result.items())
                    )
                    for key, value in result.items():
                        figures.setdefault(key, {}).setdefault(release, []).append(value)
    finally:
        tool.stop(work / "zk")
        shutil.rmtree(work, ignore_errors=True)
    print_table(figures, "other" in pythons)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 1 if failed else 0


def print_table(figures: dict[str, dict[str, list[float]]], compared: bool) -> None:
    print(
        f"{'What (median of the runs)':44} {'other':>10} {'ours':>10} {'better':>8} {'target':>9}  "
        "met"
    )
    for name, by_release in figures.items():
        ours = median(by_release["ours"]) if by_release.get("ours") else float("nan")
        other = median(by_release["other"]) if by_release.get("other") else float("nan")
        target = TARGETS.get(name)
        bound = met = ""
        if target is not None:
            bound = f"{'<=' if target[1] else '>='} {target[0]:g}"
            met = "yes" if (ours <= target[0] if target[1] else ours >= target[0]) else "NO"
        better = (
            (ours / other if other else 0.0)
            if target is not None and not target[1]
            else other / ours
            if ours
            else 0.0
        )
        ratio = f"{better:8.1f}" if compared and better else "        "
        print(f"{name:44} {other:10.2f} {ours:10.2f} {ratio} {bound:>9}  {met}")


if __name__ == "__main__":
    sys.exit(main())
