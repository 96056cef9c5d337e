"""The hosts of a provider: calls with a common rate, lists kept for a second, placement (nodemanager.md C.8)."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from nodepool.driver.utils import RateLimiter
from nodepool.nodemanager.rpc_client import Client, RpcError, RpcFault, Tls

#: Seconds that a list of slivers, and a capacity, are good for.
LIST_TTL, CAPACITY_TTL = 1.0, 10.0
#: Seconds that a host which did not answer is left out of placement.
PENALTY = 10.0


class HostError(Exception):
    """A host cannot be used now; the text names it."""


class ManagedHost:
    """One node manager."""

    def __init__(self, options: Any, limiter: RateLimiter, log: logging.Logger) -> None:
        self.name = options.name
        self.ssh_address: str | None = options.ssh_address
        self._group = options.group
        self._log = log
        self._limiter = limiter
        tls = Tls(options.ca_cert, options.client_cert, options.client_key) if options.ca_cert else None
        self.client = Client(options.url, tls)
        self._lock = threading.Lock()
        self._slivers: tuple[float, list[dict[str, Any]]] | None = None
        self._capacity: tuple[float, dict[str, Any]] | None = None
        self.problem = ""
        self._bad_until = 0.0

    def call(self, method: str, *arguments: Any, timeout: float = 30.0) -> Any:
        """A call within the provider's rate.

        :raises RpcFault: refused.
        :raises RpcError: no answer.
        """
        with self._limiter(self._log.debug, f"{self.name}: {method}"):
            pass
        return self.client.call(method, *arguments, timeout=timeout)

    def failed(self, error: Exception) -> None:
        self.problem = f"{self.name}: {error}"
        self._bad_until = time.monotonic() + PENALTY

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._bad_until

    def slivers(self) -> list[dict[str, Any]]:
        """All of the host, at most a second old."""
        with self._lock:
            if self._slivers is not None and time.monotonic() - self._slivers[0] < LIST_TTL:
                return self._slivers[1]
            found: list[dict[str, Any]] = self.call("ListSlivers")
            self._slivers = time.monotonic(), found
            return found

    def forget(self) -> None:
        """Something has changed."""
        self._slivers = self._capacity = None

    def capacity(self) -> dict[str, Any] | None:
        """None when the host does not answer."""
        known = self._capacity
        if known is not None and time.monotonic() - known[0] < CAPACITY_TTL:
            return known[1]
        if not self.usable:
            return known[1] if known is not None else None
        try:
            found: dict[str, Any] = self.call("GetCapacity", timeout=5)
        except (RpcError, RpcFault) as error:
            self.failed(error)
            self._log.warning("Host %s cannot be asked for its capacity: %s", self.name, error)
            return None
        self.problem = ""
        self._capacity = time.monotonic(), found
        return found

    @property
    def cores(self) -> int:
        found = self.capacity()
        return int(found["cores"]) if found else 1

    @property
    def group(self) -> str | None:
        if self._group:
            return str(self._group)
        found = self.capacity()
        return (found or {}).get("group") or None

    def free_share(self) -> float:
        """Per mille of guaranteed CPU that is free, and a little for free places."""
        found = self.capacity()
        if found is None:
            return -1.0
        given = found["allocated"]
        return float(found["cpu"] - given["cpu"]) + (found["slivers"] - given["slivers"]) / 1e6


class Hosts:
    """All hosts of a provider."""

    def __init__(self, config: Any, log: logging.Logger) -> None:
        limiter = RateLimiter(config.name, config.rate)
        self._hosts = {name: ManagedHost(options, limiter, log) for name, options in config.hosts.items()}

    def all(self) -> list[ManagedHost]:
        return list(self._hosts.values())

    def get(self, name: str) -> ManagedHost | None:
        return self._hosts.get(name)

    def candidates(self, az: str | None, placement: str) -> list[ManagedHost]:
        """Hosts that answer, best first: most room (spread) or least (pack)."""
        found = [(host.free_share(), host) for host in self.all() if host.usable and (az is None or host.group == az)]
        found = [(free, host) for free, host in found if free >= 0]
        return [host for _, host in sorted(found, key=lambda item: item[0], reverse=placement == "spread")]

    def problems(self) -> str:
        return "; ".join(host.problem for host in self.all() if host.problem)
