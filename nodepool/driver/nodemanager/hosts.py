"""The hosts of a provider: independent calls, cached state, placement (NM-C.8).

Decisions never wait for a host: its state is queried in the background, by separate threads per host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from nodepool.driver.nodemanager import answers
from nodepool.driver.nodemanager.config import NodeManagerHost, NodeManagerProviderConfig
from nodepool.driver.utils import RateLimiter
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault, Tls

#: Seconds for which a list of slivers, and a capacity, are valid.
LIST_TTL, CAPACITY_TTL = 1.0, 10.0
#: Seconds between two polls of a host: minimum after a change; after a failure.
LOOK_AGAIN, PROBE_AGAIN = 0.2, 2.0
#: Seconds for calls that the host answers immediately.
CALL_TIMEOUT, PROBE_TIMEOUT = 10.0, 5.0
#: Threads for each host: for short calls, and for those that wait for slivers.
CALLERS, WAITERS = 8, 16
#: Seconds for which a host with a failed launch is used only after the others.
AVOID = 30.0


class HostError(Exception):
    """A host cannot be used now; the text has its name."""


class Needs(NamedTuple):
    """Per mille of guaranteed CPU, memory in MiB, disk in KiB."""

    cpu: float
    memory: float
    disk: float


class Free(NamedTuple):
    """The free resources of a host."""

    amounts: Needs
    places: float

    def fits(self, needs: Needs) -> bool:
        return self.places >= 1 and all(has >= wanted for has, wanted in zip(self.amounts, needs, strict=True))

    def without(self, needs: Needs) -> Free:
        return Free(Needs(*(has - wanted for has, wanted in zip(self.amounts, needs, strict=True))), self.places - 1)


class ManagedHost:
    """One node manager.

    :param changed: called when it can be used (again), from any thread.
    """

    def __init__(self, options: Any, limiter: RateLimiter, log: logging.Logger, changed: Callable[[], Any]) -> None:
        self.name: str = options.name
        self.options = options
        self._log = log
        self._limiter = limiter
        self._changed = changed
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._stopped = False
        name = f"ThreadPoolExecutor-nm-{self.name}"
        self._calls = ThreadPoolExecutor(CALLERS, thread_name_prefix=f"{name}-call")
        self._waits = ThreadPoolExecutor(WAITERS, thread_name_prefix=f"{name}-wait")
        self._probes = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-probe")
        self._list: tuple[float, Future[list[dict[str, Any]]]] | None = None
        #: The last received list.
        self.slivers: list[dict[str, Any]] = []
        self._capacity: dict[str, Any] | None = None
        self._asked = -CAPACITY_TTL
        self._stale = False
        self._probing = False
        self._answers = False
        self._avoid_until = 0.0
        #: Why it cannot be used; empty when it can.
        self.problem = f"{self.name}: it has not answered yet"
        #: Not announced any more.
        self.gone = False

    # -- calls

    @property
    def client(self) -> Client:
        """Client of the host. Raises RpcError: address or certificates cannot be used."""
        with self._lock:
            if self._client is None:
                o = self.options
                try:
                    self._client = Client(o.url, Tls(o.ca_cert, o.client_cert, o.client_key) if o.ca_cert else None)
                except ValueError as error:
                    raise RpcError(str(error)) from None
                if self._stopped:
                    self._client.close()
            return self._client

    def call(self, method: str, *arguments: object, timeout: float = CALL_TIMEOUT) -> Any:
        """Make a call within the provider's rate, on the caller's thread.

        :raises RpcFault: refused.
        :raises RpcError: no answer, or a bad one.
        """
        with self._limiter(self._log.debug, f"{self.name}: {method}"):
            pass
        answer = self.client.call(method, *arguments, timeout=timeout)
        answers.check(method, arguments, answer)
        return answer

    def ask(
        self, method: str, *arguments: object, timeout: float = CALL_TIMEOUT, wait: bool = False, patient: bool = False
    ) -> Future[Any]:
        """Make a call on a thread of this host; fails immediately while it is known not to answer.

        :param wait: the call waits for something on the host.
        :param patient: call whatever is known about the host.
        """

        def run() -> Any:
            if not patient and not self.usable:
                self.look()
                raise RpcError(self.problem)
            try:
                return self.call(method, *arguments, timeout=timeout)
            except RpcError as error:
                self.failed(error)
                raise

        return self.submit(run, wait)

    def submit(self, function: Callable[[], Any], wait: bool = False) -> Future[Any]:
        """Run something on a thread of this host; fails with RpcError when the provider stops."""
        try:
            return (self._waits if wait else self._calls).submit(function)
        except RuntimeError:
            failed: Future[Any] = Future()
            failed.set_exception(RpcError(f"{self.name}: the provider is stopped"))
            return failed

    def upload(self, image: str, stream: BinaryIO, sha256: str | None, timeout: float) -> None:
        self.client.put_image(image, stream, sha256, timeout)

    def delete_image(self, image: str) -> None:
        self.client.delete_image(image, CALL_TIMEOUT)

    def stop(self) -> None:
        """Abort running calls."""
        with self._lock:
            self._stopped = True
            client = self._client
        for executor in (self._probes, self._calls, self._waits):
            executor.shutdown(wait=False, cancel_futures=True)
        if client is not None:
            client.close()

    def update(self, options: NodeManagerHost) -> None:
        """Apply a new or changed announcement."""
        came_back = self.gone
        with self._lock:
            if options != self.options:
                self.options = options
                self._client = None
            self.gone = False
        if came_back:
            self._answers = False
            self._asked = -CAPACITY_TTL
        self.forget()
        self.look()

    # -- known state

    @property
    def usable(self) -> bool:
        """Whether it has answered the last query."""
        return self._answers and not self.gone

    @property
    def asked(self) -> bool:
        """Return whether the first query has been answered or has failed."""
        return self._answers or (self._asked >= 0 and not self._probing)

    def failed(self, error: Exception) -> None:
        """Record that the host did not answer; it is skipped until it does."""
        if self._answers and not self._stopped:
            self._log.warning("Host %s does not answer, skipping it for now: %s", self.name, error)
        self.problem = f"{self.name}: {error}"
        self._answers = False
        self._asked = time.monotonic()

    def launch_failed(self) -> None:
        self._avoid_until = time.monotonic() + AVOID

    @property
    def avoided(self) -> bool:
        return time.monotonic() < self._avoid_until

    def forget(self) -> None:
        """Drop cached data after a change.

        A deleted sliver must not appear in a list when its node no longer exists: it would count as use by others.
        """
        self._stale = True
        with self._lock:
            self._list = None

    def look(self) -> None:
        """Ask for the capacity in the background if that is due."""
        with self._lock:
            ttl = PROBE_AGAIN if not self._answers else LOOK_AGAIN if self._stale else CAPACITY_TTL
            if self._probing or self._stopped or self.gone or time.monotonic() - self._asked < ttl:
                return
            self._probing = True
            self._stale = False
        try:
            self._probes.submit(self._probe)
        except RuntimeError:
            self._probing = False

    def _probe(self) -> None:
        try:
            found: dict[str, Any] = self.call("GetCapacity", timeout=PROBE_TIMEOUT)
            expected = self.options.expected_name
            if expected is not None and found.get("host") != expected:
                # A Unix socket of this machine is not that of the announced host.
                raise RpcError(f"{self.options.url} is host {found.get('host')}, not {expected}")
        except (RpcError, RpcFault) as error:
            with self._lock:
                first = self._asked < 0
                self._probing = False
            if first and not self._stopped:
                self._log.warning("Host %s cannot be used: %s", self.name, error)
            self.failed(error)
        except Exception as error:
            self._log.exception("Error asking host %s:", self.name)
            with self._lock:
                self._probing = False
            self.failed(error)
        else:
            with self._lock:
                came = not self._answers
                self._capacity = found
                self._asked = time.monotonic()
                self._answers = True
                self._probing = False
                self.problem = ""
            if came:
                self._log.info("Host %s can be used: %s cores, %s MiB", self.name, found.get("cores"), found.get("memory"))
        self._changed()

    @property
    def capacity(self) -> dict[str, Any] | None:
        """Return the last known capacity; None: not known yet. Never waits."""
        self.look()
        return self._capacity

    @property
    def cores(self) -> int:
        found = self._capacity
        return int(found["cores"]) if found else 1

    @property
    def group(self) -> str | None:
        if self.options.group:
            return str(self.options.group)
        return (self._capacity or {}).get("group") or None

    @property
    def ssh_address(self) -> str | None:
        address: str | None = self.options.ssh_address
        return address

    def reserve(self, needed: Callable[[Mapping[str, Any]], Needs]) -> None:
        """Count a sliver that is going to be created, until the next poll."""
        with self._lock:
            if self._capacity is not None:
                given, needs = dict(self._capacity["allocated"]), needed(self._capacity)
                for name, amount in (("cpu", needs.cpu), ("memory", needs.memory), ("disk", needs.disk), ("slivers", 1)):
                    given[name] += int(amount)
                self._capacity = {**self._capacity, "allocated": given}

    def free(self) -> Free:
        """Return the unassigned resources."""
        found = self._capacity
        if found is None:
            return Free(Needs(0.0, 0.0, 0.0), 0.0)
        given = found["allocated"]
        return Free(
            Needs(found["cpu"] - given["cpu"], found["memory"] - given["memory"], found["disk"] - given["disk"]),
            found["slivers"] - given["slivers"],
        )

    def describe(self) -> dict[str, Any]:
        """Return the last known state for status pages; also polls hosts of an idle provider."""
        found = self.capacity
        row: dict[str, Any] = {"name": self.name, "usable": self.usable, "problem": self.problem or None}
        if found is not None:
            # Units of provider limits: MiB of ram, GiB of disk. CPU is counted in thousandths of all cores.
            scales = {"cpu": ("cores", self.cores / 1000), "memory": ("ram", 1), "disk": ("disk", 1 / (1 << 20)),
                      "slivers": ("slivers", 1)}  # fmt: skip
            for key, amounts in (("used", found["allocated"]), ("limits", found)):
                row[key] = {title: round(amounts[name] * scale, 3) for name, (title, scale) in scales.items()}
        return row

    def list_slivers(self) -> Future[list[dict[str, Any]]]:
        """Return all slivers of the host, at most 1 s old; concurrent callers share a query."""
        with self._lock:
            if self._list is not None:
                asked, future = self._list
                if not future.done() or (time.monotonic() - asked < LIST_TTL and future.exception() is None):
                    return future
        future = self.ask("ListSlivers")
        with self._lock:
            self._list = time.monotonic(), future
        future.add_done_callback(self._listed)
        return future

    def _listed(self, future: Future[list[dict[str, Any]]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.slivers = future.result()


class Hosts:
    """All hosts of a provider, configured or announced."""

    def __init__(self, config: NodeManagerProviderConfig, log: logging.Logger, changed: Callable[[], Any]) -> None:
        self._log = log
        self._changed = changed
        self._limiter = RateLimiter(config.name, config.rate)
        self._condition = threading.Condition()
        self._configured = set(config.hosts)
        self._hosts = {name: self._make(options) for name, options in config.hosts.items()}

    def _make(self, options: NodeManagerHost) -> ManagedHost:
        return ManagedHost(options, self._limiter, self._log, self._host_changed)

    def _host_changed(self) -> None:
        with self._condition:
            self._condition.notify_all()
        self._changed()

    def start(self, timeout: float) -> None:
        """Poll all hosts; wait until each has answered or failed, for at most `timeout` seconds."""
        for host in self.all():
            host.look()
        with self._condition:
            self._condition.wait_for(lambda: all(host.asked for host in self.all()), timeout)

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

    # -- announcements; on the connection thread

    def announced(self, options: Any) -> None:
        if options.name in self._configured:
            return
        host = self._hosts.get(options.name)
        if host is None:
            self._log.info("Host %s has announced itself: %s", options.name, options.url)
            host = self._hosts[options.name] = self._make(options)
            host.look()
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
        if host is None or name in self._configured or host.gone:
            return
        self._log.warning("Host %s is not announced any more; it gets no new slivers, the others end with their leases", name)
        host.problem = f"{name}: it is not announced any more"
        host.gone = True
        self._host_changed()

    # -- placement

    def candidates(
        self, az: str | None, placement: str, needed: Callable[[Mapping[str, Any]], Needs], image: str, without: Collection[str]
    ) -> list[ManagedHost]:
        """Return the hosts that answer: most free first (spread) or last (pack), unfit last.

        :param needed: returns the needs of a sliver on a host of that capacity.
        """
        found = []
        kind, _, what = image.partition(":")
        for host in self.all():
            capacity = host.capacity
            if capacity is None or not host.usable or host.name in without or (az is not None and host.group != az):
                continue
            free = host.free()
            fits = free.fits(needed(capacity)) and (kind != "image" or what in capacity.get("images", ()))
            room = free.amounts.cpu + free.places / 1e6
            found.append((not fits, host.avoided, -room if placement == "spread" else room, host.name, host))
        return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1])]

    def problems(self) -> str:
        return "; ".join(host.problem for host in list(self._hosts.values()) if host.problem)
