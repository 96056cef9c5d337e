"""Errors of a launch as the launcher, the log and the list of problems are told of them."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from openstack import exceptions as sdk

from nodepool import exceptions
from nodepool.cloud import CloudCalls
from nodepool.driver.openstack.errors import RefusedByCloud, classify, without_values
from nodepool.driver.openstack.machines import OpenStackCreateStateMachine
from nodepool.driver.openstack.servers import fault_message
from nodepool.driver.openstack.transport import Transport

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

    def _renewSuspects(self, _label: Any, _message: str) -> None:
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


# -- texts

USERDATA = "#cloud-config\npassword: of-ours. Value: x is too long\n" + "y" * 70000
ENCODED = base64.b64encode(USERDATA.encode()).decode()
SECRET = "password: of-ours"


def schema_error(field: str, value: object, wrong: str = "is too long") -> str:
    """As nova words it (nova.api.validation.validators)."""
    return f"Invalid input for field/attribute {field}. Value: {value}. {value!r} {wrong}"


@pytest.mark.parametrize("text, found", [
    (schema_error("user_data", ENCODED), "user_data. Value: (left out), is too long"),
    (schema_error("my key. Yes", SECRET * 20), "my key. Yes. Value: (left out), is too long"),
    (schema_error("a", "b. Value: c is too long", "is not of type 'string', 'null'"),
     "a. Value: (left out), is not of type 'string', 'null'"),
    (schema_error("server", {"name": "n", "metadata": {"a": SECRET}},
                  "Additional properties are not allowed ('a', 'b' were unexpected)"),
     "server. Value: (left out), Additional properties are not allowed ('a', 'b' were unexpected)"),
    (schema_error("a", SECRET, "cannot be"), "a. Value: (left out)"),
])  # fmt: skip
def test_refused_values_are_left_out(text: str, found: str) -> None:
    found = f"Invalid input for field/attribute {found}"
    assert without_values(text) == found
    assert without_values(f"BadRequestException: 400: {text}.").rstrip(".") == f"BadRequestException: 400: {found}"
    assert without_values(found) == found


def test_other_texts_are_bounded() -> None:
    assert without_values("Invalid key_name provided. Value: 7") == "Invalid key_name provided. Value: 7"
    assert len(without_values("x" * 100000)) < 1000


class Answer(requests.Response):
    def __init__(self, status: int, message: str) -> None:
        super().__init__()
        self.status_code = status
        self.headers["Content-Type"] = "application/json"
        self._content = json.dumps({"badRequest": {"code": status, "message": message}}).encode()
        self.url = "http://cloud/servers"
        self.request = requests.Request("POST", self.url).prepare()


def transport(answer: Answer, calls: CloudCalls) -> Transport:
    made = Transport(SimpleNamespace(session=SimpleNamespace(auth=None)), calls, SimpleNamespace(name="p"), LOG)
    made.service = lambda _name: SimpleNamespace(request=lambda *_args, **_kw: answer)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("text", [
    schema_error("user_data", ENCODED), schema_error("server", {"user_data": ENCODED, "metadata": {"a": SECRET}}, "is wrong"),
    f"Cannot read {ENCODED} of the user data"])  # fmt: skip
def test_answers_do_not_show_userdata(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nowhere: neither in the error nor in what the log and the list of problems have."""
    caplog.set_level(logging.DEBUG)
    calls = CloudCalls("p", classify, {}, log=LOG)
    cloud = transport(Answer(400, text), calls)
    ways: list[Callable[[], Any]] = [
        lambda: cloud.request("create_server", "compute", "POST", "/servers", json={"server": {"user_data": ENCODED}}),
        lambda: cloud.get_response("list_servers", "compute", "/servers", "servers", json={"server": {"user_data": ENCODED}})]
    for way in ways:
        with pytest.raises(sdk.BadRequestException) as caught:
            way()
        LOG.error("Failed:", exc_info=caught.value)
        assert calls.last_error is not None
        assert len(str(caught.value)) < 1200
        for shown in (caplog.text, *calls.troubles(), calls.last_error.message, str(caught.value)):
            assert ENCODED[:40] not in shown and SECRET not in shown
        assert "for url: http://cloud/servers" in str(caught.value)
    calls.stop()


@pytest.mark.parametrize("step", ["create", "floating_ip"])
def test_a_failed_launch_does_not_show_userdata(step: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the client is; the log has the traceback of what the error came from."""
    error = refusal(sdk.BadRequestException, 400, schema_error("user_data", ENCODED))
    error.__cause__ = ValueError(schema_error("some key", SECRET))
    found = launch(**{step: error})
    assert isinstance(found, RefusedByCloud) and str(found).endswith(
        "Invalid input for field/attribute user_data. Value: (left out), is too long")
    LOG.error("Launch attempt 1/1 failed:", exc_info=found)
    assert "The above exception was the direct cause" in caplog.text
    assert ENCODED[:40] not in caplog.text and SECRET not in caplog.text
    if step == "create":
        assert "option userdata" in str(found)


def test_faults_are_bounded() -> None:
    assert len(fault_message({"fault": {"message": "x" * 5000}})) < 1000
