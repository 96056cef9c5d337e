"""Search for better values of ``min-ready``, ``max-servers`` and the ``ram`` of labels.

Only simulations judge changes. Formulas about the demand choose what is simulated: with a constant
launch time, the requests of the last launch time are the machines that ``min-ready`` has to
replace; the machines that are needed concurrently, if nobody waits, limit what ``max-servers`` can
save, and their memory what a smaller ``ram`` can save. Only measured runs make it smaller.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from nodepool.lab.whatif.assumptions import Assumptions
from nodepool.lab.whatif.demand import Demand, Trace

#: A shorter or smaller demand does not suffice.
SHORTEST, FEWEST = 2 * 3600.0, 100
MOST_CHANGES = 3
#: Part of the score of the present configuration that each change has to save.
LEAST = 0.01
#: Hours that a request counts as waiting if it fails.
FAILED = 6.0
#: Requests that two cores simulate in a second, and those that the start of a simulation costs.
RATE, START = 360.0, 400
#: Part of the largest probable gain that a change must have to be simulated with the others.
_SHARE = 0.05
#: Part of the waiting for machines that may remain after a change of ``max-servers``.
_REMAINING = 0.02


@dataclass(frozen=True)
class Option:
    """An option of the configuration.

    :param candidates: values to try, ascending, with the present one.
    :param guess: the candidate that is probably the best.
    :param gain: score that it probably saves.
    :param label: whose memory it is, if it is that.
    """

    path: tuple[str | int, ...]
    name: str
    value: int
    candidates: tuple[int, ...]
    guess: int
    gain: float
    label: str = ""


Changes = frozenset[tuple[Option, int]]
NOTHING: Changes = frozenset()


@dataclass(frozen=True)
class Figures:
    """What a simulation has measured; hours, and seconds for ``p50`` and ``p95``.

    :param cost: of machines with a price; None: there are none.
    :param score: what the search minimizes: machine hours, and hours of waiting with their weight.
        A machine with a price counts as its price divided by the mean of all prices.
    """

    p50: float | None
    p95: float | None
    waiting_hours: float
    machine_hours: float
    idle_hours: float
    cost: float | None
    score: float


def too_short(trace: Trace) -> str | None:
    """Return why the demand does not suffice for advice; None if it does."""
    number, hours = len(trace.requests), trace.requests[-1].time / 3600
    if number < FEWEST:
        return f"it has {number} requests; at least {FEWEST} are required"
    if hours < SHORTEST / 3600:
        return f"it covers {hours:.1f} h; at least {SHORTEST / 3600:.0f} h are required"
    if 2 * trace.estimated > number:
        return f"{trace.estimated} of its {number} requests have no known duration"
    return None


def simulations(requests: int, timeout: float) -> int:
    """Return how many simulations the search may use.

    The number does not depend on the speed of the machine, so that the advice is the same.
    """
    return max(1 + MOST_CHANGES, int(timeout * RATE / (requests + START)))


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return the content of a configuration file with the changes."""
    # Nothing is shared between two places, as after an anchor.
    result: dict[str, Any] = json.loads(json.dumps(config, default=str))
    for option, value in changes:
        owner: Any = result
        for item in option.path[:-1]:
            owner = owner[item]
        owner[option.path[-1]] = value
    return result


def figures(
    summary: Mapping[str, Any], prices: Mapping[tuple[str, str], float], weight: float
) -> Figures:
    """Return the figures of a simulation.

    :param prices: of an hour, by provider and label.
    :param weight: machine hours that an hour of waiting counts as.
    """
    hours = {(provider, label): value for provider, label, value in summary["hours"]}
    mean = statistics.fmean(prices.values() or [1.0]) or 1.0
    waited = summary["waited_hours"] + FAILED * summary["all"]["failed"]
    return Figures(
        summary["all"]["p50"],
        summary["all"]["p95"],
        waited,
        sum(hours.values()),
        summary["machines"].get("all", {}).get("idle", 0.0),
        sum(value * prices.get(key, 0.0) for key, value in hours.items()) if prices else None,
        sum(value * prices.get(key, mean) / mean for key, value in hours.items()) + weight * waited,
    )


# -- what is worth a simulation


def options(
    config: Mapping[str, Any],
    demand: Sequence[Demand],
    assumptions: Assumptions,
    weight: float,
    sufficient: Mapping[str, int] = MappingProxyType({}),
) -> list[Option]:
    """Return the options whose change may save something, the most promising first.

    :param config: content of the configuration file.
    :param sufficient: label -> MiB of memory that are enough for its jobs, if fewer than now.
    """
    pools = list(_pools(config))
    launch = {
        name: assumptions.mean_launch(name, driver)
        for *_pool, driver, names in pools
        for name in names
    }
    found: dict[str, Option] = {}
    for number, label in enumerate(config.get("labels") or ()):
        name, value = label["name"], label.get("min-ready") or 0
        if value >= 0 and name in launch:
            times = [each.time for each in demand for wanted in each.labels if wanted == name]
            found[name] = _min_ready(
                ("labels", number, "min-ready"), name, value, (times, launch[name], demand), weight
            )
    for path, name, pool, _driver, names in pools:
        if isinstance(value := pool.get("max-servers"), int) and value > 0:
            levels = _levels(demand, launch, assumptions, dict.fromkeys(names, 1))
            spare = sum(
                max(found[each].value, found[each].guess) for each in names if each in found
            )
            found[name] = _max_servers(path, name, value, (levels, spare), weight)
        quota = assumptions.quotas.get(config["providers"][path[1]]["name"], {})
        limit = min(pool.get("max-ram", math.inf), quota.get("ram", math.inf))
        where = name.removeprefix("max-servers of ")
        for option in _ram(path, where, pool, limit, (demand, launch, assumptions), sufficient):
            found[option.name] = replace(option, gain=weight * option.gain)
    useful = [option for option in found.values() if len(option.candidates) > 1]
    return sorted(useful, key=lambda option: -option.gain)


def _pools(
    config: Mapping[str, Any],
) -> Iterator[tuple[tuple[str | int, ...], str, dict[str, Any], str, set[str]]]:
    """Yield path and name of the limit, data, driver and labels of each pool."""
    for number, provider in enumerate(config.get("providers") or ()):
        for place, pool in enumerate(provider.get("pools") or ()):
            yield (
                ("providers", number, "pools", place, "max-servers"),
                f"max-servers of pool {provider['name']}/{pool.get('name', place)}",
                pool,
                provider.get("driver") or "openstack",
                {each["name"] for each in pool.get("labels") or ()},
            )


def _min_ready(
    path: tuple[str | int, ...],
    label: str,
    value: int,
    use: tuple[list[float], float, Sequence[Demand]],
    weight: float,
) -> Option:
    times, launch, demand = use
    # Requests that arrive while the machines of earlier ones are replaced.
    peak = max(
        (number + 1 - bisect_left(times, t - launch) for number, t in enumerate(times)), default=0
    )

    def score(ready: int) -> float:
        pairs = zip(times, times[ready:], strict=False)
        waited = sum(max(0.0, before + launch - time) for before, time in pairs)
        # Idle hours are those of all ready machines, less launches, plus waiting.
        return (ready * demand[-1].time + (1 + weight) * waited) / 3600

    guess = min(range(peak + 1), key=score)
    tries = {0, guess // 2, guess - 1, guess, guess + 1, math.ceil(guess * 1.5), value}
    candidates = sorted(each for each in tries if 0 <= each <= max(peak, value))
    gain = score(value) - score(guess)
    return Option(path, f"min-ready of label {label}", value, tuple(candidates), guess, gain)


def _levels(
    demand: Iterable[Demand],
    launch: Mapping[str, float],
    assumptions: Assumptions,
    sizes: Mapping[str, int],
) -> Counter[int]:
    """Return the sum of sizes of machines needed concurrently, if nobody waits -> seconds.

    :param sizes: by label, of those that count.
    """
    steps: Counter[float] = Counter()
    for request in demand:
        for label in sizes.keys() & {*request.labels}:
            number = request.labels.count(label) * sizes[label]
            use = launch[label] + request.duration
            steps[request.time] += number
            steps[request.time + use + max(assumptions.delete_times)] -= number
    found: Counter[int] = Counter()
    level = 0
    for time, later in pairwise(sorted(steps)):
        level += steps[time]
        found[level] += math.ceil(later - time)
    return found


def _missing(levels: Mapping[int, int], limit: float) -> float:
    """Return the sizes above the limit times hours: what requests wait for at least."""
    return sum(max(0, level - limit) * seconds for level, seconds in levels.items()) / 3600


def _max_servers(
    path: tuple[str | int, ...],
    name: str,
    value: int,
    use: tuple[Mapping[int, int], int],
    weight: float,
) -> Option:
    levels, spare = use
    most = max(value, max(levels, default=0) + spare)
    rest = _REMAINING * _missing(levels, value)
    enough = next(limit for limit in range(value, most + 1) if _missing(levels, limit) <= rest)
    guess = value if enough == value else min(enough + spare, most)
    candidates = sorted({value, (value + guess) // 2, enough, guess, most})
    gain = weight * (_missing(levels, value) - _missing(levels, guess))
    return Option(path, name, value, tuple(candidates), guess, gain)


def _ram(
    path: tuple[str | int, ...],
    where: str,
    pool: Mapping[str, Any],
    limit: float,
    use: tuple[Sequence[Demand], Mapping[str, float], Assumptions],
    sufficient: Mapping[str, int],
) -> Iterator[Option]:
    """Yield the labels that need less memory, if the limit makes requests wait.

    The gain is in hours of waiting.

    :param limit: MiB of the pool.
    """
    sizes = {each["name"]: each.get("ram") or 0 for each in pool.get("labels") or ()}
    now = _missing(_levels(*use, sizes), limit)
    for place, (label, value) in enumerate(sizes.items()):
        less = sufficient.get(label, value)
        if less < value and (then := _missing(_levels(*use, sizes | {label: less}), limit)) < now:
            at = (*path[:-1], "labels", place, "ram")
            name = f"ram of label {label} in {where}"
            yield Option(at, name, value, (less, value), less, (now - then) / value, label)


# -- search


class Search:
    """Simulates the promising changes first, then those near the best ones.

    :param judge: returns the figures of each set of changes; None if the time was over.
    :param left: simulations that the search may still ask for; 0: it ended early.
    """

    def __init__(self, judge: Callable[[list[Changes]], list[Figures | None]], left: int) -> None:
        self._judge = judge
        self.left = left
        self.known: dict[Changes, Figures] = {}

    def measure(self, wanted: Iterable[Changes]) -> None:
        new = [each for each in dict.fromkeys(wanted) if each not in self.known][: self.left]
        found = dict(zip(new, self._judge(new), strict=True))
        self.known |= {each: one for each, one in found.items() if one is not None}
        self.left = 0 if None in found.values() else self.left - len(new)

    def _penalized(self, changes: Changes) -> float:
        return self.known[changes].score + LEAST * self.known[NOTHING].score * len(changes)

    @property
    def best(self) -> Changes:
        return min(self.known, key=self._penalized)

    def run(self, found: Sequence[Option]) -> list[tuple[Option, int]]:
        """Return the best changes, in the order in which they probably save the most.

        The present configuration is unknown afterwards if its simulation did not end in time.
        """
        guesses = [
            (each, each.guess) for each in found if each.gain > max(0.0, _SHARE * found[0].gain)
        ][:MOST_CHANGES]
        # All together first: the time may suffice for two simulations only.
        self.measure([NOTHING, frozenset(guesses)])
        self.measure(frozenset(guesses[:number]) for number in range(len(guesses), 0, -1))
        if NOTHING not in self.known:
            return []
        self.measure(frozenset({one}) for one in guesses)
        best, before = self.best, None
        while self.left and best != before:
            near = [each for each in _near(best, found) if each not in self.known]
            # Two at a time for two cores; the result must not depend on their number.
            for number in range(0, len(near), 2):
                self.measure(near[number : number + 2])
                if self.best != best:
                    break
            best, before = self.best, best
        return sorted(best, key=lambda one: (-one[0].gain, one[0].path))


def _near(changes: Changes, found: Sequence[Option]) -> Iterator[Changes]:
    """Yield the changes that differ in one option: by a step of its candidates, or by all.

    If they would be too many, each of the others is omitted in turn.
    """
    values = dict(changes)
    for option in sorted(found, key=lambda each: each not in values):
        value = values.get(option, option.value)
        place = option.candidates.index(value)
        steps = {*option.candidates[max(0, place - 1) : place + 2], option.guess, option.value}
        for step in sorted(steps - {value}):
            near = changes - {(option, value)} | ({(option, step)} - {(option, option.value)})
            over = len(near) > MOST_CHANGES
            yield from (near - {other} for other in changes) if over else [near]
