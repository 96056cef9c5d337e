"""Tokens that Microsoft's library returns, which keeps them and what it was created from."""

from __future__ import annotations

import http.server
import itertools
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.cloud.http import new_session
from nodepool.driver.azure.login import Login

SERVICE = {"tenant-id": "t", "client-id": "c", "subscription-id": "s"}


class Identities(http.server.ThreadingHTTPServer):
    """The service for managed identities; each token is another one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.numbers = itertools.count(1)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Identities

    def do_GET(self) -> None:
        ends = str(int(time.time()) + 86400)
        token = {"access_token": f"token {next(self.server.numbers)}", "token_type": "Bearer"}
        body = json.dumps({**token, "expires_on": ends, "resource": "r"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> Iterator[Identities]:
    with Identities() as found:
        thread = threading.Thread(target=found.serve_forever, name="identities")
        thread.start()
        monkeypatch.setenv(
            "IDENTITY_ENDPOINT", f"http://127.0.0.1:{found.server_address[1]}/msi/token"
        )
        monkeypatch.setenv("IDENTITY_HEADER", "header")
        yield found
        found.shutdown()
        thread.join(10)


def login_with(**auth: str) -> Login:
    provider: Any = SimpleNamespace(auth={**SERVICE, **auth}, auth_path=None)
    return Login(provider, new_session())


def test_refused_token_is_replaced_although_the_library_considers_it_valid(
    identities: Identities,
) -> None:
    login = login_with(type="managed-identity", **{"client-id": ""})
    assert [login.token(), login.token()] == ["token 1", "token 1"]
    assert login.token(refused="token 1") == "token 2"
    assert login.token(refused="token 1") == "token 2"


def test_renewed_certificate_is_used_for_the_next_token(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import azure.identity

    class Credential:
        """Reads the file as the library does: when it is created."""

        def __init__(self, _tenant: str, _client: str, path: str, **_options: object) -> None:
            self.content = pathlib.Path(path).read_text()

        def get_token(self, _scope: str) -> Any:
            return SimpleNamespace(token=self.content, expires_on=time.time() + 3600)

        def __enter__(self) -> Credential:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

    monkeypatch.setattr(azure.identity, "CertificateCredential", Credential)
    path = tmp_path / "certificate.pem"
    path.write_text("first")
    login = login_with(type="certificate", **{"certificate-path": str(path)})
    assert login.token() == "first"
    path.write_text("second")
    assert login.token(refused="first") == "second"
