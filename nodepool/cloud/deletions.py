"""Batched deletions: one call for many ids, with retries per id."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from nodepool.base.backoff import Backoff
from nodepool.base.timers import Timers
from nodepool.cloud.errors import CallsStopped, CallTimeout, Classifier, ErrorKind, message_of

BACKOFF = Backoff(1.0, 60.0, jitter=0.5)
"""Before an id is retried."""
DEADLINE = 600.0
GATHER = 0.2
"""Seconds that the first id waits for others; a full batch is sent immediately."""


@dataclass(eq=False)
class _Deletion:
    key: str
    until: float
    future: Future[None] = field(default_factory=Future)
    tries: int = 0
    alone: bool = False


@dataclass(eq=False)
class _Kind:
    name: str
    delete_many: Callable[[Sequence[str]], object]
    batch: int
    parallel: int
    gather: float
    waiting: deque[_Deletion] = field(default_factory=deque)
    known: dict[str, _Deletion] = field(default_factory=dict)
    running: int = 0
    planned: bool = False
    due: float = 0.0


class DeleteBatches:
    """The delete lane of one provider.

    :param submit: runs a function on a thread of the lane (:meth:`CloudCalls.run` with that lane).
        Each resource type uses at most its ``parallel`` threads; a lane with the sum of these is
        never blocked by a type that hangs.
    """

    def __init__(
        self,
        name: str,
        classify: Classifier,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        timers: Timers,
        *,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self._classify = classify
        self._submit = submit
        self._timers = timers
        self._log = log or logging.getLogger(f"nodepool.cloud.{name}")
        self._jitter = jitter
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}
        self._stopped = False

    def add_kind(
        self,
        kind: str,
        delete_many: Callable[[Sequence[str]], object],
        *,
        batch: int,
        parallel: int = 2,
        gather: float = GATHER,
    ) -> None:
        """Register a resource type; ``delete_many`` deletes up to ``batch`` ids with one call.

        It may return a mapping id -> exception (or None) for ids that were refused individually.

        :param gather: seconds that the first id waits for others.
        """
        self._kinds[kind] = _Kind(kind, delete_many, batch, parallel, gather)

    def delete(self, kind: str, key: str, deadline: float = DEADLINE) -> Future[None]:
        """Request the deletion of one id; the future is done when the cloud accepts it.

        An id that the cloud does not know counts as deleted. An id whose deletion is pending is not
        requested again. The future contains the last error once ``deadline`` (seconds) has passed.
        """
        entry = self._kinds[kind]
        with self._lock:
            if self._stopped:
                future: Future[None] = Future()
                future.set_exception(CallsStopped(f"{self.name} is stopping"))
                return future
            known = entry.known.get(key)
            if known is not None:
                return known.future
            deletion = entry.known[key] = _Deletion(key, self._timers.clock() + deadline)
            entry.waiting.append(deletion)
            self._plan(entry, entry.gather)
            if len(entry.waiting) == entry.batch and entry.running < entry.parallel:
                self._timers.after(0.0, lambda: self._send(entry))
        return deletion.future

    def _plan(self, kind: _Kind, seconds: float) -> None:
        """Schedule a run of the queue of this resource type. Called with the lock held."""
        if not kind.planned and kind.running < kind.parallel and kind.waiting:
            kind.planned = True
            kind.due = self._timers.clock() + seconds
            self._timers.after(seconds, lambda: self._send(kind))

    def _send(self, kind: _Kind) -> None:
        batches: list[list[_Deletion]] = []
        with self._lock:
            if self._timers.clock() >= kind.due:
                kind.planned = False
            while kind.waiting and kind.running < kind.parallel and not self._stopped:
                batch = [kind.waiting.popleft()]
                while (
                    not batch[0].alone
                    and kind.waiting
                    and len(batch) < kind.batch
                    and not kind.waiting[0].alone
                ):
                    batch.append(kind.waiting.popleft())
                kind.running += 1
                batches.append(batch)
        for batch in batches:
            self._ask(kind, batch)

    def _ask(self, kind: _Kind, batch: list[_Deletion]) -> None:
        keys = [deletion.key for deletion in batch]
        self._submit(lambda: kind.delete_many(keys)).add_done_callback(
            lambda future: self._answered(kind, batch, future)
        )

    def _answered(self, kind: _Kind, batch: list[_Deletion], future: Future[Any]) -> None:
        ended: list[tuple[_Deletion, BaseException | None]] = []
        try:
            refused = future.result()
        except (CallsStopped, CancelledError):
            ended = [(deletion, CallsStopped(f"{self.name} is stopping")) for deletion in batch]
        except Exception as error:
            if len(batch) > 1 and self._kind_of(error) not in (
                ErrorKind.THROTTLED,
                ErrorKind.TRANSIENT,
            ):
                # An invalid id must not block the others: from now on each one is deleted by its
                # own call.
                self._log.info(
                    "Deleting %s %ss in one call failed, deleting them individually: %s",
                    len(batch),
                    kind.name,
                    message_of(error),
                )
                with self._lock:
                    for deletion in reversed(batch):
                        deletion.alone = True
                        kind.waiting.appendleft(deletion)
            else:
                ended = [item for deletion in batch for item in self._failed(kind, deletion, error)]
        else:
            refused = refused if isinstance(refused, dict) else {}
            for deletion in batch:
                error_of_one = refused.get(deletion.key)
                if error_of_one is None:
                    ended.append((deletion, None))
                else:
                    ended.extend(self._failed(kind, deletion, error_of_one))
        with self._lock:
            kind.running -= 1
            for deletion, _ in ended:
                kind.known.pop(deletion.key, None)
            full = len(kind.waiting) >= kind.batch or any(
                deletion.alone for deletion in kind.waiting
            )
            self._plan(kind, 0.0 if full else kind.gather)
        for deletion, result in ended:
            _finish(deletion, result)

    def _kind_of(self, error: BaseException) -> ErrorKind:
        if isinstance(error, CallTimeout):
            return error.kind
        return self._classify(error)

    def _failed(
        self, kind: _Kind, deletion: _Deletion, error: BaseException
    ) -> list[tuple[_Deletion, BaseException | None]]:
        """Schedule a retry, or return the final result."""
        if self._kind_of(error) is ErrorKind.NOT_FOUND:
            return [(deletion, None)]
        deletion.tries += 1
        deletion.alone = True
        pause = BACKOFF.pause(deletion.tries, self._jitter)
        if self._timers.clock() + pause >= deletion.until:
            return [(deletion, error)]
        self._log.warning(
            "Deleting %s %s failed, retrying in %.1f s: %s",
            kind.name,
            deletion.key,
            pause,
            message_of(error),
        )
        self._timers.after(pause, lambda: self._again(kind, deletion))
        return []

    def _again(self, kind: _Kind, deletion: _Deletion) -> None:
        with self._lock:
            if self._stopped:
                return
            kind.waiting.append(deletion)
            self._plan(kind, 0.0)

    def stop(self) -> None:
        """Send no further calls; fail the waiting deletions."""
        with self._lock:
            self._stopped = True
            left = [deletion for kind in self._kinds.values() for deletion in kind.known.values()]
            for kind in self._kinds.values():
                kind.waiting.clear()
        for deletion in left:
            _finish(deletion, CallsStopped(f"{self.name} is stopping"))


def _finish(deletion: _Deletion, error: BaseException | None) -> None:
    try:
        if error is None:
            deletion.future.set_result(None)
        else:
            deletion.future.set_exception(error)
    except InvalidStateError:
        pass  # already done: stopping and the answer coincided
