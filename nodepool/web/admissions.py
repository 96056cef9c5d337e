"""Long answers end when their callers are not accepted any more."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager

from nodepool.access.identity import Denied, Identity
from nodepool.access.tokens import FRESH
from nodepool.web.http import HttpError, Stream, Write, as_answer

#: Seconds between two checks of a caller whose token has not changed: its role may have.
CHECK = 15.0
#: Seconds; an end that is later than that is set by a later check.
FAR = 86400.0
#: An answer ends with an error when its caller was refused with one of these. The end of a lease
#: is none of them: it ends the programs of the lease, and who waits for the lease is notified.
_REFUSED = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)

#: Ends its body, with an error, when the caller of an answer is not accepted any more.
Hold = Callable[[], AbstractAsyncContextManager[None]]

log = logging.getLogger("nodepool.WebApp")


class Dismissed(HttpError):
    """The caller of a long answer is not accepted any more."""


class Admissions:
    """The callers of long answers; used on the loop of the server unless stated otherwise."""

    def __init__(self) -> None:
        #: How a caller was identified -> what is set when its token has changed.
        self._changes: weakref.WeakValueDictionary[str, asyncio.Event] = (
            weakref.WeakValueDictionary()
        )

    def start(self, threads: Executor) -> None:
        """Start to check callers.

        :param threads: of the checks, which may block.
        """
        self._loop, self._threads = asyncio.get_running_loop(), threads

    def note(self, via: str) -> None:
        """Check the callers that were identified in this way; on any thread."""
        with contextlib.suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self._wake, via)

    def _wake(self, via: str) -> None:
        if (event := self._changes.pop(via, None)) is not None:
            event.set()

    @contextlib.asynccontextmanager
    async def hold(self, identity: Identity, check: Callable[[], Identity]) -> AsyncIterator[None]:
        """End the body when its caller is not accepted any more.

        :param identity: the caller, as accepted for this answer.
        :param check: accepts the caller again, or raises an error; on a thread.
        :raises Dismissed: the caller was refused, or its token has expired.
        """
        if identity.via == "anonymous":
            yield
            return
        refusals: list[HttpError] = []
        scope = asyncio.timeout(None)
        try:
            async with scope:
                task = asyncio.create_task(self._supervise(scope, identity, check, refusals))
                try:
                    yield
                finally:
                    task.cancel()
        except TimeoutError:
            if not scope.expired():
                raise
            expired = Denied(http.HTTPStatus.UNAUTHORIZED, "unauthorized", "The token has expired")
            why = next(iter(refusals), as_answer(expired, ""))
            raise Dismissed(why.status, why.text, why.code, why.headers) from None

    async def _supervise(
        self,
        scope: asyncio.Timeout,
        identity: Identity,
        check: Callable[[], Identity],
        refusals: list[HttpError],
    ) -> None:
        # The caller may have been accepted because of a record that was read before: such a record
        # is used for FRESH seconds. So the first check follows them, and that after each change.
        pause, changed = FRESH, self._changed(identity)
        while True:
            _end(scope, _left(identity))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await changed.wait()
            if changed.is_set():
                changed = self._changed(identity)
                await asyncio.sleep(FRESH)
            pause = CHECK
            try:
                identity = await self._loop.run_in_executor(self._threads, check)
            except Exception as error:
                found = as_answer(error, f"the check of {identity.owner}", True)
                if found.status in _REFUSED:
                    refusals.append(found)
                    _end(scope, 0.0)
                    return

    def _changed(self, identity: Identity) -> asyncio.Event:
        return self._changes.setdefault(identity.via, asyncio.Event())


def _left(identity: Identity) -> float | None:
    """Return the seconds until the token of a caller expires; None: not soon."""
    now, expires = time.time(), identity.expires
    return max(0.0, expires - now) if expires is not None and expires < now + FAR else None


def _end(scope: asyncio.Timeout, seconds: float | None) -> None:
    """Let a scope end after these seconds, unless it ends already; None: not for now."""
    if not scope.expired():
        scope.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


class Admitted(Stream):
    """A stream that ends when its caller is not accepted any more."""

    def __init__(self, stream: Stream, hold: Hold) -> None:
        self.headers = stream.headers
        self._stream = stream
        self._hold = hold

    async def send(self, begin: Callable[[], Awaitable[Write]]) -> None:
        try:
            async with self._hold():
                await self._stream.send(begin)
        except Dismissed as error:
            log.info("The answer to a client was ended: %s", error.text)
