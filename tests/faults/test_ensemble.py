"""Three ZooKeepers with faults, launchers, a builder and Zuul's own client (``tools/ensemble``)."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.ensemble.faults import KINDS
from tests.support import cgroups
from tests.support.deadline import limit

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
ENSEMBLE = [sys.executable, str(REPOSITORY / "tools" / "ensemble")]


@pytest.mark.exhaustive
def test_ten_seeds_of_faults_lose_nothing_and_assign_nothing_twice(tmp_path: pathlib.Path) -> None:
    results = tmp_path / "results"
    done = subprocess.run(
        [*ENSEMBLE, "--seeds", "10", "--json", str(results)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert results.exists(), done.stderr
    print(done.stdout)
    for result in json.loads(results.read_text()):
        assert result["violations"] == [], result["seed"]
        for gap in result["gaps"]:
            assert gap["seconds"] <= limit(KINDS[gap["fault"]].longest), (result["seed"], gap)


@pytest.mark.full
def test_killed_run_leaves_neither_processes_nor_files(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        [*ENSEMBLE, "--seeds", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    def processes() -> list[str]:
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"{tmp_path}/nodepool-ensemble-" in text:
                found.append(text)
        return found

    try:
        # Servers, launchers, clients: each has the folder in its arguments.
        wait_for(lambda: len(processes()) > 6, 120, "the processes of the run")
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not list(tmp_path.glob("nodepool-ensemble-*")), 30, "the folder to be removed")
    assert processes() == []
    assert cgroups.named(f"nodepool-ensemble-{process.pid}") == []
