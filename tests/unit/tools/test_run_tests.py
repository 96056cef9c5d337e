"""The test runner: what failed is run a second time, and named when it passes then; the run has failed all the same."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest

from tests.conftest import load_tool

TESTS = """
import pathlib, pytest

def test_good():
    pathlib.Path({log!r}).open("a").write("good ")

@pytest.mark.parametrize("number", range({count}))
def test_noisy(number):
    mark = pathlib.Path({log!r} + str(number))
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")

def test_broken():
    assert {whole}
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    module = load_tool("run-tests")
    monkeypatch.setattr(module, "sys_python", lambda: sys.executable)
    monkeypatch.setattr(module.bootstrap, "REPOSITORY", tmp_path)
    return module


def stage(runner: Any, tmp_path: pathlib.Path, text: str) -> Any:
    (tmp_path / "test_sample.py").write_text(text)
    stage = runner.Stage("samples", "not real", [], ["test_sample.py"], memory=tmp_path / "memory")
    stage.run()
    assert stage.result == "FAILED" and not stage.good
    stage.retry()
    return stage


def sample(tmp_path: pathlib.Path, **changes: Any) -> str:
    return TESTS.format(**{"log": str(tmp_path / "log"), "count": 2, "whole": True, **changes})


def test_noise(runner: Any, tmp_path: pathlib.Path) -> None:
    done = stage(runner, tmp_path, sample(tmp_path))
    assert not done.good and done.noisy == ["test_sample.py::test_noisy[0]", "test_sample.py::test_noisy[1]"]
    assert (tmp_path / "log").read_text() == "good ", "what passed is not run again"


def test_broken(runner: Any, tmp_path: pathlib.Path) -> None:
    done = stage(runner, tmp_path, sample(tmp_path, whole=False))
    assert not done.good and done.noisy == []


def test_many(runner: Any, tmp_path: pathlib.Path) -> None:
    done = stage(runner, tmp_path, sample(tmp_path, count=runner.MOST_RETRIED + 1))
    assert not done.good and done.noisy == []


def test_no_test_at_all(runner: Any, tmp_path: pathlib.Path) -> None:
    assert not stage(runner, tmp_path, "import no_such_module\n").good
    assert not stage(runner, tmp_path, "").good


def test_beside(runner: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_sample.py").write_text("def test_it():\n    print('said so')\n")
    plain = runner.Stage("samples", "not real", [], ["-s", "test_sample.py"], memory=tmp_path / "memory")
    cloud = runner.Stage("OpenStack tests", "not real", [], ["test_sample.py"], install=["false"], memory=tmp_path / "memory2")
    with runner.beside([cloud, plain]):
        pass
    assert plain.result == "passed" and cloud.result == "left out" and plain.good and cloud.good
    assert "said so" in capfd.readouterr().err
