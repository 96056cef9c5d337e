"""The hosts of a provider: placement, announcements, and the launches that wait (NM-C.8)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any

from nodepool import exceptions
from nodepool.driver.nodemanager.config import (
    NodeManagerHost,
    NodeManagerLabel,
    NodeManagerProviderConfig,
)
from nodepool.driver.nodemanager.events import EventReader
from nodepool.driver.nodemanager.host import MARGIN, WAIT, ManagedHost
from nodepool.driver.nodemanager.sizes import needed_by, too_large
from nodepool.driver.utils import RateLimiter
from nodepool.nodemanager.client.rpc import RpcError
from nodepool.zk.drains import Drain, shown
from nodepool.zk.mirror.feed import Feed


class Hosts:
    """All hosts of a provider, configured or announced, and the launches that wait for one."""

    def __init__(self, provider: NodeManagerProviderConfig, log: logging.Logger) -> None:
        self.provider = provider
        self._log = log
        self._limiter = RateLimiter(provider.name, provider.rate)
        self._lock = threading.Lock()
        self._waiting: set[Callable[[], None]] = set()
        #: Returns the drain of a host; set once ZooKeeper is known.
        self.drain_of: Callable[[str], Drain | None] = lambda _name: None
        self._feed: Feed | None = None
        self._hosts = {name: self._make(options) for name, options in provider.hosts.items()}

    def _make(self, options: NodeManagerHost) -> ManagedHost:
        host = ManagedHost(options, self._limiter, self._log, self.wake_waiting)
        self._follow(host)
        return host

    def _follow(self, host: ManagedHost) -> None:
        if self._feed is not None:
            host.events = EventReader(
                host.name,
                # Not within the rate of launches: the reader pauses between its calls.
                lambda *arguments, timeout: host.client.call(*arguments, timeout=timeout),
                self.provider.name,
                self._feed,
                self._log,
            )

    def start(self, timeout: float, feed: Feed | None = None) -> None:
        """Poll all hosts; wait until each has answered or failed, for at most `timeout` seconds.

        :param feed: notes the events of the hosts.
        """
        self._feed = feed
        for host in self.all():
            self._follow(host)
        wait([query for host in self.all() if (query := host.refresh()) is not None], timeout)

    def stop(self) -> None:
        for host in list(self._hosts.values()):
            host.stop()

    def all(self) -> list[ManagedHost]:
        """Return the hosts that are not known to have left."""
        return [host for host in list(self._hosts.values()) if not host.gone]

    def get(self, name: str) -> ManagedHost | None:
        return self._hosts.get(name)

    @property
    def any_known(self) -> bool:
        return bool(self._hosts)

    def capacities(self) -> list[dict[str, Any]]:
        """Return the last known capacities, including those of briefly silent hosts."""
        return [capacity for host in self.all() if (capacity := host.capacity) is not None]

    def limits(self) -> list[dict[str, Any]]:
        """Return the capacities; of a drained host, what its slivers use."""
        return [
            {**capacity, **capacity["allocated"]} if self.drain_of(host.name) else capacity
            for host in self.all()
            if (capacity := host.capacity) is not None
        ]

    # -- announcements; on the connection thread

    def announced(self, options: NodeManagerHost) -> None:
        if options.name in self.provider.hosts:
            return
        host = self._hosts.get(options.name)
        if host is None:
            self._log.info("Host %s has announced itself: %s", options.name, options.url)
            host = self._hosts[options.name] = self._make(options)
            host.refresh()
        else:
            host.update(options)

    def remove(self, name: str) -> None:
        """Remove a host that is not ours any more."""
        host = self._hosts.pop(name, None)
        if host is not None:
            host.gone = True
            host.stop()

    def vanished(self, name: str) -> None:
        host = self._hosts.get(name)
        if host is None or name in self.provider.hosts or host.gone:
            return
        self._log.warning(
            "Host %s is not announced any more; it gets no new slivers, the others end with their "
            "leases",
            name,
        )
        host.problem = f"{name}: it is not announced any more"
        host.gone = True
        self.wake_waiting()

    # -- launches

    def choose(
        self, label: NodeManagerLabel, image: str, az: str | None, without: Collection[str]
    ) -> ManagedHost | None:
        """Return the best host that answers, by its last known state.

        A host without enough capacity, or without the image, is the last choice.
        """
        found = []
        kind, _, what = image.partition(":")
        for host in self.all():
            capacity = host.capacity
            if (
                capacity is None
                or not host.usable
                or self.drain_of(host.name) is not None
                or host.name in without
                or (az is not None and host.group != az)
            ):
                continue
            free = host.free()
            fits = needed_by(label, capacity).fits_in(free) and (
                kind != "image" or what in capacity.get("images", ())
            )
            room = free.cpu + free.slivers / 1e6
            found.append(
                (
                    not fits,
                    host.avoided,
                    -room if self.provider.placement == "spread" else room,
                    host.name,
                    host,
                )
            )
        return min(found, key=lambda entry: entry[:-1])[-1] if found else None

    def never_fits(self, label: NodeManagerLabel, az: str | None) -> str | None:
        """Return why no host could ever run a sliver of this label; None when one could."""
        reasons = []
        for host in self.all():
            capacity = host.capacity
            if capacity is None:
                return None
            if az is not None and host.group != az:
                continue
            reason = too_large(label, f"{host.name} has", capacity)
            if reason is None:
                return None
            reasons.append(reason)
        return f"label {label.name} is too large for every host: {'; '.join(reasons)}"

    def wake_on_change(self, wake: Callable[[], None]) -> None:
        """Call this once, from any thread, when a host can be used or has failed."""
        with self._lock:
            self._waiting.add(wake)

    def wake_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for wake in waiting:
            wake()

    def problems(self) -> str:
        drains = [drain for host in self.all() if (drain := self.drain_of(host.name)) is not None]
        return "; ".join(
            [
                *(host.problem for host in list(self._hosts.values()) if host.problem),
                *map(shown, drains),
            ]
        )

    def delete(self, host_name: str, sliver: str) -> Future[bool]:
        """Delete a sliver; the result is True when it is deleted.

        :raises NotFound: the host is not ours any more.
        :raises RpcError: the host is not available at present.
        """
        host = self.get(host_name)
        if host is None and not self.provider.discover:
            self._log.warning(
                "Host %s is not in provider %s any more; sliver %s ends with its lease",
                host_name,
                self.provider.name,
                sliver,
            )
            raise exceptions.NotFound
        if host is None or host.gone:
            raise RpcError(f"host {host_name} is not announced")

        def delete() -> bool:
            host.delete(sliver)
            try:
                answer: dict[str, Any] = host.call(
                    "WaitSliver", sliver, "gone", WAIT, timeout=WAIT + MARGIN
                )
            finally:
                host.forget()
            return answer.get("state") == "absent"

        return host.run(delete, wait=True)
