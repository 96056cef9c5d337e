"""``nodepool usage`` of a million exported nodes: ``python -m tests.benchmark.usage_log``.

Generates the file with the launcher's own functions (about two minutes), and prints how long each
table takes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator

from nodepool.status import usage_file
from nodepool.status.usage import GROUPS, Use

BATCH = 20_000


def nodes(number: int, seed: int = 1) -> Iterator[Use]:
    """Yield nodes that ended in turn in 500 days, of 300 jobs in 100 projects."""
    rng = random.Random(seed)
    step = 500 * 86400 / number
    for index in range(number):
        created = 1.7e9 + index * step
        ready = created + rng.uniform(1, 90)
        began = ready + rng.expovariate(1 / 300)
        freed = began + rng.expovariate(1 / 1500)
        user = {
            "tenant": f"tenant{rng.randrange(8)}",
            "project": f"project-{rng.randrange(100)}",
            "pipeline": rng.choice(("check", "gate")),
            "job": f"job-{rng.randrange(300)}",
        }
        measured = {
            "cpu_usec": rng.uniform(0, 4e6) * (freed - began),
            "memory_peak": rng.randrange(1 << 20) * 4096.0,
            "memory_limit": float(1 << 32),
            "oom_kills": float(rng.random() < 0.01),
            "disk_peak": rng.randrange(1 << 20) * 4096.0,
        }
        yield Use(
            f"{index:010}",
            f"label{rng.randrange(20)}",
            f"provider{rng.randrange(4)}",
            "main",
            created,
            ready,
            began,
            freed,
            freed + rng.uniform(1, 30),
            round(rng.expovariate(1 / 20), 3),
            user,
            measured,
        )


def generate(path: str, number: int) -> None:
    batch: list[Use] = []
    with usage_file.create(path) as file:
        for use in nodes(number):
            batch.append(use)
            if len(batch) == BATCH:
                file.write(batch, lambda use: 0.1)
                batch = []
        file.write(batch, lambda use: 0.1)
        while file.sum_up():
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--file", help="use this one, which is generated if it does not exist")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or os.path.join(folder, "usage.sqlite")
        if not os.path.exists(path):
            began = time.monotonic()
            generate(path, args.nodes)
            print(f"generated in {time.monotonic() - began:.0f} s")
        print(f"{os.path.getsize(path) / (1 << 20):.0f} MiB")
        for by in GROUPS:
            for since in (0.0, 1.7e9 + 470.4 * 86400):
                began, busy = time.monotonic(), time.process_time()
                with usage_file.UsageFile(path) as file:
                    rows = file.table(by, since).rows
                taken = time.monotonic() - began
                what = "all" if not since else "the last 30 days"
                cpu = time.process_time() - busy
                number = rows[-1]["nodes"]
                print(f"--by {by}, {what}: {taken:.2f} s ({cpu:.2f} s of CPU), {number} nodes")


if __name__ == "__main__":
    main()
