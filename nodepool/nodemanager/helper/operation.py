"""What the operations of workers have in common: their type, their errors, and waiting for the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool.nodemanager.kernel import syscalls

Operation = Callable[[dict[str, Any], list[int]], tuple[dict[str, Any], list[int]]]


class StepError(Exception):
    """A step of a worker failed: text for people.

    :param retry: the host, or the sliver, lacked something that may be there later; an OSError that it is raised from tells, too.
    """

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def is_shortage(error: BaseException) -> bool:
    """Whether the same may succeed later."""
    cause = error.__cause__
    return (
        getattr(error, "retry", False)
        or isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in syscalls.SHORTAGE)
        or (cause is not None and is_shortage(cause))
    )


def wait_for_daemon(request: dict[str, Any]) -> list[int]:
    """Until it says that what this operation needs further is there: more of the request; its descriptors. Raises StepError."""
    frame = request["more"]()
    if frame is None:
        raise StepError("the node manager has given up")
    request.update(frame[0])
    descriptors: list[int] = frame[1]
    return descriptors
