"""A .netrc of the user who runs a daemon changes no call."""

from __future__ import annotations

import http.server
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keystoneauth1.session
import pytest
import requests
from azure.core.pipeline.transport import RequestsTransport

from nodepool.answers import CloudSession, DirectSession
from nodepool.cloud.http import new_session, send
from nodepool.driver.openstack.api.transport import prepare

OURS = "Bearer of-nodepool"


class Server(http.server.ThreadingHTTPServer):
    """Stores the credentials of each call."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.credentials: list[str | None] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.credentials.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, name="server")
        thread.start()
        yield found
        found.shutdown()
        thread.join(10)


def of_github(url: str, headers: dict[str, str]) -> None:
    with DirectSession() as session:
        session.get(url, headers=headers, timeout=10)


def of_a_cloud(url: str, headers: dict[str, str]) -> None:
    with new_session() as session:
        send(session, "GET", url, "get it", headers=headers)


def of_openstack(url: str, headers: dict[str, str]) -> None:
    class Client:
        session: Any = keystoneauth1.session.Session()

    prepare(Client()).session.get(url, headers=headers, authenticated=False)


def of_azure(url: str, headers: dict[str, str]) -> None:
    from azure.core.rest import HttpRequest

    with RequestsTransport(session=CloudSession()) as transport:
        transport.send(HttpRequest("GET", url, headers=headers))


@pytest.mark.parametrize("call", [of_github, of_a_cloud, of_openstack, of_azure])
@pytest.mark.parametrize("headers", [{"Authorization": OURS}, {}])
def test_netrc_of_the_user_neither_replaces_nor_adds_credentials(
    server: Server, call: Callable[[str, dict[str, str]], None], headers: dict[str, str]
) -> None:
    call(server.url, headers)
    assert server.credentials == [headers.get("Authorization")]


def test_credentials_of_a_single_call_are_sent(server: Server) -> None:
    """As plug-ins of OpenStack for Kerberos or OpenID Connect pass them."""
    with CloudSession() as session:
        session.get(server.url, auth=requests.auth.HTTPBasicAuth("a", "b"), timeout=10)
    assert server.credentials == [requests.auth._basic_auth_str("a", "b")]
