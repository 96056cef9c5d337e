"""Parts of the openstack driver by themselves: kinds of errors, addresses, marks, requests,
logins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import requests
from keystoneauth1.adapter import Adapter
from keystoneauth1.discover import get_discovery
from keystoneauth1.exceptions import ConnectFailure
from keystoneauth1.noauth import NoAuth
from keystoneauth1.session import Session
from openstack.cloud import meta

from nodepool.base.backoff import Backoff
from nodepool.cloud import CallTimeout, CloudCalls, ErrorKind
from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.driver.openstack.api.client import CloudApi, floating_ip_metadata
from nodepool.driver.openstack.api.errors import (
    BadAnswer,
    CredentialsRefused,
    TokenRefused,
    classify,
    retry_after,
    suspect,
)
from nodepool.driver.openstack.api.images import properties
from nodepool.driver.openstack.api.networks import Networks, Rules, fill_in
from nodepool.driver.openstack.api.transport import Transport
from tests.conftest import wait_for


def http(status: int, message: str = "", **headers: str) -> Exception:
    from openstack import exceptions as sdk

    error = sdk.HttpException(message, http_status=status)
    error.status_code = status
    error.response = SimpleNamespace(headers=dict(headers), status_code=status)  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (http(404), ErrorKind.NOT_FOUND),
        (
            http(403, "Quota exceeded for cores: Requested 1, but already used 20 of 20 cores"),
            ErrorKind.QUOTA,
        ),
        (
            http(
                413,
                "VolumeLimitExceeded: Maximum number of volumes allowed (10) exceeded for quota "
                "'volumes'.",
            ),
            ErrorKind.QUOTA,
        ),
        (http(403, "Maximum number of ports exceeded"), ErrorKind.QUOTA),
        (http(413, "Over limit", **{"Retry-After": "5"}), ErrorKind.THROTTLED),
        (http(429), ErrorKind.THROTTLED),
        (http(503, "", **{"Retry-After": "5"}), ErrorKind.THROTTLED),
        (http(503), ErrorKind.TRANSIENT),
        (http(500), ErrorKind.TRANSIENT),
        (http(409, "No more IP addresses available on network x"), ErrorKind.CAPACITY),
        (http(409, "something else"), ErrorKind.OTHER),
        (http(400, "Invalid key_name provided."), ErrorKind.CONFIGURATION),
        (http(401), ErrorKind.CONFIGURATION),
        (BadAnswer("html"), ErrorKind.TRANSIENT),
        (ConnectionResetError(), ErrorKind.TRANSIENT),
        (ValueError(), ErrorKind.OTHER),
    ],
)
def test_errors_of_the_cloud_are_classified(error: Exception, kind: ErrorKind) -> None:
    assert classify(error) is kind


def test_retry_after_is_read_and_bounded() -> None:
    assert retry_after(http(429, "", **{"Retry-After": "7"})) == 7
    assert retry_after(http(429, "", **{"Retry-After": "100000"})) == 120
    assert retry_after(http(429, "", **{"Retry-After": "Sat, 01 Jan 2000 00:00:00 GMT"})) == 1
    assert retry_after(http(429, "", **{"Retry-After": "0"})) == 1
    assert retry_after(http(429, "", **{"Retry-After": "soon"})) is None
    assert retry_after(http(429, "", **{"Retry-After": "nan"})) == 1
    date = f"Fri, 31 Dec {10**20} 23:59:59 GMT"
    assert retry_after(http(429, "", **{"Retry-After": date})) is None
    assert retry_after(http(429)) is None


def test_refusals_name_the_option_that_causes_them() -> None:
    assert suspect("Invalid key_name provided.") == "key-name"
    assert suspect("The requested availability zone is not available") == "availability-zones"
    assert suspect("Unable to find security_group with name or id 'x'") == "security-groups"
    assert suspect("nonsense") is None


def test_marks_of_floating_ips() -> None:
    assert floating_ip_metadata("nodepool: nodepool_node_id=1 nodepool_provider_name=a%20b") == {
        "nodepool_node_id": "1",
        "nodepool_provider_name": "a b",
    }
    assert floating_ip_metadata("somebody's nodepool: x=y") == {}
    assert floating_ip_metadata(None) == {}


def test_image_properties_are_separated_from_own_metadata() -> None:
    found = properties(
        {"min_disk": "3", "is_protected": "yes", "own": 7, "none": None, "tags": ("a",)}, "m", None
    )
    assert found == {
        "min_disk": 3,
        "protected": True,
        "own": "7",
        "tags": ["a"],
        "owner_specified.openstack.md5": "m",
        "owner_specified.openstack.sha256": "",
    }


PRIVATE = {"id": "1", "name": "private", "router:external": False}
PUBLIC = {"id": "2", "name": "public-net", "router:external": True}


def address(addr: str, kind: str = "fixed", mac: str = "m") -> dict[str, Any]:
    return {
        "addr": addr,
        "version": 6 if ":" in addr else 4,
        "OS-EXT-IPS:type": kind,
        "OS-EXT-IPS-MAC:mac_addr": mac,
    }


def choose(addresses: dict[str, Any], **rules: Any) -> tuple[str, str, str, str]:
    server = fill_in(
        {"id": "s", "addresses": addresses}, Networks(Rules(**rules), [PRIVATE, PUBLIC])
    )
    return server["public_v4"], server["private_v4"], server["public_v6"], server["interface_ip"]


@pytest.mark.spec("OST-2.3: addresses are chosen as the SDK does, from the server's own record")
def test_addresses_are_chosen_like_the_sdk_does() -> None:
    fixed, floating = address("10.0.0.1"), address("203.0.113.1", "floating")
    assert choose({"private": [fixed]}) == ("", "10.0.0.1", "", "10.0.0.1")
    assert choose({"private": [fixed, floating]}) == ("203.0.113.1", "10.0.0.1", "", "203.0.113.1")
    assert choose({"private": [fixed, floating]}, private=True)[3] == "10.0.0.1"
    assert choose({"public-net": [address("198.51.100.9")]})[0] == "198.51.100.9"
    assert choose({"private": [fixed]}, external=("private",))[0] == "10.0.0.1"
    both = {
        "private": [fixed],
        "public-net": [address("198.51.100.9", mac="n"), address("2001:db8::1", mac="n")],
    }
    assert choose(both, ipv6=True) == ("198.51.100.9", "10.0.0.1", "2001:db8::1", "2001:db8::1")
    assert choose(both)[3] == "198.51.100.9"
    assert choose(both, default="private")[3] == "10.0.0.1"
    assert choose(both, use_external=False)[0] == ""


@pytest.mark.spec("OST-2.2: a server without addresses gets what the SDK finds with its calls")
@pytest.mark.parametrize(
    "known", [{}, {"accessIPv4": "203.0.113.9"}, {"accessIPv6": "2001:db8::9"}]
)
def test_server_without_addresses_needs_no_calls(known: dict[str, str]) -> None:
    server: Any = {
        "id": "s",
        "status": "ACTIVE",
        "addresses": {},
        "accessIPv4": "",
        "accessIPv6": "",
        **known,
    }
    cloud = Mock(private=False, force_ipv4=False)
    cloud.get_default_network.return_value = None
    cloud.get_internal_ipv4_networks.return_value = (
        cloud.get_external_ipv4_networks.return_value
    ) = []
    cloud.search_ports.return_value = [{"id": "p"}]
    cloud.search_floating_ips.return_value = [{"id": "f", "fixed_ip_address": "10.0.0.1"}]
    found = meta.add_server_interfaces(cloud, dict(server))
    names = ("addresses", "public_v4", "public_v6", "private_v4")
    filled = fill_in(dict(server), Networks(Rules(), [PRIVATE, PUBLIC]))
    assert cloud.search_floating_ips.called
    assert [filled[name] for name in names] == [found[name] for name in names]
    assert choose({}) == ("", "", "", "")


@pytest.mark.parametrize(
    "listed, pace, few",
    [(0, 0.0, 4), (50, 0.0, 4), (5000, 0.0, 100), (50, 1.0, 4), (5000, 1.0, 10)],
)
def test_few_servers_of_a_large_project_are_asked_for_one_by_one(
    over: Callable[[FakeOpenStackCloud], FakeAdapter],
    fake_provider: Any,
    listed: int,
    pace: float,
    few: int,
) -> None:
    asked: list[str] = []

    class Cloud(FakeOpenStackCloud):
        def get_server_by_id(self, server_id: str) -> Any:
            asked.append(server_id)
            return super().get_server_by_id(server_id)

        def list_servers(self, **kwargs: Any) -> list[Any]:
            asked.append("all")
            return super().list_servers(**kwargs)

    cloud = Cloud()
    ids = [cloud._make_server("s", "az1", {}) for _ in range(200)]
    cloud._server_list.extend(ids)
    adapter = over(cloud)
    fake_provider.rate = pace
    for count, calls in ((few, few), (few + 1, 1)):
        adapter._listed = listed
        asked.clear()
        wanted = [server.id for server in ids[:count]]
        assert set(adapter._someServers(wanted)) == set(wanted)
        assert len(asked) == calls


def api_of(service: Any) -> CloudApi:
    """The driver's API over one service, without credentials."""
    client: Any = SimpleNamespace(session=SimpleNamespace(auth=None))
    api = CloudApi(
        client,
        CloudCalls("p", classify, {}),
        SimpleNamespace(name="p"),
        logging.getLogger("nodepool.test"),
    )
    api.service = lambda _name: service  # type: ignore[method-assign]
    return api


def response(status: int, content: bytes, **headers: str) -> requests.Response:
    made = requests.Response()
    made.status_code, made._content, made.url = status, content, "http://cloud/"
    made.headers.update(headers)
    return made


class Pages:
    """A service that answers page by page."""

    def __init__(self, pages: dict[str | None, tuple[dict[str, Any], str | None]]) -> None:
        self.pages = pages
        self.api = api_of(self)
        self.calls = self.api.calls

    def request(
        self, path: str, method: str, params: dict[str, str], **_kw: Any
    ) -> requests.Response:
        assert (path, method) == ("/servers/detail", "GET")
        content, header = self.pages[params.get("marker")]
        return response(
            200,
            json.dumps(content).encode(),
            **({"Link": f'<{header}>; rel="next"'} if header else {}),
        )

    def list(self) -> list[str]:
        try:
            return [server["id"] for server in self.api.list_servers()]
        finally:
            self.calls.stop()


@pytest.mark.spec(
    "OST-2.2: paging by servers_links or the Link header; a repeated marker is an error"
)
@pytest.mark.usefixtures("no_retries")
def test_repeated_page_of_a_listing_is_an_error() -> None:
    links = [{"rel": "next", "href": "http://x/servers/detail?marker=b"}]
    first = {"servers": [{"id": "a"}, {"id": "b"}], "servers_links": links}
    last = {"servers": [{"id": "d"}]}
    pages = Pages(
        {
            None: (first, None),
            "b": ({"servers": [{"id": "c"}]}, "http://x/?marker=c"),
            "c": (last, None),
        }
    )
    assert pages.list() == ["a", "b", "c", "d"]
    with pytest.raises(BadAnswer, match="again"):
        Pages({None: (first, None), "b": (first, None)}).list()
    with pytest.raises(CallTimeout, match="no 'servers' in the answer"):
        Pages({None: ({"error": "html"}, None)}).list()


class DeletedMarker(Pages):
    """A service whose last entry of the first page is deleted before the second is read."""

    def __init__(self, status: int, times: int) -> None:
        first = {"servers": [{"id": "a"}, {"id": "b"}]}
        second = {"servers": [{"id": "c"}]}
        link = "http://x/servers/detail?marker=b"
        super().__init__({None: (first, link), "b": (second, None)})
        self.status, self.times = status, times

    def request(
        self, path: str, method: str, params: dict[str, str], **kw: Any
    ) -> requests.Response:
        if "marker" in params and self.times:
            self.times -= 1
            self.pages[None] = ({"servers": [{"id": "a"}, {"id": "c"}]}, None)
            message = b'{"badRequest": {"code": 400, "message": "marker [b] not found"}}'
            return response(self.status, message, **{"Content-Type": "application/json"})
        return super().request(path, method, params, **kw)


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.usefixtures("no_retries")
def test_listing_starts_again_if_the_entry_that_ends_a_page_is_deleted(status: int) -> None:
    assert DeletedMarker(status, 1).list() == ["a", "c"]


@pytest.mark.usefixtures("no_retries")
def test_listing_whose_next_page_is_always_refused_is_an_error() -> None:
    class Refused(DeletedMarker):
        def request(self, *args: Any, **kw: Any) -> requests.Response:
            answer = super().request(*args, **kw)
            self.pages[None] = ({"servers": [{"id": "a"}]}, "http://x/servers/detail?marker=b")
            return answer

    refused = Refused(400, 100)
    with pytest.raises(Exception, match="BadRequest"):
        refused.list()
    assert refused.times == 100 - 3


NOT_FOUND = b'{"itemNotFound": {"code": 404, "message": "Instance s could not be found."}}'


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.cloud.calls.BACKOFF", Backoff(0.0, 0.0))
    monkeypatch.setattr("nodepool.driver.openstack.api.transport.DEADLINE", 0.0)


@pytest.mark.usefixtures("no_retries")
def test_missing_objects_are_an_answer() -> None:
    """They are None to a query and False to a deletion; a gateway's 404 is neither."""
    answers: list[requests.Response] = []
    api = api_of(SimpleNamespace(request=lambda *_args, **_kw: answers.pop(0)))
    questions: list[tuple[Callable[[str], Any], Any]] = [
        (api.get_server_by_id, None),
        (api.get_floating_ip_by_id, None),
        (api.delete_server, False),
        (api.delete_floating_ip, False),
        (api.delete_image, False),
    ]
    for ask, missing in questions:
        answers.append(response(404, NOT_FOUND))
        assert ask("s") is missing
        answers.append(response(404, b"<html>Not Found</html>"))
        with pytest.raises(CallTimeout, match="HTTP 404"):
            ask("s")
        answers.append(response(503, b"no"))
        with pytest.raises(CallTimeout):
            ask("s")
    answers.append(response(200, b'{"server": {"id": "s"}}'))
    assert api.get_server_by_id("s") == {"id": "s"}
    for status in (202, 204):
        answers.append(response(status, b""))
        assert api.delete_server("s") is True
    for status in (200, 302):
        answers.append(response(status, b"<html>Log in</html>"))
        with pytest.raises(CallTimeout, match=f"HTTP {status}"):
            api.delete_server("s")
    answers.append(response(404, NOT_FOUND))
    with pytest.raises(Exception, match="NotFound"):
        api.list_flavors()
    api.calls.stop()


# -- logins: one at a time, for all threads of a provider


class Unauthorized(Exception):
    """As that of keystoneauth, which the driver knows by its name."""


class Auth:
    """A plug-in of keystoneauth; a login ends when the test says so."""

    reauthenticate = True
    MIN_TOKEN_LIFE_SECONDS = 120

    def __init__(self) -> None:
        self.auth_ref: Any = None
        self.logins: list[Future[str]] = []

    def invalidate(self) -> None:
        self.auth_ref = None

    def get_access(self, _session: object) -> None:
        self.logins.append(Future())
        self.auth_ref = token(self.logins[-1].result(20))


def token(text: str, expired: bool = False) -> Any:
    return SimpleNamespace(auth_token=text, will_expire_soon=lambda _seconds: expired)


@pytest.fixture
def auth() -> Auth:
    return Auth()


@pytest.fixture
def transport(auth: Auth) -> Iterator[Transport]:
    client: Any = SimpleNamespace(session=SimpleNamespace(auth=auth))
    provider: Any = SimpleNamespace(name="p", cloud_config=SimpleNamespace(name="c"))
    calls = CloudCalls("p", classify, {})
    yield Transport(client, calls, provider, logging.getLogger("nodepool.test"))
    calls.stop()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_request_whose_answer_is_lost_is_not_sent_again_by_the_sdk() -> None:
    """``connect_retries`` of clouds.yaml would repeat the creation of a server."""
    bodies: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    bodies.append(connection.recv(1 << 16))

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v2.1"
        session = Session(auth=NoAuth())
        compute = Adapter(
            session, endpoint_override=url, connect_retries=1, connect_retry_delay=0.01
        )
        client: Any = SimpleNamespace(session=session, compute=compute)
        provider: Any = SimpleNamespace(name="p", cloud_config=SimpleNamespace(name="c"))
        calls = CloudCalls("p", classify, {})
        try:
            transport = Transport(client, calls, provider, logging.getLogger("nodepool.test"))
            with pytest.raises(ConnectFailure):
                transport.send("compute", "POST", "/servers", None, {"json": {"server": {}}})
        finally:
            calls.stop()
            socket.create_connection(server.getsockname()).close()
            thread.join(10)
    assert [body.split(b" ")[0] for body in bodies if body] == [b"POST"]


def waiting(transport: Transport, count: int) -> bool:
    login: Any
    (login,) = transport._shared._asked.values()
    return len(login._waiters) == count


@pytest.mark.parametrize("fails", [False, True])
def test_threads_share_a_login_and_its_failure(
    transport: Transport, auth: Auth, threads: ThreadPoolExecutor, fails: bool
) -> None:
    callers = [threads.submit(transport.authenticate) for _ in range(6)]
    wait_for(lambda: auth.logins and waiting(transport, 5), what="five wait for the sixth")
    if fails:
        auth.logins[0].set_exception(Unauthorized("wrong password"))
        for caller in callers:
            assert isinstance(caller.exception(20), CredentialsRefused)
        retry = threads.submit(transport.authenticate)
        wait_for(lambda: len(auth.logins) == 2, what="another login")
        auth.logins[1].set_result("t")
        retry.result(20)
    else:
        auth.logins[0].set_result("t")
        for caller in callers:
            caller.result(20)
        transport.authenticate()
        assert len(auth.logins) == 1


def test_a_token_is_renewed_when_it_expires_or_is_refused(
    transport: Transport, auth: Auth, threads: ThreadPoolExecutor
) -> None:
    for before, refused in ((token("old", expired=True), None), (token("old"), "old")):
        auth.auth_ref, auth.logins = before, []
        caller = threads.submit(transport.authenticate, refused)
        wait_for(lambda: auth.logins, what="a login")
        auth.logins[0].set_result("new")
        caller.result(20)
    transport.authenticate(refused="old")
    assert auth.auth_ref.auth_token == "new"
    assert len(auth.logins) == 1, "another thread has renewed it"


def test_a_login_that_comes_too_late_is_not_repeated(
    transport: Transport, auth: Auth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token became valid between the check and the login."""
    auth.auth_ref = token("new")
    transport._log_in(auth, "old")
    assert auth.logins == []


def test_a_call_is_repeated_once_with_a_new_token(
    transport: Transport, auth: Auth, threads: ThreadPoolExecutor
) -> None:
    auth.auth_ref = token("old")
    tried: list[str] = []
    done = threading.Event()

    def call() -> str:
        tried.append(auth.auth_ref.auth_token)
        if len(tried) == 1 or done.is_set():
            raise TokenRefused("refused", auth.auth_ref.auth_token)
        return "answer"

    caller = threads.submit(transport.authenticated, call)
    wait_for(lambda: auth.logins, what="a login")
    auth.logins[0].set_result("new")
    assert caller.result(20) == "answer"
    assert tried == ["old", "new"]
    done.set()
    caller = threads.submit(transport.authenticated, call)
    wait_for(lambda: len(auth.logins) == 2, what="another login")
    auth.logins[1].set_result("newer")
    assert isinstance(caller.exception(20), TokenRefused)


def test_plug_ins_without_tokens_do_not_log_in() -> None:
    nothing: Any = None
    client: Any = SimpleNamespace(session=SimpleNamespace(auth=object()))
    Transport(client, nothing, nothing, logging.getLogger("nodepool.test")).authenticate()


def test_a_service_is_discovered_once(transport: Transport) -> None:
    """An unreadable version document is not a discovery; the SDK must forget it."""
    urls = ["http://cloud/compute", "http://cloud/compute/v2.1", "http://cloud/compute"]
    proxy = SimpleNamespace(
        endpoint_override=None, get_endpoint=lambda: urls.pop(0), service_type="compute"
    )
    client: Any = transport.client
    client.compute, client._proxies = proxy, {"compute": proxy}
    with pytest.raises(
        RuntimeError,
        match="the compute service of cloud c does not report its versions at http://cloud/compute",
    ):
        transport.service("compute")
    assert client._proxies == {}
    assert transport.service("compute") is proxy
    assert transport.service("compute") is proxy
    assert len(urls) == 1


def test_version_document_without_versions_is_read_again(transport: Transport) -> None:
    """keystoneauth1 keeps it in two caches."""
    document: dict[str, Any] = {"versions": []}

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, name="version document")
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/compute"
            session = Session(auth=NoAuth(endpoint=url))

            def endpoint() -> str:
                found = get_discovery(session, url, authenticated=False).version_data()
                return str(found[0]["url"]) if found else url

            proxy = SimpleNamespace(
                endpoint_override=None, get_endpoint=endpoint, service_type="compute"
            )
            client: Any = transport.client
            client.session, client.compute, client._proxies = session, proxy, {}
            with pytest.raises(RuntimeError, match="does not report its versions"):
                transport.service("compute")
            document["versions"] = [
                {
                    "id": "v2.1",
                    "status": "CURRENT",
                    "links": [{"rel": "self", "href": f"{url}/v2.1/"}],
                }
            ]
            assert transport.service("compute") is proxy
        finally:
            server.shutdown()
            thread.join()
            session.session.close()
