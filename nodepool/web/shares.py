"""Shares of the threads that answer requests: one owner cannot occupy all of them."""

from __future__ import annotations

import asyncio
import http
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TypeVar

from nodepool.web.http import RETRY, HttpError

#: Jobs of one owner: those that run at a time, and those that run or wait.
AT_A_TIME, MOST = 2, 400

T = TypeVar("T")


class Share:
    """The share of one owner; used on the loop of the server only."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._free = asyncio.Semaphore(AT_A_TIME)
        self._jobs = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Return the result of a job, which may block.

        A job that nobody waits for any more occupies its thread until it ends.

        :raises HttpError: too many jobs of this owner wait (503).
        """
        if self._jobs >= MOST:
            text = "Too many of your requests wait here; try again"
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, text, "busy", (RETRY,))
        loop = asyncio.get_running_loop()

        def ended(_future: Future[T]) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(self._free.release)

        self._jobs += 1
        try:
            await self._free.acquire()
            future = self._threads.submit(job)
            future.add_done_callback(ended)
            return await asyncio.wrap_future(future)
        finally:
            self._jobs -= 1


class Shares:
    """The shares of all owners.

    :param threads: more than one owner gets at a time.
    """

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self._shares: weakref.WeakValueDictionary[str, Share] = weakref.WeakValueDictionary()

    def of(self, owner: str) -> Share:
        """Return the share of an owner, or of an address that has no name."""
        return self._shares.setdefault(owner, Share(self.threads))
