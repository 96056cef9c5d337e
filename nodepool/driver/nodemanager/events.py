"""Follows the events of node managers: usage of slivers, kills for memory (NM-C.5)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.base.problems import one_line
from nodepool.driver.nodemanager.answers import event_of, metadata_of
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.mirror.feed import KILLED, Feed
from nodepool.zk.records import LARGEST

#: Seconds of one call that waits for events; until stored ones are confirmed; and until the call
#: fails.
WAIT, CONFIRM, MARGIN = 60.0, 5.0, 10.0
#: Seconds of the pause after events, so that many come in one answer; at least this time for each,
#: so that no host fills the history; and after a fault or an answer without new events.
PAUSE, EACH, LATER = 0.3, 0.01, 60.0
#: Events of one answer, as many as node managers send; characters of the id of a node.
MOST, LONGEST = 500, 20
#: Types of events of the launcher.
TYPES = {"ended": "node-usage", "killed": KILLED}


class EventReader:
    """Notes the events of one host in the launcher's history.

    What is stored is confirmed. Several launchers note the same events with the same times; readers
    of the history drop duplicates. Events that are not valid are skipped.

    :param host: its name.
    :param call: as :meth:`.Client.call`.
    :param provider: events of slivers of this provider are noted.
    """

    def __init__(
        self, host: str, call: Callable[..., Any], provider: str, feed: Feed, log: logging.Logger
    ) -> None:
        self._host, self._call = host, call
        self._provider, self._feed, self._log = provider, feed, log
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        #: Not before this (monotonic seconds), and the last logged reason.
        self._again, self._trouble = 0.0, ""

    def start(self) -> None:
        """Read until the host does not answer; this may be called as often as it answers."""
        alive = self._thread is not None and self._thread.is_alive()
        if not alive and not self._stopped.is_set() and time.monotonic() >= self._again:
            self._thread = threading.Thread(
                target=self._run, name=f"Thread-nm-events-{self._host}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._follow()
        except RpcError as error:  # whether it can be used, other calls decide
            self._log.debug("Events of host %s are not read: %s", self._host, error)
        except Exception as error:
            self._again = time.monotonic() + LATER
            trouble = one_line(error if isinstance(error, RpcFault) else repr(error))
            if trouble != self._trouble:
                self._log.warning("Host %s reports no events: %s", self._host, trouble)
            self._trouble = trouble

    def _follow(self) -> None:
        confirmed = after = 0
        #: Number in the feed, and of the host.
        noted: deque[tuple[int, int]] = deque(maxlen=10 * MOST)
        while not self._stopped.is_set():
            wait = CONFIRM if noted else WAIT
            answer = self._call(
                "WaitEvents", self._provider, confirmed, after, wait, timeout=wait + MARGIN
            )
            events = answer[:MOST] if isinstance(answer, list) else [answer]
            begun = after
            for event in events:
                number = event.get("number") if isinstance(event, dict) else None
                if type(number) is int and after < number < LARGEST:
                    after = number
                    self._note(event)
                    noted.append((self._feed.number, after))
            while noted and noted[0][0] <= self._feed.stored:
                confirmed = noted.popleft()[1]
            if events:
                pause = max(PAUSE, EACH * len(events)) if after > begun else LATER
                self._stopped.wait(pause)

    def _note(self, given: Mapping[str, Any]) -> None:
        event = event_of(given)
        if event is None:
            self._log.debug("An event of host %s is skipped: %.200r", self._host, given)
            return
        metadata = metadata_of(event)
        node = metadata.get("nodepool_node_id", "")
        if metadata.get("nodepool_provider_name") != self._provider or len(node) > LONGEST:
            return
        values = {
            key: value
            for key, value in event.items()
            if key not in ("number", "kind", "name", "metadata", "type", "node")
        }
        self._feed.note(
            TYPES[event["kind"]], node=node, provider=self._provider, host=self._host, **values
        )
