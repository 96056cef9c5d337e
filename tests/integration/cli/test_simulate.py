"""``nodepool simulate``: the launcher in virtual time, as started by a user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support import manual
from tests.support.launcher import LauncherBench, config, provider

EXAMPLE = REPOSITORY / "doc" / "examples" / "simulate"
#: What :mod:`nodepool.lab.whatif.assumptions` has for virtual machines.
LAUNCH, DELETE = 60.0, 10.0


def cloud(name: str = "cloud", labels: tuple[str, ...] = ("vm",), **pool: Any) -> dict[str, Any]:
    offered = [
        {"name": label, "cloud-image": "debian", "instance-type": "t3.small"} for label in labels
    ]
    return {
        "name": name,
        "driver": "aws",
        "region-name": "eu-west-1",
        "cloud-images": [{"name": "debian", "image-id": "ami-1", "username": "admin"}],
        "pools": [{"name": "main", "labels": offered, **pool}],
    }


class Simulations:
    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capsys = capsys
        self.complaints = ""

    def config(
        self,
        name: str,
        *providers: dict[str, Any],
        labels: tuple[str, ...] = ("vm",),
        min_ready: int = 0,
        **options: Any,
    ) -> str:
        content = {
            "zookeeper-servers": [{"host": "zk.example.org", "port": 2281}],
            "labels": [{"name": label, "min-ready": min_ready} for label in labels],
            "providers": list(providers),
            **options,
        }
        path = self.directory / name
        path.write_text(yaml.safe_dump(content))
        return str(path)

    def trace(self, *lines: str) -> str:
        path = self.directory / "trace.csv"
        path.write_text("time,labels,duration,tenant\n" + "".join(f"{line}\n" for line in lines))
        return str(path)

    def __call__(self, *arguments: str) -> dict[str, Any]:
        self._capsys.readouterr()
        assert nodepoolcmd.main(["simulate", "--json", *arguments]) == 0
        captured = self._capsys.readouterr()
        self.complaints = captured.err
        return dict(json.loads(captured.out))


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulations:
    return Simulations(tmp_path, capsys)


def about(seconds: float) -> Any:
    """Requests, locks and deletions take some milliseconds each."""
    return pytest.approx(seconds, abs=2.0)


@pytest.mark.core
def test_waiting_times_are_those_of_the_limits(simulate: Simulations) -> None:
    trace = simulate.trace("0,vm,100,", "0,vm,100,", "0,vm,100,")
    one, three = (
        simulate.config("one.yaml", cloud(**{"max-servers": 1})),
        simulate.config("three.yaml", cloud(**{"max-servers": 3})),
    )
    runs = simulate("--config", one, "--what-if", three, "--trace", trace)
    each = LAUNCH + 100 + DELETE
    assert runs["now"]["all"]["p50"] == about(LAUNCH + each)
    assert runs["now"]["all"]["worst"] == about(LAUNCH + 2 * each)
    assert runs["what-if"]["all"]["worst"] == about(LAUNCH)
    for run in runs.values():
        assert run["machines"]["provider cloud"]["in_use"] * 3600 == about(300)
    assert simulate.complaints == ""


def test_min_ready_nodes_are_there_before_the_first_request(simulate: Simulations) -> None:
    path = simulate.config("n.yaml", cloud(), min_ready=1)
    run = simulate("--config", path, "--trace", simulate.trace("0,vm,30,", "0,vm,30,"))["now"]
    assert run["all"]["p50"] == about(0)
    assert run["all"]["worst"] == about(LAUNCH)


def test_tenant_limits_hold_back_only_their_tenant(simulate: Simulations) -> None:
    limit = {"tenant-resource-limits": [{"tenant-name": "web", "max-servers": 1}]}
    path = simulate.config("n.yaml", cloud(), **limit)
    run = simulate(
        "--config", path, "--trace", simulate.trace("0,vm,100,web", "0,vm,100,web", "0,vm,100,docs")
    )["now"]
    assert run["tenants"]["web"]["worst"] >= LAUNCH + 100
    assert run["tenants"]["docs"]["worst"] == about(LAUNCH)


def test_quotas_and_sizes_of_assumptions_limit_launches(
    simulate: Simulations, tmp_path: Path
) -> None:
    assumptions = tmp_path / "a.yaml"
    assumptions.write_text(
        "launch-time: 5\nlabels: {vm: {resources: {cores: 4}}}\nproviders: {cloud: {quota: {cores: "
        "7}}}"
    )
    trace = simulate.trace("0,vm,100,", "0,vm,100,")
    run = simulate(
        "--config",
        simulate.config("n.yaml", cloud()),
        "--trace",
        trace,
        "--assume",
        str(assumptions),
    )["now"]
    assert run["all"]["p50"] == about(5)
    assert run["all"]["worst"] >= 100


def test_static_metastatic_and_image_nodes_are_simulated(simulate: Simulations) -> None:
    slots = {"name": "slot", "backing-label": "backing", "max-parallel-jobs": 2, "grace-time": 60}
    slivers = {"name": "sliver", "diskimage": "deb", "cpus": 2, "ssh-keys": "ssh-ed25519 AAAA"}
    path = simulate.config(
        "n.yaml",
        cloud(labels=("backing",)),
        {"name": "meta", "driver": "metastatic", "pools": [{"name": "main", "labels": [slots]}]},
        {
            "name": "racks",
            "driver": "static",
            "pools": [{"name": "main", "nodes": [{"name": "h1.example.org", "labels": "bare"}]}],
        },
        {
            "name": "nm",
            "driver": "nodemanager",
            "hosts": [{"name": "nm1", "url": "unix:/run/nm"}],
            "diskimages": [{"name": "deb"}],
            "pools": [{"name": "main", "max-cores": 2, "labels": [slivers]}],
        },
        labels=("backing", "slot", "bare", "sliver"),
        diskimages=[{"name": "deb", "elements": ["debian"]}],
    )
    lines = [f"0,{label},40," for label in ("slot", "slot", "bare", "bare", "sliver", "sliver")]
    run = simulate("--config", path, "--trace", simulate.trace(*lines))["now"]
    assert run["all"]["failed"] == run["all"]["unserved"] == 0
    assert run["labels"]["slot"]["worst"] == about(LAUNCH), "both slots are on one backing node"
    assert run["labels"]["bare"]["p50"] == about(0)
    assert 40 <= run["labels"]["bare"]["worst"] < 60
    assert run["labels"]["sliver"]["worst"] > 40, "max-cores has room for one"


def test_same_seed_gives_the_same_result_and_another_seed_another(
    simulate: Simulations, tmp_path: Path
) -> None:
    assumptions = tmp_path / "a.yaml"
    assumptions.write_text("launch-time: [20, 80]")
    common = (
        "--config",
        simulate.config("n.yaml", cloud(**{"max-servers": 2})),
        "--assume",
        str(assumptions),
        "--trace",
        simulate.trace("0,vm,20,", "1,vm,20,", "9,vm,20,", "15,vm,20,"),
    )
    first, again, other = simulate(*common), simulate(*common), simulate(*common, "--seed", "2")
    assert first == again
    assert first != other


def test_what_makes_the_result_less_than_it_seems_is_reported(simulate: Simulations) -> None:
    path = simulate.config("n.yaml", cloud(labels=("vm", "lost")), labels=("vm", "lost"))
    content = yaml.safe_load(Path(path).read_text())
    content["providers"][0]["pools"][0]["max-ram"] = 4096
    Path(path).write_text(yaml.safe_dump(content))
    run = simulate("--config", path, "--trace", simulate.trace("0,vm,1,", "0,ghost,1,"))["now"]
    assert run["labels"]["ghost"]["failed"] == 1
    assert "no pool offers ghost; requests for it fail" in simulate.complaints
    assert "label vm: ram of a node unknown; the limit has no effect" in simulate.complaints


def test_demand_of_the_history_is_replayed(
    bench: LauncherBench, simulate: Simulations, tmp_path: Path
) -> None:
    bench.quota(instances=5)
    given = config(provider(labels=["fake-label"]))
    pool = bench.start(given)
    for _ in range(2):
        request_id, _nodes = bench.fulfilled("fake-label", tenant_name="web")
        (node_id,) = bench.zuul.accept(request_id)
        # The history has the states that the launcher sees.
        wait_for(lambda node_id=node_id: pool.zk.node_tree.get(node_id).state == "in-use")
        bench.zuul.give_back(node_id)
    bench.wait_nodes(0)
    bench.stop(pool)
    saved = tmp_path / "saved.csv"
    run = simulate("--config", bench.config(given), "--history", "--save-trace", str(saved))["now"]
    assert simulate.complaints == ""
    assert run["tenants"]["web"]["requests"] == 2
    assert run["all"]["unserved"] == run["all"]["failed"] == 0
    assert run["all"]["worst"] < 30, "launch times come from the history, too"
    assert len(saved.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "/no/such.csv"], "/no/such.csv"),
        (["--trace", "T", "--assume", "/no"], "/no:"),
        (["--trace", "T", "--chart", "/no/such.svg"], "/no/such.svg"),
        (["--trace", "T", "--save-trace", "/no/such.csv"], "/no/such.csv"),
    ],
)
def test_mistakes_name_the_file(simulate: Simulations, arguments: list[str], message: str) -> None:
    path = simulate.config("n.yaml", cloud())
    trace = simulate.trace("0,vm,1,")
    with pytest.raises(CommandError, match=message):
        simulate("--config", path, *[trace if each == "T" else each for each in arguments])


@pytest.mark.timeout(300)
def test_example_of_the_manual_works(tmp_path: Path) -> None:
    files = {
        "config": "nodepool.yaml",
        "trace": "day.csv",
        "what-if": "more-servers.yaml",
        "assume": "assumptions.yaml",
    }
    arguments = [f"--{name}={file}" for name, file in files.items()]
    command = [
        sys.executable,
        "-m",
        "nodepool.cmd.nodepoolcmd",
        "simulate",
        f"--chart={tmp_path}/day.svg",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=EXAMPLE, capture_output=True, text=True, timeout=250, check=True
    )
    sample = manual.page("what-if").partition("assumptions.yaml\n")[2].partition("\n    ...")[0]
    assert [
        line for line in map(str.strip, sample.splitlines()) if line not in done.stdout
    ] == [], done.stdout
    assert done.stderr == ""
    assert xml.etree.ElementTree.parse(tmp_path / "day.svg").getroot().tag.endswith("svg")


def test_killed_command_leaves_no_file(tmp_path: Path) -> None:
    """The configuration may contain secrets."""
    command = [
        sys.executable,
        "-m",
        "nodepool.cmd.nodepoolcmd",
        "simulate",
        "--config=nodepool.yaml",
        "--trace=day.csv",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=EXAMPLE, env=environment, start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(children.read_text, what="the process of the run")
        os.killpg(process.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())
