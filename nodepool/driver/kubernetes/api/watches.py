"""One watch for all objects of a kind that machines wait for (KUB-7).

Events are hints, not proof: a waiting machine that cannot know whether an object has vanished
queries it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from nodepool.base.backoff import Backoff
from nodepool.cloud import CloudCalls
from nodepool.cloud.errors import CallsStopped
from nodepool.cloud.http import NoAccess, NoAnswer
from nodepool.driver.kubernetes.api.client import ClusterClient, Object, Stream
from nodepool.driver.kubernetes.api.errors import ApiError
from nodepool.driver.kubernetes.api.kinds import Kind

#: Seconds after which the server ends a watch, and a new one is started.
SECONDS = 240
#: After a watch that could not be started.
BACKOFF = Backoff(0.2, 15.0)
#: Seconds between two queries for an object while the watch works, in case it reports nothing; and
#: while it does not work.
QUIET = 15.0
WITHOUT = (0.05, 0.1, 0.2, 0.4, 0.8)

KeyOf = Callable[[Object], str]


class Waiting:
    """A machine that waits for changes of one object."""

    def __init__(self, watcher: Watcher, key: str, wake: Callable[[], None]) -> None:
        self._watcher = watcher
        self.key = key
        self.wake = wake
        self._news: Object | None = None
        self._doubt = False
        self._asked = 0
        #: Uid of the object of this name that the server has reported as deleted.
        self.deleted: str | None = None

    def take(self) -> Object | None:
        """Return the last reported state, once."""
        news, self._news = self._news, None
        return news

    def doubtful(self) -> bool:
        """Return, once, whether the object may have vanished or changed without a report."""
        doubt, self._doubt = self._doubt, False
        return doubt

    def pause(self) -> float:
        """Return the seconds until the object should be queried."""
        self._asked += 1
        if self._watcher.live:
            return QUIET
        return WITHOUT[min(self._asked, len(WITHOUT)) - 1]

    def end(self) -> None:
        self._watcher.forget(self)

    def notify(self, found: Object | None, deleted: str | None = None) -> None:
        if found is None:
            self._doubt, self.deleted = True, deleted or self.deleted
        else:
            self._news = found
        self.wake()


class Watcher:
    """Watches objects from the first :meth:`wait_for` until :meth:`stop`.

    :param key: returns the key by which an object is waited for.
    :param allowed: the account may watch these; otherwise the waiting machines query.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        calls: CloudCalls,
        kind: Kind,
        selector: str,
        key: KeyOf,
        log: logging.Logger,
        namespace: str | None = None,
        allowed: bool = True,
    ) -> None:
        self._cluster = cluster
        self._allowed = allowed
        self._calls = calls
        self._kind = kind
        self._selector = selector
        self._namespace = namespace
        self._key = key
        self._log = log
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Waiting]] = {}
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None
        self._stopped = False
        self._failures = 0
        #: The version after which changes are reported; none: all objects have to be listed first.
        self._version = ""
        #: The server reports changes.
        self.live = False
        #: Why it does not, for operators.
        self.trouble: str | None = None

    def wait_for(self, key: str, wake: Callable[[], None]) -> Waiting:
        """Register for changes from now on."""
        waiting = Waiting(self, key, wake)
        with self._lock:
            self._waiting.setdefault(key, []).append(waiting)
            if self._thread is None and self._allowed and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run,
                    name=f"Thread-{self._calls.name}-watch-{self._kind.plural}",
                    daemon=True,
                )
                self._thread.start()
        return waiting

    def forget(self, waiting: Waiting) -> None:
        with self._lock:
            left = [each for each in self._waiting.get(waiting.key, []) if each is not waiting]
            if left:
                self._waiting[waiting.key] = left
            else:
                self._waiting.pop(waiting.key, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            stream = self._stream
        if stream is not None:
            stream.close()

    # -- the thread

    def _run(self) -> None:
        while not self._stopped:
            begun = self._calls.clock()
            try:
                if not self._version:
                    self._version = self._list()
                told = self._follow()
                # A watch that ends immediately without an event counts as failed.
                self._failures = (
                    0 if told or self._calls.clock() - begun > 1 else self._failures + 1
                )
            except CallsStopped:
                return
            except (ApiError, NoAnswer, NoAccess) as error:
                if not isinstance(error, NoAnswer):
                    self._version = ""
                if (
                    isinstance(error, ApiError) and error.status == 410
                ):  # the version is too old to be watched
                    self._log.debug(
                        "The watch of %s is too far behind, listing them", self._kind.plural
                    )
                else:
                    self._failed(error)
            except Exception:
                self._log.exception("Error in the watch of %s:", self._kind.plural)
                self._version = ""
                self._failures += 1
            if self._failures and self._calls.pause(BACKOFF.pause(self._failures)):
                return

    def _failed(self, error: Exception) -> None:
        self.live = False
        self._failures += 1
        if self._stopped:
            return
        trouble = f"changes of {self._kind.plural} are not reported: {error}"
        if isinstance(error, ApiError) and error.status == 403:
            trouble += (
                " (allow the account of this launcher to list and watch "
                f"{self._kind.plural}; it polls each until then)"
            )
        if self.trouble is None and (self._failures > 1 or not isinstance(error, NoAnswer)):
            self.trouble = trouble
            self._log.warning("Provider %s: %s", self._calls.name, trouble)
        # The waiting machines query from now on.
        for waiting in self._all():
            self._notify(waiting, None)

    def _works(self) -> None:
        self.live = True
        if self.trouble is not None:
            self._log.info(
                "Provider %s: changes of %s are reported again", self._calls.name, self._kind.plural
            )
            self.trouble = None

    def _list(self) -> str:
        """Report the state of all objects; return the version after which changes are reported."""
        before = self._all()
        found, version = self._cluster.list_versioned(self._kind, self._selector, self._namespace)
        objects = {self._key(each): each for each in found}
        for waiting in before:
            self._notify(waiting, objects.get(waiting.key))
        return version

    def _follow(self) -> bool:
        """Report events until the server ends the watch; return whether there were any."""
        stream = self._cluster.watch(
            self._kind, self._selector, self._version, SECONDS, self._namespace
        )
        with self._lock:
            self._stream = stream
            if self._stopped:
                stream.close()
        self._works()
        told = False
        try:
            for event in stream:
                told = True
                self._failures = 0
                self._version = self._event(event) or self._version
        except NoAnswer:
            if not self._stopped:
                raise
        finally:
            with self._lock:
                self._stream = None
        return told

    def _event(self, event: Object) -> str | None:
        found = event.get("object")
        what = event.get("type")
        if not isinstance(found, dict):
            return None
        if what == "ERROR":
            raise ApiError(
                f"watch {self._kind.plural}",
                int(found.get("code") or 500),
                str(found.get("reason") or ""),
                str(found.get("message") or ""),
            )
        metadata: dict[str, Any] = found.get("metadata") or {}
        if what in ("ADDED", "MODIFIED", "DELETED"):
            with self._lock:
                told = list(self._waiting.get(self._key(found), ()))
            for waiting in told:
                if what == "DELETED":
                    self._notify(waiting, None, str(metadata.get("uid") or ""))
                else:
                    self._notify(waiting, found)
        return str(metadata.get("resourceVersion") or "") or None

    def _all(self) -> list[Waiting]:
        with self._lock:
            return [waiting for each in self._waiting.values() for waiting in each]

    def _notify(self, waiting: Waiting, found: Object | None, deleted: str | None = None) -> None:
        try:
            waiting.notify(found, deleted)
        except Exception:
            self._log.exception("Error reporting a change of %s %s:", self._kind.name, waiting.key)
