"""Growing pauses after failures."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from nodepool.base.backoff import Backoff, KeyedBackoff


def test_pauses_grow_to_their_limit() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.pause(n) for n in range(8)] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert backoff.pause(100_000) == 30
    assert [Backoff(1.0, 100.0, factor=3.0).pause(n) for n in (1, 2, 3, 9)] == [1, 3, 9, 100]


def test_jitter_shortens_the_pause() -> None:
    backoff = Backoff(2.0, 8.0, jitter=0.5)
    assert [backoff.pause(9, chance) for chance in (lambda: 0.0, lambda: 0.5, lambda: 1.0)] == [
        4,
        6,
        8,
    ]
    assert 1 <= backoff.pause(1) <= 2


@given(st.integers(1, 60))
def test_by_key_and_subject(count: int) -> None:
    clock = [0.0]
    backoff = KeyedBackoff(Backoff(10.0, 3600.0), lambda: clock[0])
    waits = []
    for _ in range(count):
        assert backoff.failed("a", "s") == clock[0] + backoff.wait("a", "s")
        waits.append(backoff.wait("a", "s"))
        clock[0] += waits[-1]
        assert backoff.wait("a", "s") == 0
    assert waits == sorted(waits) and waits[0] == 10 and waits[-1] <= 3600
    assert backoff.attempts("a", "s") == count
    assert backoff.wait("a", "another subject") == 0 == backoff.attempts("a", "another subject")
    backoff.succeeded("a")
    assert backoff.attempts("a", "s") == 0


def test_what_fails_together_counts_once() -> None:
    now = [100.0]
    refusals = KeyedBackoff(Backoff(0.5, 15.0), lambda: now[0])
    assert not refusals.wait("label")
    tries = []
    while now[0] < 400:
        if not refusals.wait("label"):
            tries.append(now[0])
            refusals.failed("label", together=True)
            refusals.failed("label", together=True)  # of a launch alongside it
        assert not refusals.wait("other")
        now[0] += 0.5
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert set(pauses[5:]) == {15}
    refusals.succeeded("label")
    assert not refusals.wait("label")
