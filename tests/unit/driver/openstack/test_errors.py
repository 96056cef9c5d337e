"""Errors of a launch as the launcher, the log and the list of problems get them."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from openstack import exceptions as sdk

from nodepool import exceptions
from nodepool.cloud import CloudCalls
from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.driver.openstack.api.errors import RefusedByCloud, classify, without_values
from nodepool.driver.openstack.api.transport import Transport
from nodepool.driver.openstack.servers import fault_message
from tests.support.openstack.fake import LOG, FloatingCloud, advance, create

Launch = Callable[..., Exception]
STEPS = ("create_server", "create_floating_ip")


def refusal(cls: type[sdk.HttpException], status: int, message: str) -> Exception:
    error = cls(message)
    error.status_code = status
    return error


@pytest.fixture
def launch(over: Callable[[FakeOpenStackCloud], FakeAdapter], fake_provider: Any) -> Launch:
    """``launch(create_server=error)``, or of another call: the error that ends it."""

    def run(**failing: Exception) -> Exception:
        cloud = FloatingCloud()
        for call, error in failing.items():
            setattr(cloud, call, raiser(error))
        label = fake_provider.pools["main"].labels["fake-label"]
        label.pool.auto_floating_ip = True
        with pytest.raises(Exception) as caught:
            advance(create(over(cloud), label))
        return caught.value

    return run


def raiser(error: Exception) -> Callable[..., None]:
    def fail(**_kw: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error, told",
    [
        (
            refusal(sdk.ConflictException, 409, "Quota exceeded for resources: ['floatingip']."),
            exceptions.QuotaException,
        ),
        (
            refusal(sdk.ForbiddenException, 403, "Maximum number of ports exceeded"),
            exceptions.QuotaException,
        ),
        (
            refusal(sdk.ConflictException, 409, "No more IP addresses available on network ext."),
            exceptions.CapacityException,
        ),
        (
            refusal(
                sdk.BadRequestException, 400, "Unable to find any IP address on external network e"
            ),
            exceptions.CapacityException,
        ),
        (refusal(sdk.BadRequestException, 400, "Bad request"), RefusedByCloud),
    ],
)
def test_what_the_cloud_lacks_is_no_unknown_error(
    launch: Launch, step: str, error: Exception, told: type[Exception]
) -> None:
    found = launch(**{step: error})
    assert type(found) is told
    assert str(error) in str(found)


def test_refusals_name_what_was_refused(launch: Launch) -> None:
    bad = refusal(sdk.BadRequestException, 400, "Bad network, bad request")
    place = "provider cloud-1, pool main, label fake-label: the cloud refuses to"
    assert str(launch(create_server=bad)) == (
        f"{place} create the server, because of option networks (net-2): Bad network, bad request"
    )
    assert re.fullmatch(
        f"{place} give server [0-9a-f]+ an address: Bad network, bad request",
        str(launch(create_floating_ip=bad)),
    )


def test_other_errors_are_themselves(launch: Launch) -> None:
    error = refusal(sdk.HttpException, 500, "no")
    assert launch(create_floating_ip=error) is error
    assert launch(create_server=error) is error
    quota = exceptions.QuotaException("Quota exceeded")
    assert launch(create_server=quota) is quota


# -- texts

USERDATA = "#cloud-config\npassword: of-ours. Value: x is too long\n" + "y" * 70000
ENCODED = base64.b64encode(USERDATA.encode()).decode()
SECRET = "password: of-ours"


def schema_error(field: str, value: object, wrong: str = "is too long") -> str:
    """As nova words it (nova.api.validation.validators)."""
    return f"Invalid input for field/attribute {field}. Value: {value}. {value!r} {wrong}"


@pytest.mark.parametrize(
    "text, found",
    [
        (schema_error("user_data", ENCODED), "user_data. Value: (omitted), is too long"),
        (schema_error("my key. Yes", SECRET * 20), "my key. Yes. Value: (omitted), is too long"),
        (
            schema_error("a", "b. Value: c is too long", "is not of type 'string', 'null'"),
            "a. Value: (omitted), is not of type 'string', 'null'",
        ),
        (
            schema_error(
                "server",
                {"name": "n", "metadata": {"a": SECRET}},
                "Additional properties are not allowed ('a', 'b' were unexpected)",
            ),
            "server. Value: (omitted), Additional properties are not allowed ('a', 'b' were "
            "unexpected)",
        ),
        (schema_error("a", SECRET, "cannot be"), "a. Value: (omitted)"),
    ],
)
def test_refused_values_are_skipped(text: str, found: str) -> None:
    found = f"Invalid input for field/attribute {found}"
    assert without_values(text) == found
    assert (
        without_values(f"BadRequestException: 400: {text}.").rstrip(".")
        == f"BadRequestException: 400: {found}"
    )
    assert without_values(found) == found


def test_other_texts_are_bounded() -> None:
    assert (
        without_values("Invalid key_name provided. Value: 7")
        == "Invalid key_name provided. Value: 7"
    )
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
    made = Transport(
        SimpleNamespace(session=SimpleNamespace(auth=None)), calls, SimpleNamespace(name="p"), LOG
    )
    made.service = lambda _name: SimpleNamespace(request=lambda *_args, **_kw: answer)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    "text",
    [
        schema_error("user_data", ENCODED),
        schema_error("server", {"user_data": ENCODED, "metadata": {"a": SECRET}}, "is wrong"),
        f"Cannot read {ENCODED} of the user data",
    ],
)
def test_answers_do_not_show_userdata(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nowhere: neither in the error nor in what the log and the list of problems have."""
    caplog.set_level(logging.DEBUG)
    calls = CloudCalls("p", classify, {}, log=LOG)
    cloud = transport(Answer(400, text), calls)
    with pytest.raises(sdk.BadRequestException) as caught:
        cloud.request(
            "create_server", "compute", "POST", "/servers", json={"server": {"user_data": ENCODED}}
        )
    LOG.error("Failed:", exc_info=caught.value)
    assert calls.last_error is not None
    assert len(str(caught.value)) < 1200
    for shown in (caplog.text, *calls.troubles(), calls.last_error.message, str(caught.value)):
        assert ENCODED[:40] not in shown and SECRET not in shown
    assert "for url: http://cloud/servers" in str(caught.value)
    calls.stop()


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_launch_does_not_show_userdata(
    launch: Launch, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the client is; the log has the traceback of what the error came from."""
    error = refusal(sdk.BadRequestException, 400, schema_error("user_data", ENCODED))
    error.__cause__ = ValueError(schema_error("some key", SECRET))
    found = launch(**{step: error})
    assert isinstance(found, RefusedByCloud) and str(found).endswith(
        "Invalid input for field/attribute user_data. Value: (omitted), is too long"
    )
    LOG.error("Launch attempt 1/1 failed:", exc_info=found)
    assert "The above exception was the direct cause" in caplog.text
    assert ENCODED[:40] not in caplog.text and SECRET not in caplog.text
    if step == "create_server":
        assert "option userdata" in str(found)


def test_faults_are_bounded() -> None:
    assert len(fault_message({"fault": {"message": "x" * 5000}})) < 1000
