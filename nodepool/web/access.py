"""Access to the pages and ``/api/v1``: this machine, unless ``webapp: pages`` is set."""

from __future__ import annotations

import http
import ipaddress
from collections.abc import Mapping
from typing import Any

from nodepool.base import hostnames
from nodepool.config.model import WEB_PAGES
from nodepool.web.http import HttpError

LOOPBACK, EVERYWHERE, OFF = WEB_PAGES
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


def check(pages: str, environ: Mapping[str, Any]) -> None:
    """Check the access of a client.

    :raises HttpError: the client (403) or the method (405) is not allowed, or the pages are disabled (404).
    """
    if pages == OFF:
        raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found; the pages are disabled (webapp: pages)")
    if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
        raise HttpError(http.HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD")
    if pages == EVERYWHERE:
        return
    # A foreign page whose name resolves to this machine must not read it through the browser: so the name is checked.
    if not _is_loopback(str(environ.get("REMOTE_ADDR") or "")) or not _names_us(str(environ.get("HTTP_HOST") or "")):
        raise HttpError(
            http.HTTPStatus.FORBIDDEN,
            "The pages are available on this machine only; to change that, set webapp: pages: everywhere",
        )


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
        return name in ("", "localhost", hostnames.short().lower()) or name == hostnames.fqdn().lower()
    return True
