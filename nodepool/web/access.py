"""Access to the pages and ``/api/v1``: this machine, unless ``webapp: pages`` is set."""

from __future__ import annotations

import dataclasses
import http
import ipaddress

from nodepool.access.access import Access
from nodepool.access.identity import Identity, Role
from nodepool.base import hostnames
from nodepool.config.model import WEB_PAGES
from nodepool.web.http import HttpError, Request

LOOPBACK, EVERYWHERE, OFF = WEB_PAGES
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
        "'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class Callers:
    """Knows who sends a request, and who may see the pages, tables and events.

    :param pages: ``webapp: pages``, for senders without a name.
    :param access: identifies senders; None: nobody has a name.
    """

    def __init__(self, pages: str, access: Access | None = None) -> None:
        self._pages = pages
        self._access = access

    def address(self, request: Request) -> str:
        """Return the address of the client, as reported by a named proxy if there is one."""
        return request.address if self._access is None else self._access.peer(request).address

    def identify(self, request: Request) -> Identity:
        """Return who calls.

        :raises Denied: the token is not valid.
        :raises HttpError: nobody may see anything over this connection.
        """
        assert self._access is not None
        identity = self._access.identify(request)
        if identity.role is Role.READ and identity.via == "anonymous":
            check(
                self._pages,
                dataclasses.replace(request, address=self.address(request), method="GET"),
            )
        return identity

    def check_reader(self, request: Request) -> Identity:
        """Return a client that may see pages, tables and events; its owner may be its address.

        :raises Denied: its token is not valid.
        :raises HttpError: it may not.
        """
        if self._access is None or (request.uid is None and "authorization" not in request.headers):
            address = self.address(request)
            check(self._pages, dataclasses.replace(request, address=address))
            return Identity(address, "anonymous", Role.READ)
        identity = self.identify(request)
        if identity.lease is not None:
            raise HttpError(
                http.HTTPStatus.FORBIDDEN, "The token of a lease is for its own lease only"
            )
        check(EVERYWHERE, request)
        return identity


def check(pages: str, request: Request) -> None:
    """Check the access of a client without a name.

    :raises HttpError: the client (403) or the method (405) is not allowed, or the pages are
        disabled (404).
    """
    if pages == OFF:
        text = "Not found; the pages are disabled (webapp: pages)"
        raise HttpError(http.HTTPStatus.NOT_FOUND, text, "not-allowed")
    if request.method not in ("GET", "HEAD"):
        allowed = (("Allow", "GET, HEAD"),)
        raise HttpError(http.HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD", headers=allowed)
    if pages == EVERYWHERE:
        return
    # A foreign page whose name resolves to this machine must not read it through the browser: so
    # the name is checked.
    if not _is_loopback(request.address) or not _names_us(request.headers.get("host", "")):
        text = (
            "The pages are available on this machine only; to change that, set webapp: pages: "
            "everywhere"
        )
        raise HttpError(http.HTTPStatus.FORBIDDEN, text, "not-allowed")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _names_us(host: str) -> bool:
    """Return whether the Host header is an address, localhost, or the name of this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return (
            name in ("", "localhost", hostnames.short().lower()) or name == hostnames.fqdn().lower()
        )
    return True
