"""The page about a run."""

from __future__ import annotations

import datetime
import os
import statistics
from collections import Counter

from tests.ensemble.faults import KINDS
from tests.ensemble.seeds import Result
from tests.ensemble.servers import SESSION
from tests.ensemble.verdict import Gap

ROW = "{:<30} {:>6} {:>9} {:>9} {:>9} {:>9}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def page(results: list[Result], omitted: dict[str, str]) -> str:
    """Return the report: what was done, how long nothing was fulfilled, the verdict."""
    counts: Counter[str] = sum((Counter(result.counts) for result in results), Counter())
    gaps: dict[str, list[Gap]] = {}
    for result in results:
        for gap in result.gaps:
            gaps.setdefault(gap.fault, []).append(gap)
    bad = [result for result in results if result.violations]
    took = sum(result.seconds for result in results)
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"{len(results)} seeds from {results[0].seed} on {today}, in {duration(took)}",
        f"3 ZooKeepers, 2 launchers, 1 builder, 2 clients of Zuul, leases; session {SESSION:g} s; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.0f}",
        "",
        f"Requests   {counts['requested']} submitted; fulfilled: {counts['fulfilled plain']} plain,"
        f" {counts['fulfilled slot']} metastatic, {counts['fulfilled lease']} leases",
        f"Sessions   {counts['session-lost']} of Zuul's clients expired, and {counts['expired']} "
        "nodes with them",
        f"Nodes      {counts['kept']} kept during all faults of a seed, {counts['released']} "
        "returned",
        f"Images     {counts['images']} built and uploaded after the last fault",
        f"History    {sum(len(r.history) for r in results)} entries checked for linearizability",
        "",
        "Longest time without a fulfilled request while the servers could serve, in seconds; in",
        "the last column, longest time in which ZooKeeper had no leader or no follower:",
        "",
        ROW.format("Fault", "Times", "Median", "Longest", "Limit", "No leader"),
    ]
    for fault, kind in KINDS.items():
        if found := gaps.get(fault):
            times = [gap.seconds for gap in found]
            cells = (
                f"{statistics.median(times):.1f}",
                f"{max(times):.1f}",
                f"{kind.longest:.0f}",
                f"{max(gap.unserved for gap in found):.1f}",
            )
            lines.append(ROW.format(fault, len(found), *cells))
    lines += [f"Omitted: {fault}: {reason}" for fault, reason in omitted.items()]
    inherited = sum(
        gap.longest > KINDS[gap.fault].longest for each in gaps.values() for gap in each
    )
    if inherited:
        lines += ["", f"Faults during the recovery from another one, with its limit: {inherited}"]
    slow = [(result.seed, gap) for result in results for gap in result.slow]
    lines += [
        "",
        f"Verdict: {len(bad)} of {len(results)} seeds violate a rule; {len(slow)} of "
        f"{sum(map(len, gaps.values()))} faults exceed the limit of time",
    ]
    for result in bad:
        lines += [f"  seed {result.seed}: {text}" for text in result.violations]
    lines += [f"  seed {seed}: {gap}" for seed, gap in slow]
    return "\n".join(lines)
