from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.cloud import CallsStopped, DeleteBatches, ErrorKind
from tests.support.clock import CloudError, HandClock, HandExecutor, HandTimers, classify


class Cloud:
    def __init__(self, batch: int = 50, parallel: int = 2) -> None:
        self.clock = HandClock()
        self.timers = HandTimers(self.clock)
        self.executor = HandExecutor()
        self.bad: dict[str, ErrorKind] = {}
        self.calls: list[list[str]] = []
        self.deletes = DeleteBatches("p", classify, self.executor, self.timers, jitter=lambda: 1.0)
        for kind in ("instance", "host"):
            self.deletes.add_kind(kind, self.delete_many, batch=batch, parallel=parallel)

    def delete_many(self, ids: Sequence[str]) -> Any:
        self.calls.append(list(ids))
        for key in ids:
            if key in self.bad:
                raise CloudError(self.bad[key], f"{key} is refused")


def test_many_ids_go_in_few_calls() -> None:
    cloud = Cloud()
    futures = [cloud.deletes.delete("instance", f"i{n}") for n in range(230)]
    cloud.timers.pass_time(1)
    assert [len(ids) for ids in cloud.calls] == [50, 50, 50, 50, 30]
    assert all(future.done() and future.exception() is None for future in futures)


def test_an_id_on_its_way_is_not_sent_twice() -> None:
    cloud = Cloud()
    assert cloud.deletes.delete("instance", "a") is cloud.deletes.delete("instance", "a")
    cloud.timers.pass_time(1)
    assert cloud.calls == [["a"]]
    cloud.deletes.delete("instance", "a")
    cloud.timers.pass_time(1)
    assert cloud.calls == [["a"], ["a"]]


def test_one_bad_id_does_not_keep_the_others() -> None:
    cloud = Cloud(batch=3)
    cloud.bad["b"] = ErrorKind.OTHER
    futures = {key: cloud.deletes.delete("instance", key, deadline=100) for key in "abc"}
    cloud.timers.pass_time(1)
    assert cloud.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert futures["a"].done()
    assert futures["c"].done()
    assert not futures["b"].done()
    cloud.timers.pass_time(1)
    assert cloud.calls[4:] == [["b"]], "tried again, alone"
    del cloud.bad["b"]
    cloud.timers.pass_time(5)
    assert futures["b"].exception() is None


def test_an_unknown_id_counts_as_deleted() -> None:
    cloud = Cloud()
    cloud.bad["gone"] = ErrorKind.NOT_FOUND
    futures = [cloud.deletes.delete("instance", key) for key in ("gone", "there")]
    cloud.timers.pass_time(1)
    assert [future.exception() for future in futures] == [None, None]


def test_the_deadline_ends_the_retries_with_the_last_error() -> None:
    cloud = Cloud()
    cloud.bad["a"] = ErrorKind.OTHER
    future = cloud.deletes.delete("instance", "a", deadline=100)
    cloud.timers.pass_time(101)
    assert isinstance(future.exception(0), CloudError)
    assert len(cloud.calls) == 7  # after 0, 1, 3, 7, 15, 31, 63 s
    del cloud.bad["a"]
    again = cloud.deletes.delete("instance", "a")
    cloud.timers.pass_time(1)
    assert again.exception(0) is None


def test_a_hanging_kind_holds_no_other() -> None:
    cloud = Cloud(batch=1, parallel=2)
    cloud.executor.held = True
    hosts = [cloud.deletes.delete("host", f"h{n}") for n in range(5)]
    cloud.timers.pass_time(1)
    assert len(cloud.executor.kept) == 2, "takes no more than its threads"
    cloud.executor.held = False
    instance = cloud.deletes.delete("instance", "i1")
    hung, cloud.executor.kept = cloud.executor.kept, []
    cloud.timers.pass_time(1)
    assert instance.done()
    for function, future in hung:
        future.set_result(function())
    cloud.timers.pass_time(1)
    assert all(future.done() for future in hosts)


def test_a_partial_answer_is_understood() -> None:
    cloud = Cloud()
    answers: list[Any] = [{"b": CloudError(ErrorKind.OTHER)}, None]
    cloud.deletes.add_kind(
        "host", lambda ids: (cloud.calls.append(list(ids)), answers.pop(0))[1], batch=10
    )
    futures = {key: cloud.deletes.delete("host", key) for key in "ab"}
    cloud.timers.pass_time(0.5)
    assert futures["a"].done()
    assert not futures["b"].done()
    cloud.timers.pass_time(5)
    assert futures["b"].exception(0) is None
    assert cloud.calls == [["a", "b"], ["b"]]


def test_stop_notifies_those_who_wait() -> None:
    cloud = Cloud()
    future = cloud.deletes.delete("instance", "a")
    cloud.deletes.stop()
    assert isinstance(future.exception(0), CallsStopped)
    assert isinstance(cloud.deletes.delete("instance", "b").exception(0), CallsStopped)
    cloud.timers.pass_time(10)
    assert cloud.calls == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([*ErrorKind, None, None, None])),
        max_size=8,
    ),
    st.integers(1, 5),
)
def test_every_good_id_is_deleted_and_every_future_ends(
    plan: list[tuple[str, ErrorKind | None]], batch: int
) -> None:
    cloud = Cloud(batch=batch)
    cloud.bad = {key: kind for key, kind in plan if kind is not None}
    futures = {key: cloud.deletes.delete("instance", key, deadline=60) for key, _ in plan}
    cloud.timers.pass_time(200)
    for key, future in futures.items():
        assert future.done()
        good = cloud.bad.get(key) in (None, ErrorKind.NOT_FOUND)
        assert (future.exception() is None) is good
    assert all(len(ids) <= batch for ids in cloud.calls)


def test_unknown_kinds_are_programming_errors() -> None:
    with pytest.raises(KeyError):
        Cloud().deletes.delete("volume", "v")
