"""How close ``nodepool advise`` comes to the best configuration, and how long it needs.

    python -m tests.benchmark.advise --time            # 5,000 requests
    python -m tests.benchmark.advise --record FILE     # simulate all of six small workloads

The recorded scores are those of the unit test (``tests/unit/lab/whatif/scores.json``), which
compares the search with the best of all configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from nodepool.cmd.commands import simulate
from nodepool.lab.whatif import advise
from nodepool.lab.whatif.assumptions import Assumptions
from nodepool.lab.whatif.demand import Demand, write_csv
from nodepool.lab.whatif.replay import make_job
from tests.benchmark.simulate import config as large_config
from tests.benchmark.simulate import demand as large_demand

#: Machine hours that an hour of waiting counts as, and candidates of each option.
WEIGHT, CANDIDATES = 5.0, 3
HOUR = 3600.0


def config(servers: int, **labels: int) -> dict[str, Any]:
    """Return a configuration with one pool, and labels with their ``min-ready``."""
    content = large_config(servers)
    names = [{"name": name, "min-ready": ready} for name, ready in labels.items()]
    offered = [
        {"name": name, "cloud-image": "debian", "instance-type": "t3.small"} for name in labels
    ]
    providers: Any = content["providers"]
    providers[0]["pools"][0]["labels"] = offered
    return {**content, "labels": names}


def _spread(
    choice: random.Random, number: int, begin: float = 0.0, end: float = 2.2
) -> list[float]:
    return [choice.uniform(begin, end) * HOUR for _ in range(number)]


def steady(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    times = _spread(choice, 110)
    return config(10, vm=0), _requests(choice, times, ("vm",), 400), Assumptions()


def wave(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    """A day in three hours."""
    times = [1.5 * HOUR + choice.gauss(0, 0.45 * HOUR) for _ in range(110)]
    times += [0.0, 3 * HOUR]
    return config(8, vm=4), _requests(choice, times, ("vm",), 500), Assumptions()


def bursts(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    times = [
        begin * HOUR + choice.uniform(0, 30) for begin in (0, 0.6, 1.2, 1.8, 2.4) for _ in range(21)
    ]
    return config(12, vm=8), _requests(choice, times, ("vm",), 300), Assumptions()


def two_labels(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    found = _requests(choice, _spread(choice, 80), ("small",), 300)
    found += _requests(choice, _spread(choice, 30), ("large",), 900)
    return config(9, small=1, large=4), found, Assumptions()


def long_jobs(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    times = _spread(choice, 100, end=4)
    return config(20, vm=6, spare=2), _requests(choice, times, ("vm",), 2700), Assumptions()


def scarce_quota(choice: random.Random) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    found = _requests(choice, _spread(choice, 105), ("vm",), 500)
    return config(8, vm=3), found, Assumptions(quotas={"cloud": {"instances": 8}})


def _requests(
    choice: random.Random, times: list[float], labels: tuple[str, ...], use: float
) -> list[Demand]:
    return [Demand(moment, labels, choice.lognormvariate(math.log(use), 0.4)) for moment in times]


WORKLOADS: dict[str, Callable[[random.Random], Any]] = {
    each.__name__: each for each in (steady, wave, bursts, two_labels, long_jobs, scarce_quota)
}


def workload(name: str) -> tuple[dict[str, Any], list[Demand], Assumptions]:
    content, found, assumptions = WORKLOADS[name](random.Random(1))
    first = min(each.time for each in found)
    moved = [dataclasses.replace(each, time=each.time - first) for each in found]
    return content, sorted(moved, key=lambda each: each.time), assumptions


def options(name: str) -> list[advise.Option]:
    """Return the options of a workload, with few candidates: all of them are simulated."""
    content, found, assumptions = workload(name)
    return [thinned(each) for each in advise.options(content, found, assumptions, WEIGHT)]


def thinned(option: advise.Option) -> advise.Option:
    needed = {option.value, option.guess}
    others = [each for each in option.candidates if each not in needed]
    middle = sorted(others, key=lambda each: abs(others.index(each) - len(others) // 2))
    candidates = sorted(needed | set(middle[: max(0, CANDIDATES - len(needed))]))
    return dataclasses.replace(option, candidates=tuple(candidates))


def grid(found: list[advise.Option]) -> Iterator[advise.Changes]:
    """Yield each combination of at most three changes."""
    for values in itertools.product(*(each.candidates for each in found)):
        pairs = zip(found, values, strict=True)
        changes = frozenset((one, value) for one, value in pairs if value != one.value)
        if len(changes) <= advise.MOST_CHANGES:
            yield changes


def key(changes: advise.Changes) -> str:
    return ", ".join(sorted(f"{option.name}: {value}" for option, value in changes))


def score(name: str, changes: advise.Changes) -> dict[str, float]:
    content, found, assumptions = workload(name)
    content = json.loads(json.dumps(content))
    for option, value in changes:
        owner: Any = content
        for item in option.path[:-1]:
            owner = owner[item]
        owner[option.path[-1]] = value
    with simulate.start() as process:
        output, errors = process.communicate(json.dumps(make_job(content, found, assumptions, 1)))
    assert process.returncode == 0, errors
    summary = json.loads(output)
    return dataclasses.asdict(advise.figures(summary, {}, WEIGHT)) | {
        "in_use": summary["machines"]["all"]["in_use"]
    }


def record(path: Path) -> None:
    """Simulate each configuration of each workload; what the file already has is kept."""
    scores: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in WORKLOADS:
        known = scores.setdefault(name, {})
        missing = [each for each in grid(options(name)) if key(each) not in known]
        with ThreadPoolExecutor(2, thread_name_prefix="record") as pool:
            for each, found in zip(
                missing, pool.map(lambda one, name=name: score(name, one), missing), strict=True
            ):
                known[key(each)] = found
                path.write_text(json.dumps(scores, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {len(known)} configurations", flush=True)


def measure_time(requests: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(str(folder / "day.csv"), large_demand(requests, 1.0, random.Random(1)))
        (folder / "nodepool.yaml").write_text(
            yaml.safe_dump(large_config(int(requests / 62)), sort_keys=False)
        )
        command = [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "advise", "--config"]
        command += [str(folder / "nodepool.yaml"), "--trace", str(folder / "day.csv")]
        began = time.monotonic()
        subprocess.run(command, check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{requests} requests: {time.monotonic() - began:.1f} s, "
            f"{used.ru_utime + used.ru_stime:.1f} s of processor time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.record:
        record(args.record)
    if args.time:
        measure_time(args.requests)


if __name__ == "__main__":
    main()
