"""Launch times, sizes and quotas."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodepool.lab.whatif.assumptions import Assumptions, AssumptionsError


def read(path: Path, text: str) -> Assumptions:
    path.write_text(text)
    return Assumptions.read(str(path))


def test_file_is_optional_in_all_parts(tmp_path: Path) -> None:
    assert read(tmp_path / "a.yaml", "") == Assumptions()


def test_label_beats_file_beats_driver(tmp_path: Path) -> None:
    choice = random.Random(1)
    found = read(tmp_path / "a.yaml", "launch-time: 20\nlabels: {a: {launch-time: 7}}")
    assert found.launch_seconds("a", "aws", choice) == 7.0
    assert found.launch_seconds("b", "nodemanager", choice) == 20.0
    assert Assumptions().launch_seconds("b", "nodemanager", choice) < Assumptions().launch_seconds(
        "b", "aws", choice
    )


def test_measured_times_are_used_only_where_nothing_was_configured(tmp_path: Path) -> None:
    found = read(tmp_path / "a.yaml", "labels: {a: {launch-time: 7}}")
    found.learn({"a": [1.0, 2.0, 3.0], "b": [4.0, 4.0, 4.0]})
    assert found.launch_seconds("a", "aws", random.Random(1)) == 7.0
    assert found.launch_seconds("b", "aws", random.Random(1)) == 4.0


def test_two_times_are_a_range_and_more_are_samples(tmp_path: Path) -> None:
    found = read(tmp_path / "a.yaml", "launch-time: [10, 20]\ndelete-time: [1, 2, 9]")
    launches = {found.launch_seconds("a", "aws", random.Random(seed)) for seed in range(50)}
    assert len(launches) > 40
    assert all(10 <= seconds <= 20 for seconds in launches)
    assert {found.delete_seconds(random.Random(seed)) for seed in range(50)} == {1.0, 2.0, 9.0}


def test_sizes_come_from_the_label_unless_given(tmp_path: Path) -> None:
    found = read(tmp_path / "a.yaml", "labels: {b: {resources: {cores: 8}}}")
    assert found.needs(SimpleNamespace(name="a", cpus=2, ram=512)) == {
        "instances": 1.0,
        "cores": 2,
        "ram": 512,
    }
    assert found.needs(SimpleNamespace(name="b", cpu=2)) == {"instances": 1.0, "cores": 8}


@pytest.mark.parametrize(
    "text",
    [
        "launch-time: soon",
        "launch-time: -1",
        "launch-time: []",
        "lables: {}",
        "- a",
        "a: [",
        "delete-time: .inf",
    ],
)
def test_mistakes_name_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssumptionsError, match=r"a\.yaml"):
        read(tmp_path / "a.yaml", text)
