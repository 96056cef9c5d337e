"""What operators expect of the openstack driver beyond the list of the contract, against a real
OpenStack.
"""

from __future__ import annotations

import copy
import threading

import pytest
import yaml

from tests.conftest import wait_for
from tests.support.fault_proxy import hang, html
from tests.support.launcher import LauncherBench, StatsdReceiver
from tests.support.openstack.cloud import OpenStackCloud, shape
from tests.support.openstack.scene import failed, manager, one, provider, start, use_up

pytestmark = [pytest.mark.openstack, pytest.mark.slow]


def test_secret_parts_of_clouds_yaml(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The password is in secure.yaml; a new one is noticed."""
    entry = copy.deepcopy(openstack_cloud.entry)
    password = entry["auth"].pop("password")
    secure = bench.tmp / "secret-parts.yaml"

    def write(secret: str) -> None:
        secure.write_text(yaml.safe_dump({"clouds": {"test": {"auth": {"password": secret}}}}))
        secure.chmod(0o600)

    write("of-last-year")
    monkeypatch.setattr("openstack.config.loader.SECURE_FILES", [str(secure)])
    start(bench, openstack_cloud, clouds={"test": entry})
    failed(bench)
    assert (
        "cloud test of provider cloud-1 refuses the credentials in clouds.yaml (option cloud)"
        in caplog.text
    )
    before = manager(bench)
    write(password)
    # Nodepool's own files are as they were.
    wait_for(lambda: manager(bench) is not before, 60, "a provider with the new password")
    one(bench)
    assert "of-last-year" not in caplog.text
    assert password not in caplog.text


def test_a_slow_floating_ip_delays_no_other_node(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    go_on = threading.Event()
    try:
        start(bench, openstack_cloud, provider(pool={"auto-floating-ip": True}))
        waiting = openstack_cloud.network.fail(
            lambda request: shape(request) == "POST /floatingips",
            hang(go_on, lambda request, forward: forward(request)),
        )
        first = bench.submit("small")
        wait_for(lambda: waiting.used, 60, "a call for a floating IP that is not answered")
        request_id, node = one(bench)
        assert node.public_ipv4.startswith("203.0.113.")
        use_up(bench, request_id)
        assert bench.zuul.request(first)["state"] == "pending"
    finally:
        go_on.set()
    bench.wait_request(first, "fulfilled", timeout=60)


def test_calls_are_measured(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(bench, openstack_cloud, provider(launch_retries=2))
    request_id, _ = one(bench)
    use_up(bench, request_id)
    for operation in ("create_server", "get_server", "delete_server"):
        name = f"nodepool.provider.cloud-1.api.{operation}"
        assert statsd.wait_any(name).endswith("|ms")
    openstack_cloud.compute.fail(lambda request: shape(request) == "POST /servers", html(502))
    one(bench)
    statsd.wait("nodepool.provider.cloud-1.api.create_server.error.transient", "1|c")
