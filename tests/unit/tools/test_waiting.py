"""How tests wait (``tests/conftest.py``)."""

from __future__ import annotations

import urllib.error
from email.message import Message

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
