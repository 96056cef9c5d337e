"""Runs of the simulated world, each in a separate process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests import REPOSITORY
from tests.world.mutations import MUTATIONS


def world(*arguments: str, timeout: float = 500) -> dict[int, Any]:
    """Run seeds; return their results by seed."""
    command = [sys.executable, str(REPOSITORY / "tools" / "world"), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert not done.stderr, done.stderr
    return {result["seed"]: result for result in map(json.loads, done.stdout.splitlines())}


def assert_no_violations(results: dict[int, Any], count: int) -> None:
    assert len(results) == count
    assert sum(result["requests"] for result in results.values()) > 5 * count, (
        "hardly anything was built"
    )
    for seed, result in results.items():
        story = "\n".join([*result["violations"], *result["events"]])
        assert not result["violations"], (
            f"seed {seed} (replay: tools/world --seeds {seed} --log FILE):\n{story}"
        )


@pytest.mark.core
@pytest.mark.timeout(400)
def test_three_seeds_violate_no_invariant_and_repeat() -> None:
    found = world("--seeds", "1-3", timeout=360)
    assert_no_violations(found, 3)
    again = world("--seeds", "2-2", "--jobs", "1")
    assert again[2]["digest"] == found[2]["digest"]


@pytest.mark.full
@pytest.mark.timeout(500)
def test_twelve_more_seeds_violate_no_invariant() -> None:
    assert_no_violations(world("--seeds", "4-15", timeout=460), 12)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_sixty_seeds_violate_no_invariant() -> None:
    assert_no_violations(world("--seeds", "16-75", timeout=1400), 60)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_same_seed_gives_the_same_bytes() -> None:
    first = world("--seeds", "5-6", "--jobs", "1")
    second = world("--seeds", "5-6", "--jobs", "2")
    assert {seed: result["digest"] for seed, result in first.items()} == {
        seed: r["digest"] for seed, r in second.items()
    }
    assert len({result["digest"] for result in first.values()}) == 2


def linearizable(*runs: dict[str, Any]) -> bool:
    """Ask porcupine whether each node of these runs belonged to one request at a time."""
    if shutil.which("go") is None:
        pytest.skip("the checker needs Go")
    lines = "\n".join(map(json.dumps, runs))
    command = [sys.executable, str(REPOSITORY / "tools" / "linearizable")]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode in (0, 1) and done.stdout.count("linearizable") == len(runs), done.stderr
    return done.returncode == 0


@pytest.mark.timeout(1500)
def test_20_more_seeds_violate_no_invariant_and_are_linearizable() -> None:
    results = world("--seeds", "61-80", "--jobs", "1", timeout=800)
    assert_no_violations(results, 20)
    assert sum(len(result["history"]) for result in results.values()) > 10 * 20
    assert linearizable(*results.values())


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_920_more_seeds_violate_no_invariant() -> None:
    assert_no_violations(world("--seeds", "81-1000", timeout=7000), 920)


@pytest.mark.timeout(700)
def test_node_that_two_requests_have_at_a_time_is_not_linearizable() -> None:
    first = [["7", True, "one", 0, 10], ["7", False, "one", 30, 40]]
    assert linearizable(
        {"seed": 1, "history": [*first, ["7", True, "two", 5, 35], ["8", True, "three", 5, 15]]}
    )
    assert not linearizable(
        {"seed": 1, "history": [*first, ["7", True, "two", 5, 25], ["8", True, "three", 5, 15]]}
    )


WORLD = {
    name: mutation.found_by
    for name, mutation in MUTATIONS.items()
    if isinstance(mutation.found_by, int)
}


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", WORLD)
def test_planted_defect_is_found(name: str) -> None:
    first = ("--mutation", name, "--first")
    # The recorded seed stands for another run once the scenarios have changed.
    attempts = (
        world("--seeds", seeds, *first, timeout=1400) for seeds in (str(WORLD[name]), "1-200")
    )
    assert any(result["violations"] for results in attempts for result in results.values())
