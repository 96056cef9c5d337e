"""``nodepool usage``."""

from __future__ import annotations

import csv

import pytest

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
        {"node": nodes[0].id, "memory_peak": 1 << 30, "memory_limit": 2 << 30, "oom_kills": 2},
    )
    wait_for(lambda: [row["nodes"] for row in shell.json("usage", "--json")] == [2])
    [row] = shell.json("usage", "--by", "provider", "--json")
    assert (row["provider"], row["kills"], row["memory_p95"]) == ("fake-provider", 2, 1 << 30)
    assert row["cost"] > row["idle_cost"] >= 0 and row["wait_p50"] >= 0
    assert "1.0 GiB" in shell("usage")
    [line] = csv.DictReader(shell("usage", "--csv").splitlines())
    assert line["memory_limit"] == str(2 << 30)
    assert shell.json("usage", "--since", "1h", "--json")[0]["nodes"] == 2
