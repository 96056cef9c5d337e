"""The command line of the simulated world."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nodepool.lab.simulation import install
from tests.world import lines, order

if TYPE_CHECKING:
    from tests.world.world import Result, Scenario

#: The last events of a failed run that are shown.
SHOWN = 50
#: Runs that shrinking a scenario may take.
MOST_ATTEMPTS = 60


def prepare(mutation: str | None = None) -> None:
    """Import everything that a run needs: each runs in a fork.

    :param mutation: a defect to plant; see :mod:`tests.world.mutations`.
    """
    from tests.world import mutations

    lines.instrument(change=mutations.change(mutation) if mutation else lambda _name, text: text)
    install.adapt_libraries()
    import nodepool.builder
    import nodepool.cmd.nodepoolcmd
    import nodepool.driver.fake.adapter
    import nodepool.driver.metastatic.adapter
    import nodepool.driver.nodemanager.adapter
    import nodepool.driver.nodemanager.provider
    import nodepool.driver.statemachine.provider
    import nodepool.driver.static.provider
    import nodepool.launcher
    import nodepool.nodescan
    import nodepool.nodeutils
    import nodepool.ssh
    from nodepool.driver import Drivers
    from tests.world import builders, hosts, logins, openstack, probes, world  # noqa: F401

    builders.replace_machine()
    Drivers.load([os.path.join(os.path.dirname(os.path.abspath(__file__)), "drivers")])
    # Others are loaded by the runs that need them: one more loaded driver changes the schedule of
    # all seeds.
    for name in ("simulated", "metastatic", "static", "fake"):
        Drivers.get(name)
    nodepool.driver.fake.adapter.FakeAdapter = openstack.Adapter  # type: ignore[misc]
    nodepool.nodeutils.nodescan = hosts.scan
    nodepool.ssh.run_with_key = logins.log_in
    found = nodepool.nodescan.NodescanRequest.result

    def result(request: nodepool.nodescan.NodescanRequest) -> list[str]:
        """Return a key for machines that are probed; connections are not simulated."""
        return found(request) or [probes.HOST_KEY] * bool(request.node.type[0] in probes.probed)

    vars_of_request: Any = nodepool.nodescan.NodescanRequest
    vars_of_request.result = result
    # It takes longer than most commands.
    nodepool.cmd.nodepoolcmd.create_parser = functools.cache(nodepool.cmd.nodepoolcmd.create_parser)
    nodepool.cmd.nodepoolcmd.create_parser()
    order.order_by_age(("nodepool.", "kazoo.", "concurrent.", "threading", "tests.", "simulated"))


def run(scenario: Scenario, log: str | None = None) -> Result:
    from tests.world.world import World

    world = World(scenario)
    result = world.run()
    if log:
        with open(log, "w", encoding="utf8") as file:
            file.write("\n".join(world.observer.log) + "\n")
    return result


def _start(scenario: Scenario, directory: str, log: str | None) -> int:
    """Start a child, which writes its result to a file."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.chdir(directory)
            with open("result.json", "w", encoding="utf8") as file:
                json.dump(asdict(run(scenario, log)), file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def results(scenarios: Sequence[Scenario], jobs: int = 1, log: str | None = None) -> Iterator[Any]:
    """Run scenarios, several at a time; yield their results as they end."""
    from tests.world.world import Result

    waiting = list(scenarios)
    running: dict[int, tuple[Scenario, str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                scenario, directory = waiting.pop(0), tempfile.mkdtemp()
                running[_start(scenario, directory, log)] = scenario, directory
            pid, status = os.wait()
            scenario, directory = running.pop(pid)
            try:
                with open(os.path.join(directory, "result.json"), encoding="utf8") as file:
                    result = Result(**json.load(file)) if status == 0 else None
            finally:
                shutil.rmtree(directory)
            yield result or Result(scenario.seed, ["the run itself has failed; see above"])
    finally:
        for pid, (_scenario, directory) in running.items():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            shutil.rmtree(directory)


def shrink(scenario: Scenario) -> Scenario:
    """Omit what a violation does not need: faults, requests, statements between
    preemptions.
    """
    left, wanted = MOST_ATTEMPTS, _kinds(next(results([scenario])))

    def fails(smaller: Scenario) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and bool(_kinds(next(results([smaller]))) & wanted)

    for change in ({"lines": 0}, {"delay": 0.0}, {"launchers": 1}, {"launchers": 2}):
        if any(getattr(scenario, name) != value for name, value in change.items()) and fails(
            replace(scenario, **change)
        ):
            scenario = replace(scenario, **change)
    for name in ("operations", "faults", "demand"):
        # Larger parts first: halves, quarters, single ones.
        size = max(1, len(getattr(scenario, name)) // 2)
        while size and left > 0:
            start = 0
            while start < len(items := getattr(scenario, name)) and left > 0:
                smaller = replace(scenario, **{name: items[:start] + items[start + size :]})
                if fails(smaller):
                    scenario = smaller
                else:
                    start += size
            size //= 2
    return scenario


def measure() -> Iterator[tuple[str, Any]]:
    """Run an hour without and an hour with demand and faults; yield a name and the result."""
    from tests.world import faults, nodemanagers
    from tests.world.world import Scenario

    hour = 3600.0
    base = replace(Scenario.from_seed(2, hour), lines=0, delay=0.0, latency=0.001)
    base = replace(
        base,
        labels={"small": 1, "large": 0},
        providers=[{"labels": ["large", "small"], "servers": 20}],
        tenants={},
    )
    yield (
        "idle hour, one launcher",
        next(results([replace(base, launchers=1, demand=[], faults=[])])),
    )
    scenarios = [Scenario.from_seed(seed, hour) for seed in range(1, 41)]
    left_out = {nodemanagers.LABEL}.union(*(each.scarce for each in scenarios))
    demand = [
        r
        for each in scenarios
        for r in each.demand
        if r.scheduler == 1 and not left_out.intersection(r.labels)
    ]
    for request in demand:
        request.labels = [label if label in base.labels else "small" for label in request.labels]
        # Nodes that are held until the end would fill the provider.
        request.tenant = request.held = None
    plan = faults.plan(random.Random(2), hour)
    yield (
        "busy hour, two launchers",
        next(results([replace(base, launchers=2, demand=demand, faults=plan)])),
    )


def _kinds(result: Result) -> set[str]:
    """The violations without their numbers: a smaller scenario must fail in the same way."""
    return {re.sub(r"[0-9]+", "", text) for text in result.violations}


def _numbers(text: str) -> list[int]:
    parts = [part.partition("-") for part in text.split(",")]
    return [
        number for first, _, last in parts for number in range(int(first), int(last or first) + 1)
    ]


def _tell(result: Any, scenario: Scenario) -> None:
    print(
        f"Seed {result.seed}: {len(result.violations)} violations after {result.virtual:.0f} "
        "simulated seconds"
    )
    for text in result.violations[:10]:
        print(f"  {text}")
    print(f"  the last {SHOWN} events:")
    for text in result.events[-SHOWN:]:
        print(f"    {text}")
    again = f"tools/world --seeds {result.seed}"
    print(f"  replay: {again} --log FILE; smaller: {again} --shrink", flush=True)


def command() -> int:
    description = "Run the launcher in a simulated world; see tests/world/README.rst."
    parser = argparse.ArgumentParser(prog="tools/world", description=description)
    parser.add_argument(
        "--seeds", default="1-60", help="numbers and ranges such as 7,100-120 (default: 1-60)"
    )
    parser.add_argument(
        "--minutes", type=float, help="run further seeds until this much time has passed"
    )
    parser.add_argument(
        "--duration", type=float, default=90.0, help="simulated seconds with demand and faults (90)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="seeds that run at the same time",
    )
    parser.add_argument(
        "--log", help="write the log of all simulated processes to this file (one seed)"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="find a smaller scenario that still fails"
    )
    parser.add_argument("--mutation", help="plant this defect; see tests/world/mutations.py")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each seed")
    parser.add_argument("--first", action="store_true", help="end at the first seed that fails")
    parser.add_argument(
        "--figures", action="store_true", help="measure an idle and a busy hour instead"
    )
    args = parser.parse_args()
    prepare(args.mutation)
    if args.figures:
        for name, result in measure():
            violations = len(result.violations)
            print(
                f"{name}: {result.cpu:.1f} CPU s, {result.requests} builds, {result.faults} "
                f"faults, {violations} violations"
            )
        return 0
    from tests.world.world import Scenario

    seeds = _numbers(args.seeds)
    real_time = os.times().elapsed
    scenarios = {seed: Scenario.from_seed(seed, args.duration) for seed in seeds}
    bad, total, virtual, requests, cpu = [], 0, 0.0, 0, 0.0
    while True:
        for result in results(
            list(scenarios.values()), args.jobs, args.log and os.path.abspath(args.log)
        ):
            total, virtual, requests, cpu = (
                total + 1,
                virtual + result.virtual,
                requests + result.requests,
                cpu + result.cpu,
            )
            if args.json:
                print(
                    json.dumps(asdict(replace(result, events=result.events[-SHOWN:]))), flush=True
                )
            if result.violations:
                bad.append(result.seed)
                if not args.json:
                    scenario = scenarios[result.seed]
                    if args.shrink:
                        scenario = shrink(scenario)
                        print(f"Smaller: {scenario}")
                        result = next(results([scenario]))
                    _tell(result, scenario)
                if args.first:
                    break
        if (
            args.minutes is None
            or (os.times().elapsed - real_time) >= 60 * args.minutes
            or (bad and args.first)
        ):
            break
        last = max(scenarios)
        scenarios = {
            seed: Scenario.from_seed(seed, args.duration) for seed in range(last + 1, last + 101)
        }
    if not args.json:
        print(
            f"{total} seeds, {len(bad)} with "
            f"violations{': ' + ', '.join(map(str, bad)) if bad else ''}; {requests} builds in "
            f"{virtual / 3600:.1f} simulated hours, {cpu:.0f} CPU seconds"
        )
    return 1 if bad else 0
