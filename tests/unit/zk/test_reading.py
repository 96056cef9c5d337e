"""Reads of many znodes, and writes of single ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import NoAuthError, NodeExistsError, NoNodeError

from nodepool.zk import reading


class Kazoo:
    """Answers each call with the next of its answers."""

    client_id = (7, b"")

    def __init__(self, **answers: list[object]) -> None:
        self._answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(path: str, *_args: object, **_options: object) -> Any:
            self.calls.append(name.removesuffix("_async"))
            answer = self._answers[self.calls[-1]].pop(0)

            def get(timeout: float) -> object:
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return SimpleNamespace(get=get)

        return call


OURS, THEIRS = SimpleNamespace(ephemeralOwner=7), SimpleNamespace(ephemeralOwner=8)


@pytest.mark.parametrize(
    ("answers", "ephemeral", "calls"),
    [
        ({"set": [OURS]}, True, "set"),
        ({"set": [THEIRS]}, False, "set"),
        ({"set": [NoNodeError()], "create": ["/a"]}, True, "set create"),
        ({"set": [THEIRS], "delete": [True], "create": ["/a"]}, True, "set delete create"),
        ({"set": [THEIRS], "delete": [NoNodeError()], "create": ["/a"]}, True, "set delete create"),
        ({"set": [NoNodeError(), OURS], "create": [NodeExistsError()]}, True, "set create set"),
    ],
)
def test_znode_is_written_whatever_others_do_meanwhile(
    answers: dict[str, list[object]], ephemeral: bool, calls: str
) -> None:
    kazoo: Any = Kazoo(**answers)
    reading.write(kazoo, "/a", b"x", ephemeral)
    assert " ".join(kazoo.calls) == calls


def test_write_that_others_prevent_at_each_attempt_is_no_success() -> None:
    kazoo: Any = Kazoo(set=[NoNodeError()] * 3, create=[NodeExistsError()] * 3)
    with pytest.raises(NodeExistsError):
        reading.write(kazoo, "/a", b"x")
    assert kazoo.calls == ["set", "create"] * 3


def test_what_we_may_not_read_hides_nothing_else_and_does_not_count_as_deleted() -> None:
    there: list[object] = [(b"1", None), NoAuthError(), NoNodeError(), (b"4", None)]
    kazoo: Any = Kazoo(get=[*there, *there])
    wanted = ["/a", "/b", "/c", "/d"]
    found = dict(reading.answers(kazoo.get_async, wanted, reading.UNREADABLE))
    assert found == {"/a": (b"1", None), "/d": (b"4", None)}
    with pytest.raises(NoAuthError):
        dict(reading.answers(kazoo.get_async, wanted))
