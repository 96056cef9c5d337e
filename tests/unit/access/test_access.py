"""Who calls: Unix sockets, tokens, proxies."""

from __future__ import annotations

import dataclasses
import grp
import http
import os
import pwd
from typing import Any

import pytest

from nodepool.access.access import Access
from nodepool.access.identity import Denied, Identity, Role, Sender
from nodepool.config.access import AccessConfig
from nodepool.config.model import Config
from nodepool.exceptions import ConfigError

NOBODY = pwd.getpwnam("nobody")


def no_zookeeper() -> Any:
    raise AssertionError("ZooKeeper is not needed")


def identify(sender: Sender, **config: Any) -> Identity:
    section = AccessConfig(config)
    return Access(no_zookeeper, lambda: section).identify(sender)


def denied(sender: Sender, **config: Any) -> tuple[int, str]:
    with pytest.raises(Denied) as caught:
        identify(sender, **config)
    return caught.value.status, caught.value.code


def test_root_and_the_user_of_the_daemon_are_administrators() -> None:
    assert identify(Sender(uid=0)) == Identity("root", "unix:0", Role.ADMIN)
    assert identify(Sender(uid=os.geteuid()), users={"*": "read"}).role is Role.ADMIN


@pytest.mark.parametrize(
    "users, role",
    [
        ({}, Role.READ),
        ({"nobody": "operate"}, Role.OPERATE),
        ({"*": "borrow"}, Role.BORROW),
        ({"@" + grp.getgrgid(NOBODY.pw_gid).gr_name: "borrow", "*": "read"}, Role.BORROW),
        ({"nobody": "read", "@" + grp.getgrgid(NOBODY.pw_gid).gr_name: "admin"}, Role.READ),
        ({"other": "admin"}, Role.READ),
    ],
)
def test_user_of_the_socket_has_the_configured_role(users: dict[str, str], role: Role) -> None:
    found = identify(Sender(uid=NOBODY.pw_uid), users=users)
    assert (found.owner, found.via, found.role) == ("nobody", f"unix:{NOBODY.pw_uid}", role)


def test_user_without_a_name_is_known_by_number() -> None:
    assert identify(Sender(uid=4000000), users={"*": "borrow"}).owner == "uid4000000"


def test_borrowers_have_the_limits_of_the_configuration_and_operators_none() -> None:
    leases = {"max": 600, "per-owner": 3}
    borrower = identify(Sender(uid=NOBODY.pw_uid), users={"*": "borrow"}, leases=leases)
    assert (borrower.longest, borrower.per_owner) == (600, 3)
    operator = identify(Sender(uid=NOBODY.pw_uid), users={"*": "operate"}, leases=leases)
    assert (operator.longest, operator.per_owner) == (None, None)


def test_caller_over_tcp_without_a_token_is_anonymous() -> None:
    for address in ("127.0.0.1", "192.0.2.1", "", "unix"):
        assert identify(Sender(address)) == Identity("anonymous", "anonymous", Role.READ)


@pytest.mark.parametrize(
    "sender, secure",
    [
        (Sender("127.0.0.1"), True),
        (Sender("::1"), True),
        (Sender("::ffff:127.0.0.1"), True),
        (Sender("192.0.2.9"), False),
        (Sender("192.0.2.9", headers={"x-forwarded-proto": "https"}), False),
        (Sender("198.51.100.7", headers={"x-forwarded-proto": "https"}), True),
        (Sender("198.51.100.7", headers={"x-forwarded-proto": "http"}), False),
        (Sender("198.51.100.7"), False),
        (Sender("127.0.0.1", headers={"x-forwarded-for": "192.0.2.9"}), False),
        (Sender("nonsense"), False),
        (Sender("127.0.0.1", headers={"forwarded": "for=192.0.2.9"}), False),
        (Sender(), False),
    ],
)
def test_tokens_are_accepted_over_protected_connections_only(sender: Sender, secure: bool) -> None:
    sent = {**sender.headers, "authorization": "Bearer np_00000000_short"}
    found = denied(dataclasses.replace(sender, headers=sent), proxies=["198.51.100.0/28"])
    assert found == ((401, "unauthorized") if secure else (403, "insecure"))


def test_only_named_proxies_report_the_address_of_the_client() -> None:
    section = AccessConfig({"proxies": ["198.51.100.7"]})
    access = Access(no_zookeeper, lambda: section)
    forged = {"x-forwarded-for": "10.0.0.1, 203.0.113.5"}
    assert access.peer(Sender("198.51.100.7", headers=forged)).address == "203.0.113.5"
    assert access.peer(Sender("198.51.100.8", headers=forged)).address == "198.51.100.8"
    assert (
        access.peer(Sender("198.51.100.7", headers={"x-forwarded-for": "<script>"})).address
        == "198.51.100.7"
    )


@pytest.mark.parametrize(
    "header",
    ["Basic YTpi", "np_x", "Bearer", "Bearer é", "Bearer a.b.c", "Bearer np_zzzzzzzz_" + "x" * 43],
)
def test_other_credentials_are_refused(header: str) -> None:
    assert denied(Sender("127.0.0.1", headers={"authorization": header})) == (
        http.HTTPStatus.UNAUTHORIZED,
        "unauthorized",
    )


@pytest.mark.parametrize(
    "patterns, label, allowed",
    [
        ((), "any", True),
        (("small-*",), "small-1", True),
        (("small-*",), "big-1", False),
        (("a", "b*"), "bc", True),
        (("small",), "Small", False),
    ],
)
def test_patterns_of_labels(patterns: tuple[str, ...], label: str, allowed: bool) -> None:
    assert Identity("a", "token:1", Role.BORROW, labels=patterns).offers(label) is allowed


@pytest.mark.parametrize(
    "section, place",
    [
        ({"users": {"alice": "root"}}, ("access", "users", "alice")),
        ({"proxies": ["pool.example.org"]}, ("access", "proxies", 0)),
        ({"leases": {"max": 10}}, ("access", "leases", "max")),
        ({"leases": {"max": True}}, ("access", "leases", "max")),
        ({"oidc": [{"name": "a"}]}, ("access", "oidc", 0)),
        ({"unknown": 1}, ("access", "unknown")),
        ([], ("access",)),
        (
            {"oidc": [{"name": "a:b", "issuer": "https://x", "audience": "y", "rules": []}]},
            ("access", "oidc", 0, "name"),
        ),
        (
            {"oidc": [{"name": "a", "issuer": "http://x", "audience": "y", "rules": []}]},
            ("access", "oidc", 0, "issuer"),
        ),
        (
            {
                "oidc": [
                    {
                        "name": "a",
                        "issuer": "https://x",
                        "audience": "y",
                        "rules": [{"match": {}, "role": "borrow", "owner": "o"}],
                    }
                ]
            },
            ("access", "oidc", 0, "rules", 0, "match"),
        ),
    ],
)
def test_invalid_options_are_named(section: Any, place: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().apply({"access": section})
    assert caught.value.where[: len(place)] == place
