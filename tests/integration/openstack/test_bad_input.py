"""What is wrong is named in the log, in /ready and by ``nodepool problem-list``, with provider,
label and option; others are served; and it goes when somebody has mended it (real OpenStack, real
changes in it where the cloud can do that).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool import status
from nodepool.cmd import nodepoolcmd
from tests.conftest import wait_for
from tests.support.fault_proxy import Action, cut_off, drop, hang, html, reply
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud, shape
from tests.support.openstack.scene import (
    cleanup,
    config,
    failed,
    is_call,
    label,
    manager,
    one,
    provider,
    recovers,
    start,
    use_up,
)

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check again soon for what was not there, and publish soon what is wrong."""
    from nodepool.driver.openstack.adapter import OpenStackAdapter
    from nodepool.driver.statemachine.provider import StateMachineProvider

    monkeypatch.setattr(OpenStackAdapter, "ABSENT_TTL", 0.2)
    monkeypatch.setattr(OpenStackAdapter, "IMAGE_CHECK_TIMEOUT", 0.2)
    monkeypatch.setattr(StateMachineProvider, "ERROR_LABEL_RETRY", 0.5)
    monkeypatch.setattr("nodepool.driver.utils.MAX_QUOTA_AGE", 0.5)
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)


def told(
    bench: LauncherBench, *words: str, provider: str = "cloud-1", label: str | None = None
) -> None:
    """Both ``/ready`` and ``nodepool problem-list`` have a line about it with these words."""
    place = f"provider {provider}, label {label}: " if label else f"provider {provider}: "

    def in_ready() -> bool:
        ready, lines = bench.pools[0].getReadiness()
        assert ready, "one bad provider does not stop the launcher"
        return any(line.startswith(place) and all(word in line for word in words) for line in lines)

    def in_list() -> bool:
        rows = status.problem_list(bench.zk).rows
        return any(
            (row["provider"], row["label"]) == (provider, label)
            and all(word in row["problem"] for word in words)
            for row in rows
        )

    try:
        wait_for(in_ready, 30, "told in /ready")
        wait_for(in_list, 30, "told by problem-list")
    except AssertionError as error:
        raise AssertionError(f"{error}: {words} in {bench.pools[0].getReadiness()[1]}") from None


def all_well(bench: LauncherBench) -> None:
    wait_for(
        lambda: not bench.pools[0].problems(), 60, lambda_text(lambda: bench.pools[0].problems())
    )
    wait_for(lambda: not status.problem_list(bench.zk).rows, 30, "nothing listed")


class lambda_text:
    """Text that is made when it is shown."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make

    def __str__(self) -> str:
        return f"no problems, but {self.make()}"


# -- the cloud and its credentials


def test_unknown_cloud_disables_only_its_provider(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = config(provider(), provider(label("lost"), name="cloud-2", cloud="nowhere"))
    with caplog.at_level(logging.WARNING, "nodepool"):
        bench.write_clouds({"clouds": {"test": openstack_cloud.entry}})
        bench.start(content, cleanup_interval=600)
        one(bench)
    assert (
        "cloud 'nowhere' of provider cloud-2 cannot be used, see its entry in clouds.yaml"
        in caplog.text
    )
    told(bench, "not running", "cloud 'nowhere'", "clouds.yaml", provider="cloud-2")
    path = str(bench.tmp / "nodepool.yaml")
    assert nodepoolcmd.main(["-c", path, "problem-list", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["provider"] == "cloud-2"
    bench.write_clouds(
        {"clouds": {"test": openstack_cloud.entry, "nowhere": openstack_cloud.entry}}
    )
    bench.config(content)
    wait_for(lambda: len(bench.pools[0].config.provider_managers) == 2, 60, "the provider runs")
    recovers(bench, "lost")
    all_well(bench)


@pytest.fixture
def other_user(openstack_cloud: OpenStackCloud) -> Iterator[Any]:
    identity = openstack_cloud.admin.identity
    project = identity.find_project("nodepool")
    user = identity.create_user(
        name="other", password="first-secret", domain_id="default", default_project_id=project.id
    )
    identity.assign_project_role_to_user(project, user, identity.find_role("member"))
    identity.assign_project_role_to_user(project, user, identity.find_role("reader"))
    yield user
    identity.delete_user(user)


@pytest.mark.parametrize(
    "wrong",
    [
        {"password": "wrong-secret"},
        {"username": "nobody"},
        {"project_name": "nothing"},
        {"user_domain_name": "Nowhere"},
    ],
    ids=["password", "user", "project", "domain"],
)
def test_wrong_credentials_fail_only_their_provider(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, str],
) -> None:
    closed = {**openstack_cloud.entry, "auth": {**openstack_cloud.entry["auth"], **wrong}}
    content = config(provider(), provider(label("lost"), name="cloud-2", cloud="closed"))
    with caplog.at_level(logging.DEBUG, "nodepool"):
        bench.write_clouds({"clouds": {"test": openstack_cloud.entry, "closed": closed}})
        bench.start(content, cleanup_interval=600)
        failed(bench, "lost")
        one(bench)
    text = "cloud closed of provider cloud-2 refuses the credentials in clouds.yaml"
    assert any(
        text in record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    )
    told(bench, "refuses the credentials in clouds.yaml", "option cloud", provider="cloud-2")
    everything = caplog.text + "\n".join(bench.pools[0].getReadiness()[1])
    assert closed["auth"]["password"] not in everything


def test_credentials_that_work_later(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, other_user: Any
) -> None:
    """Somebody sets the password that clouds.yaml has; later the user is locked for a while."""
    auth = {**openstack_cloud.entry["auth"], "username": "other", "password": "second-secret"}
    start(
        bench,
        openstack_cloud,
        provider(),
        provider(label("lost"), name="cloud-2", cloud="other"),
        clouds={"test": openstack_cloud.entry, "other": {**openstack_cloud.entry, "auth": auth}},
    )
    identity = openstack_cloud.admin.identity
    failed(bench, "lost")
    told(bench, "refuses the credentials", provider="cloud-2")
    identity.update_user(other_user, password="second-secret")
    recovers(bench, "lost")
    all_well(bench)
    identity.update_user(other_user, is_enabled=False)
    failed(bench, "lost")
    told(bench, "refuses the credentials", provider="cloud-2")
    one(bench)
    identity.update_user(other_user, is_enabled=True)
    recovers(bench, "lost")
    all_well(bench)


def test_revoked_token_is_replaced_without_failures(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    """The identity service takes the token back: one new token, and nothing has failed."""
    start(bench, openstack_cloud)
    first, _ = one(bench)
    adapter = manager(bench).adapter
    for _ in range(2):
        token = adapter._client.session.auth.auth_ref.auth_token
        answer = openstack_cloud.admin.identity.delete(
            "/auth/tokens", headers={"X-Subject-Token": token}
        )
        assert answer.status_code == 204, answer.text
        openstack_cloud.forget_calls()
        requests = [bench.submit("small") for _ in range(4)]
        for request_id in requests:
            bench.wait_request(request_id, "fulfilled", timeout=90)
        assert adapter._client.session.auth.auth_ref.auth_token != token
        refused = [
            item
            for item in openstack_cloud.compute.requests
            if item.headers.get("x-auth-token") == token
        ]
        assert refused
        tokens = [
            item
            for item in openstack_cloud.proxies["identity"].requests
            if shape(item) == "POST /auth/tokens"
        ]
        assert len(tokens) == 1
        use_up(bench, *requests)
    use_up(bench, first)
    all_well(bench)


# -- what labels name


def nothing(_cloud: OpenStackCloud) -> Callable[[], None]:
    return lambda: None


def make_flavor(cloud: OpenStackCloud) -> Callable[[], object]:
    flavor = cloud.admin.compute.create_flavor(name="odd", vcpus=1, ram=64, disk=1)
    return lambda: cloud.admin.compute.delete_flavor(flavor)


def make_big_flavor(cloud: OpenStackCloud) -> Callable[[], object]:
    flavor = cloud.admin.compute.create_flavor(name="odd", vcpus=1, ram=33333, disk=1)
    return lambda: cloud.admin.compute.delete_flavor(flavor)


def make_image(cloud: OpenStackCloud) -> Callable[[], object]:
    image = cloud.sdk.image.create_image(
        name="odd-image",
        data=b"x" * 100,
        disk_format="raw",
        container_format="bare",
        validate_checksum=False,
    )
    return lambda: cloud.sdk.image.delete_image(image)


def make_network(cloud: OpenStackCloud) -> Callable[[], object]:
    network = cloud.sdk.network.create_network(name="odd")
    cloud.sdk.network.create_subnet(network_id=network.id, ip_version=4, cidr="10.99.0.0/24")
    return lambda: cloud.sdk.network.delete_network(network)


def make_key(cloud: OpenStackCloud) -> Callable[[], object]:
    key = cloud.sdk.compute.create_keypair(
        name="odd", public_key=cloud.sdk.compute.find_keypair("key").public_key
    )
    return lambda: cloud.sdk.compute.delete_keypair(key)


def make_security_group(cloud: OpenStackCloud) -> Callable[[], object]:
    group = cloud.sdk.network.create_security_group(name="odd")
    return lambda: cloud.sdk.network.delete_security_group(group)


def make_server_group(cloud: OpenStackCloud) -> Callable[[], object]:
    cloud.sdk.compute.create_server_group(name="odd", policies=["soft-anti-affinity"])
    return lambda: None


def make_volume_type(cloud: OpenStackCloud) -> Callable[[], object]:
    kind = cloud.admin.block_storage.create_type(name="odd")
    return lambda: cloud.admin.block_storage.delete_type(kind)


ID = "00000000-1111-2222-3333-444444444444"
MISSING = {
    "flavor": ({"flavor_name": "odd"}, ["'odd'", "flavor-name"], make_flavor),
    "ram": ({"min_ram": 33333}, ["33333", "min-ram"], make_big_flavor),
    "image": ({"cloud_image": "odd"}, ["odd-image", "image-name"], make_image),
    "image-id": ({"cloud_image": "by-id"}, ["cloud-image"], None),
    "network": ({"networks": ["odd"]}, ["odd", "option networks"], make_network),
    "key": ({"key_name": "odd"}, ["option key-name", "odd"], make_key),
    "zone": ({"availability_zones": ["odd"]}, ["availability-zones", "odd"], None),
    "security-group": (
        {"security_groups": ["odd"]},
        ["security-groups", "odd"],
        make_security_group,
    ),
    "server-group": ({"server_group": "odd"}, ["server-group", "odd"], make_server_group),
    "volume-type": (
        {"boot_from_volume": True, "volume_size": 1, "volume_type": "odd"},
        ["volume-type", "odd"],
        make_volume_type,
    ),
}


@pytest.mark.parametrize("what", list(MISSING))
def test_missing_resource_is_named_and_harms_only_its_label(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    options, words, make = MISSING[what]
    images = [
        {"name": "base"},
        {"name": "odd", "image-name": "odd-image"},
        {"name": "by-id", "image-id": ID},
    ]
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(
            bench, openstack_cloud, provider(label(), label("odd", **options), cloud_images=images)
        )
        failed(bench, "odd")
        one(bench)
    lines = [
        f"{record.getMessage()} {record.exc_info and record.exc_info[1]}"
        for record in caplog.records
    ]
    assert any(all(word in line for word in (*words, "cloud-1", "odd")) for line in lines), lines
    told(bench, *words, label="odd")
    assert not any("label small" in line for line in bench.pools[0].getReadiness()[1])
    if make is None:
        return
    remove = make(openstack_cloud)
    try:
        recovers(bench, "odd")
        all_well(bench)
        bench.stop(bench.pools[0])
        openstack_cloud.clean()
    finally:
        remove()


def test_network_without_a_subnet_is_reported_with_its_option(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    network = openstack_cloud.sdk.network.create_network(name="bare")
    try:
        start(bench, openstack_cloud, provider(label(), label("odd", networks=["bare"])))
        failed(bench, "odd")
        one(bench)
        told(bench, "option networks", "subnet", label="odd")
        openstack_cloud.sdk.network.create_subnet(
            network_id=network.id, ip_version=4, cidr="10.99.0.0/24"
        )
        recovers(bench, "odd")
        all_well(bench)
        bench.stop(bench.pools[0])
        openstack_cloud.clean()
    finally:
        openstack_cloud.sdk.network.delete_network(network)


def test_image_removed_by_somebody(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    """Of a disk image: the record of the upload is there, the image is not."""
    labels = [label(), label("odd", diskimage="disk"), label("none", diskimage="never")]
    images = [{"name": "disk"}, {"name": "never"}]
    bench.store_image("disk", "cloud-1", external_id=ID)
    start(bench, openstack_cloud, provider(*labels, diskimages=images), top={"diskimages": images})
    failed(bench, "odd")
    failed(bench, "none")
    one(bench)
    told(bench, "option cloud-image/diskimage", ID, label="odd")
    told(bench, "disk image never (option diskimage) has not been uploaded here", label="none")
    bench.store_image(
        "disk", "cloud-1", external_id=openstack_cloud.sdk.image.find_image("base").id
    )
    bench.store_image(
        "never", "cloud-1", external_id=openstack_cloud.sdk.image.find_image("base").id
    )
    recovers(bench, "odd")
    recovers(bench, "none")
    all_well(bench)


def test_label_beyond_the_whole_quota_is_declined(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with openstack_cloud.quota(ram=1000), caplog.at_level(logging.INFO, "nodepool"):
        start(bench, openstack_cloud, provider(label(), label("odd", flavor_name="small")))
        failed(bench, "odd")
        one(bench)
    text = "provider cloud-1, ram: 2048 needed, 1000 of 1000 left"
    assert f"it would exceed quota ({text})" in caplog.text
    told(bench, "can never fit into the quota of", text, label="odd")
    recovers(bench, "odd")
    all_well(bench)
    assert openstack_cloud.calls()["compute POST /servers"] == 2


def test_servers_of_others_are_counted_and_not_changed(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody's servers, one of a deleted flavor, one in ERROR, one shut off: counted, kept, no
    problem of ours.
    """
    admin, sdk = openstack_cloud.admin, openstack_cloud.sdk
    flavor = admin.compute.create_flavor(name="gone", vcpus=3, ram=128, disk=1)
    servers = [
        sdk.compute.create_server(
            name=f"foreign-{number}",
            flavor_id=flavor.id,
            image_id=sdk.image.find_image("base").id,
            networks=[{"uuid": openstack_cloud.network_id("private")}],
        )
        for number in range(3)
    ]
    for server in servers:
        sdk.compute.wait_for_server(server, interval=0.5, wait=90)
    admin.compute.delete_flavor(flavor)
    assert (
        admin.compute.post(
            f"/servers/{servers[0].id}/action", json={"os-resetState": {"state": "error"}}
        ).status_code
        == 202
    )
    sdk.compute.stop_server(servers[1])
    with caplog.at_level(logging.WARNING, "nodepool"), openstack_cloud.quota(instances=4):
        start(bench, openstack_cloud)
        request_id, _ = one(bench)
        assert manager(bench).unmanagedQuotaUsed().get_resources()["instances"] == 3
        (worker,) = bench.pools[0].state.workers.values()
        second = bench.submit("small")
        wait_for(lambda: worker.paused_handlers, 60, "no room for another")
        use_up(bench, request_id)
        bench.wait_request(second, "fulfilled", timeout=90)
        cleanup(bench, 3)
    assert caplog.text.count("is unknown; its cores and RAM are not counted") == 1
    assert {server.id for server in servers} <= {
        server["id"] for server in openstack_cloud.servers()
    }
    all_well(bench)


# -- bad answers

BAD: dict[str, Callable[[], Action]] = {
    "gateway": lambda: html(502),
    "not found": lambda: html(404),
    "html": lambda: html(200),
    "empty": lambda: reply(200, b"", "application/json"),
    "other json": lambda: reply(200, "{}", "application/json"),
    "list": lambda: reply(200, "[]", "application/json"),
    "cut off": cut_off,
    "dropped": drop,
}
ASKED = {
    "flavors": ("compute", "GET /flavors/detail"),
    "limits": ("compute", "GET /limits"),
    "zones": ("compute", "GET /os-availability-zone"),
    "servers": ("compute", "GET /servers/detail"),
    "networks": ("network", "GET /networks"),
    "images": ("image", "GET /images"),
    "volume limits": ("block-storage", "GET /limits"),
    "tokens": ("identity", "POST /auth/tokens"),
}


def forget_everything(bench: LauncherBench, name: str = "cloud-1") -> None:
    provider = manager(bench, name)
    provider.adapter._forget()
    provider.adapter._client.session.auth.invalidate()
    provider.adapter._listings.forget()
    provider.label_quota_cache.clear()
    provider.invalidateQuotaCache()


@pytest.mark.parametrize("asked", list(ASKED))
def test_bad_answers_pass(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, asked: str
) -> None:
    """Twice such an answer: the question is asked again, the request is served at its first
    attempt.
    """
    service, call = ASKED[asked]
    start(bench, openstack_cloud)
    one(bench)
    for name, fault in BAD.items():
        forget_everything(bench)
        made = openstack_cloud.proxies[service].fail(is_call(call), fault(), times=2)
        request_id, _ = one(bench)
        assert made.used == 2, name
        use_up(bench, request_id)
    assert openstack_cloud.calls()["compute POST /servers"] == len(BAD) + 1
    all_well(bench)


@pytest.mark.parametrize("asked", list(ASKED))
def test_call_without_an_answer_is_repeated(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, asked: str
) -> None:
    """No answer within ``api_timeout``: asked again."""
    service, call = ASKED[asked]
    openstack_cloud.entry["api_timeout"] = 5
    go_on = threading.Event()
    start(bench, openstack_cloud)
    one(bench)
    forget_everything(bench)
    made = openstack_cloud.proxies[service].fail(is_call(call), hang(go_on), times=1)
    try:
        one(bench)
    finally:
        go_on.set()
    assert made.used == 1
    all_well(bench)


@pytest.mark.parametrize("name", ["gateway", "cut off"])
@pytest.mark.parametrize("service", ["identity", "compute", "network"])
def test_bad_answers_for_long(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    service: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the start of the launcher on: reported, the other provider serves, and the first one
    when the cloud is itself again.
    """
    monkeypatch.setattr("nodepool.driver.openstack.api.transport.DEADLINE", 5.0)
    straight = {**openstack_cloud.entry, "auth": openstack_cloud.sdk.config.config["auth"]}
    straight = {
        key: value for key, value in straight.items() if not key.endswith("endpoint_override")
    }
    openstack_cloud.proxies[service].fail(lambda request: True, BAD[name](), times=float("inf"))
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(
            bench,
            openstack_cloud,
            provider(),
            provider(label("other"), name="cloud-2", cloud="straight"),
            clouds={"test": openstack_cloud.entry, "straight": straight},
        )
        under_way = bench.submit("small")
        one(bench, "other")
        told(bench, "fails (transient)")
        record = bench.wait_request(under_way, timeout=120)
        assert record["state"] == "failed"
        one(bench, "other")
    assert any(
        "Provider cloud-1: " in line and "fails repeatedly" in line for line in caplog.messages
    )
    assert not any(line.startswith("provider cloud-2") for line in bench.pools[0].getReadiness()[1])
    openstack_cloud.proxies[service].heal()
    recovers(bench, "small", 60)
    all_well(bench)
