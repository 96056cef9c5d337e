"""Errors of a launch as the launcher is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from openstack import exceptions as sdk

from nodepool import exceptions
from nodepool.driver.openstack.errors import RefusedByCloud
from nodepool.driver.openstack.machines import OpenStackCreateStateMachine

LOG = logging.getLogger("nodepool.test")


def refusal(cls: type[sdk.HttpException], status: int, message: str) -> Exception:
    error = cls(message)
    error.status_code = status
    return error


class Adapter:
    """A cloud in which one step of a launch fails."""

    def __init__(self, **failing: Exception) -> None:
        self._api = SimpleNamespace(watches=False)
        self.provider = SimpleNamespace(name="p", diskimages={})
        self.failing = failing

    def _step(self, name: str, result: Any) -> Any:
        if name in self.failing:
            raise self.failing[name]
        return result

    def _submitApi(self, api: Callable[..., Any], *args: Any, **kw: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(api(*args, **kw))
        except Exception as error:
            future.set_exception(error)
        return future

    def _findFlavor(self, _name: str, _min_ram: int) -> Any:
        return {"id": "f", "vcpus": 1, "ram": 1}

    def _createServer(self, _name: str, **_kw: Any) -> Any:
        return self._step("create", {"id": "s"})

    def _getServer(self, _server_id: str) -> Any:
        return {"id": "s", "status": "ACTIVE", "addresses": {}}

    def _createFloatingIp(self, _server: Any) -> Any:
        return self._step("floating_ip", {"id": "ip", "floating_ip_address": "a"})

    def _listFloatingIps(self) -> list[Any]:
        return []

    def _attachIpToServer(self, server: Any, floating_ip: Any) -> None:
        self._step("attach", None)

    def _getServerById(self, _server_id: str) -> Any:
        return None

    def _chooseZone(self, _label: Any, az: str | None) -> str | None:
        return az

    def _activeAt(self, _server: Any) -> None:
        return None

    def _expandServer(self, server: Any) -> Any:
        return server

    def _needsFloatingIp(self, _server: Any) -> bool:
        return True

    def _forget(self, *_kinds: str) -> None:
        pass

    def _lostServer(self, _name: str, _metadata: Any) -> None:
        return None


def launch(**failing: Exception) -> Exception:
    """The error that ends it."""
    label = SimpleNamespace(
        name="l", cloud_image=SimpleNamespace(name="i", image_id="i", config_drive=None), flavor_name="f", min_ram=0,
        key_name="key", azs=None, networks=[], security_groups=[], boot_from_volume=False, volume_size=1, volume_type=None,
        server_group=None, scheduler_hints=None, userdata="u", instance_properties={}, dynamic_instance_properties={},
        pool=SimpleNamespace(name="main", security_groups=[], auto_floating_ip=True))
    machine = OpenStackCreateStateMachine(Adapter(**failing), "np1", label, None, {}, None, None, LOG)
    for _ in range(10):
        try:
            machine.advance()
        except Exception as error:
            return error
    raise AssertionError(f"the launch goes on: {machine.state}")


@pytest.mark.parametrize("step", ["create", "floating_ip", "attach"])
@pytest.mark.parametrize("error, told", [
    (refusal(sdk.ConflictException, 409, "Quota exceeded for resources: ['floatingip']."), exceptions.QuotaException),
    (refusal(sdk.ForbiddenException, 403, "Maximum number of ports exceeded"), exceptions.QuotaException),
    (refusal(sdk.ConflictException, 409, "No more IP addresses available on network ext."), exceptions.CapacityException),
    (refusal(sdk.BadRequestException, 400, "Unable to find any IP address on external network e"), exceptions.CapacityException),
    (refusal(sdk.BadRequestException, 400, "Bad request"), RefusedByCloud),
])  # fmt: skip
def test_what_the_cloud_lacks_is_no_unknown_error(step: str, error: Exception, told: type[Exception]) -> None:
    found = launch(**{step: error})
    assert type(found) is told
    assert str(error) in str(found)


def test_refusals_tell_what_was_refused() -> None:
    bad = refusal(sdk.BadRequestException, 400, "Bad network, bad request")
    assert str(launch(create=bad)) == (
        "provider p, pool main, label l: the cloud refuses to create the server, because of option networks: "
        "Bad network, bad request")
    assert str(launch(floating_ip=bad)) == (
        "provider p, pool main, label l: the cloud refuses to give server s an address: Bad network, bad request")


def test_other_errors_are_themselves() -> None:
    error = refusal(sdk.HttpException, 500, "no")
    assert launch(floating_ip=error) is error
    assert launch(create=error) is error
    quota = exceptions.QuotaException("Quota exceeded")
    assert launch(create=quota) is quota
