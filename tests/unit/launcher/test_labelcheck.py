"""Questions to clouds beside the thread that wants to know."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nodepool.launcher.requests.labelcheck import FRESH, LabelCheck
from tests.conftest import wait_for


class Asked:
    """A check, its clock, and how often an answer has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = 0
        self.check = LabelCheck(self._answered, lambda: self.now)

    def _answered(self) -> None:
        self.answers += 1

    def wait(self, answers: int) -> None:
        wait_for(lambda: self.answers == answers)
        self.check.join(10)


def test_answers_come_and_grow_old() -> None:
    asked, questions = Asked(), []

    def ready(answer: Any, what: str = "pool") -> bool:
        def ask() -> Any:
            questions.append(answer)
            return answer

        return asked.check.ready("p", "l", what, ask)

    assert ready("yes") is False
    asked.wait(1)
    assert ready("not asked") is True
    assert ready(None, what="the same after a reload") is False
    asked.wait(2)
    assert ready("not asked", what="the same after a reload") is False
    asked.now += FRESH
    assert ready("yes", what="the same after a reload") is False
    asked.wait(3)
    assert ready("not asked", what="the same after a reload") is True
    assert questions == ["yes", None, "yes"]


def test_an_error_is_told_to_whoever_asked() -> None:
    asked = Asked()
    asked.check.ready("p", "l", None, lambda: 1 // 0)
    asked.wait(1)
    with pytest.raises(ZeroDivisionError):
        asked.check.ready("p", "l", None, lambda: True)


def test_one_thread_per_provider() -> None:
    asked, go_on = Asked(), threading.Event()
    before = threading.active_count()
    for label in ("a", "b", "c"):
        asked.check.ready("slow", label, None, lambda: go_on.wait(10))
    asked.check.ready("quick", "a", None, lambda: True)
    wait_for(lambda: asked.check.ready("quick", "a", None, lambda: True))
    assert threading.active_count() <= before + 2
    asked.check.stop()
    go_on.set()
    asked.wait(2)  # of those of the slow one only that which was under way
    wait_for(lambda: threading.active_count() <= before)  # a shared thread may have ended meanwhile
