"""Uses of nodes, from the events of the history."""

from __future__ import annotations

import math
import pathlib
import random
from typing import Any

import pytest
import yaml

from nodepool.config.loading import loadConfig
from nodepool.config.model import Config
from nodepool.status.usage import (
    FEWEST_RUNS,
    Sufficient,
    Use,
    advice,
    percentile,
    price_of,
    sizes,
    sufficient,
    table,
    uses,
)

GIB = 1 << 30
HOUR = 3600.0


def life(
    node: str, begin: float = 0.0, label: str = "small", **values: Any
) -> list[dict[str, Any]]:
    """The events of a node that starts in a minute, waits an hour, and is used for two."""
    request, user = f"200-{node}", {"tenant": "acme", "project": "web", "job": "unit"}
    common = {"node": node, "provider": "metal", "pool": "main", "labels": [label]}
    user |= {key: values.pop(key) for key in ("job", "owner", "tenant") if key in values}
    measured = {
        "cpu_usec": 7_200_000_000,
        "memory_peak": GIB,
        "memory_limit": 2 * GIB,
        "oom_kills": 0,
        "disk_peak": GIB,
        **values,
    }
    used = begin + 60 + HOUR
    freed = used + 2 * HOUR
    asked = {"request": request}

    def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "time": time, **fields}

    return [
        event("node-created", begin, state="building", **common),
        event("node-changed", begin + 60, state="ready", before="building", **common),
        event("request-submitted", used - 8, labels=[label], **asked, **user),
        event("node-allocated", used - 1, state="ready", **asked, **common),
        event("request-changed", used - 1, state="fulfilled", nodes=[node], seconds=7.0, **asked),
        event("request-removed", used - 0.5, **asked),
        event("node-changed", used, state="in-use", before="ready", **common),
        event("node-changed", freed, state="used", before="in-use", **common),
        event("node-removed", freed + 10, before="deleting", **common),
        event("node-usage", freed + 9, node=node, provider="metal", complete=True, **measured),
    ]


def unpriced(_use: Use) -> float | None:
    return None


def test_hours_wait_and_measured_values_of_a_node() -> None:
    results = table(uses(life("1")), "job", 1e6, lambda use: 0.5)
    [row] = results.rows
    assert row == {
        "job": "unit",
        "nodes": 1,
        "used_hours": 2.0,
        "idle_hours": 1.0,
        "launch_hours": 0.02,
        "wait_p50": 7.0,
        "wait_p95": 7.0,
        "memory_p50": GIB,
        "memory_p95": GIB,
        "memory_limit": 2 * GIB,
        "cores_p50": 1.0,
        "cores_p95": 1.0,
        "kills": 0,
        "cost": 1.51,
        "idle_cost": 0.5,
    }
    assert next(iter(results.columns)) == "job"


@pytest.mark.spec("issue 49, 3: groups; order and repetition of events do not matter")
def test_groups_do_not_depend_on_the_order_of_events() -> None:
    events = (
        life("1") + life("2", 100.0, "large", job="build") + life("3", 9.0, owner="ada", tenant="")
    )
    expected = {
        by: table(uses(events), by, 1e6, unpriced).rows
        for by in ("label", "job", "tenant", "owner", "provider", "pipeline")
    }
    assert [(row["label"], row["nodes"]) for row in expected["label"]] == [
        ("small", 2),
        ("large", 1),
        ("(all)", 3),
    ]
    assert {row["owner"] for row in expected["owner"]} == {None, "ada", "(all)"}
    for seed in range(20):
        mixed = events + random.Random(seed).sample(events, 8)
        random.Random(seed).shuffle(mixed)
        mixed.sort(
            key=lambda event: "request" in event["type"] and event["type"] != "request-submitted"
        )
        for by in ("label", "provider"):
            assert table(uses(mixed), by, 1e6, unpriced).rows == expected[by]


def test_nodes_in_use_count_until_now() -> None:
    events = [event for event in life("1") if event["time"] < 60 + 2 * HOUR]
    [row] = table(uses(events), "label", 60 + 1.5 * HOUR, lambda use: 1.0).rows
    assert (row["used_hours"], row["idle_hours"]) == (0.5, 1.0)
    assert (row["memory_p50"], row["kills"], row["cost"]) == (None, None, 1.52)


@pytest.mark.parametrize("value", ["x", None, -5, [1], {}])
def test_values_of_old_or_hostile_node_managers_are_unknown(value: Any) -> None:
    [row] = table(uses(life("1", memory_peak=value, cpu_usec=value)), "label", 1e6, unpriced).rows
    assert row["memory_p50"] is None and row["cores_p50"] is None


@pytest.fixture
def configuration(tmp_path: pathlib.Path) -> Config:
    def provider(name: str, **options: Any) -> dict[str, Any]:
        labels = [
            {"name": name, "cloud-image": "host", "ram": ram}
            for name, ram in (("small", 2048), ("medium", 4096), ("large", 8192))
        ]
        return {
            "name": name,
            "driver": "nodemanager",
            "hosts": [{"name": "h", "url": "unix:/run/x"}],
            "cloud-images": [{"name": "host"}],
            "pools": [{"name": "main", "labels": labels}],
            **options,
        }

    path = tmp_path / "nodepool.yaml"
    content = {
        "zookeeper-servers": [{"host": "127.0.0.1"}],
        "zookeeper-insecure": True,
        "labels": [{"name": "small"}, {"name": "medium"}, {"name": "large", "cost": {"hour": 3}}],
        "providers": [
            provider("metal", cost={"hour": 1.5}),
            provider("free"),
            {
                "name": "racks",
                "driver": "static",
                "cost": {"hour": 0.5},
                "pools": [{"name": "main", "nodes": [{"name": "h1", "labels": "small"}]}],
            },
        ],
    }
    path.write_text(yaml.safe_dump(content))
    return loadConfig(str(path))


def test_price_is_of_the_label_or_else_of_the_provider(configuration: Config) -> None:
    for label, where, price in (
        ("small", "metal", 1.5),
        ("large", "metal", 3.0),
        ("small", "free", None),
        ("small", "racks", 0.5),
        ("gone", "gone", None),
    ):
        assert price_of(configuration, Use("1", label=label, provider=where, pool="main")) == price


@pytest.mark.spec("issue 49, 5: ten synthetic jobs of known need: the advised size is right in ten")
def test_smallest_label_that_suffices(configuration: Config) -> None:
    needs = {
        "tiny": (0.1, 0, "large", "small"),
        "half": (1.0, 0, "large", "small"),
        "just small": (1.7, 0, "medium", "small"),
        "over small": (1.9, 0, "medium", "medium"),
        "medium": (3.0, 0, "large", "medium"),
        "just medium": (3.4, 0, "large", "medium"),
        "over medium": (3.9, 0, "large", "large"),
        "full of caches": (4.0, 0, "medium", "medium"),
        "killed in small": (2.0, 2, "small", "medium"),
        "killed in the largest": (8.0, 1, "large", None),
    }
    events = [
        event
        for number, (job, (peak, kills, label, _advised)) in enumerate(needs.items())
        for run in range(3)
        for event in life(
            f"{number}-{run}", job=job, label=label, memory_peak=peak * GIB * (1 - run / 10),
            oom_kills=kills * (run == 0),
        )
    ]  # fmt: skip
    rows = {row["job"]: row for row in advice(uses(events), sizes(configuration)).rows}
    assert {job: row["advised"] for job, row in rows.items()} == {
        job: advised for job, (_peak, _kills, _label, advised) in needs.items()
    }
    assert all(row["runs"] == 3 for row in rows.values())
    assert rows["half"]["headroom"] == 0.5 and rows["killed in small"]["headroom"] is None


def test_percentiles_of_one_list_and_of_several() -> None:
    assert percentile([], 0.5) is None and percentile([[], []], 0.5) is None
    assert percentile([[3.0]], 0.95) == 3.0
    assert percentile([[float(n) for n in range(1, 101)]], 0.95) == 95.0
    assert percentile([[2.0], [1.0]], 0.5) == 1.0
    rng = random.Random(1)
    for _ in range(200):
        values = [
            rng.choice((rng.random(), 5e-324, 1.0, 1e300)) for _ in range(rng.randrange(1, 30))
        ]
        lists = [sorted(values[start::4]) for start in range(4)]
        for part in (0.0, 0.5, 0.95, 1.0):
            expected = sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
            assert percentile(lists, part, 400) == expected


def test_node_managers_measure_only_nodes_of_their_provider() -> None:
    events = life("1")
    evil = {**events[-1], "provider": "evil", "cpu_usec": 1, "oom_kills": 99}
    for mixed in ([*events, evil], [evil, *events], [evil, *events[:-1]]):
        [row] = table(uses(mixed), "label", 1e6, unpriced).rows
        assert row["kills"] in (0, None) and row["cores_p50"] in (1.0, None)


def runs(number: int, label: str, peak: float, **values: Any) -> list[dict[str, Any]]:
    return [
        event
        for run in range(number)
        for event in life(f"{label}{peak}{run}", label=label, memory_peak=peak * GIB, **values)
    ]


def test_label_needs_the_memory_of_its_most_demanding_job(configuration: Config) -> None:
    events = runs(FEWEST_RUNS, "large", 1.0, job="lint") + runs(1, "large", 3.0, job="link")
    found = sufficient(uses(events), sizes(configuration))
    assert found == {"large": Sufficient(4 * GIB, 3 * GIB, FEWEST_RUNS + 1)}


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(runs(FEWEST_RUNS - 1, "large", 1.0), id="few runs"),
        pytest.param(runs(FEWEST_RUNS, "small", 0.1), id="the smallest label"),
        pytest.param(runs(FEWEST_RUNS, "large", 1.0, oom_kills=1), id="kills"),
        pytest.param(runs(FEWEST_RUNS, "gone", 1.0), id="a label that is not declared"),
        pytest.param(
            runs(FEWEST_RUNS, "large", 1.0) + runs(1, "large", 7.5, job="link"), id="a large job"
        ),
        pytest.param(
            runs(FEWEST_RUNS, "large", 1.0)
            + [
                event
                for event in runs(FEWEST_RUNS + 1, "large", 2.0)
                if event["type"] != "node-usage"
            ],
            id="most runs not measured",
        ),
    ],
)
def test_label_keeps_its_memory_without_evidence_of_all_jobs(
    configuration: Config, events: list[dict[str, Any]]
) -> None:
    assert sufficient(uses(events), sizes(configuration)) == {}
