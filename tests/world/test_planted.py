"""Each planted defect is found by the test that the list names; test_world.py has those that the
world finds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import REPOSITORY
from tests.conftest import zookeeper_server
from tests.support.deadline import PATIENCE
from tests.support.selection import PROGRESS
from tests.world import lines
from tests.world.mutations import MUTATIONS, change, path
from tests.world.planted import NAME

BY_TEST = {
    name: mutation.found_by
    for name, mutation in MUTATIONS.items()
    if isinstance(mutation.found_by, str)
}


def run(name: str, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test with a planted defect."""
    environment = {
        key: value for key, value in os.environ.items() if key != PROGRESS
    }  # the progress is that of this run
    environment |= {NAME: name, "NODEPOOL_TEST_PATIENCE": str(PATIENCE / 4)}  # it is to fail
    if test.startswith("tests/integration/"):
        server = zookeeper_server()
        environment |= {
            f"NODEPOOL_ZK_{key.upper()}": server[key] for key in ("ca", "cert", "key", "plain")
        }
        environment["NODEPOOL_ZK_HOST"] = server["hosts"]
    plugins = [
        argument
        for plugin in ("tests.world.planted", "no:randomly", "no:cacheprovider")
        for argument in ("-p", plugin)
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *plugins,
        "-o",
        "addopts=--strict-markers",
        "-q",
        "-rf",
        "--tb=short",
        test,
    ]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", BY_TEST)
def test_planted_defect_is_found(name: str) -> None:
    done = run(name, BY_TEST[name])
    failed = [
        line.partition(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith("FAILED tests/")
    ]
    assert (done.returncode, failed) == (
        pytest.ExitCode.TESTS_FAILED,
        [f"FAILED {BY_TEST[name]}"],
    ), done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_defect_still_fits_the_program(name: str) -> None:
    mutation = MUTATIONS[name]
    text = path(mutation.module).read_text()
    compile(change(name)(mutation.module, text), name, "exec")
    with pytest.raises(ValueError, match="occurs 0 times"):
        change(name)(mutation.module, "")
    if name in BY_TEST:
        file, _, test = BY_TEST[name].partition("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()


def test_text_of_a_module_that_was_imported_is_not_replaced() -> None:
    with pytest.raises(ImportError, match=r"tests\.world\.lines was imported before"):
        lines.replace_text(lines.__name__, lambda _name, text: text)


def test_defect_in_a_module_that_no_test_imports_is_reported() -> None:
    done = run("changed-uploads-are-marked", "tests/unit/base/test_backoff.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "do not import nodepool.builder.cleanup.records" in done.stderr


def test_failure_of_a_directed_test_shows_the_assertion_and_what_the_launcher_did() -> None:
    done = run(
        "leaks-are-not-looked-for",
        "tests/world/directed/test_deletion.py::test_only_leaked_servers_of_the_provider_are_"
        "deleted",
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "AssertionError: the leaked server deleted did not hold within" in done.stdout
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} INFO nodepool\.", done.stdout, re.MULTILINE), (
        done.stdout
    )
