"""Remembered answers of the cloud: one question at a time, older answers while it is asked
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from nodepool.cloud import answer_cache
from nodepool.cloud.answer_cache import AnswerCache
from nodepool.driver.openstack.api.errors import suspected_lookups
from tests.conftest import wait_for


class Cloud:
    """Answers on request."""

    def __init__(self) -> None:
        self.questions: list[Future[Any]] = []
        self.free: Any = None

    def ask(self) -> Any:
        if self.free is not None:
            return self.free
        question: Future[Any] = Future()
        self.questions.append(question)
        return question.result(20)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(10) as executor:
        yield executor


def waiting(memo: AnswerCache, future: Future[Any], count: int) -> bool:
    return len(future._waiters) == count  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [False, True])
def test_many_threads_ask_once(threads: ThreadPoolExecutor, fails: bool) -> None:
    memo, cloud = AnswerCache(), Cloud()
    answers = [threads.submit(memo.get, "flavors", None, cloud.ask) for _ in range(8)]
    wait_for(
        lambda: cloud.questions and waiting(memo, memo._asked["flavors", None], 7),
        what="seven wait for the eighth",
    )
    if fails:
        cloud.questions[0].set_exception(RuntimeError("nova"))
        assert [str(answer.exception(20)) for answer in answers] == ["nova"] * 8
        cloud.free = "later"
        assert memo.get("flavors", None, cloud.ask) == "later"
    else:
        cloud.questions[0].set_result(["small"])
        assert [answer.result(20) for answer in answers] == [["small"]] * 8
        assert memo.get("flavors", None, cloud.ask) == ["small"]
    assert len(cloud.questions) == 1


def test_the_wait_for_another_thread_ends(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_cache, "SHARED_DEADLINE", 0.01)
    memo, cloud = AnswerCache(), Cloud()
    first = threads.submit(memo.get, "flavors", None, cloud.ask)
    wait_for(lambda: cloud.questions)
    with pytest.raises(answer_cache.CallTimeout, match="flavors"):
        memo.get("flavors", None, cloud.ask)
    cloud.questions[0].set_result([])
    assert first.result(20) == []


def test_older_answers_serve_while_they_are_renewed(threads: ThreadPoolExecutor) -> None:
    memo, cloud = AnswerCache(), Cloud()
    memo.get("zones", None, lambda: ["old"])
    memo._fetches["zones", None] = cloud.ask
    renewals = [threads.submit(memo.renew, None, (), 10.0) for _ in range(2)]
    wait_for(
        lambda: cloud.questions and waiting(memo, memo._asked["zones", None], 1),
        what="one waits for the other",
    )
    assert memo.get("zones", None, cloud.ask) == ["old"]
    assert not any(renewal.done() for renewal in renewals)
    cloud.questions[0].set_result(["new"])
    for renewal in renewals:
        renewal.result(20)
    assert memo.get("zones", None, cloud.ask) == ["new"]
    assert len(cloud.questions) == 1


def test_a_failed_renewal_keeps_the_older_answer() -> None:
    def fail() -> None:
        raise RuntimeError("nova")

    memo = AnswerCache()
    memo.get("zones", None, lambda: ["old"])
    memo._fetches["zones", None] = fail
    with pytest.raises(RuntimeError, match="nova"):
        memo.renew(("zones",), ())
    assert memo.get("zones", None, fail) == ["old"]


def test_what_is_renewed() -> None:
    clock, asked = Clock(), []
    memo = AnswerCache(clock)

    def fetch(what: str) -> Callable[[], str]:
        return lambda: asked.append(what) or what  # type: ignore[func-returns-value]

    def renewed(kinds: Any, *names: str) -> list[str]:
        asked.clear()
        memo.renew(kinds, names, 10)
        return sorted(asked)

    for kind, name in (("zones", None), ("flavors", None), ("image", "a"), ("image", "b")):
        memo.get(kind, name, fetch(name or kind))
    assert renewed(set()) == []
    assert renewed({"image"}, "a") == ["a"]
    assert renewed(None, "a") == ["flavors", "zones"], "not again so soon"
    assert renewed(None, "a", "b") == ["b"]
    clock.now = 10
    assert renewed(None, "a") == ["a", "flavors", "zones"]
    assert memo.age("flavors") == 0
    assert memo.age("networks") == float("inf")


def test_a_forgotten_question_is_asked_again(threads: ThreadPoolExecutor) -> None:
    """What was asked before somebody learned better counts for those who asked then."""
    memo, cloud = AnswerCache(), Cloud()
    before = threads.submit(memo.get, "zones", None, cloud.ask)
    wait_for(lambda: cloud.questions)
    memo.forget()
    after = threads.submit(memo.get, "zones", None, cloud.ask)
    wait_for(lambda: len(cloud.questions) == 2)
    cloud.questions[1].set_result("new")
    assert after.result(20) == "new"
    cloud.questions[0].set_result("old")
    assert before.result(20) == "old"
    assert memo.get("zones", None, cloud.ask) == "new"


def test_only_what_was_not_found_is_forgotten() -> None:
    memo, asked = AnswerCache(), threading.Event()
    memo.get("image", "there", lambda: "id")
    memo.get("image", "missing", lambda: None)
    memo.forget(("image",), absent=True)
    assert memo.get("image", "there", asked.set) == "id"
    memo.get("image", "missing", asked.set)
    assert asked.is_set()


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        ("Invalid key_name provided.", set()),
        ("Security group nowhere not found for project", set()),
        ("The requested availability zone is not available", {"zones"}),
        ("Network 5 could not be found.", {"networks", "network"}),
        ("Flavor's disk is too small for requested image.", {"flavors", "image"}),
        ("Block Device Mapping is Invalid: failed to get image", {"image"}),
        ("made up", None),
    ],
)
def test_what_a_refusal_may_be_about(message: str, kinds: set[str] | None) -> None:
    assert suspected_lookups(message) == kinds


def test_an_old_answer_is_requested_again() -> None:
    clock, answers = Clock(), iter(range(9))
    memo = AnswerCache(clock)
    for now, answer in ((0, 0), (10, 0), (10.1, 1), (20, 1), (21, 2)):
        clock.now = now
        assert memo.get("servers", None, lambda: next(answers), 10) == answer
    clock.now = 99
    assert memo.get("servers", None, lambda: next(answers)) == 2

    def fail() -> Any:
        raise RuntimeError("nova")

    with pytest.raises(RuntimeError):
        memo.get("servers", None, fail, 10)
    assert memo.get("servers", None, lambda: next(answers), 10) == 3
