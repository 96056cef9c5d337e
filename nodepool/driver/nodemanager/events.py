"""Follows the events of node managers: usage of slivers, kills for memory (NM-C.5)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.driver.nodemanager.answers import metadata_of
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.mirror.feed import KILLED, Feed

#: Seconds of one call that waits for events; until stored ones are confirmed; until the host counts
#: as silent; and the pause after events, so that many come in one answer.
WAIT, CONFIRM, MARGIN, PAUSE = 60.0, 5.0, 10.0, 0.3
#: Types of events of the launcher.
TYPES = {"ended": "node-usage", "killed": KILLED}


class EventReader:
    """Notes the events of one host in the launcher's history.

    What is stored is confirmed. Several launchers note the same events with the same times; readers
    of the history drop duplicates.

    :param host: its name.
    :param call: as :meth:`.ManagedHost.call`.
    :param failed: is called when the host does not answer.
    :param provider: events of slivers of this provider are noted.
    """

    def __init__(
        self,
        host: str,
        call: Callable[..., Any],
        failed: Callable[[RpcError], object],
        provider: str,
        feed: Feed,
        log: logging.Logger,
    ) -> None:
        self._host, self._call, self._failed = host, call, failed
        self._provider, self._feed, self._log = provider, feed, log
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start reading, unless that runs; until the host does not answer any more."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name=f"Thread-nm-events-{self._host}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._follow()
        except RpcFault as fault:
            self._log.info("%s reports no events: %s", self._host, fault)
        except RpcError as error:
            self._failed(error)
        except Exception:
            self._log.exception("Events of host %s cannot be read:", self._host)

    def _follow(self) -> None:
        confirmed = after = 0
        #: Number in the feed, and of the host.
        noted: deque[tuple[int, int]] = deque()
        while not self._stopped.is_set():
            wait = CONFIRM if noted else WAIT
            events = self._call(
                "WaitEvents", self._provider, confirmed, after, wait, timeout=wait + MARGIN
            )
            for event in events:
                after = event["number"]
                if metadata_of(event).get("nodepool_provider_name") == self._provider:
                    self._note(event)
                noted.append((self._feed.number, after))
            while noted and noted[0][0] <= self._feed.stored:
                confirmed = noted.popleft()[1]
            if events:
                self._stopped.wait(PAUSE)

    def _note(self, event: Mapping[str, Any]) -> None:
        values = {
            key: value
            for key, value in event.items()
            if key not in ("number", "kind", "name", "metadata", "type", "node")
        }
        self._feed.note(
            TYPES[event["kind"]],
            node=metadata_of(event).get("nodepool_node_id"),
            provider=self._provider,
            host=self._host,
            **values,
        )
