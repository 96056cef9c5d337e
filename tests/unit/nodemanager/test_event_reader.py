"""Events of node managers, of which some are older, newer, broken or hostile."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nodepool.driver.nodemanager import events
from nodepool.driver.nodemanager.events import MOST, EventReader
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.mirror.feed import Feed
from tests.conftest import wait_for

OURS = {"nodepool_provider_name": "metal", "nodepool_node_id": "0000000007"}


def ended(number: Any, **values: Any) -> dict[str, Any]:
    return {"number": number, "kind": "ended", "time": 1.5, "name": "a", "metadata": OURS, **values}


class Host:
    """Gives these answers, one to each call; then none until it is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        monkeypatch.setattr(events, "PAUSE", 0.0)
        monkeypatch.setattr(events, "LATER", 0.0)
        monkeypatch.setattr(events, "EACH", 0.0)
        self.answers, self.calls = list(answers), []
        self.feed = Feed()
        self.reader = EventReader("h", self.call, "metal", self.feed, logging.getLogger("test"))

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        assert (method, arguments[0]) == ("WaitEvents", "metal")
        self.calls.append(arguments[1:3])
        if not self.answers:
            raise RpcError("it does not answer")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self) -> list[dict[str, Any]]:
        """Read as long as there are answers; each good answer of other calls starts the reader."""

        def done() -> bool:
            self.reader.start()
            return not self.answers and len(self.calls) > len(self.noted)

        wait_for(done)
        self.reader.stop()
        thread = self.reader._thread
        assert thread is not None
        thread.join(10)
        return self.noted

    @property
    def noted(self) -> list[dict[str, Any]]:
        return self.feed.since(0)[0]


def test_invalid_events_are_skipped_and_all_others_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(
        monkeypatch,
        [
            ended(1, cpu_usec=5),
            {"number": 2, "kind": "frozen", "time": 1},  # of a newer node manager
            ended(3, cpu_usec=-1),
            ended(4, time="x"),
            ended(5, metadata={**OURS, "nodepool_node_id": "7" * 1_000_000}),
            ended(6, metadata={**OURS, "nodepool_provider_name": "other"}),
            "x",
            None,
            ended(True),
            ended(7.5),
            ended(1 << 60),
            ended(8, node="0000000001", type="node-removed", unknown=[1]),
        ],
    )
    found = host.run()
    assert [(event["type"], event["node"]) for event in found] == [("node-usage", "0000000007")] * 2
    assert found[0]["cpu_usec"] == 5 and found[0]["time"] == 1.5 and "unknown" not in found[1]
    assert host.calls[:2] == [(0, 0), (0, 8)]


def test_repeated_numbers_and_long_answers_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, [ended(1)] * 3, [ended(n) for n in range(2, MOST + 50)])
    assert len(host.run()) == MOST + 1


@pytest.mark.parametrize(
    "first", [RpcFault(100, "unknown method"), RpcFault(104, "locked"), {}, 5, RpcError("away")]
)
def test_reader_starts_again_after_faults(monkeypatch: pytest.MonkeyPatch, first: Any) -> None:
    host = Host(monkeypatch, first, [ended(1)])
    assert len(host.run()) == 1


def test_only_what_is_stored_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, [ended(1)], [ended(2)])
    call = host.call

    def stored(*arguments: Any, **options: Any) -> Any:
        host.feed.stored = max(0, host.feed.number - 1)
        return call(*arguments, **options)

    host.reader._call = stored
    host.run()
    assert host.calls[:3] == [(0, 0), (0, 1), (1, 2)] or host.calls[:3] == [(0, 0), (0, 1), (0, 2)]
