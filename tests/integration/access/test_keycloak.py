"""Job tokens of a real Keycloak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jwt
import pytest

from nodepool.access.identity import Denied, Role
from nodepool.config.access import Issuer
from tests.support import keycloak
from tests.support.clock import HandClock
from tests.support.job_tokens import Verifiers
from tests.support.keycloak import Keycloak

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]
RULE = {
    "match": {"pool_groups": "builders"},
    "role": "borrow",
    "owner": "{azp}",
    "labels": ["small-*"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keycloak]:
    with keycloak.running(tmp_path_factory.mktemp("keycloak")) as found:
        yield found


def issuer(server: Keycloak, **changes: Any) -> Issuer:
    return Issuer(
        {
            "name": "keycloak",
            "issuer": server.issuer,
            "audience": "nodepool",
            "rules": [RULE],
            **changes,
        }
    )


def status(verifiers: Verifiers, token: str) -> int:
    with pytest.raises(Denied) as caught:
        verifiers.identify(token)
    return int(caught.value.status)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_service_account_is_identified_by_its_claims(server: Keycloak, algorithm: str) -> None:
    found = Verifiers([issuer(server)]).identify(server.token(algorithm))
    assert (found.owner, found.via, found.role) == (
        f"keycloak:ci-{algorithm}",
        "oidc:keycloak",
        Role.BORROW,
    )
    assert found.labels == ("small-*",)


@pytest.mark.parametrize("algorithm", ["PS256", "EdDSA"])
def test_token_signed_with_another_algorithm_is_refused(server: Keycloak, algorithm: str) -> None:
    token = server.token(algorithm)
    assert jwt.get_unverified_header(token)["alg"] == algorithm
    assert status(Verifiers([issuer(server)]), token) == 401


def test_token_for_another_audience_is_refused(server: Keycloak) -> None:
    assert status(Verifiers([issuer(server, audience="other")]), server.token()) == 401


def test_token_of_another_realm_is_refused(server: Keycloak) -> None:
    other = issuer(server, issuer=f"{server.url}/realms/master")
    assert status(Verifiers([other]), server.token()) == 401


def test_service_account_without_a_matching_rule_is_refused(server: Keycloak) -> None:
    assert (
        status(
            Verifiers([issuer(server, rules=[{**RULE, "match": {"pool_groups": "build"}}])]),
            server.token(),
        )
        == 403
    )


def test_changed_token_is_refused(server: Keycloak) -> None:
    head, _, signature = server.token().split(".")
    other = server.token("ES256").split(".")[1]
    assert status(Verifiers([issuer(server)]), f"{head}.{other}.{signature}") == 401


def test_key_for_encryption_is_published_and_does_not_disturb(server: Keycloak) -> None:
    assert {"enc", "sig"} <= {key["use"] for key in server.published()}
    assert Verifiers([issuer(server)]).identify(server.token()).role is Role.BORROW


def test_new_key_is_accepted_after_a_minute_and_the_old_one_stays_valid(server: Keycloak) -> None:
    clock = HandClock()
    verifiers, old = Verifiers([issuer(server)], clock), server.token()
    verifiers.identify(old)
    server.rotate()
    new = server.token()
    assert jwt.get_unverified_header(new)["kid"] != jwt.get_unverified_header(old)["kid"]
    assert status(verifiers, new) == 401
    clock.now += 61
    assert verifiers.identify(new).role is verifiers.identify(old).role is Role.BORROW
