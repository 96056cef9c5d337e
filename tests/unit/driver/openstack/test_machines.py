"""Servers in states that the cloud of the integration tests does not get into."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from openstack.exceptions import HttpException

from nodepool import exceptions
from nodepool.cloud import CallsStopped
from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.driver.openstack import machines
from nodepool.driver.openstack.api.networks import Networks
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.lookups import FEW
from tests.conftest import wait_for
from tests.support.openstack.fake import LOG, METADATA, advance, advance_until, create
from tests.unit.driver.openstack.test_parts import http

Over = Callable[[FakeOpenStackCloud], FakeAdapter]


class Cloud(FakeOpenStackCloud):
    """Notes what it is asked; some servers cannot be checked, or are not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.deleted: list[str] = []
        self.hidden = self.keeps = False

    def get_server_by_id(self, server_id: str) -> Any:
        self.asked.append(server_id)
        if server_id in self.errors:
            raise self.errors[server_id]
        return None if self.hidden else super().get_server_by_id(server_id)

    def delete_server(self, name_or_id: str, **kwargs: Any) -> bool:
        self.deleted.append(name_or_id)
        return self.keeps or super().delete_server(name_or_id, **kwargs)


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def adapter(over: Over, cloud: Cloud) -> FakeAdapter:
    return over(cloud)


@pytest.fixture
def label(fake_provider: Any) -> Any:
    return fake_provider.pools["main"].labels["fake-label"]


@pytest.fixture
def servers(cloud: Cloud) -> list[str]:
    return [str(cloud.create_server(name=f"s{number}").id) for number in range(15)]


def looked_at(cloud: Cloud, machine: Any, times: int) -> None:
    """This many more polls of its server."""
    until = len(cloud.asked) + times
    wait_for(lambda: machine.advance() or len(cloud.asked) >= until, what=f"{times} looks")


@pytest.mark.spec(
    "OST-2.4: done when the listing has it no more; a cloud that keeps deleted servers lists none"
)
def test_deleted_and_kept(adapter: FakeAdapter, cloud: Cloud, label: Any) -> None:
    server = cloud.get_server(advance(create(adapter, label)).external_id)
    assert server is not None
    cloud.keeps = True
    server["OS-EXT-STS:task_state"] = "soft-deleting"
    machine = adapter.getDeleteStateMachine(server.id, LOG)
    advance_until(machine, machine.SERVER_DELETING)
    looked_at(cloud, machine, 3)
    assert not machine.complete
    server.status, server["OS-EXT-STS:task_state"] = "SOFT_DELETED", None
    advance(machine)
    assert cloud.deleted == [server.id]
    assert list(adapter.listInstances()) == []


def test_a_deletion_that_was_accepted_and_forgotten(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "DELETE_AGAIN", 0.0)
    server = cloud.get_server(advance(create(adapter, label)).external_id)
    assert server is not None
    cloud.keeps = True
    machine = adapter.getDeleteStateMachine(server.id, LOG)
    wait_for(lambda: machine.advance() or len(cloud.deleted) > 2, what="deleted again")
    assert not machine.complete
    cloud.keeps = False
    advance(machine)
    assert not cloud._server_list


def test_machine_with_an_id_of_another_driver_does_not_exist(adapter: FakeAdapter) -> None:
    with pytest.raises(exceptions.NotFound, match="is not the id of a server"):
        advance(adapter.getDeleteStateMachine({"vm": "x"}, LOG))


@pytest.mark.parametrize("count", [FEW - 2, FEW + 6], ids=["one by one", "listed"])
@pytest.mark.spec(
    "issue 5: waiting for one object asks for that object; a failed look never harms a healthy "
    "launch"
)
def test_one_that_cannot_be_looked_at(
    adapter: FakeAdapter, cloud: Cloud, servers: list[str], count: int
) -> None:
    cloud.errors["bad"] = http(500, "cell is down")
    found = dict(adapter._someServers([*servers[:count], "bad", "gone"]))
    assert isinstance(found.pop("bad"), Exception)
    assert set(found) == set(servers[:count])
    cloud.errors["bad"] = CallsStopped("cloud")
    with pytest.raises(CallsStopped):
        adapter._someServers([servers[0], "bad"])


@pytest.mark.spec("DRV: findMissingInstances; a listing that leaves servers out is no proof")
def test_only_what_the_cloud_reports_missing_is_missing(
    adapter: FakeAdapter, cloud: Cloud, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.errors["bad"] = http(500)
    wanted = [*servers[:2], "gone", "bad", servers[2]]
    adapter._made.update(wanted)
    cloud._server_list.find(servers[1]).status = "SHUTOFF"  # type: ignore[union-attr]
    listed = [server for server in cloud.list_servers() if server.id != servers[2]]
    monkeypatch.setattr(cloud, "list_servers", lambda: listed)
    assert adapter.findMissingInstances(wanted) == [servers[1], "gone"]
    assert cloud.asked == ["gone", "bad", servers[2]]


@pytest.mark.spec("OST-2.2: not (yet) listed: the previous object stays")
def test_new_server_that_is_not_shown_yet(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "SETTLING", 1000.0)
    cloud.hidden = True
    machine = create(adapter, label)
    machine.start_time = -1000.0  # the call had to wait for its turn
    advance_until(machine, machine.SERVER_CREATING)
    looked_at(cloud, machine, 3)
    monkeypatch.setattr(adapter, "SETTLING", 0.0)
    with pytest.raises(exceptions.LaunchStatusException, match="vanished"):
        advance(machine)
    cloud.hidden = False
    again = create(adapter, label)
    advance_until(again, again.SERVER_CREATING)
    cloud._server_list.find(again.external_id).status = "SOFT_DELETED"  # type: ignore[union-attr]
    with pytest.raises(exceptions.LaunchStatusException, match="deleted"):
        advance(again)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.spec("DRV: a launch given up leaves no server behind")
def test_server_that_comes_after_its_launch_was_given_up(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    asked, go_on, make = threading.Event(), threading.Event(), cloud.create_server

    def slow(**kw: Any) -> Any:
        asked.set()
        assert go_on.wait(20)
        server = make(**kw)
        if fails:
            raise http(500)
        return server

    monkeypatch.setattr(cloud, "create_server", slow)
    machine = create(adapter, label)
    machine.advance()
    assert asked.wait(20)
    machine.abandon()
    assert cloud.deleted == []
    go_on.set()
    wait_for(lambda: cloud.deleted and not cloud._server_list, what="the late server removed")


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.spec("LAU-13.3: a node that got the id of a lost one does not delete its server")
def test_only_a_server_of_the_same_node_is_removed_after_an_unanswered_creation(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    machine = create(adapter, label)
    marks = {
        **METADATA,
        "nodepool_node_created": METADATA.get("nodepool_node_created") if ours else "1000",
    }
    server = cloud.create_server(
        name=machine.hostname, meta={key: value for key, value in marks.items() if value}
    )

    def unanswered(**_kw: Any) -> Any:
        raise http(500)

    monkeypatch.setattr(cloud, "create_server", unanswered)
    with pytest.raises(HttpException, match="Unknown error"):
        advance(machine)
    assert (machine.external_id == server.id) is ours


def test_launch_that_is_aborted_while_the_server_is_built_polls_no_more(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    cloud.pause_creates = True
    machine = create(adapter, label)
    advance_until(machine, machine.SERVER_CREATING)
    machine.abandon()
    assert not adapter.watched_servers._watches
    assert cloud.deleted == [], "the launcher deletes what it knows"


@pytest.mark.spec("OST-2.3.1: unconfigured arguments are omitted")
def test_a_creation_asks_for_what_is_configured(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    make = cloud.create_server
    monkeypatch.setattr(cloud, "create_server", lambda **kw: (asked.append(kw), make(**kw))[1])
    label.networks, label.pool.security_groups = [], []
    advance(create(adapter, label, az="az2"))
    assert set(asked[-1]) == {
        "name",
        "image",
        "flavor",
        "config_drive",
        "availability_zone",
        "meta",
    }
    assert asked[-1]["availability_zone"] == "az2"
    monkeypatch.setattr(Networks, "default", {"id": "net-of-clouds-yaml"})
    label.azs, label.server_group, label.volume_size = ["az1"], "group", 7
    advance(create(adapter, label, az="az2"))
    assert asked[-1]["availability_zone"] == "az1"
    assert asked[-1]["nics"] == [{"net-id": "net-of-clouds-yaml"}]
    assert asked[-1]["scheduler_hints"] == {"group": "group"}
    assert "volume_size" not in asked[-1]
    label.networks, label.boot_from_volume = ["fake-ipv6-network-name"], True
    advance(create(adapter, label, az="az1"))
    assert asked[-1]["nics"] == [{"net-id": adapter._findNetwork("fake-ipv6-network-name")["id"]}]
    assert (asked[-1]["boot_from_volume"], asked[-1]["volume_size"]) == (True, 7)


def test_marks_of_volumes(adapter: FakeAdapter, cloud: Cloud, fake_provider: Any) -> None:
    label = fake_provider.pools["main"].labels["cloud-label"]
    label.cloud_image = fake_provider.cloud_images["by-id"]
    advance(create(adapter, label, image=None))
    (volume,) = cloud.list_volumes()
    assert volume["metadata"] == METADATA


@pytest.mark.spec("OST-2.6: ports DOWN at two looks; a cloud without a network service has none")
def test_ports_that_stay_down_are_deleted(
    adapter: FakeAdapter,
    cloud: Cloud,
    fake_provider: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, looks = [0.0], []

    def ports(filters: Any) -> list[Any]:
        looks.append(now[0])
        raise http(500, "broken")

    monkeypatch.setattr(cloud, "list_ports", ports)
    monkeypatch.setattr(adapter._api, "has", lambda _service: False)
    leaks = LeakCleaner(adapter, fake_provider, LOG, lambda: now[0])
    for now[0] in range(0, 3600, 60):
        leaks.run()
    assert looks == [] and not [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]
    monkeypatch.setattr(adapter._api, "has", lambda _service: True)
    for now[0] in range(3600, 3600 + 3000, 60):
        leaks.run()
    assert 4 <= len(looks) <= 5, "a failing look is not repeated by each pass"
