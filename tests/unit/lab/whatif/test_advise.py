"""Advice on ``min-ready`` and ``max-servers``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodepool.lab.whatif import advise
from nodepool.lab.whatif.advise import NOTHING, Changes, Figures, Option, Search
from nodepool.lab.whatif.assumptions import Assumptions
from nodepool.lab.whatif.demand import Demand, Trace
from tests.benchmark import advise as workloads

#: Of all configurations of each workload: `python -m tests.benchmark.advise --record FILE`.
SCORES = json.loads(Path(__file__).with_name("scores.json").read_text())
LAUNCH, HOUR = 60.0, 3600.0


def every(seconds: float, number: int, use: float = 100.0, label: str = "vm") -> list[Demand]:
    return [Demand(seconds * each, (label,), use) for each in range(number)]


def figures(score: float) -> Figures:
    return Figures(0.0, 0.0, 0.0, 0.0, 0.0, None, score)


def option(name: str, value: int = 0, guess: int = 1, *more: int) -> Option:
    return Option((name,), name, value, tuple(sorted({value, guess, *more})), guess, 1.0)


def by(found: list[Option]) -> dict[str, Option]:
    return {each.name: each for each in found}


# -- the search


@pytest.mark.core
@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_search_comes_within_5_percent_of_the_best_of_all_configurations(name: str) -> None:
    scores = SCORES[name]
    in_use = scores[""]["in_use"]
    # As many as with 5,000 requests.
    allowed = advise.simulations(5000, 60.0)
    found = workloads.options(name)
    assert {workloads.key(each) for each in workloads.grid(found)} == set(scores), "record again"

    def overhead(changes: Changes) -> float:
        """No change saves hours in which nodes are in use."""
        return float(scores[workloads.key(changes)]["score"]) - in_use

    simulated: list[Changes] = []

    def judge(wanted: list[Changes]) -> list[Figures | None]:
        simulated.extend(wanted)
        return [figures(overhead(each) + in_use) for each in wanted]

    chosen = Search(judge, allowed).run(found)
    best = min(overhead(each) for each in workloads.grid(found))
    assert overhead(frozenset(chosen)) <= best * 1.05
    assert len(chosen) <= advise.MOST_CHANGES
    assert len(simulated) == len(set(simulated)) <= allowed


def judge_of(score: Callable[[dict[str, int]], float]) -> Callable[..., list[Figures | None]]:
    return lambda wanted: [
        figures(score({one.name: value for one, value in each})) for each in wanted
    ]


def test_change_that_saves_too_little_is_not_advised() -> None:
    a, b = option("a"), option("b")
    judge = judge_of(lambda values: 100 - 0.9 * values.get("a", 0) - 5 * values.get("b", 0))
    assert Search(judge, 20).run([a, b]) == [(b, 1)]


def test_at_most_three_changes_are_advised_those_that_save_the_most() -> None:
    found = [option(name) for name in "abcde"]
    saved = dict(zip("abcde", (5, 9, 2, 8, 7), strict=True))
    judge = judge_of(lambda values: 100 - sum(saved[name] for name in values))
    assert {each.name for each, _value in Search(judge, 40).run(found)} == {"b", "d", "e"}


def test_search_proceeds_from_the_guess_to_better_candidates() -> None:
    a = option("a", 0, 2, 1, 3, 4, 5)
    assert Search(judge_of(lambda values: 100 - 3 * values.get("a", 0)), 20).run([a]) == [(a, 5)]


def test_changes_that_only_help_without_each_other_are_not_combined() -> None:
    a, b = option("a"), option("b")
    judge = judge_of(lambda values: {0: 100, 1: 80 - values.get("b", 0), 2: 120}[len(values)])
    assert Search(judge, 20).run([a, b]) == [(b, 1)]


def test_search_that_ran_out_of_time_returns_the_best_that_it_has_measured() -> None:
    a, b = option("a"), option("b")

    measured = iter([figures(100), figures(95)])

    search = Search(lambda wanted: [next(measured, None) for _ in wanted], 20)
    assert search.run([a, b]) == [(a, 1), (b, 1)]
    assert search.left == 0
    search = Search(lambda wanted: [None for _ in wanted], 20)
    assert search.run([a, b]) == [] and NOTHING not in search.known


def test_search_asks_for_no_more_simulations_than_allowed() -> None:
    asked: list[Changes] = []

    def judge(wanted: list[Changes]) -> list[Figures | None]:
        asked.extend(wanted)
        return [figures(100 - len(each)) for each in wanted]

    search = Search(judge, 5)
    search.run([option(str(number), 0, 3, 1, 2) for number in range(9)])
    assert len(asked) == 5 and search.left == 0


# -- what is simulated


def content(servers: int = 10, **ready: int) -> dict[str, Any]:
    return workloads.config(servers, **ready)


def test_candidates_of_min_ready_reach_from_none_to_all_requests_of_a_launch_time() -> None:
    found = by(advise.options(content(vm=2), every(20, 500), Assumptions(), 100.0))
    ready = found["min-ready of label vm"]
    # A request each 20 s, and launches of 60 s: the fourth node is never missing.
    assert (ready.value, ready.guess) == (2, 3)
    assert ready.candidates[0] == 0 and ready.candidates[-1] == 4
    assert ready.path == ("labels", 0, "min-ready") and ready.gain > 0


def test_label_that_nobody_requests_needs_no_ready_nodes() -> None:
    found = by(advise.options(content(vm=0, spare=3), every(600, 100), Assumptions(), 5.0))
    assert found["min-ready of label spare"].guess == 0


def test_cheap_waiting_needs_no_ready_nodes() -> None:
    found = by(advise.options(content(vm=2), every(600, 100), Assumptions(), 0.0))
    assert found["min-ready of label vm"].guess == 0


def test_pool_with_enough_servers_gets_no_more() -> None:
    assert not [
        each
        for each in advise.options(content(50, vm=1), every(60, 200), Assumptions(), 5.0)
        if each.name.startswith("max-servers")
    ]


def test_servers_that_the_demand_needs_concurrently_limit_the_candidates_of_max_servers() -> None:
    # 60 s of launch, 930 s of use and 10 s of deletion; a request each 100 s.
    found = by(advise.options(content(2, vm=0), every(100, 200, use=930), Assumptions(), 0.0))
    servers = found["max-servers of pool cloud/main"]
    assert servers.candidates[0] == 2 and servers.candidates[-1] == 10
    assert servers.path == ("providers", 0, "pools", 0, "max-servers")


def test_negative_min_ready_and_unlimited_pools_are_not_touched() -> None:
    given = content(2, vm=-1)
    del given["providers"][0]["pools"][0]["max-servers"]
    assert advise.options(given, every(50, 200), Assumptions(), 5.0) == []


def slivers(**pool: Any) -> dict[str, Any]:
    labels = [{"name": "small", "ram": 1024}, {"name": "vm", "ram": 4096}]
    provider = {"name": "metal", "driver": "nodemanager", "pools": [{"name": "main", **pool}]}
    provider["pools"][0]["labels"] = labels
    names = [{"name": each["name"], "min-ready": -1} for each in labels]  # not touched
    return {"labels": names, "providers": [provider]}


@pytest.mark.parametrize("limited_by", ["pool", "account"])
def test_less_memory_is_a_candidate_if_the_limit_makes_requests_wait(limited_by: str) -> None:
    # Four requests concurrently, of which the limit allows two.
    given = slivers(**{"max-ram": 8192} if limited_by == "pool" else {})
    assumptions = Assumptions(quotas={"metal": {"ram": 8192}} if limited_by == "account" else {})
    demand = every(100, 200, use=380)
    (found,) = advise.options(given, demand, assumptions, 0.0, {"vm": 1024})
    assert found.name == "ram of label vm in pool metal/main" and found.label == "vm"
    assert found.path == ("providers", 0, "pools", 0, "labels", 1, "ram")
    assert (found.value, found.guess, found.candidates) == (4096, 1024, (1024, 4096))
    (found,) = advise.options(given, demand, assumptions, 5.0, {"vm": 1024})
    # Two of four wait at each time.
    assert found.gain == pytest.approx(5 * 2 * demand[-1].time / HOUR, rel=0.1)


def test_same_label_has_less_memory_in_each_provider() -> None:
    given, other = (slivers(**{"max-ram": 8192}) for _ in range(2))
    other["providers"][0]["name"] = "more"
    given["providers"] += other["providers"]
    found = advise.options(given, every(100, 200, use=380), Assumptions(), 0.0, {"vm": 1024})
    assert sorted(each.path[1] for each in found) == [0, 1]


def test_memory_stays_without_evidence_or_if_nobody_waits_for_it() -> None:
    demand = every(100, 200, use=380)
    assert advise.options(slivers(**{"max-ram": 8192}), demand, Assumptions(), 5.0) == []
    for pool in ({}, {"max-ram": 32768}):
        assert advise.options(slivers(**pool), demand, Assumptions(), 5.0, {"vm": 1024}) == []


# -- demand and figures


@pytest.mark.parametrize(
    ("requests", "estimated", "reason"),
    [
        (every(600, 99), 0, "it has 99 requests; at least 100 are required"),
        (every(30, 200), 0, "it covers 1.7 h; at least 2 h are required"),
        (every(60, 200), 101, "101 of its 200 requests have no known duration"),
        (every(60, 200), 100, None),
    ],
)
def test_short_history_is_refused_with_the_reason(
    requests: list[Demand], estimated: int, reason: str | None
) -> None:
    assert advise.too_short(Trace(requests, {}, estimated)) == reason


@pytest.mark.parametrize(("requests", "number"), [(200, 36), (1000, 15), (5000, 4), (50_000, 4)])
def test_larger_demand_gets_fewer_simulations(requests: int, number: int) -> None:
    assert advise.simulations(requests, 60.0) == number


def summary(**hours: float) -> dict[str, Any]:
    return {
        "hours": [["cloud", label, value] for label, value in hours.items()],
        "waited_hours": 2.0,
        "machines": {"all": {"idle": 1.0}},
        "all": {"p50": 1.0, "p95": 2.0, "failed": 1},
    }


def test_score_adds_weighted_waiting_to_machine_hours_and_failures_count_as_waiting() -> None:
    found = advise.figures(summary(a=10.0, b=20.0), {}, 5.0)
    assert found == Figures(1.0, 2.0, 8.0, 30.0, 1.0, None, 70.0)


def test_expensive_machines_count_more() -> None:
    prices = {("cloud", "a"): 3.0, ("cloud", "b"): 1.0}
    found = advise.figures(summary(a=10.0, b=20.0, free=4.0), prices, 0.0)
    assert found.cost == 50.0
    assert found.score == 15.0 + 10.0 + 4.0


def test_change_of_an_anchor_changes_only_its_own_place() -> None:
    label = {"name": "a", "min-ready": 1}
    given = {"labels": [label, label]}
    one = Option(("labels", 0, "min-ready"), "a", 1, (1, 2), 2, 1.0)
    assert advise.changed(given, frozenset({(one, 2)})) == {
        "labels": [{"name": "a", "min-ready": 2}, {"name": "a", "min-ready": 1}]
    }
    assert label["min-ready"] == 1
