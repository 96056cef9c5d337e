"""An answer of a cloud without an end does not fill the memory of the launcher."""

from __future__ import annotations

import contextlib
import functools
import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keystoneauth1.exceptions
import keystoneauth1.session
import pytest
from azure.core.pipeline.transport import RequestsTransport

from nodepool import answers
from nodepool.cloud.http import NoAccess, NoAnswer, new_session, send
from nodepool.driver.azure.login import Login
from nodepool.driver.gce.client import Transport
from nodepool.driver.kubernetes.api import kinds
from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.openstack.api.transport import prepare

TOO_LONG = "its answer has more than 67108864 bytes"
PIECE = b"x" * (1 << 20)


class Endless(http.server.BaseHTTPRequestHandler):
    """Answers with the status in the path, and a body without an end."""

    def do_GET(self) -> None:
        status = self.path.strip("/").partition("/")[0]
        self.send_response(int(status) if status.isdecimal() else 200)
        self.send_header("Location", "/200")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(PIECE)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever, name="endless")
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("status", [200, 302, 500])
def test_endless_answer_of_a_cloud_is_an_error_with_the_name_of_the_call(
    url: str, status: int
) -> None:
    with new_session() as session, pytest.raises(NoAnswer, match=f"list things: .*{TOO_LONG}"):
        send(session, "GET", f"{url}/{status}", "list things")


@pytest.mark.parametrize("status", [200, 302])
def test_endless_answer_of_google_is_an_error_with_the_name_of_the_call(
    url: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Transport()
    monkeypatch.setattr(transport, "_authorized", lambda *_args: {})
    with pytest.raises(NoAnswer, match=f"list things: .*{TOO_LONG}"):
        transport.send("GET", f"{url}/{status}", "list things")
    transport.close()


@pytest.mark.parametrize("which", ["token service", "metadata server"])
def test_endless_answer_of_a_token_service_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def default(_scopes: object, ask: Callable[..., object]) -> tuple[Any, None]:
        def refresh(ask: Callable[..., object], *_rest: object) -> None:
            ask(f"{url}/200")

        if which == "metadata server":
            ask(f"{url}/200")
        return SimpleNamespace(before_request=refresh), None

    transport = Transport()
    monkeypatch.setattr("google.auth.default", default)
    with pytest.raises(NoAnswer, match="the token service"):
        transport.send("GET", url, "list things")
    transport.close()


@pytest.mark.parametrize("status", [200, 302, 500])
def test_endless_answer_of_openstack_is_an_error(url: str, status: int) -> None:
    client: Any = SimpleNamespace(session=keystoneauth1.session.Session())
    session = prepare(client).session
    with pytest.raises(keystoneauth1.exceptions.ClientException, match=TOO_LONG):
        session.get(f"{url}/{status}", authenticated=False, connect_retries=0)
    session.session.close()


@pytest.mark.parametrize("status", [200, 302, 401, 500])
def test_endless_answer_of_kubernetes_is_an_error_with_the_name_of_the_call(
    url: str, status: int
) -> None:
    access: Any = SimpleNamespace(
        host=f"{url}/{status}",
        verify_ssl=True,
        proxy=None,
        authorization=lambda: None,
        renew=lambda: None,
    )
    client = ClusterClient(access, logging.getLogger("test"))
    with pytest.raises(NoAnswer, match=f"list .* at {url}.*{TOO_LONG}"):
        client.list(kinds.POD)
    client.close()


def test_endless_answer_to_the_library_of_azure_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks some times: that is quicker without pauses, and with a lower limit.
    monkeypatch.setattr(RequestsTransport, "sleep", lambda _self, _seconds: None)
    monkeypatch.setattr(answers, "body_of", functools.partial(answers.body_of, most=1 << 20))
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"{url}/200")
    monkeypatch.setenv("IDENTITY_HEADER", "secret")
    provider: Any = SimpleNamespace(auth={"type": "managed-identity"})
    with (
        new_session() as session,
        pytest.raises((NoAnswer, NoAccess), match="more than 1048576 bytes"),
    ):
        Login(provider, session).token()
