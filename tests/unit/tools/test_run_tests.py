"""The test runner: what failed is named at the end, and not run again."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import load_tool
from tests.support.selection import choose_part

TESTS = """
import pathlib

def test_unsteady():
    mark = pathlib.Path({mark!r})
    assert mark.exists() or mark.touch(), "the first time"

def test_broken():
    print("ERROR    nodepool: a message of the program")
    assert False
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    module = load_tool("run-tests")
    monkeypatch.setattr(module, "sys_python", lambda: sys.executable)
    monkeypatch.setattr(module.bootstrap, "REPOSITORY", tmp_path)
    return module


def sample_stage(
    runner: Any, folder: pathlib.Path, *options: str, install: Sequence[str] = ()
) -> Any:
    command = [sys.executable, "-m", "pytest", *options, "test_sample.py"]
    return runner.Stage("samples", command, "not real", list(install), folder=folder)


def stage(runner: Any, tmp_path: pathlib.Path, text: str) -> Any:
    (tmp_path / "test_sample.py").write_text(text)
    stage = sample_stage(runner, tmp_path / "memory")
    stage.run()
    assert stage.result == "FAILED" and not stage.good
    return stage


def test_tests_that_failed_are_named_at_the_end_with_the_reason(
    runner: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = stage(runner, tmp_path, TESTS.format(mark=str(tmp_path / "mark")))
    capfd.readouterr()
    runner.report([done])
    first, *others = capfd.readouterr().err.splitlines()
    assert first.startswith("samples: FAILED, ")
    broken, unsteady = sorted(others)
    assert broken.startswith("  FAILED test_sample.py::test_broken - assert False")
    assert unsteady.startswith(
        "  FAILED test_sample.py::test_unsteady - AssertionError: the first time"
    )


def test_no_test_at_all(runner: Any, tmp_path: pathlib.Path) -> None:
    assert not stage(runner, tmp_path, "import no_such_module\n").good
    assert not stage(runner, tmp_path, "").good


def test_lanes_run_all_stages_and_show_what_they_print(
    runner: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_sample.py").write_text("def test_it():\n    print('was run')\n")
    plain = sample_stage(runner, tmp_path, "-s")
    cloud = sample_stage(runner, tmp_path, install=["false"])
    check = runner.Stage("a check", [sys.executable, "-c", "print('checked')"])
    runner.Run([[cloud, plain], [check]], tmp_path / "run").execute()
    assert (
        plain.result == check.result == "passed"
        and cloud.result == "skipped"
        and plain.good
        and cloud.good
    )
    printed = capfd.readouterr().err
    assert "was run" in printed and "checked" in printed and "1 passed" in printed


def test_progress_line_shows_what_runs_and_how_long_it_takes(
    runner: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "durations.json").write_text(
        json.dumps({"samples (short)": 400, "others (short)": 100})
    )
    monkeypatch.setattr(runner, "DURATIONS", tmp_path / "durations.json")
    samples, others = (
        runner.Stage(what, [], "", key=f"{what} (short)") for what in ("samples", "others")
    )
    run = runner.Run([[samples], [others]], tmp_path / "run")
    assert run.line(3) == ".. 3 s: preparing; none failed; about 6 min 40 s left"
    for stage, part in ((samples, 0.25), (others, 0.5)):
        stage.folder.mkdir(parents=True)
        (stage.folder / "progress.json").write_text(
            json.dumps({"done": 3, "left": 9, "part": part, "failed": [f"{stage.what}::one"]})
        )
        stage.began = 1.0
    others.status, others.result = 0, "passed"
    # 100 s were expected for a quarter of the samples, and it took 150: the other three quarters
    # take 450.
    assert (
        run.line(150)
        == ".. 2 min 30 s: samples 3 of 12; 2 failed, at last others::one; about 7 min 30 s left"
    )


def test_each_test_is_in_one_of_the_sets(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection: Any = pytestconfig.pluginmanager.get_plugin("nodepool-selection")
    assert selection.is_short(request.node), "a test without a record is in the short set"
    selection.durations = {**selection.durations, request.node.nodeid: 2.1}
    assert not selection.is_short(request.node)
    with monkeypatch.context() as patched:
        patched.setattr("tests.support.selection.GUARDING", {request.node.nodeid})
        assert selection.is_short(request.node)
    request.node.add_marker("core")
    assert selection.is_short(request.node)
    del selection.durations[request.node.nodeid]
    request.node.add_marker("full")
    assert not selection.is_short(request.node)


def test_rest_runs_all_core_tests_that_the_short_set_has_not(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection: Any = pytestconfig.pluginmanager.get_plugin("nodepool-selection")
    for name, chosen in (("_short", False), ("_rest", True), ("_sampled", True)):
        monkeypatch.setattr(selection, name, chosen)
    monkeypatch.setattr("tests.support.selection.choose_part", lambda *_args: set())
    request.node.add_marker("openstack")
    selection.pytest_collection_modifyitems(pytestconfig, items := [request.node])
    assert items == []
    request.node.add_marker("core")
    selection.pytest_collection_modifyitems(pytestconfig, items := [request.node])
    assert items == [request.node]


def test_rest_runs_one_variant_each_of_tests_that_take_a_part_of_the_time() -> None:
    seconds = {f"a.py::test_{test}[{n}]": 1.0 + n for test in range(30) for n in range(3)}
    chosen = choose_part(seconds, 7)
    assert chosen == choose_part(dict(reversed(seconds.items())), 7), "each worker chooses the same"
    assert 9 <= sum(map(seconds.__getitem__, chosen)) <= 11.25, "a sixteenth of 180"
    assert len({name.partition("[")[0] for name in chosen}) == len(chosen)
    assert set().union(*(choose_part(seconds, seed) for seed in range(300))) == set(seconds)
    assert len(choose_part({"b.py::test_one": 9.0}, 7)) == 1


@pytest.mark.parametrize(
    ("options", "number"), [(["--rest"], 1), (["--rest", "--all-variants"], 20)]
)
def test_variants_are_skipped_in_the_rest_only(
    tmp_path: pathlib.Path, options: list[str], number: int
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.full\n@pytest.mark.parametrize('n', range(20))\ndef "
        "test_it(n):\n    pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests.support import selection\n\n"
        "def pytest_addoption(parser):\n    selection.add_options(parser)\n\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'full')\n    "
        "selection.register(config)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "--collect-only",
        "-q",
        *options,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("::test_it[") == number, done.stdout + done.stderr


@pytest.mark.parametrize(
    "tool",
    [
        "gitea",
        "kubernetes",
        "matrix",
        "openstack",
        "package",
        "quickstart",
        "release.py",
        "run-tests",
        "scaleset",
        "vm",
        "zookeeper",
    ],
)
def test_tool_explains_itself_on_a_machine_without_our_packages(tool: str) -> None:
    command = [sys.executable, "-E", "-S", str(REPOSITORY / "tools" / tool), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr and done.stdout, done.stderr
