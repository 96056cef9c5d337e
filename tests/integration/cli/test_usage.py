"""``nodepool usage``."""

from __future__ import annotations

import csv
import pathlib

import pytest

from nodepool.launcher import statistics, usage_log
from nodepool.zk import history
from tests.conftest import wait_for
from tests.integration.cli.test_observe import Shell
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture
def shell(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Shell:
    given = config(provider(cost={"hour": 3600.0}))
    bench.start(given)
    return Shell(bench.config(given), capsys)


def test_hours_and_cost_of_nodes_that_were_used(shell: Shell, bench: LauncherBench) -> None:
    assert shell.json("usage", "--json") == []
    request, nodes = bench.fulfilled("fake-label")
    bench.use_up(request)
    bench.wait_gone(nodes[0].id)
    bench.fulfilled("fake-label")
    kazoo = bench.zk.kazoo_client
    history.append(
        kazoo,
        "node-usage",
        {
            "node": nodes[0].id,
            "provider": "fake-provider",
            "memory_peak": 1 << 30,
            "memory_limit": 2 << 30,
            "oom_kills": 2,
        },
    )
    wait_for(lambda: [row["nodes"] for row in shell.json("usage", "--json")] == [2])
    [row] = shell.json("usage", "--by", "provider", "--json")
    assert (row["provider"], row["kills"], row["memory_p95"]) == ("fake-provider", 2, 1 << 30)
    assert row["cost"] > row["idle_cost"] >= 0 and row["wait_p50"] >= 0
    assert "1.0 GiB" in shell("usage")
    [line] = csv.DictReader(shell("usage", "--csv").splitlines())
    assert line["memory_limit"] == str(2 << 30)
    assert shell.json("usage", "--since", "1h", "--json")[0]["nodes"] == 2


@pytest.mark.spec("issue 49, 3: ended nodes are exported, once, also after another start")
def test_ended_nodes_are_exported_to_a_file(
    bench: LauncherBench,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "INTERNAL_INTERVAL", 0.1)
    monkeypatch.setattr(usage_log, "INTERVAL", 0.1)
    path = tmp_path / "usage.sqlite"
    given = config(provider(cost={"hour": 3600.0}), **{"usage-log": str(path)})
    pool = bench.start(given)
    shell = Shell(bench.config(given), capsys)
    request, nodes = bench.fulfilled("fake-label")
    bench.use_up(request)
    bench.wait_gone(nodes[0].id)
    wait_for(lambda: path.exists() and [row["nodes"] for row in shell.json("usage", "--json")])
    [row] = shell.json("usage", "--by", "provider", "--json")
    assert (row["provider"], row["nodes"], row["memory_p95"]) == ("fake-provider", 1, None)
    assert row["cost"] > 0
    bench.stop(pool)
    kazoo = bench.zk.kazoo_client
    history.append(
        kazoo,
        "node-usage",
        {"node": nodes[0].id, "provider": "fake-provider", "memory_peak": 1 << 30},
    )
    bench.start(given)
    wait_for(lambda: shell.json("usage", "--json")[0]["memory_p95"] == 1 << 30)
    assert shell.json("usage", "--json")[0]["nodes"] == 1
    path.rename(tmp_path / "moved")
    wait_for(path.exists)
    assert shell.json("usage", "--log", str(tmp_path / "moved"), "--json")[0]["nodes"] == 1
