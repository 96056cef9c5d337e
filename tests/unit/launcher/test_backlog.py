"""How many requests a pool accepts before it has considered them."""

from __future__ import annotations

from nodepool.launcher.pools.backlog import LIMIT, Backlog


def accepted(backlog: Backlog) -> int:
    """Hand over requests until they are refused; return their number."""
    before = len(backlog.ids)
    while not backlog.refuses():
        backlog.ids.add(str(len(backlog.ids)))
    return len(backlog.ids) - before


def all_considered(backlog: Backlog) -> None:
    for request_id in list(backlog.ids):
        backlog.considered(request_id, paused=False)


def test_pool_that_was_paused_accepts_one_request_then_more_and_more() -> None:
    backlog = Backlog()
    assert accepted(backlog) == LIMIT
    for request_id in list(backlog.ids):
        backlog.considered(request_id, paused=True)
    found = []
    for _ in range(4):
        found.append(accepted(backlog))
        all_considered(backlog)
    assert found == [1, 2, 8, LIMIT]


def test_paused_pool_accepts_one_request_at_a_time() -> None:
    backlog = Backlog()
    backlog.considered("x", paused=True)
    for _ in range(3):
        assert accepted(backlog) == 1
        assert backlog.considered("0", paused=True), "the one that was refused is offered again"


def test_requests_that_were_refused_are_offered_again_when_half_of_the_backlog_is_done() -> None:
    backlog = Backlog()
    accepted(backlog)
    told = [backlog.considered(str(number), paused=False) for number in range(LIMIT)]
    assert [number for number, again in enumerate(told, 1) if again] == [LIMIT // 2]


def test_pool_refuses_until_requests_are_offered_again() -> None:
    backlog = Backlog()
    backlog.ids.update(map(str, range(LIMIT)))
    assert backlog.refuses()
    for number in range(LIMIT):
        again = backlog.considered(str(number), False)
        assert backlog.refuses() is not again
        if again:
            break
    assert len(backlog.ids) == LIMIT // 2


def test_nothing_is_offered_again_if_nothing_was_refused() -> None:
    backlog = Backlog()
    backlog.ids = {"1", "2"}
    assert not backlog.refuses()
    assert not backlog.considered("1", paused=False) and not backlog.considered("2", paused=True)
