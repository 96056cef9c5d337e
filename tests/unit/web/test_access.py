"""Who may see the pages, and make calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nodepool.access.identity import Identity, Role
from nodepool.config.model import WEB_PAGES, Config
from nodepool.exceptions import ConfigurationError
from nodepool.web import access
from nodepool.web.actions.actions import _check_role
from nodepool.web.actions.routes import Refused, Route
from nodepool.web.http import HttpError, Request


@pytest.mark.parametrize(
    "address, host, allowed",
    [
        ("127.0.0.1", "localhost:8005", True),
        ("127.9.9.9", "127.0.0.1:8005", True),
        ("::1", "[::1]:8005", True),
        ("::ffff:127.0.0.1", "LOCALHOST", True),
        ("::1", "[::1]", True),
        ("127.0.0.1", "", True),
        ("10.0.0.1", "localhost", False),
        ("::ffff:10.0.0.1", "localhost", False),
        ("", "localhost", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "evil.example:8005", False),
    ],
)
def test_loopback_pages_are_only_for_this_machine(address: str, host: str, allowed: bool) -> None:
    request = Request(address=address, headers={"host": host})
    if allowed:
        access.check("loopback", request)
    else:
        with pytest.raises(HttpError, match="this machine only"):
            access.check("loopback", request)
    access.check("everywhere", request)
    with pytest.raises(HttpError, match="disabled"):
        access.check("off", request)


def test_pages_option_is_checked() -> None:
    config = Config()
    for value in WEB_PAGES:
        config.setWebApp({"pages": value})
        assert config.web_pages == value
    config.setWebApp({"pages": False})  # a bare off, in YAML
    assert config.web_pages == "off"
    config.setWebApp(None)
    assert Config().web_pages == "loopback"
    with pytest.raises(ConfigurationError, match="loopback, everywhere, off"):
        config.setWebApp({"pages": "all"})


def test_lease_token_makes_calls_for_this_lease_only() -> None:
    function: Any = None
    # The id of a lease is that of its request.
    delete = Route("DELETE", "/requests/{id}", function, "Delete a request", Role.OPERATE, {})
    renew = dataclasses.replace(delete, path="/leases/{id}/renew", of_lease=True)
    holder = Identity("alice", "lease:200-1", Role.BORROW, lease="200-1")
    _check_role(holder, renew, {"id": "200-1"})
    for route, lease in ((delete, "200-1"), (renew, "200-2")):
        with pytest.raises(Refused, match="is for its own lease only"):
            _check_role(holder, route, {"id": lease})
