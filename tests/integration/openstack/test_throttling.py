"""Each service of a real OpenStack says "too fast": nothing fails, only calls to that service
slow down, and it passes.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.fault_proxy import Fault, html
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import (
    PROVIDER,
    cleanup,
    is_call,
    label,
    manager,
    one,
    provider,
    start,
    throttled,
    use_up,
)

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]

WAYS = {
    "429 with Retry-After": throttled(429, 0.5),
    "429": throttled(429, None),
    "503 with Retry-After": throttled(503, 0.5),
    "503": throttled(503, None),
    "503 of a gateway": html(503),
}
LANES = {"network": "network", "image": "image", "block-storage": "volume", "identity": "identity"}


@dataclass
class Service:
    """How calls to a service come about in a launcher: what is forgotten, so that it has to be
    asked again, and one more call.
    """

    forget: Callable[[Any], None]
    call: Callable[[Any], object]


def forget_token(adapter: Any) -> None:
    adapter._client.session.auth.invalidate()


def ask_for_token(adapter: Any) -> None:
    forget_token(adapter)
    adapter._api.authenticate()


SERVICES = {
    "network": Service(
        lambda adapter: adapter._forget("networks"), lambda adapter: adapter._api.list_networks()
    ),
    "image": Service(
        lambda adapter: adapter._forget("image"), lambda adapter: adapter._api.get_image("nothing")
    ),
    "block-storage": Service(
        lambda adapter: None, lambda adapter: adapter._api.get_volume_limits()
    ),
    "identity": Service(forget_token, ask_for_token),
}


def paces(adapter: Any) -> dict[str, bool]:
    return {name: rate.slowed for name, rate in adapter.calls.rates.items()}


def refuse(cloud: OpenStackCloud, name: str, way: Any, times: float = 2) -> Fault:
    """The next calls, besides those for version documents."""
    if name == "identity":
        return cloud.proxies[name].fail(is_call("POST /auth/tokens"), way, times)
    return cloud.proxies[name].fail(
        lambda request: not is_call("GET /")(request) and not is_call("GET ")(request), way, times
    )


@pytest.mark.parametrize("name", list(SERVICES))
def test_throttled_service_fails_no_launch(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, name: str
) -> None:
    """Every request is served at its first attempt."""
    options = {"boot_from_volume": True, "volume_size": 1} if name == "block-storage" else {}
    start(
        bench,
        openstack_cloud,
        provider(
            label(**options),
            pool={"auto-floating-ip": name == "network"},
            launch_retries=1,
            rate=0.01,
        ),
    )
    adapter, lane = manager(bench).adapter, LANES[name]
    requests = [one(bench)[0]]
    for title, way in WAYS.items():
        SERVICES[name].forget(adapter)
        manager(bench).invalidateQuotaCache()
        fault = refuse(openstack_cloud, name, way)
        requests.append(one(bench)[0])
        wait_for(lambda fault=fault: fault.used == 2, 60, f"{title}: the service has refused calls")  # type: ignore[misc]
        assert [each for each, slowed in paces(adapter).items() if slowed] == [lane], title
        assert any(
            f"throttled: {lane} calls" in str(problem) for problem in bench.pools[0].problems()
        ), title
        for _ in range(25):
            SERVICES[name].call(adapter)
        assert not any(paces(adapter).values()), title
    assert openstack_cloud.calls()["compute POST /servers"] == len(WAYS) + 1
    use_up(bench, *requests)
    cleanup(bench)
    wait_for(
        lambda: not openstack_cloud.floating_ips() and not openstack_cloud.volumes(),
        60,
        "nothing is left",
    )


@pytest.mark.parametrize("way", list(WAYS)[:2])
@pytest.mark.parametrize(
    "call", ["POST /images", "PUT /images/{id}/file", "GET /images/{id}", "DELETE /images/{id}"]
)
def test_throttled_upload_is_completed(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    tmp_path: pathlib.Path,
    call: str,
    way: str,
) -> None:
    start(bench, openstack_cloud)
    adapter = manager(bench).adapter
    path = tmp_path / "image.raw"
    path.write_bytes(b"content" * 1000)
    fault = openstack_cloud.image.fail(is_call(call), WAYS[way], times=2)
    image_id = adapter.uploadImage(
        None,
        "image-1",
        str(path),
        image_format="raw",
        metadata={"nodepool_provider_name": PROVIDER},
        md5=hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest(),
    )
    assert openstack_cloud.sdk.image.get_image(image_id).status == "active"
    adapter.deleteImage(image_id)
    assert openstack_cloud.images() == []
    assert fault.used == 2


@pytest.mark.parametrize(
    "way", [throttled(503, None), html(503), html(502)], ids=["503", "503 of a gateway", "502"]
)
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost"])
def test_floating_ip_is_made_once(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, way: Any, lost: bool
) -> None:
    """Also when the network service has made it before the gateway gave up."""
    start(bench, openstack_cloud, provider(pool={"auto-floating-ip": True}, launch_retries=1))

    def act(request: Any, forward: Any) -> Any:
        if lost:
            forward(request)
        return way(request, forward)

    fault = openstack_cloud.network.fail(is_call("POST /floatingips"), act, times=1)
    _, node = one(bench)
    assert [ip.floating_ip_address for ip in openstack_cloud.floating_ips()] == [node.public_ipv4]
    assert fault.used == 1
