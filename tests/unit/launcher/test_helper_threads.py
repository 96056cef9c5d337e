"""Helper threads of pools: few altogether, some for each, none without work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nodepool.launcher.pools.helpers import MOST, OWN, Helpers
from tests.conftest import wait_for

ISSUE = "issue 11, 8: threads of classic drivers are bounded"


@pytest.fixture
def made() -> Iterator[list[Helpers]]:
    all_made: list[Helpers] = []
    yield all_made
    for helpers in all_made:
        helpers.close()


def threads(name: str) -> int:
    return sum(thread.name.startswith(f"{name}_") for thread in threading.enumerate())


@pytest.mark.spec(ISSUE)
def test_bounds(made: list[Helpers]) -> None:
    """Pools that block use up what is common to all; another one runs its work all the same."""
    common, go_on = threading.BoundedSemaphore(MOST), threading.Event()
    made += [Helpers(f"pool{number}", common) for number in range(3)]
    began: list[int] = []

    def block() -> None:
        began.append(1)
        assert go_on.wait(20)

    for helpers in made[:2]:
        for _ in range(2 * MOST):
            assert helpers.submit(block)
    assert [threads("pool0"), threads("pool1")] == [MOST, OWN + 2]
    assert not common.acquire(blocking=False)
    ran = threading.Event()
    made[2].submit(ran.set)
    assert ran.wait(10)
    go_on.set()
    wait_for(lambda: len(began) == 4 * MOST)


@pytest.mark.spec(ISSUE)
def test_threads_without_work_end(made: list[Helpers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.pools.helpers.IDLE", 0.05)
    common = threading.BoundedSemaphore(2)
    helpers = Helpers("pool", common)
    made.append(helpers)
    for _ in range(2):
        barrier = threading.Barrier(OWN + 2)
        for _ in range(OWN + 2):
            helpers.submit(lambda barrier=barrier: barrier.wait(10))  # type: ignore[misc]
        wait_for(lambda: threads("pool") == 0)
        assert [common.acquire(blocking=False) for _ in range(2)] == [True, True], "what was borrowed is back"
        common.release(2)


def test_one_after_the_other_needs_one_thread(made: list[Helpers]) -> None:
    helpers = Helpers("pool", threading.BoundedSemaphore(1))
    made.append(helpers)
    names: set[str] = set()
    for _ in range(20):
        done = threading.Event()
        helpers.submit(lambda done=done: (names.add(threading.current_thread().name), done.set()))  # type: ignore[misc]
        assert done.wait(10)
        wait_for(lambda: helpers._idle == helpers._threads)
    assert len(names) == 1


def test_closing(made: list[Helpers]) -> None:
    helpers = Helpers("pool", threading.BoundedSemaphore(1))
    done = threading.Event()
    helpers.submit(done.set)
    assert done.wait(10)
    helpers.close()
    wait_for(lambda: threads("pool") == 0)
    assert not helpers.submit(done.clear) and done.is_set()
