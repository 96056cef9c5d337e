"""Type, errors and protocol that the operations of workers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool.nodemanager.kernel import syscalls

Operation = Callable[[dict[str, Any], list[int]], tuple[dict[str, Any], list[int]]]


class StepError(Exception):
    """A step of a worker failed; the text is for humans.

    :param retry: the failure may be temporary, because of a shortage on the host or in the sliver;
        the OSError that this is raised from also counts.
    """

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def is_shortage(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    cause = error.__cause__
    return (
        getattr(error, "retry", False)
        or isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in syscalls.SHORTAGE)
        or (cause is not None and is_shortage(cause))
    )


def wait_for_daemon(request: dict[str, Any]) -> list[int]:
    """Wait for the rest of the request; return its descriptors. Raises StepError."""
    frame = request["more"]()
    if frame is None:
        raise StepError("the node manager has given up")
    request.update(frame[0])
    descriptors: list[int] = frame[1]
    return descriptors
