"""``nodepool plan``: what a changed configuration would do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from tests.support.launcher import LauncherBench, config, provider


class Plans:
    """:param before: the configuration in force."""

    def __init__(
        self, bench: LauncherBench, capsys: pytest.CaptureFixture[str], before: dict[str, Any]
    ) -> None:
        self.bench, self.capsys = bench, capsys
        self.before = bench.config(before, "before.yaml")

    def __call__(self, after: dict[str, Any]) -> dict[tuple[str, str], str]:
        """(effect, of what) -> text."""
        path = self.bench.config(after, "after.yaml")
        self.capsys.readouterr()
        assert nodepoolcmd.main(["-c", self.before, "plan", "-c", path, "--format", "json"]) == 0
        rows = json.loads(self.capsys.readouterr().out)
        return {(row["effect"], row["subject"]): row["text"] for row in rows}


@pytest.mark.spec(
    "issue: plan: what it would create and strand, requests that could never be served, limits "
    "that would bite"
)
def test_nodes_and_requests(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = provider("one", labels=["a", "b"]), provider("two", labels=["c"])
    plans = Plans(bench, capsys, config(one, two))
    assert plans(config(one, two)) == {}
    bench.ready_node("one", "main", "a")
    kept = bench.ready_node("one", "main", "b")
    lost = bench.ready_node(
        "two",
        "main",
        "c",
        state="in-use",
        tenant_name="t",
        resources={"cores": 8, "ram": 1, "instances": 1},
    )
    request_id = bench.submit("c", "c")
    smaller = provider("one", labels=["a"], pool={"max-servers": 1})
    found = plans(
        config(
            smaller,
            labels={"a": {"min-ready": 3}},
            **{"tenant-resource-limits": [{"tenant-name": "t", "max-cores": 4}]},
        )
    )
    assert request_id in found["never served", "c, c"]
    assert lost.id in found["strands nodes", "provider two"]
    assert kept.id in found["strands nodes", "label b"]
    assert "below its 2 nodes" in found["limit", "pool one-main"]
    assert "cores 4 is below the 8 in use" in found["limit", "tenant t"]
    assert found["creates nodes", "label a"].startswith("2 for min-ready 3")
    assert (
        found["changes", "provider one"].startswith("pools[main].labels[b]: {")
        and "max-servers: not set -> 1" in (found["changes", "provider one"])
    )
    assert found["changes", "label a"] == "min-ready: 0 -> 3"
    assert "removed two" in found["changes", "configuration"]
    renamed = provider("one", pools=[{"name": "other", "labels": ["a", "b"]}])
    assert kept.id in plans(config(renamed, two))["strands nodes", "pool one-main"]
    rack = {"name": "one", "driver": "static", "pools": [{"name": "main", "nodes": []}]}
    labels = [{"name": name} for name in "abc"]
    driver = plans({"labels": labels, "providers": [rack]})[
        "strands nodes", "driver of provider one"
    ]
    assert kept.id in driver and "would remain in the former cloud" in driver


@pytest.mark.spec("issue: plan: another launcher that offers it counts")
def test_nodes_above_a_lower_min_ready(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config(provider("one", labels=["a"]), labels={"a": {"min-ready": 3}})
    plans = Plans(bench, capsys, before)
    for _ in range(3):
        bench.ready_node("one", "main", "a", requestor="NodePool:min-ready")
    lower = config(provider("one", labels=["a"]), labels={"a": {"min-ready": 1}})
    assert plans(lower)["deletes nodes", "label a"].startswith("2 above min-ready 1")


def test_labels_of_other_launchers_count_as_offered(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.quota(instances=0)
    bench.start(config(provider("theirs", labels=["c"])))
    bench.submit("c")
    plans = Plans(bench, capsys, config(provider("one", labels=["c"])))
    assert ("never served", "c") not in plans(config(provider("one", labels=["a"])))


@pytest.mark.spec("issue: plan: what it would build, upload, delete")
def test_plan_lists_images_to_build_upload_and_delete(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(*images: str, uploaded: tuple[str, ...], **more: Any) -> dict[str, Any]:
        entry = provider("one", labels=["a"], diskimages=[{"name": name} for name in uploaded])
        return {
            **config(entry, **more),
            "diskimages": [{"name": name, "elements": ["x"]} for name in images],
            "images-dir": str(bench.tmp),
            "elements-dir": str(bench.tmp),
        }

    plans = Plans(bench, capsys, given("old", "kept", uploaded=("old", "kept")))
    bench.store_image("old", "one")
    bench.store_image("kept", "one")
    found = plans(given("kept", "new", uploaded=("kept", "new")))
    assert "1 builds" in found["deletes images", "image old"]
    assert found["uploads", "image new"] == "after its build, to provider one"
    assert ("builds", "image new") in found and ("builds", "image kept") not in found
    found = plans(given("old", "kept", uploaded=("old",)))
    assert "1 uploads in provider one would be deleted" in found["deletes images", "image kept"]


@pytest.mark.spec("issue: plan: a bad file is told as config-validate does")
def test_a_bad_file(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = bench.config(config(provider()), "before.yaml")
    bad = bench.config({**config(provider()), "labels": [{"name": "x", "min-redy": 1}]}, "bad.yaml")
    assert nodepoolcmd.main(["-c", before, "plan", "-c", bad]) == 1
    assert "did you mean min-ready" in caplog.text
    assert nodepoolcmd.main(["-c", before, "plan", "-c", before]) == 0
    assert "nothing would change" in capsys.readouterr().out
