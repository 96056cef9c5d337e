"""Launchers of one provider and offers that its cloud has sold out (OST-1.8, DRV-7.9)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from nodepool.driver.fake.adapter import FakeOpenStackCloud
from nodepool.driver.fake.cloud import _http_error
from nodepool.driver.fake.objects import Dummy
from nodepool.zk import paths
from nodepool.zk.failures import Failures
from nodepool.zk.sold_out import SoldOutOffers
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

ALTERNATIVES = [{"flavor-name": "medium"}, {"flavor-name": "large"}]


class Cloud(FakeOpenStackCloud):
    """Servers of flavors that are sold out are accepted and get no host."""

    def __init__(self) -> None:
        super().__init__()
        self._flavor_list = [
            Dummy(Dummy.FLAVOR, id=name, name=name, ram=1024 * size, vcpus=size)
            for size, name in enumerate(("small", "medium", "large"), 1)
        ]
        self._azs = ["az1"]
        self.sold_out: set[str] = set()
        self.over_quota = False
        self.asked: list[str] = []

    def create_server(self, name: str = "", **kwargs: Any) -> Dummy:
        self.asked.append(kwargs["flavor"]["name"])
        if self.over_quota:
            raise _http_error("ForbiddenException", "Quota exceeded for cores", 403)
        server = super().create_server(name, **kwargs)
        if self.asked[-1] in self.sold_out:
            server.becomes("ERROR", time.monotonic())
            server["fault"] = {"message": "No valid host was found."}
        return server


@pytest.fixture
def cloud(bench: LauncherBench) -> Cloud:
    cloud = Cloud()
    bench.use_cloud(lambda: cloud)
    return cloud


def content(label: str, **options: Any) -> dict[str, Any]:
    """A configuration with a separate pool for the label."""
    entry = {
        "name": label,
        "cloud-image": "fake-image",
        "flavor-name": "small",
        "alternatives": ALTERNATIVES,
    }
    return config(provider(pools=[{"name": f"pool-{label}", "labels": [entry]}], **options))


def sold_out(bench: LauncherBench) -> list[str]:
    return sorted(name for note in bench.zk.readNotes(SoldOutOffers) for name in note.until)


def test_second_launcher_does_not_try_what_the_first_found_sold_out(
    bench: LauncherBench, cloud: Cloud
) -> None:
    bench.start(content("a", **{"launch-retries": 1}), name="one.yaml")
    bench.start(content("b", **{"launch-retries": 1}), name="two.yaml")
    cloud.sold_out = {"small", "medium"}
    _id, [node] = bench.fulfilled("a")
    assert cloud.asked == ["small", "medium", "large"], "no refusal uses up the only attempt"
    assert (node.resources["cores"], node.resources["ram"]) == (3, 3072)
    assert sold_out(bench) == ["medium in az1", "small in az1"]
    assert bench.zk.readNotes(Failures) == []
    wait_for(lambda: len(bench.adapter("fake-provider", bench.pools[1]).sold_out.left()) == 2)
    bench.fulfilled("b")
    assert cloud.asked[3:] == ["large"]


def test_offers_that_are_sold_out_are_a_problem_until_they_work(
    bench: LauncherBench, cloud: Cloud
) -> None:
    pool = bench.start(content("a"))
    cloud.sold_out = {"small"}
    bench.fulfilled("a")
    (problem,) = [each for each in pool.problems() if each.text.startswith("sold out: ")]
    assert problem.text.startswith("sold out: small in az1 until 20")
    assert problem.provider == "fake-provider"
    assert "alternatives" in problem.help
    cloud.sold_out = {"medium", "large"}
    bench.fulfilled("a")
    assert sold_out(bench) == ["large in az1", "medium in az1"]
    assert cloud.asked[-1] == "small", "the one refused longest ago"


def test_reason_of_a_request_that_waits_for_quota_names_the_offers(
    bench: LauncherBench, cloud: Cloud
) -> None:
    pool = bench.start(content("a"))
    cloud.over_quota = True
    request_id = bench.submit("a")
    (worker,) = pool.getPoolWorkers("fake-provider")
    (handler,) = wait_for(lambda: list(worker.paused_handlers), what="a paused handler")
    text = "cloud quota exceeded (label a), sold out: large in az1 until 20"
    wait_for(lambda: text in str(handler.shortage), what="the reason")
    assert set(cloud.asked[:3]) == {"small", "medium", "large"}
    cloud.over_quota = False
    bench.wait_request(request_id, "fulfilled", timeout=30)


def test_records_without_sold_out_offers_are_deleted(bench: LauncherBench, cloud: Cloud) -> None:
    now = time.time()
    for name, until in (("gone", now - 1), ("fake-provider", now + 200)):
        data = json.dumps({"offers": {"small": until}}).encode()
        bench.zk.kazoo_client.create(f"{paths.NOTES}/sold-out:{name}", data, makepath=True)
    bench.start(content("a"))
    wait_for(lambda: [note.name for note in bench.zk.readNotes(SoldOutOffers)] == ["fake-provider"])
