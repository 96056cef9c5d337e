from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nodepool.cloud import Poller
from nodepool.cloud.polling import CEILING, EARLY, FLOOR
from tests.support.clock import CloudError, ErrorKind, HandClock, HandExecutor, HandTimers


class Cloud:
    def __init__(self, batch: int = 100) -> None:
        self.clock = HandClock()
        self.timers = HandTimers(self.clock)
        self.executor = HandExecutor()
        self.things: dict[str, str] = {}
        self.questions: list[tuple[float, list[str]]] = []
        self.broken = False
        self.refused: set[str] = set()
        self.watched: Poller[str] = Poller(
            "things", self.fetch, self.executor, self.timers, batch=batch
        )

    def fetch(self, ids: Sequence[str]) -> dict[str, str | Exception]:
        self.questions.append((self.clock.now, list(ids)))
        if self.broken:
            raise CloudError(ErrorKind.TRANSIENT, "down")
        refused: dict[str, str | Exception] = {
            key: CloudError(ErrorKind.TRANSIENT, "this one") for key in ids if key in self.refused
        }
        return refused | {
            key: self.things[key] for key in ids if key in self.things and key not in refused
        }


def test_only_watched_ids_are_requested_and_absence_is_reported() -> None:
    cloud = Cloud()
    cloud.things = {"a": "running", "foreign": "running"}
    woken: list[str] = []
    a = cloud.watched.watch("a", lambda: woken.append("a"))
    b = cloud.watched.watch("b", lambda: woken.append("b"))
    assert a.latest is None
    cloud.timers.pass_time(1)
    assert cloud.questions[0][1] == ["a", "b"]
    assert sorted(woken[:2]) == ["a", "b"]
    assert a.latest is not None
    assert a.latest.value == "running"
    assert b.latest is not None
    assert b.latest.value is None


def test_one_question_per_batch() -> None:
    cloud = Cloud(batch=10)
    for number in range(25):
        cloud.watched.watch(f"i{number}", lambda: None)
    cloud.timers.pass_time(FLOOR)
    assert [len(ids) for _, ids in cloud.questions] == [10, 10, 5]


def test_one_by_one() -> None:
    cloud = Cloud(batch=1)
    for number in range(3):
        cloud.watched.watch(f"i{number}", lambda: None)
    cloud.timers.pass_time(FLOOR)
    assert [ids for _, ids in cloud.questions] == [["i0"], ["i1"], ["i2"]]


def test_nothing_is_asked_when_nobody_waits() -> None:
    cloud = Cloud()
    watch = cloud.watched.watch("a", lambda: None)
    watch.end()
    cloud.timers.pass_time(1000)
    assert cloud.questions == []


def test_a_failed_poll_harms_nobody_and_is_retried() -> None:
    cloud = Cloud()
    woken: list[str] = []
    watch = cloud.watched.watch("a", lambda: woken.append("a"))
    cloud.broken = True
    cloud.timers.pass_time(5)
    assert len(cloud.questions) >= 2
    assert woken == []
    assert watch.latest is None
    cloud.broken = False
    cloud.things["a"] = "running"
    cloud.timers.pass_time(CEILING)
    assert woken
    assert watch.latest is not None
    assert watch.latest.value == "running"


def test_an_object_that_cannot_be_looked_at_harms_no_other() -> None:
    cloud = Cloud()
    cloud.things = {"a": "running", "bad": "running"}
    cloud.refused = {"bad"}
    a, bad = cloud.watched.watch("a", lambda: None), cloud.watched.watch("bad", lambda: None)
    cloud.timers.pass_time(FLOOR)
    assert cloud.questions[0][1] == ["a", "bad"]
    assert a.latest is not None and a.latest.value == "running"
    assert bad.latest is None
    cloud.timers.pass_time(20)
    later = [ids for _, ids in cloud.questions[1:]]
    assert ["a"] in later and ["bad"] in later and ["a", "bad"] not in later, (
        "it is asked for by itself"
    )
    assert bad.latest is None, "nobody takes it for absent"
    assert later.count(["bad"]) < later.count(["a"])
    cloud.refused = set()
    cloud.timers.pass_time(2 * CEILING)
    assert bad.latest is not None and bad.latest.value == "running"


def test_what_the_first_poll_finds_done_is_expected_sooner() -> None:
    """Else one slow change would make all later ones be seen late."""
    cloud = Cloud()
    for takes in (20.0,) * 9 + (4.0,) * 20:
        watch = cloud.watched.watch("a", lambda: None, "launch")
        started = cloud.clock.now
        while watch.latest is None or watch.latest.asked - started < takes:
            cloud.timers.pass_time(FLOOR / 4)
        watch.end()
        seen = watch.latest.asked - started
    assert seen - 4.0 <= 2 * FLOOR


def test_the_usual_time_is_learned_and_most_polls_are_saved() -> None:
    cloud = Cloud()
    for _ in range(3):
        watch = cloud.watched.watch("a", lambda: None, "launch")
        cloud.timers.pass_time(60)
        watch.end()
    assert cloud.watched.expected("launch") == 60
    cloud.questions.clear()
    started = cloud.clock.now
    watch = cloud.watched.watch("a", lambda: None, "launch")
    cloud.timers.pass_time(57)
    early = [when for when, _ in cloud.questions if when - started < 45]
    assert 3 <= len(early) <= 6, "seldom, but often enough to see an early failure"
    late = [when for when, _ in cloud.questions if when - started > 50]
    assert len(late) >= 10, "frequent when it is about to happen"
    watch.end(reached=False)
    assert cloud.watched.expected("launch") == 60


def test_next_poll_respects_the_floor() -> None:
    cloud = Cloud()
    watch = cloud.watched.watch("a", lambda: None)
    watch.again()
    cloud.timers.pass_time(0)
    assert len(cloud.questions) == 1
    watch.again()
    cloud.timers.pass_time(FLOOR * 0.5)
    assert len(cloud.questions) == 1
    cloud.timers.pass_time(FLOOR * 0.6)
    assert len(cloud.questions) == 2


def test_an_answer_asked_for_before_the_watch_began_does_not_count() -> None:
    cloud = Cloud()
    cloud.executor.held = True
    first = cloud.watched.watch("a", lambda: None)
    cloud.timers.pass_time(1)
    cloud.executor.held = False
    # The question is on its way (answered with "absent") when somebody else starts to wait.
    function, future = cloud.executor.kept.pop()
    answer = function()
    cloud.clock.now += 1
    second = cloud.watched.watch("a", lambda: None)
    future.set_result(answer)
    assert first.latest is not None
    assert second.latest is None
    cloud.timers.pass_time(5)
    assert second.latest is not None


def test_a_hanging_question_holds_only_its_own_ids() -> None:
    cloud = Cloud(batch=1)
    cloud.executor.held = True
    cloud.watched.watch("hangs", lambda: None)
    cloud.timers.pass_time(1)
    assert len(cloud.executor.kept) == 1
    cloud.executor.held = False
    hung = cloud.executor.kept.pop()
    watch = cloud.watched.watch("b", lambda: None)
    cloud.timers.pass_time(20)
    assert watch.latest is not None
    assert ["hangs"] not in [ids for _, ids in cloud.questions]
    hung[1].set_exception(CloudError(ErrorKind.TRANSIENT))
    cloud.timers.pass_time(CEILING)
    assert ["hangs"] in [ids for _, ids in cloud.questions]


def test_a_watch_that_nobody_reads_is_dropped() -> None:
    cloud = Cloud()
    watch = cloud.watched.watch("a", lambda: None)
    cloud.timers.pass_time(590)
    assert not watch.ended
    assert watch.latest is not None
    cloud.timers.pass_time(590)
    assert not watch.ended
    cloud.timers.pass_time(30)
    assert watch.ended
    cloud.questions.clear()
    cloud.timers.pass_time(100)
    assert cloud.questions == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 30), st.booleans()), max_size=30),
    st.integers(1, 4),
)
def test_no_id_is_asked_faster_than_the_floor_and_none_is_forgotten(
    events: list[tuple[int, float, bool]], batch: int
) -> None:
    cloud = Cloud(batch=batch)
    watches = {}
    for number, seconds, broken in events:
        key = f"i{number}"
        if key in watches:
            watches.pop(key).end(reached=broken)
        else:
            watches[key] = cloud.watched.watch(key, lambda: None, "launch")
        cloud.broken = broken
        cloud.timers.pass_time(seconds)
        assert all(each.latest is None or each.latest.value is None for each in watches.values())
    cloud.broken = False
    asked: dict[str, float] = {}
    cloud.questions.clear()
    cloud.timers.pass_time(4 * CEILING)
    for when, ids in cloud.questions:
        assert len(ids) <= batch
        assert len(set(ids)) == len(ids)
        for key in ids:
            assert when - asked.get(key, float("-inf")) >= FLOOR - 1e-6
            asked[key] = when
    assert set(asked) == set(watches)


def changes(cloud: Cloud, after: float, count: int = 30) -> tuple[float, float]:
    """Things that change ``after`` this many seconds, one by one: polls of each of the last 20,
    and how late it was seen.
    """
    looks: list[int] = []
    late: list[float] = []
    for number in range(count):
        key, before, begun = f"i{number}", len(cloud.questions), cloud.clock.now
        watch = cloud.watched.watch(key, lambda: None, "launch")
        while watch.latest is None or watch.latest.value is None:
            cloud.timers.pass_time(0.05)
            if cloud.clock.now - begun >= after:
                cloud.things[key] = "running"
        watch.end()
        looks.append(len(cloud.questions) - before)
        late.append(cloud.clock.now - begun - after)
        cloud.timers.pass_time(1)
    return sum(looks[-20:]) / 20, sum(late[-20:]) / 20


def test_changes_that_always_take_equally_long_are_seen_by_the_first_poll() -> None:
    plain, narrow = Cloud(), Cloud()
    narrow.watched.narrow = True
    looks, late = changes(narrow, 7.3)
    looks_before, late_before = changes(plain, 7.3)
    assert looks <= 1.5 < looks_before
    assert late <= max(FLOOR / 2, late_before)
    # What becomes quicker is noticed, what becomes slower, too.
    for duration in (6.6, 9.0):
        looks, late = changes(narrow, duration, 60)
        assert looks <= 1.6
        assert late <= FLOOR / 2


def test_changes_of_different_length_are_waited_for_as_before() -> None:
    cloud = Cloud()
    cloud.watched.narrow = True
    cloud.watched._durations["launch"] = deque([(5.0, 5.5), (9.0, 9.5), (7.0, 7.5)])
    assert cloud.watched._early("launch", 7.5) == EARLY * 7.5


def test_nothing_is_asked_before_the_first_poll_of_an_unknown_kind() -> None:
    cloud = Cloud()
    cloud.watched.watch("a", lambda: None, "launch", first=2.0)
    cloud.timers.pass_time(1.9)
    assert cloud.questions == []
    cloud.timers.pass_time(0.2 + FLOOR)
    assert len(cloud.questions) == 2


def test_who_is_patient_shares_the_questions_of_others() -> None:
    cloud = Cloud()
    cloud.things = {"new": "pending", "old": "terminated"}
    cloud.watched.watch("new", lambda: None, "launch", first=2.0)
    old = cloud.watched.watch("old", lambda: None, "delete", patience=3.0)
    cloud.timers.pass_time(2.1)
    assert [sorted(ids) for _, ids in cloud.questions] == [["new", "old"]]
    old.end()
    assert cloud.watched.expected("delete") == EARLY * FLOOR, "what patience added is not learned"
    # Nobody else looks: it does not wait.
    alone = Cloud()
    alone.watched.watch("old", lambda: None, "delete", patience=3.0)
    alone.timers.pass_time(FLOOR + 0.1)
    assert len(alone.questions) == 1
    # Nobody else looks in time.
    late = Cloud()
    late.watched.watch("new", lambda: None, "launch", first=9.0)
    late.watched.watch("old", lambda: None, "delete", patience=3.0)
    late.timers.pass_time(FLOOR + 0.1)
    assert [ids for _, ids in late.questions] == [["old"]]
