"""Pool: the API of a launcher, which gives out leases."""

from __future__ import annotations

import contextlib
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.client.calls import POLL, RETRY, Calls, Duration, NodepoolError, path_of, seconds
from nodepool.client.lease import ATTACHED, Lease

#: Codes of answers to a lease that waits after which it is requested again.
AGAIN = ("gone", "ended", "try-again")


class Pool(Calls):
    """Gives out leases; its parameters are those of :class:`.Calls`."""

    def lease(
        self,
        *labels: str,
        for_: Duration | None = None,
        wait: Duration | None = "10m",
        purpose: str = "",
        key: str | None = None,
        tenant: str | None = None,
        provider: str | None = None,
        priority: str | None = None,
        notes: Mapping[str, Any] | None = None,
        on_change: Callable[[Lease], object] | None = None,
    ) -> Lease:
        """Lease one node for each label; all come from one pool.

        :param for_: time until the end; None: as long as this program lives.
        :param wait: longest time to wait for the nodes; None: do not wait, see ``Lease.wait``.
        :param key: a second call with the same key gives the same lease.
        :param on_change: is called with the lease as soon as it exists, and whenever what it waits
            for has changed.
        :raises NoCapacity: the nodes were not ready in time, and are no longer wanted, or cannot be
            had.
        :raises NotAllowed, NodepoolError: the server refuses the call.
        """
        limit = None if wait is None else time.monotonic() + seconds(wait)
        body: dict[str, Any] = {
            "labels": list(labels),
            "for": ATTACHED if for_ is None else int(seconds(for_)),
        }
        given = {
            "purpose": purpose,
            "tenant": tenant,
            "provider": provider,
            "priority": priority,
            "notes": dict(notes or {}),
        }
        body.update({name: value for name, value in given.items() if value})
        # A call whose answer is lost is repeated: the key makes sure that it gives the same lease.
        key = key or uuid.uuid4().hex
        while True:
            try:
                return self._ask(body, key, limit, for_ is None, on_change)
            except NodepoolError as error:
                # A server that ends takes its waiting leases along, and another user may take a
                # node at the last moment.
                if error.code not in AGAIN or limit is None or time.monotonic() + RETRY >= limit:
                    raise
            time.sleep(RETRY)

    def _ask(
        self,
        body: dict[str, Any],
        key: str,
        limit: float | None,
        attached: bool,
        on_change: Callable[[Lease], object] | None,
    ) -> Lease:
        wait = (
            0.0
            if limit is None or on_change is not None
            else min(POLL, max(0.0, limit - time.monotonic()))
        )
        answer = self.call(
            "POST", "/leases", {**body, "wait": wait}, headers={"Idempotency-Key": key}, retry=limit
        )
        lease = Lease(self, answer, attached=attached)
        if limit is not None:
            try:
                lease.wait(max(0.0, limit - time.monotonic()), on_change)
            except BaseException:
                with contextlib.suppress(NodepoolError):
                    lease.give_back()
                raise
        return lease

    def get(self, lease_id: str, token: str | None = None) -> Lease:
        """Return a lease that exists.

        :param token: of the lease, if the pool's own may not use it.
        :raises LeaseEnded: it does not exist, or has ended.
        """
        return Lease(self, self.call("GET", path_of(lease_id), token=token), token=token)

    def leases(self, owner: str | None = None, state: str | None = None) -> list[Lease]:
        """Return leases and held nodes.

        :param owner: only of this owner; ``me``: your own.
        """
        query = urllib.parse.urlencode(
            {name: text for name, text in (("owner", owner), ("state", state)) if text}
        )
        found = self.call("GET", f"/leases?{query}" if query else "/leases")["leases"]
        return [Lease(self, answer) for answer in found]
