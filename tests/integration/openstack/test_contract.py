"""Lines of OST-3 that other modules leave to the fake cloud, held by a real OpenStack."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.builder import BuilderBench
from tests.support.fault_proxy import FaultProxy, Forward, Reply, reply
from tests.support.fault_proxy import Request as ProxiedRequest
from tests.support.launcher import LauncherBench, StatsdReceiver
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import (
    Zone,
    cleanup,
    config,
    failed,
    is_call,
    label,
    manager,
    one,
    provider,
    start,
    use_up,
)

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]


# -- 3.2 credentials


@pytest.fixture
def other_user(openstack_cloud: OpenStackCloud) -> Iterator[dict[str, Any]]:
    """``auth`` of another member of the project."""
    identity = openstack_cloud.admin.identity
    project = identity.find_project("nodepool")
    user = identity.create_user(
        name="other", password="other-secret", domain_id="default", default_project_id=project.id
    )
    for role in ("member", "reader"):
        identity.assign_project_role_to_user(project, user, identity.find_role(role))
    try:
        yield {
            "auth": {
                **openstack_cloud.entry["auth"],
                "username": "other",
                "password": "other-secret",
            }
        }
    finally:
        identity.delete_user(user)


@pytest.fixture
def application_credential(openstack_cloud: OpenStackCloud) -> Iterator[dict[str, Any]]:
    sdk = openstack_cloud.sdk
    user = sdk.session.get_user_id()
    made = sdk.identity.create_application_credential(user, name="nodepool-test")
    auth = {
        "auth_url": openstack_cloud.entry["auth"]["auth_url"],
        "application_credential_id": made.id,
        "application_credential_secret": made.secret,
    }
    try:
        yield {"auth_type": "v3applicationcredential", "auth": auth}
    finally:
        sdk.identity.delete_application_credential(user, made)


@pytest.mark.spec(
    "OST-3.2: after changing clouds.yaml and the provider, the new client has the new data"
)
@pytest.mark.parametrize("kind", ["other_user", "application_credential"])
def test_changed_credentials_are_used_by_the_new_client_only(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, request: pytest.FixtureRequest, kind: str
) -> None:
    """Nodes and launches of the old client continue."""
    pool = start(bench, openstack_cloud)
    old = manager(bench)
    assert old.adapter._client.auth == openstack_cloud.entry["auth"]
    first, node = one(bench)
    # A launch under way: its server is not shown active yet.
    building = openstack_cloud.compute.fail(
        is_call("GET /servers/{id}"), in_build, times=float("inf")
    )
    under_way = bench.submit("small")
    wait_for(lambda: building.used, 60, "a launch under way")

    entry = {**openstack_cloud.entry, **request.getfixturevalue(kind)}
    bench.write_clouds({"clouds": {"test": entry}})
    bench.config(config(provider(label(), label("new"))))
    wait_for(
        lambda: "new" in pool.config.labels and manager(bench) is not old, 60, "the new provider"
    )
    assert manager(bench).adapter._client.auth == entry["auth"]
    openstack_cloud.compute.heal()
    bench.wait_request(under_way, "fulfilled", timeout=90)
    wait_for(lambda: not old.running, 60, "the old provider has stopped")

    second, _ = one(bench, "new")
    assert {server["user_id"] for server in openstack_cloud.servers()} == {
        openstack_cloud.sdk.session.get_user_id(),
        manager(bench).adapter._client.session.get_user_id(),
    }
    cleanup(bench, 2)
    assert openstack_cloud.server(node.external_id)["status"] == "ACTIVE"
    use_up(bench, first, under_way, second)
    assert openstack_cloud.servers() == []


def in_build(_request: ProxiedRequest, forward: Forward) -> Reply:
    answer = forward(_request)
    if answer.status == 200:
        content = json.loads(answer.body)
        content["server"]["status"] = "BUILD"
        answer.body = json.dumps(content).encode()
    return answer


# -- 3.7 images


@pytest.mark.spec("OST-3.7: a cloud image that appears later is noticed within IMAGE_CHECK_TIMEOUT")
def test_image_appears_later(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is active: not while it is still without content."""
    from nodepool.driver.openstack.adapter import OpenStackAdapter

    monkeypatch.setattr(OpenStackAdapter, "IMAGE_CHECK_TIMEOUT", 0.5)
    start(
        bench,
        openstack_cloud,
        provider(
            label(cloud_image="late"), cloud_images=[{"name": "late", "image-name": "late-image"}]
        ),
    )
    failed(bench)
    image = openstack_cloud.sdk.image.create_image(
        name="late-image", disk_format="raw", container_format="bare"
    )
    failed(bench)
    answer = openstack_cloud.sdk.image.put(
        f"/images/{image.id}/file",
        data=b"x" * 100,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == 204, answer.text

    def served() -> bool:
        return bool(bench.wait_request(bench.submit("small"), timeout=60)["state"] == "fulfilled")

    wait_for(served, 60, "a node of the late image")
    (server,) = openstack_cloud.servers()
    assert server["image"]["id"] == image.id


# -- 3.18 zones


@pytest.fixture
def zone(openstack_cloud: OpenStackCloud) -> Iterator[Zone]:
    made = Zone(openstack_cloud.admin, "zone-1")
    try:
        yield made
    finally:
        # The compute service keeps hosts with servers where they are.
        openstack_cloud.clean()
        made.remove()


@pytest.mark.spec(
    "OST-3.18: zones changed in the cloud: one request fails, the next uses the new zones"
)
def test_changed_zones_fail_one_request_only(
    zone: Zone, bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    pool = start(bench, openstack_cloud)
    request_id, node = one(bench)
    assert node.az == "zone-1"
    use_up(bench, request_id)
    zone.rename("zone-2")
    failed(bench)
    request_id, node = one(bench)
    assert node.az == "zone-2"
    (worker,) = pool.state.workers.values()
    wait_for(lambda: not worker.request_handlers, 60, "no handler left over")
    use_up(bench, request_id)


# -- 3.20, 3.21 servers after their deletion


@pytest.mark.spec("OST-3.20: a server that the API still lists as DELETED counts as gone")
def test_listed_as_deleted(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(bench, openstack_cloud)
    request_id, node = one(bench)
    record = {
        **openstack_cloud.server(node.external_id),
        "status": "DELETED",
        "OS-EXT-STS:vm_state": "deleted",
    }

    def still_shown(request: ProxiedRequest, forward: Forward) -> Reply:
        answer = forward(request)
        if is_call("GET /servers/detail")(request) and answer.status == 200:
            content = json.loads(answer.body)
            content["servers"] = [
                item for item in content["servers"] if item["id"] != node.external_id
            ] + [record]
            answer.body = json.dumps(content).encode()
        elif request.path.endswith(f"/servers/{node.external_id}"):
            return Reply(
                200, json.dumps({"server": record}).encode(), [("Content-Type", "application/json")]
            )
        return answer

    node_ids = bench.zuul.accept(request_id)
    openstack_cloud.compute.fail(
        lambda request: request.method == "GET", still_shown, times=float("inf")
    )
    bench.zuul.give_back(*node_ids)
    bench.wait_gone(*node_ids, timeout=60)
    assert openstack_cloud.calls()["compute DELETE /servers/{id}"] == 1
    adapter = manager(bench).adapter
    adapter._gone = type(adapter._gone)()  # as another launcher, or later
    assert list(manager(bench).listNodes()) == []
    manager(bench).invalidateQuotaCache()
    assert manager(bench).unmanagedQuotaUsed().get_resources().get("instances", 0) == 0
    cleanup(bench, 3)
    assert openstack_cloud.calls()["compute DELETE /servers/{id}"] == 1
    assert statsd.last("nodepool.provider.cloud-1.leaked.instances") is None


class FailingDeletion:
    """The compute service accepts the deletion of a server; it ends in ERROR. ``times`` of them."""

    def __init__(self, cloud: OpenStackCloud, times: int) -> None:
        self.cloud = cloud
        self.fault = cloud.compute.fail(is_call("DELETE /servers/{id}"), self.act, times)

    def act(self, request: ProxiedRequest, _forward: Forward) -> Reply:
        server_id = request.path.rpartition("/")[2]
        answer = self.cloud.admin.compute.post(
            f"/servers/{server_id}/action", json={"os-resetState": {"state": "error"}}
        )
        assert answer.status_code == 202, answer.text
        return Reply(204)


@pytest.mark.spec(
    "OST-3.21: a server in ERROR after its delete stays listed, counts, and is retried as a leak"
)
def test_error_after_delete(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(bench, openstack_cloud)
    request_id, node = one(bench)
    FailingDeletion(openstack_cloud, 1)
    bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(
        lambda: openstack_cloud.server(node.external_id)["status"] == "ERROR",
        60,
        "a server in ERROR",
    )
    assert [item.metadata["nodepool_node_id"] for item in manager(bench).listNodes()] == [node.id]
    assert bench.node(node.id).state == "deleting"
    assert manager(bench).estimatedNodepoolQuotaUsed().quota["compute"]["instances"] == 1
    # Without its record it counts as somebody's, and is a leak.
    bench.zk.deleteRawNode(node.id)
    wait_for(lambda: not manager(bench)._zk.getProviderNodes("cloud-1"), 60, "the record is gone")
    assert manager(bench).unmanagedQuotaUsed().get_resources()["instances"] == 1
    cleanup(bench, 2)
    wait_for(lambda: not openstack_cloud.servers(), 60, "the leak is gone")
    statsd.wait("nodepool.provider.cloud-1.leaked.instances", "1|c")


@pytest.mark.spec(
    "OST-3.21: a deletion that failed in the cloud is repeated; the record stays until it worked"
)
def test_deletion_is_repeated(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.openstack.machines.DELETE_AGAIN", 0.5)
    start(bench, openstack_cloud)
    request_id, node = one(bench)
    failing = FailingDeletion(openstack_cloud, 2)
    bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(lambda: failing.fault.used, 60, "a deletion that fails")
    assert bench.node(node.id).state == "deleting"
    bench.wait_gone(node.id, timeout=90)
    assert (failing.fault.used, openstack_cloud.servers()) == (2, [])


# -- 3.24 uploads


@pytest.mark.spec(
    "OST-3.24: an upload failure in one provider stops neither the other provider nor the launcher"
)
def test_upload_refused_by_one_cloud(
    bench: LauncherBench, builders: BuilderBench, openstack_cloud: OpenStackCloud
) -> None:
    names = {"good": openstack_cloud.image.url, "bad": ""}
    with FaultProxy(openstack_cloud.image.upstream) as refusing:
        names["bad"] = refusing.url
        refusal = refusing.fail(
            is_call("POST /images"),
            reply(403, "<html>You are not authorized.</html>", "text/html"),
            times=float("inf"),
        )
        entry = {**openstack_cloud.entry, "image_format": "raw"}
        bench.write_clouds(
            {
                "clouds": {
                    name: {**entry, "image_endpoint_override": url} for name, url in names.items()
                }
            }
        )
        images = {
            "images-dir": str(builders.images_dir),
            "build-log-dir": str(builders.log_dir),
            "elements-dir": ".",
            "diskimages": [builders.image("disk")],
        }
        providers = [
            provider(
                label("common", diskimage="disk"),
                label(f"on-{name}", diskimage="disk"),
                name=name,
                cloud=name,
                diskimages=[{"name": "disk"}],
            )
            for name in names
        ]
        content = {**config(*providers, **images)}
        content["labels"] = [
            {"name": "common", "min-ready": 2},
            {"name": "on-good"},
            {"name": "on-bad"},
        ]
        builders.start(bench.config(content))
        upload = builders.wait_upload("disk", "good", timeout=60)
        wait_for(lambda: refusal.used, 60, "a refused upload")
        bench.start(content, cleanup_interval=600)
        ready = bench.wait_nodes(2, timeout=60, state="ready")
        assert {node.provider for node in ready} == {"good"}
        _, node = one(bench, "on-good")
        assert openstack_cloud.server(node.external_id)["image"]["id"] == upload.external_id
        failed(bench, "on-bad")
        assert not builders.uploads("disk", "bad")
        refusing.heal()
        builders.wait_upload("disk", "bad", timeout=90)
        _, node = one(bench, "on-bad")
        assert node.cloud == "bad"
        bench.stop(bench.pools[0])
        for builder in list(builders.builders):
            builders.stop(builder)


# -- 3.26 the console


@pytest.mark.spec("OST-3.26: console log lines appear once per failed scan")
def test_console_log_is_written_once_per_failed_scan(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody answers at the addresses of this cloud."""
    caplog.set_level(logging.INFO, "nodepool")
    start(
        bench,
        openstack_cloud,
        provider(
            label("told", console_log=True, host_key_checking=True),
            label("quiet", host_key_checking=True),
            boot_timeout=2,
            launch_retries=2,
        ),
    )
    expected = None
    for name, times in (("told", 2), ("quiet", 0)):
        caplog.clear()
        openstack_cloud.forget_calls()
        request_id = bench.submit(name)
        if expected is None:
            (server,) = wait_for(
                lambda: [item for item in openstack_cloud.servers() if item["status"] == "ACTIVE"],
                60,
                "an active server",
            )
            console = openstack_cloud.sdk.compute.get_server_console_output(server["id"])["output"]
            expected = [line for line in console.splitlines() if line.strip()]
            assert expected
        bench.wait_request(request_id, "failed", timeout=90)
        lines = [
            record.getMessage()
            for record in caplog.records
            if "Console log from hostname np" in record.getMessage()
        ]
        for text in expected:
            assert sum(line.endswith(text) for line in lines) == times, (text, lines)
        assert openstack_cloud.calls()["compute POST /servers/{id}/action"] == times
    wait_for(lambda: not openstack_cloud.servers(), 60, "no server left")
