"""``/api/v1/usage``: who has used the pool in the last day, from the history."""

from __future__ import annotations

import time
from typing import Any

from nodepool.config.model import Config
from nodepool.status.usage import GROUPS, Ledger, Use, price_of, table
from nodepool.web.cache import ResponseCache
from nodepool.zk.history import LONGEST, HistoryFollower
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds for which the nodes are cached, and most requests whose users are remembered.
AGE, MOST_USERS = 30.0, 100_000


class UsagePage:
    """Reads each write of the history once, so that only the first answer takes long."""

    def __init__(self) -> None:
        self._ledger, self._history = Ledger(), HistoryFollower()
        self._cache: ResponseCache[list[Use]] = ResponseCache(AGE)

    def answer(self, zk: ZooKeeper, config: Config | None, by: str, since: float) -> dict[str, Any]:
        """Return the table of nodes that existed in the last seconds.

        :param by: one of :data:`.usage.GROUPS`.
        :raises HttpError: it is being read for another client.
        :raises KazooException: ZooKeeper cannot be reached.
        """
        now = time.time()
        uses = self._cache.get("uses", lambda: self._read(zk, now)).body
        chosen = [use for use in uses if use.removed is None or use.removed >= now - since]
        results = table(chosen, by, now, lambda use: price_of(config, use) if config else None)
        columns = [{"key": key, "title": title} for key, title in results.columns.items()]
        return {"by": by, "groups": GROUPS, "columns": columns, "rows": results.rows}

    def _read(self, zk: ZooKeeper, now: float) -> list[Use]:
        ledger = self._ledger
        for events in self._history.read(zk.kazoo_client):
            for event in events:
                ledger.add(event)
        ledger.uses = {name: use for name, use in ledger.uses.items() if use.last > now - LONGEST}
        if len(ledger.users) > MOST_USERS:
            ledger.users.clear()
        return list(ledger.uses.values())
