"""Types of errors of a cloud API, and the launcher's exceptions for them (DRV-9)."""

from __future__ import annotations

import enum
from collections.abc import Callable

from nodepool import exceptions

LONGEST_MESSAGE = 1000
"""Characters of an error that are logged and kept: some clouds return the whole request or a web
page.
"""


def bounded(text: str) -> str:
    """Return the text, or its start and its length if it is too long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE - 40]}... ({len(text)} characters)"


def message_of(error: BaseException) -> str:
    """Return the message of an error for logs and records; never empty."""
    return bounded(str(error) or repr(error))


class ErrorKind(enum.Enum):
    """Error types that callers handle differently."""

    NOT_FOUND = "not_found"
    QUOTA = "quota"
    CAPACITY = "capacity"
    THROTTLED = "throttled"
    #: Worth a retry: connection lost, time-out, 5xx, invalid answer.
    TRANSIENT = "transient"
    #: Fails until the configuration is changed: wrong credentials, flavor, image, ...
    CONFIGURATION = "configuration"
    OTHER = "other"


Classifier = Callable[[BaseException], ErrorKind]
"""Classifies an exception of the driver's library; one per driver."""


class CallTimeout(exceptions.TimeoutException):
    """A call missed its deadline; ``kind`` is that of the last error."""

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
    """Return the launcher's exception for ``error``, or ``error`` itself.

    Use as ``raise translate(error, classify) from error``.

    :param kinds: translate only these; all if none is given.
    """
    kind = classify(error)
    cls = _EXCEPTIONS.get(kind)
    if cls is None or (kinds and kind not in kinds) or isinstance(error, cls):
        return error
    return cls(bounded(str(error)))
