"""Servers in states that the cloud of the integration tests does not get into."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.cloud import CallsStopped, Look
from nodepool.driver.openstack.adapter import OpenStackAdapter
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.lookups import FEW, CloudLookups
from nodepool.driver.openstack.machines import OpenStackCreateStateMachine, OpenStackDeleteStateMachine
from tests.unit.test_openstack_parts import http

LOG = logging.getLogger("nodepool.test")


def done(result: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Watch:
    """Answers each look as it is told."""

    def __init__(self) -> None:
        self.started = 0.0
        self.look: Look[Any] | None = None
        self.ended: bool | None = None

    def end(self, reached: bool) -> None:
        self.ended = reached


class Adapter:
    """The parts of the adapter that the machines use."""

    def __init__(self) -> None:
        self._api = SimpleNamespace(watches=True)
        self._gone: set[str] = set()
        self.provider = SimpleNamespace(name="cloud")
        self.deleted: list[str] = []
        self.watch = Watch()

    def _submitDelete(self, function: Any) -> Future[Any]:
        return done(function())

    def _deleteFloatingIpsOf(self, server_id: str) -> None:
        pass

    def _requestDeletion(self, server_id: str) -> Future[Any]:
        self.deleted.append(server_id)
        return done()

    def _wasMissing(self, server_id: str) -> bool:
        return False

    def _watchServer(self, *_args: Any) -> Watch:
        return self.watch


class Creation(OpenStackCreateStateMachine):
    """Without what is found out before the call."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.log, self.provider = adapter, LOG, adapter.provider
        self._watch, self.watches, self._deadline = None, True, None
        self.future, self.external_id = None, None
        self.server: Any = {"id": "s"}
        self.label = SimpleNamespace(name="label", pool=SimpleNamespace(name="pool"))


class Servers(CloudLookups):
    """A cloud of 20 servers; those that are named cannot be looked at by id."""

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        self._api, self.calls, self._client = self, None, None  # type: ignore[assignment]
        self.provider = SimpleNamespace(rate=0.0, name="cloud")
        self.log = LOG  # type: ignore[assignment]
        self._initLookups(None)
        self.errors = errors
        self.watches = True
        self.asked: list[str] = []

    def get_server_by_id(self, server_id: str, repeat: bool = True) -> dict[str, str] | None:
        self.asked.append(server_id)
        if server_id in self.errors:
            raise self.errors[server_id]
        if server_id.startswith("gone"):
            return None
        return {"id": server_id, "status": "ACTIVE"}

    def get_response(self, *_args: object, **_kw: object) -> object:
        servers = [{"id": f"s{number}", "status": "ACTIVE"} for number in range(20)] + [{"id": "off", "status": "SHUTOFF"}]
        return SimpleNamespace(json=lambda: {"servers": servers}, status_code=200)


@pytest.mark.spec("driver-openstack.md 2.4: done when the listing has it no more; a cloud that keeps deleted servers lists none")
def test_deleted_and_kept() -> None:
    adapter = Adapter()
    machine = OpenStackDeleteStateMachine(adapter, "s", LOG)
    machine.advance()
    adapter.watch.look = Look({"id": "s", "status": "ACTIVE", "OS-EXT-STS:task_state": "soft-deleting"}, 1.0)
    machine.advance()
    assert not machine.complete
    adapter.watch.look = Look({"id": "s", "status": "SOFT_DELETED", "OS-EXT-STS:task_state": None}, 100.0)
    machine.advance()
    assert machine.complete and adapter.deleted == ["s"]


@pytest.mark.parametrize("count", [FEW - 2, FEW + 6], ids=["one by one", "listed"])
@pytest.mark.spec("issue 5: waiting for one object asks for that object; a failed look never harms a healthy launch")
def test_one_that_cannot_be_looked_at(count: int) -> None:
    cloud = Servers({"bad": http(500, "cell is down")})
    found = cloud._someServers([*(f"s{number}" for number in range(count)), "bad", "gone"])
    assert isinstance(found.pop("bad"), Exception)
    assert set(found) == {f"s{number}" for number in range(count)}
    with pytest.raises(CallsStopped):
        Servers({"bad": CallsStopped("cloud")})._someServers(["s0", "bad"])


@pytest.mark.spec("driver-api.md: findMissingInstances; a listing that leaves servers out is no proof")
def test_missing_is_what_the_cloud_says_so_of() -> None:
    cloud = Servers({"bad": http(500)})
    assert OpenStackAdapter.findMissingInstances(cloud, ["s0", "off", "gone", "bad", "hidden"]) == ["off", "gone"]  # type: ignore[arg-type]
    assert cloud.asked == ["gone", "bad", "hidden"]


@pytest.mark.spec("driver-openstack.md 2.2: not (yet) listed: the previous object stays")
def test_new_server_that_is_not_shown_yet() -> None:
    machine = Creation(Adapter())
    machine.start_time = -1000.0  # the call had to wait for its turn
    machine._watch = watch = Watch()  # type: ignore[assignment]
    watch.look = Look(None, 5.0)
    assert not machine._active()
    watch.look = Look(None, 11.0)
    with pytest.raises(exceptions.LaunchStatusException, match="vanished"):
        machine._active()
    machine._watch = again = Watch()  # type: ignore[assignment]
    again.look = Look({"id": "s", "status": "SOFT_DELETED"}, 1.0)
    with pytest.raises(exceptions.LaunchStatusException, match="deleted"):
        machine._active()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.spec("driver-api.md: a launch given up leaves no server behind")
def test_server_that_comes_after_its_launch_was_given_up(fails: bool) -> None:
    adapter = Adapter()
    machine = Creation(adapter)
    machine.state, machine.external_id = machine.SERVER_CREATING_SUBMIT, None
    machine.future = future = Future()
    future.set_running_or_notify_cancel()
    machine.abandon()
    assert adapter.deleted == []
    if fails:
        machine.external_id = "s"  # noted by the call
        future.set_exception(http(500))
    else:
        future.set_result({"id": "s"})
    assert adapter.deleted == ["s"]


def test_launch_given_up_while_the_server_is_built_looks_no_more() -> None:
    adapter = Adapter()
    machine = Creation(adapter)
    machine.state, machine.external_id, machine._watch = machine.SERVER_CREATING, "s", adapter.watch  # type: ignore[assignment]
    machine.abandon()
    assert adapter.watch.ended is False and adapter.deleted == [], "the launcher deletes what it knows"


@pytest.mark.spec("driver-openstack.md 2.6: ports DOWN at two looks; a cloud without a network service has none")
def test_port_cleanup(caplog: pytest.LogCaptureFixture) -> None:
    now, looks = [0.0], []

    def ports(status: str) -> list[Any]:
        looks.append(now[0])
        raise http(500, "broken")

    networks = [False]
    adapter = SimpleNamespace(_api=SimpleNamespace(has=lambda _service: networks[0]), _listPorts=ports)
    provider = SimpleNamespace(name="cloud", port_cleanup_interval=600, clean_floating_ips=False)
    leaks = LeakCleaner(adapter, provider, LOG, lambda: now[0])
    for now[0] in range(0, 3600, 60):
        leaks.run()
    assert looks == [] and not caplog.records
    networks[0] = True
    for now[0] in range(3600, 3600 + 3000, 60):
        leaks.run()
    assert 4 <= len(looks) <= 5, "a failing look is not repeated by each pass"
