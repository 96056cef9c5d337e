"""A real Keycloak on loopback, as an issuer of job tokens."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import ports
from tests.support.deadline import limit

VERSION = "26.5.6"
REALM = "acme"
#: Algorithms of the clients ``ci-<algorithm>``.
ALGORITHMS = ("RS256", "ES256", "PS256", "EdDSA")
FETCH_TIMEOUT, START_TIMEOUT, CALL_TIMEOUT, STOP_TIMEOUT = 600.0, 180.0, 20.0, 30.0


def distribution() -> pathlib.Path:
    """Return the archive, which is fetched once by Maven; skips the test if it cannot be had."""
    cache = pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "nodepool-tests"
    )
    name = f"keycloak-quarkus-dist-{VERSION}.zip"
    if not (cache / name).exists():
        for program in ("mvn", "java"):
            if shutil.which(program) is None:
                pytest.skip(f"Keycloak needs {program}, which is not installed")
        part = cache / f"part-{os.getpid()}"
        goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
        artifact = f"-Dartifact=org.keycloak:keycloak-quarkus-dist:{VERSION}:zip"
        fetched = subprocess.run(
            ["mvn", "-q", "-B", goal, artifact, f"-DoutputDirectory={part}"],
            capture_output=True,
            timeout=FETCH_TIMEOUT,
            cwd="/",
        )
        if fetched.returncode != 0:
            pytest.skip(f"Maven cannot fetch Keycloak {VERSION}: {fetched.stdout.decode()[-500:]}")
        (part / name).rename(cache / name)
        part.rmdir()
    return cache / name


def _client(algorithm: str, secret: str) -> dict[str, Any]:
    audience = {"included.custom.audience": "nodepool", "access.token.claim": "true"}
    groups = {
        "claim.name": "pool_groups",
        "claim.value": '["builders", "all"]',
        "jsonType.label": "JSON",
        "access.token.claim": "true",
    }
    return {
        "clientId": f"ci-{algorithm}",
        "secret": secret,
        "serviceAccountsEnabled": True,
        "standardFlowEnabled": False,
        "publicClient": False,
        "attributes": {"access.token.signed.response.alg": algorithm},
        "protocolMappers": [
            {
                "name": "audience",
                "protocol": "openid-connect",
                "protocolMapper": "oidc-audience-mapper",
                "config": audience,
            },
            {
                "name": "groups",
                "protocol": "openid-connect",
                "protocolMapper": "oidc-hardcoded-claim-mapper",
                "config": groups,
            },
        ],
    }


class Keycloak:
    """A server with the realm ``acme``.

    :ivar issuer: the URL of the realm.
    """

    def __init__(self, port: int, admin: str, secret: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.issuer = f"{self.url}/realms/{REALM}"
        self._admin = admin
        self._secret = secret

    def call(
        self,
        path: str,
        form: dict[str, str] | None = None,
        body: object = None,
        bearer: str | None = None,
    ) -> Any:
        data = None if form is None else urllib.parse.urlencode(form).encode()
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, headers), timeout=CALL_TIMEOUT
        ) as answer:
            found = answer.read()
        return json.loads(found) if found else None

    def token(self, algorithm: str = "RS256") -> str:
        """Return a new access token of the service account of a client."""
        form = {
            "grant_type": "client_credentials",
            "client_id": f"ci-{algorithm}",
            "client_secret": self._secret,
        }
        return str(
            self.call(f"/realms/{REALM}/protocol/openid-connect/token", form)["access_token"]
        )

    def published(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call(f"/realms/{REALM}/protocol/openid-connect/certs")[
            "keys"
        ]
        return found

    def rotate(self) -> None:
        """Let a new RSA key sign from now on."""
        form = {
            "grant_type": "password",
            "client_id": "admin-cli",
            "username": "admin",
            "password": self._admin,
        }
        bearer = self.call("/realms/master/protocol/openid-connect/token", form)["access_token"]
        realm = self.call(f"/admin/realms/{REALM}", bearer=bearer)["id"]
        provider = {
            "name": "new",
            "providerId": "rsa-generated",
            "providerType": "org.keycloak.keys.KeyProvider",
            "parentId": realm,
            "config": {"priority": ["500"]},
        }
        self.call(f"/admin/realms/{REALM}/components", body=provider, bearer=bearer)


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[Keycloak]:
    """Run a server with an empty database, and stop it."""
    shutil.unpack_archive(distribution(), directory)
    home = directory / f"keycloak-{VERSION}"
    admin, secret, port = secrets.token_urlsafe(16), secrets.token_urlsafe(16), ports.reserve()
    realm = {
        "realm": REALM,
        "enabled": True,
        "sslRequired": "none",
        "clients": [_client(name, secret) for name in ALGORITHMS],
    }
    (home / "data" / "import").mkdir(parents=True)
    (home / "data" / "import" / "realm.json").write_text(json.dumps(realm))
    (home / "bin" / "kc.sh").chmod(0o755)
    environment = {
        **os.environ,
        "KC_BOOTSTRAP_ADMIN_USERNAME": "admin",
        "KC_BOOTSTRAP_ADMIN_PASSWORD": admin,
        "JAVA_OPTS_APPEND": "-Xmx700m",
    }
    command = [
        home / "bin" / "kc.sh",
        "start-dev",
        "--import-realm",
        "--db=dev-mem",
        "--http-host=127.0.0.1",
        f"--http-port={port}",
        "--cache=local",
    ]
    with open(directory / "keycloak.log", "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        server, deadline = Keycloak(port, admin, secret), time.monotonic() + limit(START_TIMEOUT)
        while True:
            try:
                server.published()
                break
            except OSError:
                log = (directory / "keycloak.log").read_text(errors="replace")
                assert process.poll() is None and time.monotonic() < deadline, log[-3000:]
                time.sleep(0.2)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT)
