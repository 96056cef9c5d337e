"""Keeps the last good configuration in force while the file on disk cannot be used (config.md section 11)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from nodepool.exceptions import ConfigurationError


class ConfigKeeper:
    """Says what is wrong with the file on disk, and since when; each problem is logged once.

    :param stale_changed: called with 1 when the file cannot be used, with 0 when it is in force.
    """

    def __init__(self, paths: Iterable[str | None], log: logging.Logger, stale_changed: Callable[[int], Any]) -> None:
        self._paths = [path for path in paths if path]
        self._log = log
        self._stale_changed = stale_changed
        #: Why the file on disk is not in force, and since when (Unix seconds); None when it is.
        self.error: str | None = None
        self.stale_since: float | None = None
        self._reported: Any = None

    def good(self) -> None:
        """The file on disk is in force."""
        if self.error is not None:
            self._log.info("The configuration is good again")
        self.error = self.stale_since = None
        self._reported = None
        self._stale_changed(0)

    def bad(self, error: Exception) -> None:
        """The file on disk cannot be used."""
        signature = (str(error), self._mtimes())
        if self.stale_since is None:
            self.stale_since = time.time()
        self.error = str(error)
        self._stale_changed(1)
        if signature == self._reported:
            return
        self._reported = signature
        if isinstance(error, (ConfigurationError, OSError)):
            self._log.error("The configuration cannot be used, keeping the last good one: %s", error)
        else:
            self._log.error("The configuration cannot be used, keeping the last good one:", exc_info=error)

    def describe(self) -> list[str]:
        """One line about the file on disk when it is not in force."""
        if self.error is None:
            return []
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.stale_since))
        return [f"configuration: stale since {since}: {self.error}"]

    def _mtimes(self) -> list[int | None]:
        result: list[int | None] = []
        for path in self._paths:
            try:
                result.append(os.stat(path).st_mtime_ns)
            except OSError:
                result.append(None)
        return result
