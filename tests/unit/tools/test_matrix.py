"""tools/matrix: its table keeps what did not run, and its rows run tests that exist."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import load_tool


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    module = load_tool("matrix")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "matrix.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "tested-with.rst")
    return module


def test_rows_that_did_not_run_keep_their_date_and_result(matrix: Any) -> None:
    old = matrix.Result("3.9.4", "2026-01-02", "passed: 7 tests", "")
    matrix.save({"zookeeper-3.9": old, "zookeeper-3.8": old})
    new = matrix.Result("3.9.5", "2026-03-04", "FAILED: 1 of 7 tests", "``test_one``")
    matrix.save({**matrix.load(), "zookeeper-3.9": new})
    assert matrix.load() == {"zookeeper-3.8": old, "zookeeper-3.9": new}
    cells = matrix.PAGE.read_text().partition("* - zookeeper-3.9")[2].splitlines()
    assert [cell.removeprefix("     - ") for cell in cells[2:6]] == [
        "3.9.5",
        "2026-03-04",
        "FAILED: 1 of 7 tests",
        "``test_one``",
    ]


def test_page_of_the_manual_is_the_one_that_the_results_give() -> None:
    module = load_tool("matrix")
    assert module.PAGE.read_text() == module.page(module.load())


def test_rows_run_tests_that_exist(matrix: Any) -> None:
    missing = []
    for name, row in matrix.ROWS.items():
        assert row.command or row.tests, name
        for test in row.tests:
            path, _, function = test.removeprefix("--ignore=").partition("::")
            file = REPOSITORY / path
            if not file.exists() or (function and f"def {function}(" not in file.read_text()):
                missing.append(f"{name}: {test}")
    assert missing == []


@pytest.mark.parametrize(
    ("status", "text", "result", "failed"),
    [
        (0, "5 passed in 1.20s", "passed: 5 tests", ""),
        (0, "5 passed, 2 skipped in 1.20s (0:00:01)", "passed: 5 tests, 2 skipped", ""),
        (0, "2 skipped in 1.20s", "not run here: all 2 tests were skipped", ""),
        (
            1,
            "FAILED a.py::b - x\nERROR a.py::b\n1 failed, 5 passed, 1 error in 9.0s",
            "FAILED: 1 of 6 tests",
            "``a.py::b``",
        ),
        (4, "no such file", "FAILED: status 4", ""),
        (-1, "5 passed in 1.2s", "FAILED: not finished within 60 min", ""),
    ],
)
def test_result_counts_the_tests_by_outcome(
    matrix: Any, status: int, text: str, result: str, failed: str
) -> None:
    assert matrix.judge(status, text) == (result, failed)
