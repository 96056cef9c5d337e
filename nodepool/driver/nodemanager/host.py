"""One node manager: calls with deadlines, and cached state (NM-C.8).

Decisions never wait for a host: its state is queried in the background, by separate threads per
host.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from nodepool.driver.nodemanager import answers
from nodepool.driver.nodemanager.config import NodeManagerHost, NodeManagerLabel
from nodepool.driver.nodemanager.events import EventReader
from nodepool.driver.nodemanager.sizes import Amounts, amounts_of, needed_by
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
#: Seconds of one wait for a sliver, and additional ones until the host counts as silent.
WAIT, MARGIN = 10.0, 5.0
#: Seconds for which a host with a failed launch is used only after the others.
AVOID = 30.0
#: Faults of the API (NM-A.8).
BAD_ARGUMENT, INTERNAL = 102, 104

T = TypeVar("T")


class HostError(Exception):
    """A host cannot be used now; the text has its name."""


class ManagedHost:
    """One node manager.

    :param changed: called when it can be used (again), from any thread.
    """

    def __init__(
        self,
        options: NodeManagerHost,
        limiter: RateLimiter,
        log: logging.Logger,
        changed: Callable[[], Any],
    ) -> None:
        #: Reads its events while it answers; None: nobody wants them.
        self.events: EventReader | None = None
        self.name = options.name
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
        self._asked = -math.inf
        self._stale = False
        self._probe: Future[None] | None = None
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
                    tls = (
                        Tls(o.ca_cert, o.client_cert, o.client_key)
                        if o.ca_cert and o.client_cert and o.client_key
                        else None
                    )
                    self._client = Client(o.url, tls)
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
            answer = self.client.call(method, *arguments, timeout=timeout)
        answers.check(method, arguments, answer)
        return answer

    def ask(
        self,
        method: str,
        *arguments: object,
        timeout: float = CALL_TIMEOUT,
        wait: bool = False,
        patient: bool = False,
    ) -> Future[Any]:
        """Make a call on a thread of this host; the rest as in :meth:`run`."""
        return self.run(lambda: self.call(method, *arguments, timeout=timeout), wait, patient)

    def run(
        self, function: Callable[[], T], wait: bool = False, patient: bool = False
    ) -> Future[T]:
        """Run something on a thread of this host. Fails immediately while it is not usable.

        :param wait: it waits for something on the host.
        :param patient: run it whatever is known about the host.
        """

        def run() -> T:
            if not patient and not self.usable:
                self.refresh()
                raise RpcError(self.problem)
            try:
                return function()
            except RpcError as error:
                self.failed(error)
                raise

        try:
            return (self._waits if wait else self._calls).submit(run)
        except RuntimeError:
            failed: Future[T] = Future()
            failed.set_exception(RpcError(f"{self.name}: the provider is stopped"))
            return failed

    def delete(self, sliver: str) -> None:
        """Delete a sliver on the caller's thread; raises as :meth:`call`."""
        try:
            self.call("DeleteSliver", sliver)
        except RpcFault as fault:
            if fault.code != BAD_ARGUMENT:  # no such sliver, as far as records go
                raise
        finally:
            self.forget()

    def stop(self) -> None:
        """Abort running calls."""
        if self.events is not None:
            self.events.stop()
        with self._lock:
            self._stopped = True
            client = self._client
        for executor in (self._probes, self._calls, self._waits):
            executor.shutdown(wait=False, cancel_futures=True)
        if client is not None:
            client.close()

    def update(self, options: NodeManagerHost) -> None:
        """Apply a new or changed announcement."""
        with self._lock:
            if options != self.options:
                self.options = options
                self._client = None
            if self.gone:
                self.gone = self._answers = False
                self._asked = -math.inf
        self.forget()
        self.refresh()

    # -- known state

    @property
    def usable(self) -> bool:
        """Whether it has answered the last query."""
        return self._answers and not self.gone

    def failed(self, error: Exception) -> None:
        """Record that the host did not answer; it is skipped until it does."""
        if (self._answers or self._asked == -math.inf) and not self._stopped:
            self._log.warning("Host %s cannot be used, skipping it for now: %s", self.name, error)
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

        A deleted sliver must not appear in a list when its node no longer exists: it would count as
        use by others.
        """
        self._stale = True
        with self._lock:
            self._list = None

    def refresh(self) -> Future[None] | None:
        """Ask for the capacity in the background if that is due; return the last query."""
        with self._lock:
            ttl = PROBE_AGAIN if not self._answers else LOOK_AGAIN if self._stale else CAPACITY_TTL
            idle = self._probe is None or self._probe.done()
            if (
                idle
                and not self._stopped
                and not self.gone
                and time.monotonic() - self._asked >= ttl
            ):
                self._stale = False
                self._probe = self._probes.submit(self._ask_capacity)
            return self._probe

    def _ask_capacity(self) -> None:
        try:
            found: dict[str, Any] = self.call("GetCapacity", timeout=PROBE_TIMEOUT)
            expected = self.options.expected_name
            if expected is not None and found.get("host") != expected:
                # A Unix socket of this machine is not that of the announced host.
                raise RpcError(f"{self.options.url} is host {found.get('host')}, not {expected}")
        except (RpcError, RpcFault) as error:
            self.failed(error)
        except Exception as error:
            self._log.exception("Error asking host %s:", self.name)
            self.failed(error)
        else:
            with self._lock:
                came = not self._answers
                self._capacity = found
                self._asked = time.monotonic()
                self._answers = True
                self.problem = ""
            if self.events is not None:
                self.events.start()
            if came:
                self._log.info(
                    "Host %s can be used: %s cores, %s MiB",
                    self.name,
                    found.get("cores"),
                    found.get("memory"),
                )
        self._changed()

    @property
    def capacity(self) -> dict[str, Any] | None:
        """Return the last known capacity; None: not known yet. Never waits."""
        self.refresh()
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

    def reserve(self, label: NodeManagerLabel) -> None:
        """Count a sliver that is going to be created, until the next poll."""
        with self._lock:
            if self._capacity is not None:
                needs, given = (
                    needed_by(label, self._capacity)._asdict(),
                    self._capacity["allocated"],
                )
                allocated = {
                    **given,
                    **{name: given[name] + int(amount) for name, amount in needs.items()},
                }
                self._capacity = {**self._capacity, "allocated": allocated}

    def free(self) -> Amounts:
        """Return the unassigned resources."""
        found = self._capacity
        return (
            Amounts(0, 0, 0, 0)
            if found is None
            else amounts_of(found).minus(amounts_of(found["allocated"]))
        )

    def describe(self) -> dict[str, Any]:
        """Return the last known state for status pages; also polls hosts of an idle provider."""
        found = self.capacity
        row: dict[str, Any] = {
            "name": self.name,
            "usable": self.usable,
            "problem": self.problem or None,
        }
        if found is not None:
            # Units of provider limits: MiB of ram, GiB of disk. CPU is counted in thousandths of
            # all cores.
            scales = {
                "cpu": ("cores", self.cores / 1000),
                "memory": ("ram", 1),
                "disk": ("disk", 1 / (1 << 20)),
                "slivers": ("slivers", 1),
            }
            for key, amounts in (("used", found["allocated"]), ("limits", found)):
                row[key] = {
                    title: round(amounts[name] * scale, 3)
                    for name, (title, scale) in scales.items()
                }
        return row

    def list_slivers(self, now: bool = False) -> Future[list[dict[str, Any]]]:
        """Return all slivers of the host, at most 1 s old; concurrent callers share a query.

        :param now: with those that were created before this call.
        """

        def query() -> list[dict[str, Any]]:
            self.slivers = self.call("ListSlivers")
            return self.slivers

        with self._lock:
            if self._list is not None and not now:
                asked, future = self._list
                if not future.done() or (
                    time.monotonic() - asked < LIST_TTL and future.exception() is None
                ):
                    return future
            future = self.run(query)
            self._list = time.monotonic(), future
            return future
