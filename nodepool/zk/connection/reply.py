"""The answer to one request, processed on the connection thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("nodepool.zk.protocol")


class Reply:
    """Receives the answer to one request on the connection thread.

    ``callback(result, error, zxid)`` must not block: it runs between reading two messages. It has
    the two methods of kazoo's AsyncResult that the connection uses.
    """

    __slots__ = ("_callback", "zxid")

    def __init__(self, callback: Callable[[Any, BaseException | None, int], None]) -> None:
        self._callback: Callable[[Any, BaseException | None, int], None] | None = callback
        self.zxid = 0

    def set(self, value: object = None) -> None:
        self._answer(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._answer(None, error)

    def _answer(self, value: object, error: BaseException | None) -> None:
        callback, self._callback = self._callback, None
        if callback is None:
            return
        try:
            callback(value, error, self.zxid)
        except Exception:  # it affects this request only, not the connection
            log.exception("Error in the callback of an answer:")
