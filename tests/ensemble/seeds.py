"""Run seeds, in turn, on one ensemble."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.ensemble import clock, network, verdict
from tests.ensemble.faults import KINDS, Faults
from tests.ensemble.load import Load
from tests.ensemble.servers import NUMBERS, Ensemble, Monitor
from tests.world.history import Entry

#: Seconds of load before, between and after faults.
CALM = (0.3, 1.0)
#: Seconds of load after the last fault; what it delays is measured.
AFTER = 1.5
#: Faults of a seed, at least and at most.
FAULTS = (2, 3)


@dataclass
class Result:
    """What a seed did, for people and for ``--json``."""

    seed: int
    seconds: float = 0.0
    gaps: list[verdict.Gap] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    history: list[Entry] = field(default_factory=list)

    @property
    def slow(self) -> list[verdict.Gap]:
        return [gap for gap in self.gaps if gap.too_long]


class Run:
    """The processes of a run, used by all its seeds."""

    def __init__(self, folder: pathlib.Path, throttle: pathlib.Path | None) -> None:
        network.build(NUMBERS)
        library = clock.build(folder)
        self._folder = folder
        self._ensemble = Ensemble(folder, throttle, library)
        self.omitted: dict[str, str] = {}
        if throttle is None:
            self.omitted["slow disk"] = "the kernel cannot limit writes here"
        if library is None:
            self.omitted["clock steps"] = "there is no C compiler"
        self._ensemble.start()
        self._monitor = Monitor(self._ensemble)
        self._monitor.start()
        self._load = Load(self._ensemble, folder, library)

    def choose(self, seed: int, only: str | None) -> list[str]:
        """Return the faults of a seed."""
        kinds = [kind for kind in KINDS if kind not in self.omitted]
        chance = random.Random(seed)
        return [only] if only else chance.sample(kinds, chance.randint(*FAULTS))

    def seed(self, seed: int, only: str | None = None) -> Result:
        """Run one seed; what goes wrong is among its violations."""
        result = Result(seed)
        began = time.monotonic()
        try:
            self._seed(result, only)
        except Exception as error:
            say(traceback.format_exc())
            result.violations.append(traceback.format_exception_only(error)[0].splitlines()[0])
            self._load.renew()
        result.seconds = time.monotonic() - began
        return result

    def _seed(self, result: Result, only: str | None) -> None:
        chance = random.Random(result.seed)
        faults = Faults(self._ensemble, self._load, self._folder, chance)
        self._load.journal.take()
        faults.back_up()
        self._load.start(result.seed)
        for fault in self.choose(result.seed, only):
            time.sleep(chance.uniform(*CALM))
            faults.happen(fault)
        time.sleep(AFTER)
        images, end = set(self._load.image_ids()), time.monotonic()
        self._load.stop()
        result.violations += verdict.lost_machines(self._load, self._load.journal.read())
        self._load.end()
        lost = any(window.forgets for window in faults.windows)
        if lost:
            self._load.recover()
        result.violations += verdict.leaks(self._load)
        result.violations += verdict.images(self._load, images, lost)
        result.violations += [f"{name} has ended" for name in self._load.ended()]
        events = self._load.journal.take()
        (self._folder / f"events-{result.seed}.json").write_text(json.dumps(events))
        result.violations += verdict.violations(events, faults.windows)
        result.gaps = verdict.gaps(events, faults.windows, end, self._monitor.served)
        counts = Counter(event["event"] for event in events)
        counts.update(
            f"fulfilled {event['label']}" for event in events if event["event"] == "fulfilled"
        )
        counts["images"] = len(set(self._load.image_ids()) - images)
        result.counts = dict(counts)
        result.history = verdict.history(events, faults.windows, result.seed)

    def close(self) -> None:
        self._load.close()
        self._ensemble.close()


def as_json(results: list[Result]) -> str:
    return json.dumps([dataclasses.asdict(result) for result in results])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_all(run: Run, seeds: range, only: str | None) -> list[Result]:
    """Run the seeds; the histories are checked at the end."""
    results: list[Result] = []
    for seed in seeds:
        result = run.seed(seed, only)
        results.append(result)
        say(f"seed {seed}: {result.seconds:.0f} s; {'; '.join(map(str, result.gaps))}")
        for violation in result.violations:
            say(f"  {violation}")
    runs = [{"seed": result.seed, "history": result.history} for result in results]
    bad = verdict.linearizable(runs)
    for result in results:
        if result.seed in bad:
            result.violations.append("the history is not linearizable")
            say(f"seed {result.seed}: the history is not linearizable")
    return results
