"""tools/mutants: which guards it removes, and that what remains is a program."""

from __future__ import annotations

import ast
import json
import os
import pathlib
from typing import Any

import coverage
import pytest

from tests import REPOSITORY
from tests.conftest import load_tool
from tests.world.guards import GUARDS

SOURCE = """
def write(txn, tree, node, waiting, age):
    if tree.is_locked(node.id):
        return
    if age >= LIMIT:
        raise ValueError
    txn.check(node.lock.path)
    txn.set(node.path, "ä", node.version)
    waiting.wake()
"""


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_tool("mutants")


def mutated(tool: Any, kind: str) -> list[str]:
    found = [mutant for mutant in tool.Finder("write.py", SOURCE).found if mutant.kind == kind]
    return [SOURCE[: m.start] + m.new + SOURCE[m.end :] for m in found]


@pytest.mark.parametrize(
    "kind, old, new",
    [
        ("version", "node.version", "-1"),
        ("check", "txn.check(node.lock.path)", "pass"),
        ("lock", "tree.is_locked(node.id)", "False"),
        ("boundary", "age >= LIMIT", "age > LIMIT"),
        ("limit", "age >= LIMIT", "False"),
        ("wake", "waiting.wake()", "pass"),
    ],
)
def test_each_kind_of_guard_is_removed(tool: Any, kind: str, old: str, new: str) -> None:
    assert mutated(tool, kind) == [SOURCE.replace(old, new)]


def test_guards_of_the_launcher_are_found_and_their_mutants_are_programs(tool: Any) -> None:
    mutants = [
        m for m in tool.find(None) if m.kind in ("version", "check", "lock", "limit", "wake")
    ]
    found = {(m.path, m.kind) for m in mutants}
    for path in (
        "nodepool/driver/request/writes.py",
        "nodepool/zk/facade/base.py",
        "nodepool/launcher/cleanup.py",
    ):
        assert {(path, "version"), (path, "check")} <= found
    for mutant in mutants:
        text = (REPOSITORY / mutant.path).read_text()
        ast.parse(text[: mutant.start] + mutant.new + text[mutant.end :])


@pytest.fixture
def tree(tool: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A module, three test files, and which of their tests reached its fifth line (the statement
    of the limit).
    """
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "write.py").write_text(SOURCE)
    (tmp_path / "tests/durations.json").write_text(json.dumps({"tests/slow.py::b": 9.0}))
    for name in ("slow.py", "other.py", "unit/quick.py"):
        (tmp_path / "tests" / name).write_text(
            f"import {tool.INTERFERENCE}" if name == "other.py" else ""
        )
    data = coverage.CoverageData(str(tmp_path / "reached"))
    for test in ("tests/slow.py::b", "tests/other.py::c", "tests/unit/quick.py::a"):
        data.set_context(f"{test}|run")
        data.add_lines({str(tmp_path / "write.py"): [5]})
    data.set_context("tests/slow.py::elsewhere|run")
    data.add_lines({str(tmp_path / "write.py"): [6]})
    data.write()
    data.close()
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    monkeypatch.setattr(tool, "REACHED", tmp_path / "reached")
    return tmp_path


def limit(tool: Any) -> Any:
    return next(
        mutant for mutant in tool.Finder("write.py", SOURCE).found if mutant.kind == "limit"
    )


def test_tests_that_reach_the_statement_are_chosen_and_those_that_interfere_come_first(
    tool: Any, tree: pathlib.Path
) -> None:
    assert tool.Reached(60.0).tests(limit(tool)) == [
        "tests/other.py::c",
        "tests/unit/quick.py::a",
        "tests/slow.py::b",
    ]


def test_no_more_tests_are_chosen_than_the_budget_allows(tool: Any, tree: pathlib.Path) -> None:
    assert tool.Reached(5.0).tests(limit(tool)) == ["tests/other.py::c", "tests/unit/quick.py::a"]


def test_module_that_changed_since_it_was_measured_is_refused(
    tool: Any, tree: pathlib.Path
) -> None:
    later = (tree / "reached").stat().st_mtime + 1
    os.utime(tree / "write.py", (later, later))
    with pytest.raises(OSError, match=r"write.py has changed .* run tools/mutants --measure"):
        tool.Reached(60.0).tests(limit(tool))


@pytest.mark.parametrize(
    "runs, outcome",
    [
        ([("survived", "")], "survived"),
        ([("timeout", "")], "timeout"),
        ([("killed", "a"), ("killed", "a"), ("survived", "")], "killed"),
        ([("killed", "a"), ("survived", ""), ("survived", "")], "survived"),
        ([("killed", "a"), ("killed", "a"), ("killed", "a"), ("survived", "")], "survived"),
        ([("killed", "cannot be imported"), ("survived", "")], "killed"),
    ],
    ids=[
        "no test",
        "too slow",
        "a test",
        "a test only once",
        "a test without it, too",
        "no test can run",
    ],
)
def test_mutant_is_killed_only_by_what_does_not_fail_without_it(
    tool: Any, tree: pathlib.Path, runs: list[tuple[str, str]], outcome: str
) -> None:
    copy = tool.Copy.__new__(tool.Copy)
    copy.root, copy.run_tests = tree, lambda _tests: runs.pop(0)
    assert copy.outcome(limit(tool), ["a", "b"])[0] == outcome
    assert runs == [] and (tree / "write.py").read_text() == SOURCE


def test_tests_that_cannot_be_run_at_all_are_an_error(tool: Any, tree: pathlib.Path) -> None:
    copy = tool.Copy.__new__(tool.Copy)
    copy.root, copy.run_tests = tree, lambda _tests: ("killed", "cannot be imported")
    with pytest.raises(OSError, match="cannot be run without the mutant either"):
        copy.outcome(limit(tool), ["a"])


def test_results_are_kept_for_the_next_run(tool: Any, tmp_path: pathlib.Path) -> None:
    tool.Results(str(tmp_path / "results")).add("write.py:5 limit", "survived", "")
    assert tool.Results(str(tmp_path / "results")).done["write.py:5 limit"]["outcome"] == "survived"


def test_tests_that_are_measured_exist(tool: Any) -> None:
    assert all((REPOSITORY / test).is_dir() for test in tool.TESTS)


def test_planted_defects_are_mutants_with_the_test_that_finds_them(tool: Any) -> None:
    found = {
        mutant.kind: (mutant, tests) for mutant, tests in tool.listed("nodepool/lease").items()
    }
    mutant, tests = found["ended-leases-get-certificates"]
    text = (REPOSITORY / mutant.path).read_text()
    assert (
        text[mutant.start : mutant.end] == GUARDS[mutant.kind].old
        and mutant.new == GUARDS[mutant.kind].new
    )
    assert tests == [GUARDS[mutant.kind].found_by]
    assert {mutant.path.rpartition("/")[0] for mutant, _tests in found.values()} == {
        "nodepool/lease"
    }
