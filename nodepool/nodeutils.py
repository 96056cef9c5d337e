"""Small helpers that drivers import (DRV-10)."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from nodepool import exceptions
from nodepool.base.attributes import Attributes

log = logging.getLogger("nodepool.utils")

ITERATE_INTERVAL = 2
"""Default pause of ``iterate_timeout``, in seconds."""


def iterate_timeout(
    max_seconds: float,
    exc: Callable[[str], BaseException],
    purpose: str,
    interval: float = ITERATE_INTERVAL,
) -> Iterator[int]:
    """Yield 1, 2, ... every ``interval`` seconds.

    After ``max_seconds``, ``exc("Timeout waiting for ...")`` is raised.
    """
    deadline = time.monotonic() + max_seconds
    count = 0
    while time.monotonic() < deadline:
        count += 1
        yield count
        time.sleep(interval)
    raise exc(f"Timeout waiting for {purpose}")


def set_node_ip(node: Any) -> None:
    """Resolve ``node.hostname`` and set ``public_ipv4`` or ``public_ipv6``.

    Names containing ``fake`` are skipped. Raises LaunchNetworkException if the name has no address.
    """
    if "fake" in node.hostname:
        return
    try:
        addresses = socket.getaddrinfo(node.hostname, node.connection_port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise exceptions.LaunchNetworkException(
            f"Unable to resolve host {node.hostname}: {error}"
        ) from error
    for family, _type, _proto, _name, sockaddr in addresses:
        if family == socket.AF_INET:
            node.public_ipv4 = sockaddr[0]
            return
        if family == socket.AF_INET6:
            node.public_ipv6 = sockaddr[0]
            return
    raise exceptions.LaunchNetworkException(f"Unable to find public IP of server {node.hostname}")


def nodescan(
    ip: str, port: int = 22, timeout: float = 60, gather_hostkeys: bool = True
) -> list[str]:
    """Wait up to ``timeout`` seconds for the port to answer; return the host keys.

    Keys have the form ``"<type> <base64>"``. Without ``gather_hostkeys`` a TCP connection is
    sufficient and the list is empty. Raises ConnectionTimeoutException.
    """
    if "fake" in ip:
        return ["ssh-rsa FAKEKEY"] if gather_hostkeys else []
    # Imported here, because most drivers never scan.
    from nodepool.nodescan import scan_blocking

    return scan_blocking(ip, port, timeout, gather_hostkeys)


class Timer:
    """Context manager that logs the duration of its block at debug level."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any], msg: str) -> None:
        self.log = log
        self.msg = msg
        self.start = 0.0

    def __enter__(self) -> Timer:
        self.start = time.monotonic()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.log.debug("%s in %.3fs", self.msg, time.monotonic() - self.start)


__all__ = ["ITERATE_INTERVAL", "Attributes", "Timer", "iterate_timeout", "nodescan", "set_node_ip"]
