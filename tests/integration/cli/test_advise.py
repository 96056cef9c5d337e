"""``nodepool advise``, as started by a user."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from nodepool.lab.whatif.demand import Demand, write_csv
from nodepool.zk import history
from tests.benchmark.advise import config
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, provider
from tests.support.launcher import config as config_of_launcher


class Advice:
    """A demand of a request each 75 s, and a configuration without ready nodes."""

    def __init__(self, directory: Path, requests: int = 100, ready: int = 0) -> None:
        self.path, self.trace = directory / "nodepool.yaml", directory / "trace.csv"
        content = config(30, vm=ready)
        content["labels"][0]["cost"] = {"hour": 0.5}
        self.path.write_text("# Ours.\n" + yaml.safe_dump(content, sort_keys=False))
        write_csv(str(self.trace), [Demand(75.0 * each, ("vm",), 30.0) for each in range(requests)])

    def __call__(self, *more: str) -> None:
        files = ["--config", str(self.path), "--trace", str(self.trace)]
        assert nodepoolcmd.main(["advise", *files, *more]) in (0, None)


@pytest.mark.timeout(300)
def test_advice_has_the_effect_that_simulate_measures_and_patch_applies_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = Advice(tmp_path)
    advice("--json", "--timeout", "280")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (change,) = found["changes"]
    assert change["option"] == "labels[vm].min-ready" and change["in_diff"]
    assert change["now"] == 0 and change["advised"] in (1, 2)
    now, then = found["figures"]
    assert now["p50"] == pytest.approx(60, abs=2) and then["p50"] < 1
    assert then["score"] < now["score"] and then["idle_hours"] > now["idle_hours"]
    assert then["cost"] == pytest.approx(then["machine_hours"] * 0.5)
    subprocess.run(["patch", str(advice.path)], input=found["diff"], text=True, check=True)
    assert advice.path.read_text().startswith("# Ours.\n")
    files = ["--config", str(advice.path), "--trace", str(advice.trace)]
    capsys.readouterr()
    assert nodepoolcmd.main(["simulate", "--json", *files]) == 0
    again = json.loads(capsys.readouterr().out)["now"]
    assert again["all"]["p95"] == then["p95"]
    assert again["machines"]["all"]["idle"] == then["idle_hours"]


@pytest.mark.timeout(300)
def test_configuration_that_needs_no_change_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Advice(tmp_path, ready=0)("--timeout", "280", "--hour-of-waiting", "0")
    captured = capsys.readouterr()
    assert "No change saves enough." in captured.out and "---" in captured.out
    assert "configurations were compared with 100 requests" in captured.err


def test_short_demand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="it has 99 requests; at least 100 are required"):
        Advice(tmp_path, requests=99)()


def test_history_is_the_default_demand(bench: LauncherBench) -> None:
    bench.quota(instances=5)
    given = config_of_launcher(provider(labels=["fake-label"]))
    pool = bench.start(given)
    request_id, _nodes = bench.fulfilled("fake-label")
    (node_id,) = bench.zuul.accept(request_id)
    # The history has the states that the launcher sees.
    wait_for(lambda: pool.zk.node_tree.get(node_id).state == "in-use")
    bench.zuul.give_back(node_id)
    bench.wait_nodes(0)
    bench.stop(pool)
    with pytest.raises(CommandError, match="it has 1 requests"):
        nodepoolcmd.main(["advise", "--config", str(bench.config(given))])


@pytest.mark.timeout(300)
def test_memory_that_no_job_has_used_is_advised_with_its_evidence(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [
        {"name": name, "cloud-image": "host", "ram": ram}
        for name, ram in (("small", 1024), ("large", 4096))
    ]
    metal = {
        "name": "metal",
        "driver": "nodemanager",
        "hosts": [{"name": "h", "url": "unix:/run/x"}],
        "cloud-images": [{"name": "host"}],
        "pools": [{"name": "main", "max-ram": 8192, "labels": labels}],
    }
    path = bench.config(config_of_launcher(metal))
    events = [event for number in range(100) for event in use(str(number), 80.0 * number, "large")]
    for data, _number in history._packed(sorted(events, key=lambda event: event["time"])):
        bench.zk.kazoo_client.create(f"{history.ROOT}/", data, sequence=True, makepath=True)
    assert nodepoolcmd.main(["advise", "--config", str(path), "--json", "--timeout", "280"]) == 0
    captured = capsys.readouterr()
    (change,) = [each for each in json.loads(captured.out)["changes"] if "ram" in each["option"]]
    assert change["option"] == "providers[metal].pools[main].labels[large].ram"
    assert (change["now"], change["advised"], change["in_diff"]) == (4096, 1024, True)
    assert "label large: the highest memory peak of 100 measured runs is 512.0 MiB" in captured.err


def use(name: str, begin: float, label: str) -> list[dict[str, Any]]:
    """The events of a request whose node is used for five minutes."""
    node = {"node": name, "provider": "metal", "pool": "main", "labels": [label]}
    request = {"request": f"200-{name}"}
    return [
        {"time": begin, "type": "request-submitted", "labels": [label], **request},
        {"time": begin, "type": "node-created", "state": "building", **node},
        {"time": begin + 3, "type": "node-changed", "state": "ready", "before": "building", **node},
        {
            "time": begin + 3,
            "type": "request-changed",
            "state": "fulfilled",
            "nodes": [name],
            **request,
        },
        {"time": begin + 3, "type": "node-changed", "state": "in-use", "before": "ready", **node},
        {"time": begin + 303, "type": "node-changed", "state": "used", "before": "in-use", **node},
        {"time": begin + 310, "type": "node-usage", "memory_peak": 512 << 20, **node},
    ]


def test_too_short_timeout_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no simulation of 100 requests ended within 0\.01 s"):
        Advice(tmp_path)("--timeout", "0.01")
