"""Job tokens, signed by test keys that a real HTTP server publishes."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import pathlib
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from nodepool.access import oidc
from nodepool.access.identity import Denied, Role
from nodepool.config.access import Issuer, protected
from tests.conftest import wait_for
from tests.support.authority import Authority
from tests.support.clock import HandClock
from tests.support.deadline import limit
from tests.support.job_tokens import Verifiers, patient

#: Claims as the four systems send them (names and types of their documentation).
GITHUB = {
    "sub": "repo:acme/site:ref:refs/heads/main",
    "repository": "acme/site",
    "repository_id": "74",
    "repository_owner": "acme",
    "repository_owner_id": "65",
    "ref": "refs/heads/main",
    "ref_type": "branch",
    "run_id": "5",
    "environment": "prod",
    "job_workflow_ref": "acme/site/.github/workflows/ci.yml@refs/heads/main",
}
GITLAB = {
    "sub": "project_path:acme/site:ref_type:branch:ref:main",
    "project_id": "22",
    "project_path": "acme/site",
    "ref": "main",
    "ref_type": "branch",
    "ref_protected": "true",
    "pipeline_source": "push",
    "job_id": "302",
    "namespace_path": "acme",
}
FORGEJO = {
    "sub": "repo:acme/site:ref:refs/heads/main",
    "repository": "acme/site",
    "repository_owner": "acme",
    "ref": "refs/heads/main",
}
KEYCLOAK = {
    "sub": "d41d8cd9",
    "azp": "ci",
    "preferred_username": "service-account-ci",
    "groups": ["builders", "all"],
    "email_verified": True,
}


@functools.cache
def rsa_key() -> Any:
    return rsa.generate_private_key(65537, 2048)


class IssuerServer(http.server.ThreadingHTTPServer):
    """Publishes the keys of an issuer."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.keys = {"one": rsa_key(), "two": ec.generate_private_key(ec.SECP256R1())}
        self.pause, self.garbage, self.status = 0.0, False, 200
        self.credentials: set[str | None] = set()
        self.hang = threading.Event()
        self.hang.set()
        self.override: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def document(self, path: str) -> Any:
        if path.endswith("/openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.override}
        keys = []
        for kid, key in self.keys.items():
            algorithm = (
                jwt.algorithms.RSAAlgorithm
                if isinstance(key, rsa.RSAPrivateKey)
                else jwt.algorithms.ECAlgorithm
            )
            keys.append(
                {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}
            )
        return {"keys": [*keys, {"kty": "future", "kid": "three"}, {"no": "kid"}]}


class Handler(http.server.BaseHTTPRequestHandler):
    server: IssuerServer

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.server.credentials.add(self.headers["Authorization"])
        self.server.hang.wait(20)
        data = json.dumps(self.server.document(self.path)).encode()
        if self.server.garbage:
            self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            return
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.server.pause:
            self.wfile.write(data)
            return
        with contextlib.suppress(OSError):
            for byte in data:
                self.wfile.write(bytes((byte,)))
                time.sleep(self.server.pause)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[IssuerServer]:
    with IssuerServer() as found:
        thread = threading.Thread(target=found.serve_forever, name="issuer")
        thread.start()
        yield found
        found.hang.set()
        found.shutdown()
        thread.join()


def issuer(server: IssuerServer, *rules: dict[str, Any]) -> Issuer:
    given = rules or ({"match": {"sub": "*"}, "role": "borrow", "owner": "{sub}"},)
    return Issuer(
        {"name": "ci", "issuer": server.url, "audience": "nodepool", "rules": list(given)}
    )


def token(
    server: IssuerServer,
    claims: dict[str, Any] | None = None,
    kid: str = "one",
    key: Any = None,
    **more: Any,
) -> str:
    now = time.time()
    content = {
        "iss": server.url,
        "aud": "nodepool",
        "exp": now + 300,
        "iat": now,
        "nbf": now,
        **(claims or GITHUB),
        **more,
    }
    key = key or server.keys[kid]
    algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    return jwt.encode(content, key, algorithm, headers={"kid": kid})


def refused(verifiers: Verifiers, text: str) -> tuple[int, str]:
    with pytest.raises(Denied) as caught:
        verifiers.identify(text)
    return int(caught.value.status), str(caught.value)


@pytest.mark.parametrize(
    "claims, match, owner",
    [
        (GITHUB, {"repository_owner_id": "65", "ref": "refs/heads/main"}, "{repository}"),
        (
            GITHUB,
            {"job_workflow_ref": "acme/site/.github/workflows/*@refs/heads/main"},
            "{repository}",
        ),
        (GITLAB, {"project_path": "acme/*", "ref_protected": "true"}, "{project_path}"),
        (FORGEJO, {"repository": "acme/site"}, "{repository}"),
    ],
)
def test_job_is_identified_by_its_claims(
    server: IssuerServer, claims: dict[str, Any], match: dict[str, str], owner: str
) -> None:
    rule = {
        "match": match,
        "role": "borrow",
        "owner": owner,
        "tenant": "acme",
        "labels": ["small"],
        "max": 7200,
    }
    found = Verifiers([issuer(server, rule)]).identify(token(server, claims))
    assert (found.owner, found.via, found.role, found.tenant) == (
        "ci:acme/site",
        "oidc:ci",
        Role.BORROW,
        "acme",
    )
    assert (found.labels, found.longest) == (("small",), 7200)


def test_claim_with_several_values_matches_any_of_them(server: IssuerServer) -> None:
    rule = {
        "match": {"groups": "builders", "email_verified": True},
        "role": "operate",
        "owner": "{preferred_username}",
    }
    found = Verifiers([issuer(server, rule)]).identify(token(server, KEYCLOAK, "two"))
    assert (found.owner, found.role) == ("ci:service-account-ci", Role.OPERATE)


@pytest.mark.parametrize(
    "match",
    [
        {"repository": "acme"},
        {"repository": "acme/?ite"},
        {"repository": "[a]cme/site"},
        {"repository": "ACME/site"},
        {"unknown": "*"},
        {"repository": "acme/site", "ref": "refs/heads/other"},
    ],
)
def test_job_without_a_matching_rule_is_refused(
    server: IssuerServer, match: dict[str, str]
) -> None:
    rule = {"match": match, "role": "borrow", "owner": "x"}
    status, text = refused(Verifiers([issuer(server, rule)]), token(server))
    assert status == 403 and "No rule of issuer ci" in text


def test_first_matching_rule_decides(server: IssuerServer) -> None:
    rules = [
        {"match": {"ref": "refs/heads/*"}, "role": "read", "owner": "a"},
        {"match": {"sub": "*"}, "role": "admin", "owner": "b"},
    ]
    assert Verifiers([issuer(server, *rules)]).identify(token(server)).role is Role.READ


def test_owner_that_is_too_long_is_refused_and_not_cut(server: IssuerServer) -> None:
    rule = {"match": {"sub": "*"}, "role": "borrow", "owner": "{sub}"}
    verifiers = Verifiers([issuer(server, rule)])
    assert len(verifiers.identify(token(server, {"sub": "x" * 252})).owner) == 255
    assert refused(verifiers, token(server, {"sub": "x" * 253}))[0] == 401


def test_rule_whose_owner_needs_a_missing_claim_does_not_match(server: IssuerServer) -> None:
    rule = {"match": {"sub": "*"}, "role": "borrow", "owner": "{nothing}"}
    assert refused(Verifiers([issuer(server, rule)]), token(server))[0] == 403


@pytest.mark.parametrize(
    "more",
    [
        {"aud": "other"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"exp": None},
        {"nbf": 9999999999},
        {"aud": None},
        {"exp": "soon"},
        {"iss": ["a"]},
        {"sub": "a\nb"},
    ],
)
def test_invalid_claims_are_refused(server: IssuerServer, more: dict[str, Any]) -> None:
    content = {name: value for name, value in {**GITHUB, **more}.items() if value is not None}
    now = time.time()
    claims = {"iss": server.url, "aud": "nodepool", "exp": now + 300, **content}
    for name, value in more.items():
        if value is None:
            del claims[name]
    text = jwt.api_jws.encode(
        json.dumps(claims).encode(), server.keys["one"], "RS256", {"kid": "one"}
    )
    assert refused(Verifiers([issuer(server)]), text)[0] == 401


def test_clocks_may_differ_by_a_minute(server: IssuerServer) -> None:
    verifiers, now = Verifiers([issuer(server)]), time.time()
    assert verifiers.identify(token(server, exp=now - 50, nbf=now + 50)).role is Role.BORROW
    assert refused(verifiers, token(server, exp=now - 70))[0] == 401


def test_other_algorithms_are_refused(server: IssuerServer) -> None:
    """Also the public key as the secret of HS256."""
    verifiers = Verifiers([issuer(server)])
    claims = {"iss": server.url, "aud": "nodepool", "exp": time.time() + 300, **GITHUB}
    assert refused(verifiers, jwt.encode(claims, None, "none", {"kid": "one"}))[0] == 401
    public = (
        rsa_key()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    head = base64.urlsafe_b64encode(
        json.dumps({"alg": "HS256", "typ": "JWT", "kid": "one"}).encode()
    ).rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")
    import hashlib
    import hmac

    signature = base64.urlsafe_b64encode(
        hmac.digest(public, head + b"." + body, hashlib.sha256)
    ).rstrip(b"=")
    assert refused(verifiers, b".".join((head, body, signature)).decode())[0] == 401


def test_signature_of_another_key_is_refused(server: IssuerServer) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    assert refused(Verifiers([issuer(server)]), token(server, kid="one", key=other))[0] == 401


@pytest.mark.parametrize("text", ["a.b.c", "..", "e30.e30.e30", "x" * 5000 + ".a.b"])
def test_texts_that_are_no_jwt_are_refused(server: IssuerServer, text: str) -> None:
    assert refused(Verifiers([issuer(server)]), text)[0] == 401
    assert server.requests == []


def test_token_that_names_no_key_is_refused(server: IssuerServer) -> None:
    claims = {"iss": server.url, "aud": "nodepool", "exp": time.time() + 300, **GITHUB}
    text = jwt.encode(claims, server.keys["one"], "RS256")
    status, said = refused(Verifiers([issuer(server)]), text)
    assert status == 401 and "the token names no key" in said
    assert server.requests == []


def test_unknown_keys_let_the_keys_be_read_once_a_minute(server: IssuerServer) -> None:
    clock = HandClock()
    verifiers = Verifiers([issuer(server)], clock)
    verifiers.identify(token(server))
    new = rsa.generate_private_key(65537, 2048)
    for _ in range(5):
        assert refused(verifiers, token(server, kid="new", key=new))[0] == 401
    assert server.requests.count("/keys") == 1
    server.keys["new"] = new
    clock.now += 61
    assert verifiers.identify(token(server, kid="new", key=new)).role is Role.BORROW
    assert server.requests.count("/keys") == 2


def test_keys_are_read_again_after_an_hour(server: IssuerServer) -> None:
    clock = HandClock()
    verifiers = Verifiers([issuer(server)], clock)
    verifiers.identify(token(server))
    clock.now += 3599
    verifiers.identify(token(server))
    clock.now += 2
    del server.keys["one"]
    verifiers.identify(token(server, kid="one", key=rsa_key()))  # this call lets them be read
    wait_for(lambda: server.requests.count("/keys") == 2, what="the keys")
    refused(verifiers, token(server, kid="unknown", key=rsa_key()))  # they have been read
    assert refused(verifiers, token(server, kid="one", key=rsa_key()))[0] == 401


def test_issuer_that_hangs_holds_up_no_call(server: IssuerServer) -> None:
    server.hang.clear()
    verifiers, text = oidc.Verifiers([issuer(server)]), token(server)
    for kid in ("one", "invented", "one"):
        with pytest.raises(Denied) as caught:
            verifiers.identify(token(server, kid=kid, key=rsa_key()))
        assert (caught.value.status, caught.value.code) == (
            503,
            "busy",
        ) and "are being read; try again" in str(caught.value)
    assert len(server.requests) <= 1
    server.hang.set()
    wait_for(lambda: server.requests.count("/keys") == 1, what="the keys")
    assert patient(verifiers, text).role is Role.BORROW


@pytest.mark.parametrize(
    "override",
    [
        {"issuer": "https://evil.example"},
        {"jwks_uri": "http://192.0.2.1/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "https:/keys"},
        {"jwks_uri": 5},
        {"jwks_uri": None},
        {"issuer": None},
    ],
)
def test_configuration_of_another_issuer_and_unprotected_keys_are_refused(
    server: IssuerServer, override: dict[str, str]
) -> None:
    server.override = override
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost.evil.example/keys",
        "http://127.0.0.1.evil.example/keys",
        "http://localhost@evil.example/keys",
        "http://evil.example/http://localhost",
        "https:///keys",
        "file:///keys",
        "",
    ],
)
def test_names_that_begin_like_this_machine_are_not_this_machine(url: str) -> None:
    assert not protected(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example.com",
        "http://localhost:8080/realms/a",
        "http://127.0.0.1/",
        "http://[::1]:1/",
    ],
)
def test_keys_are_read_by_https_or_from_this_machine(url: str) -> None:
    assert protected(url)


@pytest.mark.parametrize("status", [200, 302])
def test_issuer_that_sends_its_answer_byte_by_byte_is_given_up_at_the_deadline(
    server: IssuerServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(oidc, "TIMEOUT", 0.2)
    server.pause, server.status = 0.05, status
    began = time.monotonic()
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401
    assert time.monotonic() - began < limit(2.0) and server.requests == [
        "/.well-known/openid-configuration"
    ]


def test_issuer_that_does_not_speak_http_is_refused(server: IssuerServer) -> None:
    server.garbage = True
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401


def test_issuer_that_sends_too_much_is_refused(
    server: IssuerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "MOST_BYTES", 20)
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401
    assert server.requests == ["/.well-known/openid-configuration"]


def test_issuer_that_redirects_is_refused(server: IssuerServer) -> None:
    server.status = 302
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401
    assert server.requests == ["/.well-known/openid-configuration"]


def test_issuer_gets_no_password_of_this_user(
    server: IssuerServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret")
    monkeypatch.setenv("NETRC", str(netrc))
    Verifiers([issuer(server)]).identify(token(server))
    assert server.credentials == {None}


def test_certificate_of_an_authority_of_the_system_is_accepted(
    server: IssuerServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("issuer", "IP:127.0.0.1"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = server.url.replace("http:", "https:")
    assert refused(Verifiers([issuer(server)]), token(server))[0] == 401
    monkeypatch.setenv("SSL_CERT_FILE", authority.cert)
    assert Verifiers([issuer(server)]).identify(token(server)).via == "oidc:ci"


def test_job_with_a_known_key_is_accepted_while_an_unknown_key_is_looked_up(
    server: IssuerServer,
) -> None:
    clock = HandClock()
    verifiers, text = oidc.Verifiers([issuer(server)], clock), token(server)
    patient(verifiers, text)
    clock.now += 61
    server.hang.clear()
    with pytest.raises(Denied) as caught:
        verifiers.identify(token(server, kid="new", key=rsa_key()))
    assert caught.value.code == "busy"
    assert verifiers.identify(text).role is Role.BORROW
