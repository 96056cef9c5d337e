"""Follows node requests by watches until they are finished."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss, NoNodeError, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError

from nodepool.zk import paths
from nodepool.zk.records import FAILED, FULFILLED

GONE = "gone"
FINISHED = frozenset({FULFILLED, FAILED, GONE})
#: Seconds after which a request is read again even if no watch fired (the session may have been
#: lost).
READ_AGAIN = 10.0
#: Seconds without news after which users are first informed what is waited for.
QUIET = 1.0

EXIT_OK, EXIT_FAILED, EXIT_TIMEOUT = 0, 1, 3

#: report(request id, state or GONE, record)
Report = Callable[[str, str, dict[str, Any]], None]
#: quiet(ids of the unfinished requests): called when nothing has happened for a while
Quiet = Callable[[list[str]], None]


class Follower:
    def __init__(self, kazoo: KazooClient) -> None:
        self._kazoo = kazoo
        self._changed: queue.SimpleQueue[str] = queue.SimpleQueue()

    def follow(
        self, request_ids: Iterable[str], timeout: float | None, report: Report, quiet: Quiet
    ) -> dict[str, str | None]:
        """Report each state until all requests are finished or ``timeout`` seconds have passed."""
        start = time.monotonic()
        states: dict[str, str | None] = dict.fromkeys(request_ids)
        for request_id in states:
            self._changed.put(request_id)
        told = 0
        while open_ids := [
            request_id for request_id, state in states.items() if state not in FINISHED
        ]:
            wait = READ_AGAIN if told else QUIET
            if timeout is not None:
                wait = min(wait, max(0.0, timeout - (time.monotonic() - start)))
            try:
                self._poll(self._changed.get(timeout=wait), states, report)
                continue
            except queue.Empty:
                told += 1
            quiet(open_ids)
            if timeout is not None and time.monotonic() - start >= timeout:
                break
            for request_id in open_ids:
                self._poll(request_id, states, report)
        return states

    def _poll(self, request_id: str, states: dict[str, str | None], report: Report) -> None:
        if states[request_id] in FINISHED:
            return
        record: dict[str, Any] = {}
        try:
            data, _ = self._kazoo.get(
                paths.request(request_id), watch=lambda event: self._changed.put(request_id)
            )
            record = json.loads(data)
            state = str(record["state"])
        except NoNodeError:
            state = GONE
        except (ConnectionLoss, SessionExpiredError, KazooTimeoutError):
            return  # read again after the reconnect
        except (ValueError, KeyError, TypeError):
            state = "unreadable"
        if state != states[request_id]:
            states[request_id] = state
            report(request_id, state, record)


def exit_status(states: Iterable[str | None]) -> int:
    """Return 0: all fulfilled; 1: one failed or was deleted; 3: not finished in time."""
    states = list(states)
    if any(state in (FAILED, GONE) for state in states):
        return EXIT_FAILED
    return EXIT_OK if all(state == FULFILLED for state in states) else EXIT_TIMEOUT
