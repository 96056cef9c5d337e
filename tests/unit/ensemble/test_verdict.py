"""What ``tools/ensemble`` reads from the events of a seed."""

from __future__ import annotations

from typing import Any

from tests.ensemble import verdict
from tests.ensemble.faults import KINDS, Window
from tests.ensemble.report import page
from tests.ensemble.seeds import Result
from tests.world.history import NEVER

KILL = "leader killed"


def event(kind: str, t: float, request: str = "one", **values: Any) -> dict[str, Any]:
    return {"event": kind, "t": t, "request": request, **values}


REQUESTED = event("requested", 1.0, began=0.5)
FULFILLED = event("fulfilled", 2.0, nodes=["7"])
LOCKED = event("locked", 3.0)


def test_gap_counts_from_the_fault_to_the_next_one() -> None:
    windows = [Window(KILL, 10, 10, False), Window("slow disk", 20, 20, False)]
    events = [event("fulfilled", t) for t in (9, 12, 13, 19, 21, 27)]
    assert verdict.gaps(events, windows, 30, [11, 12, 25]) == [
        verdict.Gap(KILL, 6, 8, KINDS[KILL].longest),
        verdict.Gap("slow disk", 6, 5, KINDS["slow disk"].longest),
    ]


def test_fault_before_the_first_request_after_another_has_the_larger_limit() -> None:
    windows = [
        Window("all emptied", 10, 15, True),
        Window(KILL, 16, 16, False),
        Window(KILL, 20, 20, False),
    ]
    first, second, third = verdict.gaps([event("fulfilled", 19.5)], windows, 30, [])
    assert first.longest == second.longest == KINDS["all emptied"].longest > third.longest
    assert (second.seconds, second.too_long, third.too_long) == (3.5, False, True)


def test_gap_begins_when_servers_that_all_stopped_serve_again() -> None:
    windows = [Window("all emptied", 10, 15, True)]
    events = [event("fulfilled", 9), event("fulfilled", 16)]
    (gap,) = verdict.gaps(events, windows, 18, [])
    assert gap.seconds == 2


def test_returned_node_is_free_from_the_begin_of_its_return() -> None:
    events = [REQUESTED, FULFILLED, LOCKED, event("releasing", 4.0), event("released", 5.0)]
    assert verdict.history(events, [], 3) == [
        ("3.0:7", True, "one", 500_000, 3_000_000),
        ("3.0:7", False, "one", 4_000_000, 5_000_000),
    ]


def test_node_of_an_expired_session_may_be_free_since_it_was_locked() -> None:
    events = [REQUESTED, FULFILLED, LOCKED, event("releasing", 4.0), event("expired", 5.0)]
    assert verdict.history(events, [], 3)[1] == ("3.0:7", False, "one", 3_000_000, NEVER)


def test_node_ids_after_a_loss_of_data_are_other_nodes() -> None:
    windows = [Window("all emptied", 0.1, 0.8, True)]
    assert verdict.history([REQUESTED, FULFILLED], windows, 3)[0][0] == "3.1:7"


def test_only_requests_from_before_a_loss_of_data_may_be_lost() -> None:
    events = [REQUESTED, event("lost", 9)]
    assert verdict.violations(events, [Window("all emptied", 0.1, 1.5, True)]) == []
    assert len(verdict.violations(events, [Window("all emptied", 0.1, 0.9, True)])) == 1
    assert len(verdict.violations(events, [Window(KILL, 0.1, 1.5, False)])) == 1


def test_page_shows_how_many_faults_have_the_limit_of_another() -> None:
    limit = KINDS["all emptied"].longest
    result = Result(3, gaps=[verdict.Gap(KILL, 3.5, 0.5, limit)])
    text = page([result], {})
    assert "Faults during the recovery from another one, with its limit: 1" in text
    assert "0 of 1 faults exceed the limit of time" in text
