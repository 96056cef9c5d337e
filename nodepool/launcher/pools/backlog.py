"""Requests handed to a pool that it has not considered yet."""

from __future__ import annotations

#: Maximum number of them; more wait in serving order.
LIMIT = 48


class Backlog:
    """Ids of requests, and how many the pool accepts.

    Of many requests handed to a pool that is almost full, the first would pause it, and all others
    would return to the queue for each node that becomes free. A pool that was paused therefore
    accepts one, and after each that does not pause it twice as many.
    """

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._accepts = LIMIT
        self._refused = False

    def refuses(self) -> bool:
        """Return whether the pool accepts no more requests, until :meth:`considered` returns
        True.
        """
        if not self._refused and len(self.ids) < self._accepts:
            return False
        self._refused = True
        if (
            len(self.ids) <= self._accepts // 2
        ):  # the last one was considered before the flag was set
            self._refused = False
        return self._refused

    def considered(self, request_id: str, paused: bool) -> bool:
        """Remove a request; return whether those that were refused are to be offered again.

        :param paused: the pool is paused now.
        """
        self.ids.discard(request_id)
        self._accepts = 1 if paused else min(LIMIT, 2 * self._accepts)
        again = self._refused and len(self.ids) <= self._accepts // 2
        self._refused = self._refused and not again
        return again
