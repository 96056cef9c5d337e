"""Wrong configuration and bad answers: clear errors, no harm to others, recovery without restart
(real OpenStack, proxies).
"""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.fault_proxy import Action, cut_off, drop, hang, html, lose_answer, reply
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
    throttled,
    use_up,
)

pytestmark = [pytest.mark.openstack, pytest.mark.slow]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check again soon for what was not there."""
    from nodepool.driver.openstack.adapter import OpenStackAdapter
    from nodepool.driver.statemachine.provider import StateMachineProvider

    monkeypatch.setattr(OpenStackAdapter, "ABSENT_TTL", 0.2)
    monkeypatch.setattr(OpenStackAdapter, "IMAGE_CHECK_TIMEOUT", 0.2)
    monkeypatch.setattr(StateMachineProvider, "ERROR_LABEL_RETRY", 0.5)


def test_unknown_cloud_harms_only_its_provider(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(
            bench,
            openstack_cloud,
            provider(),
            provider(label("lost"), name="cloud-2", cloud="nowhere"),
        )
        one(bench)
    assert "nowhere" in caplog.text
    assert "cloud-2" in caplog.text


def test_wrong_credentials_harm_only_their_provider(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {
        **openstack_cloud.entry,
        "auth": {**openstack_cloud.entry["auth"], "password": "wrong"},
    }
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(
            bench,
            openstack_cloud,
            provider(),
            provider(label("lost"), name="cloud-2", cloud="closed"),
            clouds={"test": openstack_cloud.entry, "closed": wrong},
        )
        failed(bench, "lost")
        one(bench)
    assert "cloud closed of provider cloud-2 refuses the credentials in clouds.yaml" in caplog.text
    assert "wrong" not in [word.strip("'\",") for word in caplog.text.split()]


def test_credentials_refused_for_a_while(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    refused = reply(
        401,
        '{"error": {"code": 401, "message": "The request you have made requires authentication."}}',
        "application/json",
    )
    openstack_cloud.proxies["identity"].fail(
        is_call("POST /auth/tokens"), refused, times=float("inf")
    )
    start(bench, openstack_cloud)
    failed(bench)
    openstack_cloud.proxies["identity"].heal()
    recovers(bench, "small")


def test_expired_token_is_renewed_without_a_failed_attempt(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(bench, openstack_cloud)
    one(bench)
    expired = reply(
        401, '{"error": {"code": 401, "message": "The token has expired"}}', "application/json"
    )
    openstack_cloud.compute.fail(is_call("POST /servers"), expired)
    openstack_cloud.forget_calls()
    one(bench)
    tokens = [
        request
        for request in openstack_cloud.proxies["identity"].requests
        if shape(request) == "POST /auth/tokens"
    ]
    assert len(tokens) == 1


def test_missing_flavor_is_reported_until_it_exists(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(bench, openstack_cloud, provider(label(), label("odd", flavor_name="odd")))
        failed(bench, "odd")
        one(bench)
    assert (
        "Label odd of provider cloud-1 cannot work: Unable to find flavor named 'odd' (option "
        "flavor-name)" in caplog.text
    )
    flavor = openstack_cloud.admin.compute.create_flavor(name="odd", vcpus=1, ram=64, disk=1)
    try:
        recovers(bench, "odd")
    finally:
        openstack_cloud.admin.compute.delete_flavor(flavor)


def test_missing_image_is_reported_until_it_exists(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(
            bench,
            openstack_cloud,
            provider(
                label(),
                label("odd", cloud_image="odd"),
                cloud_images=[{"name": "base"}, {"name": "odd", "image-name": "odd-image"}],
            ),
        )
        failed(bench, "odd")
        one(bench)
    assert "to use odd-image as the cloud image for label odd" in caplog.text
    openstack_cloud.sdk.image.create_image(
        name="odd-image",
        data=b"x" * 100,
        disk_format="raw",
        container_format="bare",
        validate_checksum=False,
    )
    recovers(bench, "odd")


def test_missing_network_is_reported_until_it_exists(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(bench, openstack_cloud, provider(label(), label("odd", networks=["odd"])))
        failed(bench, "odd")
        one(bench)
    assert (
        "provider cloud-1, pool main, label odd: Unable to find network odd (option networks)"
        in caplog.text
    )
    network = openstack_cloud.sdk.network.create_network(name="odd")
    openstack_cloud.sdk.network.create_subnet(
        network_id=network.id, ip_version=4, cidr="10.99.0.0/24"
    )
    try:
        recovers(bench, "odd")
        bench.stop(bench.pools[0])
        openstack_cloud.clean()
    finally:
        openstack_cloud.sdk.network.delete_network(network)


def test_missing_key_is_reported_until_it_exists(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(bench, openstack_cloud, provider(label(), label("odd", key_name="odd")))
        failed(bench, "odd")
        one(bench)
    assert (
        "provider cloud-1, pool main, label odd: the cloud refuses to create the server, because "
        "of option key-name" in caplog.text
    )
    public = openstack_cloud.sdk.compute.find_keypair("key").public_key
    key = openstack_cloud.sdk.compute.create_keypair(name="odd", public_key=public)
    try:
        recovers(bench, "odd")
    finally:
        openstack_cloud.sdk.compute.delete_keypair(key)


@pytest.mark.parametrize(
    "fault",
    [html(502), html(200), reply(200, b"", "application/json"), cut_off(), drop(), lose_answer()],
    ids=["gateway", "html", "empty", "cut off", "dropped", "lost"],
)
def test_bad_answers_to_a_creation(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, fault: Action
) -> None:
    """The second attempt succeeds; what the first one made is removed."""
    start(bench, openstack_cloud, provider(launch_retries=2))
    openstack_cloud.compute.fail(is_call("POST /servers"), fault)
    _, node = one(bench)
    wait_for(
        lambda: {server["id"] for server in openstack_cloud.servers()} == {node.external_id},
        20,
        "one server",
    )


@pytest.mark.parametrize(
    "fault",
    [
        html(502),
        html(404),
        html(200),
        reply(200, b"", "application/json"),
        reply(200, "{}"),
        cut_off(),
        drop(),
        throttled(),
        throttled(413),
        throttled(503),
    ],
)
def test_bad_answers_while_waiting(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, fault: Action
) -> None:
    """They cost neither the launch nor the record of a server that still exists."""
    start(bench, openstack_cloud)
    openstack_cloud.compute.fail(is_call("GET /servers/{id}"), fault, times=2)
    request_id, node = one(bench)
    openstack_cloud.compute.fail(is_call("DELETE /servers/{id}"), fault, times=2)
    openstack_cloud.compute.fail(is_call("GET /servers/{id}"), fault, times=2)
    use_up(bench, request_id)
    assert node.external_id not in {server["id"] for server in openstack_cloud.servers()}


@pytest.mark.parametrize(
    "fault", [html(200), reply(200, "{}", "application/json"), reply(200, b""), cut_off(), drop()]
)
def test_failed_list_harms_no_launch(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, fault: Action
) -> None:
    """A failed list is not an empty list, and harms no launch."""
    start(bench, openstack_cloud)
    one(bench)
    openstack_cloud.compute.fail(is_call("GET /servers/detail"), fault, times=1)
    time.sleep(1.1)  # the age of a listing that is used again
    cleanup(bench)
    openstack_cloud.compute.heal()
    assert len(list(manager(bench).adapter.listInstances())) == 1
    one(bench)


def test_throttling_slows_and_recovers(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(bench, openstack_cloud, provider(rate=0.01))
    one(bench)
    calls = manager(bench).adapter.calls
    openstack_cloud.compute.fail(is_call("POST /servers"), throttled(), times=2)
    one(bench)
    assert openstack_cloud.calls()["compute POST /servers"] == 4
    assert calls.describe()["throttled"]
    assert calls.last_error.kind.value == "throttled"
    for _ in range(30):
        list(manager(bench).adapter._api.list_flavors())
    assert not calls.describe()["throttled"]


def test_hanging_cloud_delays_only_its_provider(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    """One provider's cloud does not answer: the other serves as quickly as ever, and the first
    comes back.
    """
    go_on = threading.Event()
    slow = {
        key: value for key, value in openstack_cloud.entry.items() if not key.startswith("compute")
    }
    straight = {
        **slow,
        "compute_endpoint_override": openstack_cloud.sdk.session.get_endpoint(
            service_type="compute"
        ),
    }
    start(
        bench,
        openstack_cloud,
        provider(),
        provider(label("other"), name="cloud-2", cloud="straight"),
        clouds={"test": openstack_cloud.entry, "straight": straight},
    )
    one(bench, "other")
    one(bench)
    hanging = hang(go_on, lambda request, forward: forward(request))
    openstack_cloud.compute.fail(lambda _request: True, hanging, times=float("inf"))
    waiting = [bench.submit("small") for _ in range(3)]
    began = time.monotonic()
    one(bench, "other")
    took = time.monotonic() - began
    go_on.set()
    assert took < limit(15)
    for request in waiting:
        bench.wait_request(request, "fulfilled", timeout=60)


def test_config_validate_names_missing_clouds_and_wrong_types(bench: LauncherBench) -> None:
    """Missing cloud, wrong types and volume-type without a volume are reported with their place."""
    from nodepool.cmd.config_validator import ConfigValidator

    bench.write_clouds({"clouds": {"test": {}}})
    content = config(provider(label(scheduler_hints="x")))
    del content["providers"][0]["cloud"]
    path = bench.config(content)
    assert ConfigValidator(path).validate() == 1
