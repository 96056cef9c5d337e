"""The page of the manual on several CI systems with one pool: its configuration, and what it
says about limits and order.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api
from tests.support import manual
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture
def shared(bench: LauncherBench, tmp_path: pathlib.Path) -> Iterator[Api]:
    """A launcher with the configuration of the page and capacity for six nodes."""
    bench.quota(instances=6)
    settings = yaml.safe_load(manual.block("many-systems", "yaml"))
    [label] = settings.pop("labels")
    assert label.pop("min-ready") == 2  # these would only disturb what is counted here
    api = Api(bench, bench.start(config(provider(labels=[label["name"]]), **settings)), tmp_path)
    try:
        yield api
    finally:
        api.app.stop()


def rows(table: str) -> list[list[str]]:
    """Return state, owner, labels and purpose of each lease in a table."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table.splitlines()
        if "| 200-" in line
    ]
    return [[row[1], row[2], row[3], row[6]] for row in cells]


def test_one_tenant_has_one_limit_over_all_systems_and_lets_others_pass(
    shared: Api, bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    zuul = bench.submit("small-noble", tenant_name="acme")
    bench.wait_request(zuul, "fulfilled")
    [node] = bench.zuul.accept(zuul)
    github, gitlab, alice = (
        shared.pool("github", tenant="acme"),
        shared.pool("gitlab", tenant="acme"),
        shared.pool("alice"),
    )
    github.lease("small-noble", for_="1h", purpose="job 1")
    github.lease("small-noble", for_="1h", purpose="job 2")
    waiting = gitlab.lease("small-noble", for_="1h", purpose="job 3", wait=None)
    reason = "tenant acme is limited to 3 instances, 3 in use, 1 needed"
    wait_for(lambda: reason in (waiting.refresh().why or {}).get("text", ""), 20, "its reason")
    alice.lease("small-noble", for_="1h", purpose="bisect")
    arguments = ["-c", str(bench.tmp / "nodepool.yaml")]
    capsys.readouterr()
    nodepoolcmd.main([*arguments, "lease", "list"])
    assert rows(capsys.readouterr().out) == rows(manual.page("many-systems"))
    nodepoolcmd.main([*arguments, "explain", "request", waiting.id])
    explained = capsys.readouterr().out
    assert reason in explained and reason in manual.page("many-systems")
    bench.zuul.give_back(node)
    assert waiting.wait("30s").state == "held"


def test_full_pool_serves_by_priority_then_relative_priority_then_arrival(
    shared: Api, bench: LauncherBench
) -> None:
    alice = shared.pool()
    held = [alice.lease("small-noble", for_="1h") for _ in range(6)]
    # In the opposite order of what they get.
    nightly = alice.lease("small-noble", for_="1h", wait=None, priority="300")
    wait_for(lambda: nightly.refresh().why, 20, "a reason")
    busy = bench.submit("small-noble", relative_priority=1)
    first, second = (alice.lease("small-noble", for_="1h", wait=None) for _ in range(2))
    urgent = bench.submit("small-noble", priority="100")
    wait_for(
        lambda: bench.zuul.request(urgent)["state"] == "pending",
        20,
        "the most urgent one at the pool",
    )

    def served() -> list[bool]:
        states = [
            bench.zuul.request(urgent)["state"],
            first.refresh().state,
            second.refresh().state,
        ]
        states += [bench.zuul.request(busy)["state"], nightly.refresh().state]
        return [state in ("held", "fulfilled") for state in states]

    for number in range(5):
        assert sum(served()) == number
        held.pop().give_back()
        wait_for(
            lambda number=number: served() == [True] * (number + 1) + [False] * (4 - number),
            20,
            f"{number + 1} in order",
        )


def test_priority_100_needs_the_role_operate(shared: Api) -> None:
    with pytest.raises(Exception, match="operate"):
        shared.pool().lease("small-noble", for_="1h", wait=None, priority="100")
