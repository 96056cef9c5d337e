"""SIGKILL of the launcher around each call that changes something in a real OpenStack: nothing
lost, nothing twice, nothing left.

The proxies kill: before the call reaches the cloud, when the cloud has done it and nobody knows, or
so that it arrives when the next launcher runs already.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import Chroot, wait_for
from tests.support.fault_proxy import Fault, Forward, Reply, Request
from tests.support.faults.launcher import SESSION, Zuul
from tests.support.kill import Daemon, killing
from tests.support.openstack.cloud import OpenStackCloud, shape
from tests.support.openstack.scene import config, label, provider

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(400)]

#: Seconds in which everything must be as it should be, on a loaded machine.
PATIENCE = 120.0
WHEN = ("before", "after", "late")
#: The changing calls in the life of a node with a volume and a floating IP: service and shape.
CREATION = {
    "server": ("compute", "POST /servers"),
    "volume mark": ("block-storage", "POST /volumes/{id}/metadata"),
    "floating IP": ("network", "POST /floatingips"),
}
DELETION = {
    "floating IP": ("network", "DELETE /floatingips/{id}"),
    "server": ("compute", "DELETE /servers/{id}"),
}


class Bench:
    """A launcher that may be killed, with a label that needs all kinds of things and one that
    needs a server only.
    """

    def __init__(self, cloud: OpenStackCloud, chroot: Chroot, tmp: pathlib.Path) -> None:
        self.cloud = cloud
        self.clouds = tmp / "clouds.yaml"
        self.clouds.write_text(yaml.safe_dump({"clouds": {"test": cloud.entry}}))
        self.clouds.chmod(0o600)
        self.tmp = tmp
        self.chroot = chroot
        self.zuul = Zuul(chroot.connect())
        self.daemons: list[Daemon] = []
        self.faults: list[Fault] = []

    def start(self, cleanup: float = 600) -> Daemon:
        """:param cleanup: seconds between two searches for leaks; only the one at the start,
        which deletes nothing.
        """
        entry = provider(
            label("full", boot_from_volume=True, volume_size=1), pool={"auto-floating-ip": True}
        )
        plain = provider(label("plain"))["pools"][0]
        entry["pools"].append({**plain, "name": "plain"})
        path = self.chroot.config(config(entry), timeout=SESSION)
        daemon = Daemon(
            self.tmp,
            "serve.py",
            path,
            NODEPOOL_FAULT_CLEANUP=str(cleanup),
            OS_CLIENT_CONFIG_FILE=str(self.clouds),
        )
        self.daemons.append(daemon)
        return daemon

    def kill_at(self, service: str, wanted: str, *when: str) -> None:
        """At the next calls of this shape that concern the full node."""
        self.faults += [
            self.cloud.proxies[service].fail(
                lambda request: shape(request) == wanted and _is_full(request),
                killing(self.daemons, each),
            )
            for each in when
        ]

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            for daemon in self.daemons:
                daemon.again()
            return condition()

        wait_for(look, PATIENCE, what)

    def wait_fulfilled(self, *requests: str) -> None:
        def fulfilled() -> bool:
            states = self.zuul.states(list(requests))
            assert not states["LOST"] and not states["failed"], states
            return states["fulfilled"] == len(requests)

        self.wait(fulfilled, "requests fulfilled")

    def left(self) -> dict[str, Any]:
        """All there is, when nobody wants a node."""
        found = {
            "nodes": self.zuul.read("nodes"),
            "requests": self.zuul.read("requests"),
            **left_in(self.cloud),
        }
        return {what: things for what, things in found.items() if things}

    def wait_nothing_left(self) -> None:
        self.wait(lambda: not self.left(), "no record, server, volume, port, floating IP left")

    def check(self) -> None:
        assert [fault.used for fault in self.faults] == [1] * len(self.faults)
        assert self.zuul.twice() == []
        (daemon,) = self.daemons
        assert daemon.process.poll() is None
        assert daemon.lives == 1 + len(self.faults)


def left_in(cloud: OpenStackCloud) -> dict[str, Any]:
    ports = [
        port
        for port in cloud.sdk.network.ports(project_id=cloud.sdk.session.get_project_id())
        if not port.device_owner or port.device_owner.startswith("compute:")
    ]
    return {
        "servers": {server["name"]: server["status"] for server in cloud.servers()},
        "volumes": {volume.id: (volume.status, volume.metadata) for volume in cloud.volumes()},
        "ports": {port.id: (port.status, port.device_owner) for port in ports},
        "floating IPs": {
            ip.floating_ip_address: (ip.port_id, ip.description) for ip in cloud.floating_ips()
        },
    }


def _is_full(request: Request) -> bool:
    """Creations are distinguished by their content; those of other nodes are kept."""
    return shape(request) != "POST /servers" or b"base,full" in request.body


@pytest.fixture
def crashes(
    openstack_cloud: OpenStackCloud, zk_chroot: Chroot, tmp_path: pathlib.Path
) -> Iterator[Bench]:
    bench = Bench(openstack_cloud, zk_chroot, tmp_path)
    try:
        yield bench
    finally:
        for daemon in bench.daemons:
            daemon.stop()


@pytest.mark.spec(
    "issue: SIGKILL of the launcher at every step leaves nothing in the cloud after clean-up"
)
@pytest.mark.parametrize("what", CREATION)
def test_killed_launcher_leaves_no_server(crashes: Bench, what: str) -> None:
    """Another request is served undisturbed meanwhile. Only servers whose id nobody knows are
    left to the search for leaks.
    """
    crashes.kill_at(*CREATION[what], *WHEN)
    crashes.start(cleanup=0.5 if what == "server" else 600)
    requests = [crashes.zuul.submit("full"), crashes.zuul.submit("plain")]
    crashes.wait_fulfilled(*requests)
    crashes.zuul.use(requests)
    crashes.wait_nothing_left()
    crashes.check()


def test_floating_ip_that_is_not_shown(crashes: Bench) -> None:
    """The compute service learns of floating IPs later than the network service; they go with
    the server all the same.
    """

    def hide(request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        data = json.loads(answer.body)
        for name, interfaces in data.get("server", {}).get("addresses", {}).items():
            data["server"]["addresses"][name] = [
                each for each in interfaces if each["OS-EXT-IPS:type"] != "floating"
            ]
        answer.body = json.dumps(data).encode()
        return answer

    crashes.cloud.compute.fail(
        lambda request: shape(request) == "GET /servers/{id}", hide, math.inf
    )
    crashes.kill_at(*CREATION["floating IP"], "after")
    crashes.start()
    request = crashes.zuul.submit("full")
    crashes.wait_fulfilled(request)
    crashes.zuul.use([request])
    crashes.wait_nothing_left()
    crashes.check()


@pytest.mark.spec(
    "issue: SIGKILL of the launcher at every step leaves nothing in the cloud after clean-up"
)
@pytest.mark.parametrize("when", [("before", "after"), ("late",)], ids="-".join)
@pytest.mark.parametrize("what", DELETION)
def test_deletion_is_completed_after_a_kill(
    crashes: Bench, what: str, when: tuple[str, ...]
) -> None:
    """A deletion that the cloud has done is not asked for again, so nothing comes after
    ``after`` and ``late``.
    """
    crashes.start()
    request, other = crashes.zuul.submit("full"), crashes.zuul.submit("plain")
    crashes.wait_fulfilled(request, other)
    (kept,) = crashes.zuul.accept(other)
    crashes.kill_at(*DELETION[what], *when)
    crashes.zuul.use([request])
    crashes.wait(lambda: list(crashes.zuul.read("nodes")) == [kept], "only the node in use is left")
    crashes.zuul.give_back(kept)
    crashes.wait_nothing_left()
    crashes.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("then", DELETION)
@pytest.mark.parametrize("what", CREATION)
def test_launcher_killed_while_deleting_leftovers_leaves_nothing(
    crashes: Bench, what: str, then: str, when: str
) -> None:
    """Killed again while what the first kill has left is deleted (or the node itself, where
    there is no such thing).
    """
    crashes.kill_at(*CREATION[what], "after")
    crashes.kill_at(*DELETION[then], when)
    crashes.start(cleanup=0.5)
    request = crashes.zuul.submit("full")
    crashes.wait_fulfilled(request)
    crashes.zuul.use([request])
    crashes.wait_nothing_left()
    crashes.check()


@pytest.mark.exhaustive
def test_all_in_one_life(crashes: Bench) -> None:
    for calls in (CREATION, DELETION):
        for call in calls.values():
            crashes.kill_at(*call, "before", "after")
    crashes.start(cleanup=0.5)
    request = crashes.zuul.submit("full")
    crashes.wait_fulfilled(request)
    crashes.zuul.use([request])
    crashes.wait_nothing_left()
    crashes.check()
