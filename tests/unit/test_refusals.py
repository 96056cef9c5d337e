"""How often a node is tried that the cloud refuses for quota."""

from __future__ import annotations

import itertools

from nodepool.driver.statemachine.refusals import PAUSE, Refusals


def test_growing_pause() -> None:
    now = [100.0]
    refusals = Refusals(lambda: now[0])
    assert not refusals.rests("label")
    tries = []
    while now[0] < 400:
        if not refusals.rests("label"):
            tries.append(now[0])
            refusals.note("label")
            refusals.note("label")  # of a launch beside it
        assert not refusals.rests("other")
        now[0] += 0.5
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert set(pauses[5:]) == {PAUSE[1]}
    refusals.clear("label")
    assert not refusals.rests("label")
