"""How tests wait (``tests/conftest.py``)."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from email.message import Message
from typing import Any

import pytest

from tests.conftest import wait_for


@pytest.mark.parametrize("code, waits", [(404, True), (500, False)])
def test_answer_that_something_does_not_exist_is_waited_for(code: int, waits: bool) -> None:
    answers = iter([code, 200])

    def ask() -> int:
        if (found := next(answers)) != 200:
            raise urllib.error.HTTPError("http://localhost", found, "", Message(), None)
        return found

    if waits:
        assert wait_for(ask) == 200
    else:
        with pytest.raises(urllib.error.HTTPError) as caught:
            wait_for(ask)
        caught.value.close()


def test_a_name_that_an_object_lacks_fails_immediately() -> None:
    thread: Any = threading.current_thread()
    with pytest.raises(AttributeError, match="is_allive"):
        wait_for(lambda: thread.is_allive())


def test_what_does_not_exist_yet_is_waited_for() -> None:
    answers: Iterator[Any] = iter([None, threading.current_thread()])
    assert wait_for(lambda: next(answers).is_alive())
