"""Compares the time of one owner's calls with and without an owner that takes all it gets."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

from tests.conftest import limit

#: Seconds: shorter times are not compared, and longer ones are those of a call that is kept out.
FLOOR, LONGEST = 0.02, 20.0
#: Calls of the honest owner in one series, series in one comparison, and comparisons: load of the
#: machine passes, a greedy owner that is not limited does not.
CALLS, SERIES, TRIES = 5, 3, 3

#: Starts what is greedy; yields a function that returns whether it still takes all it gets.
Greedy = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call, which fails if it is kept out."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="honest", daemon=True)
    begin = time.monotonic()
    thread.start()
    thread.join(limit(LONGEST))
    found = time.monotonic() - begin
    assert not thread.is_alive(), "the honest call waits for the greedy owner"
    if errors:
        raise errors[0]
    return found


def _medians(honest: Callable[[], object], greedy: Greedy) -> tuple[float, float]:
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(SERIES):
        alone += [_seconds(honest) for _ in range(CALLS)]
        with greedy() as occupies:
            for _ in range(CALLS):
                beside.append(_seconds(honest))
                assert occupies(), "the greedy owner takes nothing any more"
    return statistics.median(alone), statistics.median(beside)


def assert_fair(honest: Callable[[], object], greedy: Greedy) -> None:
    """Check that honest calls succeed alongside greedy ones, and take at most twice as long."""
    found = []
    for _ in range(TRIES):
        found.append(_medians(honest, greedy))
        if found[-1][1] <= 2 * max(found[-1][0], FLOOR):
            return
    raise AssertionError(f"seconds of honest calls, alone and beside a greedy owner: {found}")


@contextlib.contextmanager
def in_threads(call: Callable[[], object], number: int) -> Iterator[list[threading.Thread]]:
    """Run calls that the block ends; they may fail."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    threads = [threading.Thread(target=run, name="greedy", daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(limit(LONGEST))
