"""Who may see the pages and ``/api/v1``: this machine, unless the configuration says otherwise (``webapp``: ``pages``)."""

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
    """:raises HttpError: this client may not (403), this method is none (405), or there are no pages (404)."""
    if pages == OFF:
        raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found; the pages are switched off (webapp: pages)")
    if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
        raise HttpError(http.HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD")
    if pages == EVERYWHERE:
        return
    # A page of elsewhere whose name is made to mean this machine must not read it through the browser: so the name counts, too.
    if not _is_loopback(str(environ.get("REMOTE_ADDR") or "")) or not _names_us(str(environ.get("HTTP_HOST") or "")):
        raise HttpError(
            http.HTTPStatus.FORBIDDEN, "The pages are for this machine only; set pages: everywhere in webapp to change that"
        )


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _names_us(host: str) -> bool:
    """Of the header Host: an address, localhost, or the name of this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", hostnames.short().lower()) or name == hostnames.fqdn().lower()
    return True
