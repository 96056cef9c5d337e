"""Log format of the original: UTC time like C's asctime, colon, message (NM-A.13)."""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from io import TextIOWrapper

from nodepool.exceptions import ConfigurationError
from nodepool.logconfig import MultiLineFormatter


class LineFormatter(MultiLineFormatter):
    """Formats the time on each line, also of tracebacks; usable in a logging configuration."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__("%(asctime)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.asctime(time.gmtime(record.created))


class PrivateFileHandler(logging.handlers.WatchedFileHandler):
    """A log file with access for its owner only, also after a rotation by logrotate."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename,
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            os.fchmod(descriptor, 0o600)
            return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
        except BaseException:
            os.close(descriptor)
            raise


def install(path: str) -> None:
    """Write what the daemon logs to a file as well.

    :raises ConfigurationError: it cannot be written.
    """
    try:
        handler = PrivateFileHandler(os.path.abspath(path))
    except OSError as error:
        raise ConfigurationError(f"log-file: cannot write {path}: {error.strerror}") from error
    handler.setFormatter(LineFormatter())
    logging.getLogger("nodepool").addHandler(handler)
