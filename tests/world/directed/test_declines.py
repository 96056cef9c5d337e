"""Declines and failed requests (LAU-3)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.driver.statemachine import StateMachineHandler
from nodepool.zk import declines
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider


@pytest.mark.spec("LAU-21.25; DRV-14.5")
def test_an_unknown_label_fails(bench: LauncherBench) -> None:
    pool = bench.start(config(provider("fake-one"), provider("fake-two", labels=["other"])))
    record = bench.wait_request(bench.submit("fake-label", "zorky-zuul"), "failed")
    assert set(record["declined_by"]) == set(pool.state.workers)
    bench.wait_nodes(0)


@pytest.mark.spec("LAU-3: images not available")
def test_a_missing_image_declines(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(
                diskimages=[{"name": "img"}],
                pools=[
                    {
                        "name": "main",
                        "labels": [{"name": "fake-label", "diskimage": "img", "min-ram": 1}],
                    }
                ],
            ),
            diskimages=[{"name": "img", "elements": ["x"]}],
            **{"elements-dir": ".", "images-dir": str(bench.tmp)},
        )
    )

    def problems() -> list[str]:
        return [
            problem.text
            for problem in bench.pools[0]
            .getProviderManager("fake-provider")
            .label_problems.listed()
        ]

    bench.wait_request(bench.submit("fake-label"), "failed")
    assert problems() == ["disk image img (option diskimage) has not been uploaded here"]
    bench.store_image("img", "fake-provider")
    wait_for(
        lambda: bench.pools[0].zk.getMostRecentImageUpload("img", "fake-provider", cached=True)
    )
    assert problems() == [], "although nobody has requested the label since"
    bench.fulfilled("fake-label")


@pytest.mark.spec("LAU-21.74; DRV-14.6")
def test_a_disabled_pool_declines(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 0})))
    request_id = bench.submit("fake-label")
    [launcher_id] = bench.wait_request(request_id, "failed")["declined_by"]
    assert [launcher_id] == list(pool.state.workers)
    noted = json.loads(bench.zuul.client.get(declines.path(request_id, launcher_id))[0])
    assert noted == {
        "pool": "fake-provider-main",
        "reason": "pool is disabled by max_servers",
        "codes": ["pool-disabled"],
        "help": "raise `max-servers` of the pool, which is 0",
    }
    counted = metrics.REQUESTS_DECLINED(hostnames.short(), "pool-disabled")
    assert pool.state.statsd.snapshot().counters[counted] >= 1


@pytest.mark.spec("DRV-5.4")
def test_a_driver_declines_for_its_own_reasons(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateMachineHandler, "getDeclinedReasons", lambda self: ["it is Sunday"])
    bench.start(config(provider()))
    request_id = bench.submit("fake-label")
    [launcher_id] = bench.wait_request(request_id, "failed")["declined_by"]
    noted = json.loads(bench.zuul.client.get(declines.path(request_id, launcher_id))[0])
    assert (noted["reason"], noted["codes"]) == ("it is Sunday", ["by-driver"])


@pytest.mark.spec("LAU-3: a disabled pool of better priority lets the next one serve; DRV-14.6")
def test_a_disabled_pool_of_better_priority(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider("fake-off", pool={"max-servers": 0}, priority=1),
            provider("fake-on", priority=2),
        )
    )
    assert bench.fulfilled("fake-label")[1][0].provider == "fake-on"


@pytest.mark.spec("DRV-14.18: larger than the whole provider or pool limit")
def test_a_request_that_never_fits(bench: LauncherBench) -> None:
    bench.quota(cores=8)
    bench.start(config(provider("fake-small", pool={"max-servers": 1}), provider("fake-large")))
    assert bench.fulfilled("fake-label", "fake-label")[1][0].provider == "fake-large"
    bench.wait_request(bench.submit(*["fake-label"] * 3), "failed")


@pytest.mark.spec("LAU-3: declines of dead launchers stay and do not hinder a new one")
def test_old_declines_do_not_block(bench: LauncherBench) -> None:
    request_id = bench.submit("fake-label", declined_by=["some-dead-launcher"])
    bench.start(config(provider()))
    assert bench.wait_request(request_id, "fulfilled")["declined_by"] == ["some-dead-launcher"]


@pytest.mark.spec("LAU-3: re-evaluated when the last pool that has not declined disappears")
def test_a_vanished_pool_does_not_leave_requests_hanging(bench: LauncherBench) -> None:
    registered = {
        "id": "elsewhere",
        "name": "main",
        "provider_name": "other",
        "supported_labels": ["fake-label", "x"],
        "state": "running",
        "priority": 100,
        "paused": False,
        "hostname": "h",
        "kind": "pool",
        "version": "11",
        "model_api": 0,
    }
    path = bench.zuul.client.create(
        "/nodepool/components/pool/h",
        json.dumps(registered).encode(),
        ephemeral=True,
        sequence=True,
        makepath=True,
    )
    pool = bench.start(config(provider(pool={"max-servers": 0})))
    ids = [bench.submit("fake-label"), bench.submit("x"), bench.submit("unknown")]
    own = list(pool.state.workers)
    wait_for(lambda: bench.zuul.request(ids[0]).get("declined_by") == own)
    assert [bench.zuul.request(i)["state"] for i in ids[:2]] == ["requested"] * 2
    bench.zuul.client.delete(path)
    for request_id in ids:
        bench.wait_request(request_id, "failed")


@pytest.mark.spec(
    "issue: a launcher that starts with requests waiting fails none that another of its pools "
    "serves"
)
def test_nothing_is_failed_while_pools_are_being_registered(bench: LauncherBench) -> None:
    providers = [provider(f"fake-{i}", labels=[f"label{i}"]) for i in range(8)]
    ids = [bench.submit(f"label{i}") for i in range(8)]
    bench.start(config(*providers))
    for request_id in ids:
        assert bench.wait_request(request_id, "fulfilled")["declined_by"] == []


@pytest.mark.spec("LAU-2, issue 'Bad input': broken records concern only themselves")
def test_broken_requests_disturb_nothing(
    bench: LauncherBench, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.dumps({"state": "requested", "node_types": ["fake-label"]}).encode()
    create = bench.zuul.client.create
    for data in (
        b"",
        b"{",
        b"[1]",
        b'{"state": "odd"}',
        b'{"state": "requested", "node_types": "text"}',
        b'{"state": "requested", "node_types": ["fake-label"], "relative_priority": "high"}',
    ):
        create("/nodepool/requests/200-", data, sequence=True, makepath=True)
    create("/nodepool/requests/strange", good)
    create("/nodepool/requests/200-abc", good)
    bench.start(config(provider()))
    nulls = bench.submit(
        "fake-label", relative_priority=None, declined_by=None, requestor_data=None
    )
    bench.wait_request(nulls, "fulfilled")
    bench.fulfilled("fake-label")
    messages = [r.getMessage() for r in caplog.records]
    assert len([m for m in messages if "/nodepool/requests/strange" in m]) == 1
    assert bench.zuul.request("strange")["state"] == "requested"


@pytest.mark.spec("ZK-5: optional keys; an empty set of labels")
def test_a_minimal_request(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    path = bench.zuul.client.create(
        "/nodepool/requests/100-",
        b'{"state": "requested", "node_types": ["fake-label"]}',
        sequence=True,
    )
    bench.wait_request(path.rsplit("/", 1)[1], "fulfilled")
    assert bench.wait_request(bench.submit(), "fulfilled")["nodes"] == []


@pytest.mark.spec(
    "LAU-8.5, DRV-7.3: a label that can never work is offered as broken, the rest works"
)
def test_a_misconfigured_label(bench: LauncherBench, caplog: pytest.LogCaptureFixture) -> None:
    from nodepool.exceptions import RuntimeConfigurationException

    pool = bench.start(config(provider(labels=["fake-label", "broken"])))
    adapter = bench.adapter("fake-provider")
    original = adapter.getQuotaForLabel

    def quota(label: Any) -> Any:
        if label.name == "broken":
            raise RuntimeConfigurationException("induced")
        return original(label)

    adapter.getQuotaForLabel = quota
    for _ in range(2):
        assert bench.wait_request(bench.submit("broken"), "failed")["declined_by"]
    bench.fulfilled("fake-label")
    assert set(pool.getProviderManager("fake-provider").errorLabels()) == {"broken"}
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([r for r in warnings if "cannot work" in r.getMessage()]) == 1
    bench.wait_nodes(1)
