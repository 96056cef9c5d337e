"""Servers whose authority was created by plain ``openssl req -x509``, and those of clusters, with
the defaults of Python 3.13.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import pathlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3.connection
from openstack.connection import Connection

from nodepool.adapters.gitea.api import ForgeConnection
from nodepool.adapters.github.service import Place, Service
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import ClusterClient
from nodepool.driver.kubernetes.api.kinds import NAMESPACE
from nodepool.driver.openstack.api.transport import prepare
from nodepool.nodemanager.client.rpc import Client, Tls
from nodepool.nodemanager.sources.sources import SlicesXmlSource
from tests.support.authority import Authority


class Scene:
    """A server that refuses everything but a handshake, and who signed its certificate."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.authority = folder, Authority(folder, plain=True)
        self.cert, self.key = self.authority.issue("server", "IP:127.0.0.1")
        self.requests: list[str] = []
        scene = self

        class Refuses(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                scene.requests.append(self.path)
                self.send_error(404)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def scene(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for module, name in (
        (ssl, "create_default_context"),
        (urllib3.connection, "create_urllib3_context"),
    ):
        monkeypatch.setattr(module, name, strict(getattr(module, name)))
    found = Scene(tmp_path)
    thread = threading.Thread(target=found.server.serve_forever, args=(0.05,), name="server")
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def strict(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    def made(*args: object, **options: object) -> ssl.SSLContext:
        context = create(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    return made


def github(scene: Scene) -> None:
    place = Place.read(f"{scene.url}/acme")
    service = Service(
        place, lambda: "ghp_secret", threading.Event(), certificates=scene.authority.cert
    )
    service.find("set", 1)


def gitea(scene: Scene) -> None:
    ForgeConnection(scene.url, lambda: "secret", ca_file=scene.authority.cert).call("GET", "/jobs")


def kubernetes(scene: Scene) -> None:
    cluster = {"server": scene.url, "certificate-authority": scene.authority.cert}
    content = {
        "current-context": "x",
        "clusters": [{"name": "x", "cluster": cluster}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": "secret"}}],
    }
    (scene.folder / "kubeconfig").write_text(json.dumps(content))
    client = ClusterClient(KubeconfigAccess(None), logging.getLogger("test"))
    with contextlib.closing(client):
        client.list(NAMESPACE)


def node_manager(scene: Scene) -> None:
    Client(scene.url, Tls(scene.authority.cert, scene.cert, scene.key)).call("GetSlivers")


def slices(scene: Scene) -> None:
    options = {"url": f"{scene.url}/slices.xml", "ca": scene.authority.cert}
    config: Any = SimpleNamespace(state_dir=str(scene.folder), node_id="1")
    SlicesXmlSource("slices", options, config, lambda *_: None, new=False).fetch()


def openstack(scene: Scene) -> None:
    cloud = Connection(
        auth={"auth_url": scene.url, "username": "x", "password": "x", "project_name": "x"},
        cacert=scene.authority.cert,
    )
    with contextlib.closing(cloud):
        prepare(cloud).authorize()


@pytest.mark.parametrize("call", [github, gitea, kubernetes, node_manager, slices, openstack])
def test_authority_without_optional_extensions_is_accepted(
    scene: Scene, call: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(scene.folder / "kubeconfig"))
    with contextlib.suppress(Exception):  # the server refuses the request
        call(scene)
    assert scene.requests


@pytest.fixture
def proxy(scene: Scene) -> Iterator[str]:
    """Return the URL of a proxy."""

    class Connects(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                self.send_response(200)
                self.end_headers()
                other = {server: self.connection, self.connection: server}
                while data := (one := select.select([*other], [], [])[0][0]).recv(4096):
                    other[one].sendall(data)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Connects) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,), name="proxy")
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("call", [github, gitea, kubernetes, openstack])
def test_authority_without_optional_extensions_is_accepted_behind_a_proxy(
    scene: Scene, proxy: str, call: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(scene.folder / "kubeconfig"))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with contextlib.suppress(Exception):  # the server refuses the request
        call(scene)
    assert scene.requests
