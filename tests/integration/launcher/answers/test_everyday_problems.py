"""Everyday problems: commands, API, ``/ready`` and ``problem-list`` name the same cause and
suggest a remedy.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.status import cluster
from nodepool.zk import reports
from nodepool.zk.components import BuilderComponent
from nodepool.zk.mirror.progress import UploadFailure
from nodepool.zk.records import HOLD
from tests.conftest import wait_for
from tests.integration.launcher.answers.conftest import Desk, answer, created
from tests.support.launcher import config, provider


def test_full_quota_names_the_limit_and_its_users(desk: Desk) -> None:
    desk.bench.quota(instances=2)
    desk.start(config(provider()))
    for _ in range(2):
        desk.bench.fulfilled("fake-label", tenant_name="acme")
    request = desk.bench.submit("fake-label")
    found = answer(
        desk, "request", request, "instances: 1 needed, 0 of 2 left", "2 nodes", "tenant acme has 2"
    )
    assert found["suggestion"].startswith("raise the quota of provider fake-provider")
    answer(desk, "label", "fake-label", "1 request waiting", "0 of 2 left")
    assert "0 of 2 left" in created(desk, "fake-label")
    assert "Quota of fake-provider: 2 of 2 instances in use" in desk.run("status")[1]


def test_full_pool_names_its_option(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    desk.bench.fulfilled("fake-label")
    found = answer(
        desk, "request", desk.bench.submit("fake-label"), "instances: 1 needed, 0 of 1 left"
    )
    assert found["suggestion"].startswith("raise `max-servers` of pool main")


def test_held_nodes_that_fill_a_pool_are_named(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    request_id, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.zuul.accept(request_id)
    desk.bench.zuul.write_node(
        node.id, state=HOLD, hold_job="nightly", comment="for alice", hold_expiration=7200
    )
    desk.bench.zuul.unlock(node.id)
    request = desk.bench.submit("fake-label")
    found = answer(
        desk,
        "request",
        request,
        "1 of 1 are held",
        f"{node.id} by nightly, for alice for another 1 h 59 min",
    )
    assert "delete held and forgotten nodes" in found["suggestion"]
    assert f"{node.id} by nightly" in created(desk, "fake-label")


def test_misspelt_label_gets_a_suggestion(desk: Desk) -> None:
    desk.start(config(provider()))
    assert "did you mean fake-label?" in created(desk, "fake-labl")
    request = desk.bench.submit("fake-labl")
    desk.bench.wait_request(request, "failed")
    answer(
        desk, "request", request, "failed: no launcher offers fake-labl; did you mean fake-label?"
    )


def test_tenant_limit_names_tenant_and_option_and_gives_no_estimate(desk: Desk) -> None:
    limits = [{"tenant-name": "acme", "max-servers": 1}]
    desk.start(config(provider(), **{"tenant-resource-limits": limits}))
    desk.bench.fulfilled("fake-label", tenant_name="acme")
    request = desk.bench.submit("fake-label", tenant_name="acme")
    found = answer(desk, "request", request, "tenant acme is limited to 1 instances, 1 in use")
    assert "`max-servers` of tenant acme in `tenant-resource-limits`" in found["suggestion"]
    assert "expected" not in found["facts"]
    assert "tenant acme is limited to 1" in created(desk, "fake-label", "--tenant", "acme")


def disk_image_config(**image: Any) -> dict[str, Any]:
    entry = provider(
        pools=[
            {
                "name": "main",
                "labels": [{"name": "fake-label", "diskimage": "winimg", "min-ram": 8192}],
            }
        ]
    )
    entry["diskimages"] = [{"name": "winimg"}]
    disk_image = {"name": "winimg", "elements": ["vm"], "release": "21", **image}
    return config(
        entry,
        diskimages=[disk_image],
        **{"images-dir": "/tmp/images", "elements-dir": "/tmp/elements"},
    )


def test_image_paused_in_the_file_and_never_built_is_reported(desk: Desk) -> None:
    desk.start(disk_image_config(pause=True))
    request = desk.bench.submit("fake-label")
    desk.bench.wait_request(request, "failed")
    found = answer(
        desk, "request", request, "image winimg is paused by the option pause of its diskimage"
    )
    assert "pause: false" in found["suggestion"]
    answer(desk, "image", "winimg", "image winimg is paused by the option pause")
    answer(desk, "label", "fake-label", "image winimg is paused by the option pause")
    wait_for(
        lambda: any("winimg is paused" in text for text in desk.problems()),
        what="the image in problem-list",
    )
    assert "winimg is paused" in desk.ready()
    assert [row["paused"] for row in desk.table("images") if row["image"] == "winimg"] == [True]
    assert "winimg" in desk.run("image-status")[1]


def test_image_that_nobody_builds_is_reported(desk: Desk) -> None:
    desk.start(disk_image_config())
    found = answer(
        desk, "label", "fake-label", "image winimg has never been built: no builder is running"
    )
    assert found["suggestion"] == "start nodepool-builder"
    wait_for(
        lambda: any("no builder is running" in text for text in desk.problems()),
        what="the image in problem-list",
    )


@pytest.mark.parametrize("known_by", [("bench.example.org", None), ("vm", "builder-1")])
def test_image_for_a_new_provider_whose_builder_is_dead_names_the_builder(
    desk: Desk, known_by: tuple[str, str | None]
) -> None:
    entries = [
        {"name": "main", "labels": [{"name": "fake-label", "diskimage": "winimg", "min-ram": 8192}]}
    ]
    providers = [provider(name, pools=entries) for name in ("fake-provider", "fake-new")]
    for entry in providers:
        entry["diskimages"] = [{"name": "winimg"}]
    desk.bench.store_image("winimg", "fake-provider")
    BuilderComponent(desk.bench.zk.client, "nb02").register()
    desk.start({**disk_image_config(), "providers": providers})
    words = (
        "image winimg is built, but has no usable upload in provider fake-new: the builder on "
        "bench, which has its files, is not"
    )
    found = answer(desk, "image", "winimg", words)
    assert found["suggestion"].startswith(
        "start nodepool-builder on bench, or run `nodepool image-build winimg`"
    )
    desk.reported(words)
    name, known = known_by
    back = BuilderComponent(desk.bench.zk.client, name)
    back.content["builder_id"] = known
    back.register()
    wait_for(
        lambda: desk.explain("image", "winimg")["suggestion"].startswith("wait for the upload"),
        what="the builder is back",
    )


def test_image_that_no_provider_has_is_built_and_waits_for_nothing(desk: Desk) -> None:
    upload = desk.bench.store_image("other", "fake-provider")
    desk.bench.zk.deleteUpload("other", upload.build_id, "fake-provider", upload.id)
    desk.start(disk_image_config())
    words = "image other is built, and is not uploaded: no provider of a running launcher has it"
    assert answer(desk, "image", "other", words)["suggestion"] == (
        "name it in the `diskimages` of a provider"
    )


def test_failed_upload_of_another_provider_is_no_cause_of_a_label(desk: Desk) -> None:
    desk.start(two_providers(["fake-label"], ["other-label"]))
    desk.bench.store_image("winimg", "fake-provider")
    upload_failed(desk, "fake-new")
    desk.bench.fulfilled("fake-label")
    desk.bench.submit("fake-label")
    answer(desk, "label", "fake-label", "1 request waiting", "instances: 1 needed, 0 of 1 left")
    answer(desk, "label", "other-label", "the last upload failed: too large for fake-new")


def test_failed_upload_of_one_of_two_providers_is_no_cause_of_a_label(desk: Desk) -> None:
    desk.start(two_providers(["fake-label"], ["fake-label"]))
    desk.bench.store_image("winimg", "fake-provider")
    upload_failed(desk, "fake-new")
    desk.bench.fulfilled("fake-label")
    desk.bench.submit("fake-label")
    answer(desk, "label", "fake-label", "1 request waiting", "instances: 1 needed, 0 of 1 left")


def test_label_is_explained_by_the_upload_of_its_provider(desk: Desk) -> None:
    desk.start(two_providers(["fake-label"], ["other-label"]))
    upload_failed(desk, "fake-new")
    upload_failed(desk, "fake-provider")
    answer(desk, "label", "fake-label", "the last upload failed: too large for fake-provider")
    answer(desk, "label", "other-label", "the last upload failed: too large for fake-new")


def two_providers(*labels: list[str]) -> dict[str, Any]:
    """Providers with capacity for one node each, whose labels have the same disk image."""
    providers = []
    for name, offered in zip(("fake-provider", "fake-new"), labels, strict=True):
        entries = [{"name": label, "diskimage": "winimg", "min-ram": 8192} for label in offered]
        pools = [{"name": "main", "max-servers": 1, "labels": entries}]
        providers.append(provider(name, pools=pools) | {"diskimages": [{"name": "winimg"}]})
    options = {key: disk_image_config()[key] for key in ("diskimages", "images-dir")}
    return config(*providers, **options, **{"elements-dir": "/tmp/elements"})


def upload_failed(desk: Desk, name: str) -> None:
    now = time.time()
    desk.bench.zk.progress.write(
        UploadFailure("winimg", name, reason=f"too large for {name}", time=now, next_try=now + 60)
    )


def test_min_ready_that_cannot_be_reached_is_reported(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1}), labels={"fake-label": {"min-ready": 3}}))
    wanted = ("1 of 3 ready (min-ready), because", "instances: 1 needed, 0 of 1 left")
    found = answer(desk, "label", "fake-label", *wanted)
    assert "max-servers" in found["suggestion"]
    wait_for(
        lambda: any(wanted[0] in text for text in desk.problems()), what="min-ready in problem-list"
    )
    assert wanted[0] in desk.ready()


def test_min_ready_is_counted_once_with_two_launchers(desk: Desk) -> None:
    desk.start(config(provider(), labels={"fake-label": {"min-ready": 2}}))
    (own,) = wait_for(desk.bench.zk.readReports, what="the first report")
    reports.write(desk.bench.zk.kazoo_client, reports.path("other-1"), {**own, "hostname": "other"})
    wait_for(lambda: len(desk.bench.pools[0].zk.readReports()) == 2, what="two reports")
    assert [row["min_ready"] for row in desk.table("labels")] == [2]


def test_waiting_requests_are_listed_once_with_two_launchers(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    desk.bench.fulfilled("fake-label")
    request = desk.bench.submit("fake-label")
    answer(desk, "request", request, "0 of 1 left")
    (own,) = [report for report in desk.bench.zk.readReports() if report["waiting"]]
    (group,) = own["waiting"]
    other = {"code": "other-launcher", "pool": "", "text": "another launcher can serve it"}
    shown = {**own, "hostname": "other", "waiting": [{**group, "reasons": [other]}]}
    reports.write(desk.bench.zk.kazoo_client, reports.path("other-1"), shown)
    wait_for(lambda: len(desk.bench.zk.readReports()) == 2, what="two reports")
    (row,) = cluster.by_cause(desk.bench.zk).rows
    assert (row["count"], row["ids"]) == (1, [request])
    assert "0 of 1 left" in row["reason"] and "max-servers" in row["suggestion"]
    (listed,) = [
        row for row in wait_for(lambda: desk.table("requests"), what="rows") if row["id"] == request
    ]
    assert "0 of 1 left" in listed["reason"] and "another launcher" not in listed["reason"]


def test_deleted_node_is_explained_to_the_next_command(desk: Desk) -> None:
    pool = desk.start(config(provider()))
    wait_for(lambda: pool.statistics.elected, what="elected")
    request, (node,) = desk.bench.fulfilled("fake-label")
    desk.bench.use_up(request)
    status, out, err = desk.run("explain", "node", node.id)
    assert status == 0, err
    assert (
        out.startswith((f"node {node.id}: deleted ", f"node {node.id}: no longer exists"))
        and "history:" in out
    )


def test_provider_that_does_not_start_is_the_cause(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, zk_conn: Any) -> None:
        raise RuntimeError("HTTP 401: the password has expired")

    monkeypatch.setattr("nodepool.driver.statemachine.provider.StateMachineProvider.start", fail)
    desk.start(config(provider()))
    wanted = (
        "provider fake-provider, which offers fake-label, does not run",
        "HTTP 401: the password has expired",
    )
    answer(desk, "request", desk.bench.submit("fake-label"), *wanted)
    answer(desk, "label", "fake-label", *wanted)
    assert "HTTP 401" in created(desk, "fake-label")
    assert "HTTP 401" in desk.ready()


def test_label_of_a_file_with_a_mistake_is_explained(desk: Desk) -> None:
    pool = desk.start(config(provider()))
    entry = provider(labels=["fake-label", "new-label"])
    desk.bench.config({**config(entry), "webapp": {"port": 99999}})
    wait_for(lambda: pool.config_state.stale_since is not None, what="the file is refused")
    request = desk.bench.submit("new-label")
    desk.bench.wait_request(request, "failed")
    found = answer(
        desk,
        "request",
        request,
        "no launcher offers new-label",
        "uses an older configuration",
        "99999",
    )
    assert "correct the configuration file" in found["suggestion"]


def test_dead_static_host_is_the_cause(desk: Desk) -> None:
    with socket.socket() as reserved:  # bound, and nobody listens
        reserved.bind(("127.0.0.1", 0))
        node = {
            "name": "127.0.0.1",
            "labels": ["metal"],
            "connection-port": reserved.getsockname()[1],
            "timeout": 1,
            "host-key-checking": True,
            "connection-type": "ssh",
            "username": "zuul",
        }
        rack = {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [node]}]}
        desk.start({"labels": [{"name": "metal"}], "providers": [rack]})
        wait_for(
            lambda: any("cannot be used now" in text for text in desk.problems()),
            what="the host in problem-list",
        )
        request = desk.bench.submit("metal")
        found = answer(desk, "request", request, "host zuul@127.0.0.1 port", "cannot be used now")
        assert "repair the host" in found["suggestion"] and "expected" not in found["facts"]
        answer(desk, "label", "metal", "cannot be used now")
        assert "cannot be used now" in created(desk, "metal")
        assert "cannot be used now" in desk.ready()


def test_request_behind_another_names_it_with_its_cause(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    desk.bench.fulfilled("fake-label")
    first = desk.bench.submit("fake-label", priority="100")
    desk.bench.wait_request(first, "pending")
    second = desk.bench.submit("fake-label", priority="300")
    found = answer(
        desk,
        "request",
        second,
        f"request {first} comes first, which waits",
        "instances: 1 needed, 0 of 1 left",
    )
    assert found["suggestion"].startswith("raise `max-servers` of pool main")
    assert f"request {first} comes first" in created(desk, "fake-label", "--priority", "300")


def test_refused_credential_is_reported_with_the_words_of_the_cloud(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.start(config(provider(**{"launch-retries": 1})))

    def refuse(*args: Any, **kw: Any) -> None:
        raise exceptions.LaunchNodepoolException("HTTP 401: the password has expired")

    monkeypatch.setattr(desk.bench.adapter("fake-provider"), "_createServer", refuse)
    request = desk.bench.submit("fake-label")
    desk.bench.wait_request(request, "failed")
    answer(desk, "request", request, "failed: ", "HTTP 401: the password has expired")
    answer(desk, "label", "fake-label", "HTTP 401: the password has expired")
    answer(desk, "provider", "fake-provider", "HTTP 401: the password has expired")
    wait_for(
        lambda: any("HTTP 401" in text for text in desk.problems()),
        what="the label in problem-list",
    )
    assert "HTTP 401" in desk.ready()


def test_launchers_of_one_host_are_distinguished(desk: Desk) -> None:
    desk.start(config(provider()))
    (own,) = wait_for(desk.bench.zk.readReports, what="the first report")
    assert own["name"] == own["hostname"]
    reports.write(desk.bench.zk.kazoo_client, reports.path("other-1"), {**own, "pid": 77})
    found = wait_for(
        lambda: len(read := desk.bench.pools[0].zk.readReports()) == 2 and read, what="two reports"
    )
    names = {f"{own['hostname']}:{own['pid']}", f"{own['hostname']}:77"}
    assert (
        {report["name"] for report in found}
        == names
        == {report["name"] for report in desk.bench.zk.readReports()}
    )
    shown = {row["launcher"] for row in cluster.providers(desk.bench.zk).rows}
    assert shown == names


def test_slot_that_waits_for_a_backing_node_names_the_limit_of_the_other_pool(desk: Desk) -> None:
    slots = {
        "name": "meta",
        "driver": "metastatic",
        "pools": [
            {
                "name": "main",
                "labels": [
                    {
                        "name": "small",
                        "backing-label": "big",
                        "max-parallel-jobs": 2,
                        "grace-time": 1,
                    }
                ],
            }
        ],
    }
    given = config(provider(labels=["big"], pool={"max-servers": 1}), slots)
    desk.start(given)
    desk.bench.fulfilled("big")
    request = desk.bench.submit("small")
    found = answer(
        desk,
        "request",
        request,
        "waiting for a backing node of big",
        "instances: 1 needed, 0 of 1 left",
    )
    assert found["suggestion"].startswith("raise `max-servers` of pool main")
    assert "waiting for a backing node of big" in created(desk, "small")


def test_switched_off_provider_gives_no_estimate(desk: Desk) -> None:
    desk.start(config(provider(**{"max-concurrency": 0})))
    request = desk.bench.submit("fake-label")
    found = answer(desk, "request", request, "max-concurrency is 0")
    assert found["suggestion"] == "raise `max-concurrency` of the provider"
    assert "expected" not in found["facts"]
    assert "max-concurrency is 0" in created(desk, "fake-label")


def test_reasons_are_no_older_than_their_request(desk: Desk) -> None:
    desk.start(config(provider(pool={"max-servers": 1})))
    desk.bench.fulfilled("fake-label")
    late = desk.bench.submit("fake-label")
    answer(desk, "request", late, "0 of 1 left")
    (own,) = [report for report in desk.bench.zk.readReports() if report["waiting"]]
    waiting = [{**group, "since": time.time() - 5000} for group in own["waiting"]]
    reports.write(
        desk.bench.zk.kazoo_client,
        reports.path("other-1"),
        {**own, "hostname": "other", "waiting": waiting},
    )

    def ages() -> list[float]:
        found = desk.explain("request", late)["candidates"]
        return [each["age"] for each in found if each["name"].endswith("on other")]

    assert max(wait_for(ages, what="the other launcher's reason")) < 1000


def test_label_page_lists_no_problems_of_other_labels(desk: Desk) -> None:
    pool = desk.start(config(provider(labels=["first", "second"])))
    pool.getProviderManager("fake-provider").label_problems.note("first", "image", "no such image")
    wait_for(
        lambda: any("no such image" in text for text in desk.problems()),
        what="the problem in problem-list",
    )
    assert desk.explain("label", "first")["problems"] == [
        "provider fake-provider, label first: no such image"
    ]
    assert desk.explain("label", "second")["problems"] == []
    assert len(desk.explain("provider", "fake-provider")["problems"]) == 1


def test_equal_labels_of_a_request_are_shown_once(desk: Desk) -> None:
    desk.start(config(provider(labels=["first", "second"], pool={"max-servers": 1})))
    request = desk.bench.submit(*["first"] * 200, "second")
    desk.bench.wait_request(request, "failed")
    found = desk.explain("request", request)
    assert found["facts"]["labels"] == "first x200, second"
    assert all(
        text.count("first") <= 1
        for text in (found["answer"], *(event["text"] for event in found["history"]))
    )
