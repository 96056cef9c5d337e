"""Kinds of errors of a cloud's API, and what the launcher calls them (DRV-9)."""

from __future__ import annotations

import email.utils
import enum
import time
from collections.abc import Callable, Mapping

from nodepool import exceptions

LONGEST_MESSAGE = 1000
"""Characters of an error that are logged and kept: some clouds answer with the whole request, or a web page."""
LONGEST_ASKED = 120.0
"""Seconds that a cloud can make us wait by Retry-After; a clock that is wrong asks for days."""


def bounded(text: str) -> str:
    """The text, or its start and length."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE - 40]}... ({len(text)} characters)"


def message_of(error: BaseException) -> str:
    """The error as it is logged and kept; never empty."""
    return bounded(str(error) or repr(error))


def asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header Retry-After, which has seconds or a date."""
    text = headers.get("Retry-After") or ""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), LONGEST_ASKED)


class ErrorKind(enum.Enum):
    """Everything a caller may want to treat differently."""

    NOT_FOUND = "not_found"
    QUOTA = "quota"
    CAPACITY = "capacity"
    THROTTLED = "throttled"
    #: Worth another try: connection lost, time-out, 5xx, an answer that is no answer.
    TRANSIENT = "transient"
    #: Will not work until the configuration is changed: wrong credentials, flavor, image, ...
    CONFIGURATION = "configuration"
    OTHER = "other"


Classifier = Callable[[BaseException], ErrorKind]
"""Tells the kind of an exception of the driver's library; one per driver."""


class CallTimeout(exceptions.TimeoutException):
    """A call, with its waits and retries, did not succeed within its deadline; ``kind`` is that of the last error."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.TRANSIENT) -> None:
        super().__init__(message)
        self.kind = kind


class CallsStopped(RuntimeError):
    """The provider is stopping: the call was not made, or not repeated."""


_EXCEPTIONS: dict[ErrorKind, type[Exception]] = {
    ErrorKind.NOT_FOUND: exceptions.NotFound,
    ErrorKind.QUOTA: exceptions.QuotaException,
    ErrorKind.CAPACITY: exceptions.CapacityException,
    ErrorKind.CONFIGURATION: exceptions.RuntimeConfigurationException,
}


def translate(error: BaseException, classify: Classifier, *kinds: ErrorKind) -> BaseException:
    """The launcher's exception for ``error``, or ``error`` itself.

    :param kinds: translate these only; all when none is given. Use as ``raise translate(error, classify) from error``.
    """
    kind = classify(error)
    cls = _EXCEPTIONS.get(kind)
    if cls is None or (kinds and kind not in kinds) or isinstance(error, cls):
        return error
    return cls(bounded(str(error)))
