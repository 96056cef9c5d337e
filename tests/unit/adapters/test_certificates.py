"""Forges with a certificate of an authority that the system does not know."""

from __future__ import annotations

import http.server
import pathlib
import ssl
import threading
from collections.abc import Callable, Iterator

import certifi
import pytest

from nodepool.adapters.gitea.api import ForgeConnection
from nodepool.adapters.github.service import Place, Service
from nodepool.adapters.runners.forge import ForgeError
from tests.support.authority import Authority


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def forge(tmp_path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The URL of a forge, and the file of its authority."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("forge", "IP:127.0.0.1"))
    server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name="forge")
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/acme", authority.cert
    server.shutdown()
    thread.join()
    server.server_close()


def _github(url: str, ca_file: str) -> None:
    Service(Place.read(url), lambda: "ghp_secret", threading.Event(), certificates=ca_file).find(
        "set", 1
    )


def _gitea(url: str, ca_file: str) -> None:
    ForgeConnection(url.removesuffix("/acme"), lambda: "secret", ca_file=ca_file or None).call(
        "GET", "/jobs"
    )


@pytest.mark.spec("GitHub 8.8: Enterprise Server with its own authority")
@pytest.mark.parametrize("call", [_github, _gitea])
def test_certificate_of_a_named_authority_is_accepted(
    forge: tuple[str, str], call: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the system; what the configuration names comes first.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    with pytest.raises(ForgeError, match="404"):
        call(*forge)
    with pytest.raises(ForgeError, match=r"CERTIFICATE_VERIFY_FAILED.* set ca-file"):
        call(forge[0], "")
