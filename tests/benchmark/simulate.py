"""How long ``nodepool simulate`` needs for a week.

    python -m tests.benchmark.simulate [--requests 50000] [--days 7] [--one]

Two configurations run side by side, as with ``--what-if``, unless ``--one`` is given. Requests
arrive in bursts and by the time of the day.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from nodepool.lab.whatif.demand import Demand, write_csv

DAY = 86400.0
LABELS = {"small": (300.0, 0.7), "large": (1500.0, 0.3)}


def demand(count: int, days: float, choice: random.Random) -> list[Demand]:
    """More in the afternoon than at night, a third of them in bursts."""
    times: list[float] = []
    while len(times) < count:
        moment = choice.uniform(0, days * DAY)
        if choice.random() < 0.15 + 0.85 * math.exp(-(((moment % DAY) / 3600 - 14) ** 2) / 20):
            times += [moment + choice.uniform(0, 60) for _ in range(choice.choice((1, 1, 1, 1, 4)))]
    found = []
    for moment in sorted(times[:count]):
        label = choice.choices(list(LABELS), [weight for _mean, weight in LABELS.values()])[0]
        use = choice.lognormvariate(math.log(LABELS[label][0]), 0.5)
        found.append(
            Demand(
                moment - min(times),
                (label,),
                use,
                choice.choice(("web", "docs")),
                choice.choice((100, 200, 300)),
            )
        )
    return found


def config(servers: int) -> dict[str, object]:
    labels = [
        {"name": name, "cloud-image": "debian", "instance-type": "t3.small"} for name in LABELS
    ]
    images = [{"name": "debian", "image-id": "ami-1", "username": "admin"}]
    pool = {"name": "main", "max-servers": servers, "labels": labels}
    cloud = {
        "name": "cloud",
        "driver": "aws",
        "region-name": "eu-west-1",
        "cloud-images": images,
        "pools": [pool],
    }
    return {
        "zookeeper-servers": [{"host": "zk.example.org", "port": 2281}],
        "labels": [{"name": name, "min-ready": 5} for name in LABELS],
        "providers": [cloud],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--one", action="store_true", help="only the first configuration")
    args = parser.parse_args()
    # Servers enough for the mean of the day; the afternoons have queues.
    mean = (
        args.requests
        * sum(use * weight for use, weight in LABELS.values())
        * math.exp(0.125)
        / (args.days * DAY)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(str(folder / "week.csv"), demand(args.requests, args.days, random.Random(1)))
        (folder / "now.yaml").write_text(yaml.safe_dump(config(math.ceil(1.8 * mean))))
        (folder / "more.yaml").write_text(yaml.safe_dump(config(math.ceil(2.5 * mean))))
        command = [
            sys.executable,
            "-m",
            "nodepool.cmd.nodepoolcmd",
            "simulate",
            "--json",
            "--config",
            str(folder / "now.yaml"),
            "--trace",
            str(folder / "week.csv"),
        ]
        command += [] if args.one else ["--what-if", str(folder / "more.yaml")]
        began = time.monotonic()
        runs = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(
            f"{args.requests} requests of {args.days:g} days, {len(runs)} configuration(s): "
            f"{time.monotonic() - began:.0f} s"
        )
        for run, summary in runs.items():
            found = summary["all"]
            print(
                f"{run}: p50 {found['p50']:.1f} s, p95 {found['p95']:.0f} s, worst "
                f"{found['worst']:.0f} s, "
                f"utilization {summary['machines']['all']['utilization']:.0%}, unserved "
                f"{found['unserved']}"
            )


if __name__ == "__main__":
    main()
