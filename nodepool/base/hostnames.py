"""Names of this host, looked up once because the resolver may be slow."""

from __future__ import annotations

import functools
import socket


@functools.cache
def fqdn() -> str:
    return socket.getfqdn()


@functools.cache
def short() -> str:
    return socket.gethostname()
