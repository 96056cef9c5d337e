"""The export of ended nodes to a file."""

from __future__ import annotations

import json
import logging
import pathlib
import zlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kazoo.exceptions import ConnectionLoss, NoNodeError

from nodepool.launcher import usage_log
from nodepool.launcher.usage_log import FORGET_AFTER, INTERVAL, UsageLog
from nodepool.status.usage_file import UsageFile
from nodepool.zk.history import HistoryFollower
from tests.unit.status.test_usage import GIB, life


class History:
    """The writes of a history, as a client of ZooKeeper."""

    def __init__(self) -> None:
        self.writes: dict[str, bytes] = {}
        self.number = 0
        self.read: list[str] = []
        self.broken = False

    def append(self, *events: dict[str, Any]) -> None:
        self.writes[f"{self.number:010}"] = zlib.compress(
            b"\n".join(json.dumps(event).encode() for event in events)
        )
        self.number += 1

    def merge(self) -> None:
        names = sorted(self.writes)
        text = b"\n".join(zlib.decompress(self.writes[name]) for name in names)
        self.writes = {f"{names[0][:10]}-{names[-1][-10:]}": zlib.compress(text)}

    def get_children_async(self, _path: str) -> Any:
        return SimpleNamespace(get=lambda timeout: list(self.writes))

    def get_async(self, path: str) -> Any:
        name = path.rpartition("/")[2]

        def get(timeout: float) -> tuple[bytes, None]:
            if self.broken:
                raise ConnectionLoss
            if name not in self.writes:
                raise NoNodeError
            self.read.append(name)
            return self.writes[name], None

        return SimpleNamespace(get=get)


class Setting:
    """A launcher that exports to a file; the passes run on the thread of the test."""

    def __init__(self, path: pathlib.Path) -> None:
        self.history, self.now, self.path = History(), 0.0, path
        self.nodes: dict[str, object] = {}
        self.state: Any = SimpleNamespace(
            clock=SimpleNamespace(monotonic=lambda: self.now),
            config=SimpleNamespace(usage_log=str(path), labels={}, providers={}),
            zk=SimpleNamespace(
                synced=True,
                kazoo_client=self.history,
                node_tree=SimpleNamespace(get=self.nodes.get),
                request_tree=SimpleNamespace(get=lambda _request: None),
            ),
        )
        self.log = UsageLog(self.state)

    def update(self) -> None:
        self.log._update(str(self.path))

    def rows(self) -> dict[str, Any]:
        with UsageFile(str(self.path)) as file:
            return {use.node: use for use in file.uses(0.0)}


@pytest.fixture
def setting(tmp_path: pathlib.Path) -> Setting:
    return Setting(tmp_path / "usage.sqlite")


def test_each_write_is_read_once_also_after_a_merge(setting: Setting) -> None:
    history, follower = setting.history, HistoryFollower()
    for number in range(4):
        history.append({"type": "a", "time": number})

    def times() -> list[float]:
        return [event["time"] for events in follower.read(cast(Any, history)) for event in events]

    assert times() == [0, 1, 2, 3]
    history.merge()
    history.append({"type": "a", "time": 4})
    assert times() == [4] and times() == []
    history.append({"type": "a", "time": 5})
    history.merge()
    assert times() == [0, 1, 2, 3, 4, 5], "a merge contains something new: all of it is read"
    history.writes["odd"] = b""
    history.writes = {"0000000001": history.writes[next(iter(history.writes))]}
    assert times() == [0, 1, 2, 3, 4, 5], "ZooKeeper was emptied"


def test_write_that_is_merged_while_it_is_read_is_not_missed(setting: Setting) -> None:
    history, follower = setting.history, HistoryFollower()
    for number in range(3):
        history.append({"type": "a", "time": number})
    found = []
    for events in follower.read(cast(Any, history)):
        found += events
        if len(found) == 1:
            history.merge()
    for events in follower.read(cast(Any, history)):
        found += events
    assert {event["time"] for event in found} == {0, 1, 2}


@pytest.mark.spec("issue 49, 3: a row for each ended node; kill -9 loses nothing of the history")
def test_ended_nodes_are_written_once_however_they_arrive(setting: Setting) -> None:
    first, second = life("1"), life("2", 5.0, "large")
    setting.history.append(*first[:6], *second[:3])
    setting.update()
    assert setting.rows() == {}
    setting.history.append(*first[6:])
    setting.history.append(*second[3:9])
    setting.update()
    expected = setting.rows()
    assert set(expected) == {"1", "2"} and expected["1"].measured["memory_peak"] == GIB
    assert expected["2"].measured == {} and expected["2"].user["job"] == "unit"
    # The usage comes after the end; nothing else is read again.
    setting.history.read.clear()
    setting.history.append(second[9])
    setting.update()
    assert setting.history.read == ["0000000003"]
    expected = setting.rows()
    assert expected["2"].measured["memory_peak"] == GIB and expected["2"].label == "large"
    assert not setting.log._ledger.uses, "memory is only needed for nodes that exist"
    # Another launcher is elected, or this one starts again.
    setting.history.merge()
    setting.log = UsageLog(setting.state)
    setting.update()
    assert setting.rows() == expected
    # The file was moved away.
    setting.path.unlink()
    setting.update()
    assert setting.rows() == expected


def test_nodes_whose_end_is_not_in_the_history_are_forgotten(setting: Setting) -> None:
    setting.nodes["2"] = object()
    setting.history.append(*life("1")[:4], *life("2")[:4], *life("3"))
    setting.update()
    assert set(setting.log._ledger.uses) == {"1", "2"} and setting.log._ledger.users
    setting.now = FORGET_AFTER
    setting.update()
    assert set(setting.log._ledger.uses) == {"2"} and not setting.log._ledger.users


def test_file_that_cannot_be_written_is_a_problem_until_it_can(
    setting: Setting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, config = setting.log, setting.state.config
    setting.history.append(*life("1"))
    setting.path.write_text("not a database" * 100)

    def check(elected: bool = True) -> list[str]:
        log.check(elected)
        if log._wake.is_set():
            log._wake.clear()
            log._pass()
        setting.now += INTERVAL
        return [str(problem) for problem in log.problems()]

    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(usage_log.threading, "Thread", lambda **_options: thread)
    for _ in range(2):
        [problem] = check()
        assert f"usage-log {setting.path} cannot be written: file is not" in problem
        assert "Suggestion: " in problem
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "logged once"
    assert check(elected=False) == [] and check()
    config.usage_log = "relative"
    assert "it is not an absolute path" in check()[0]
    config.usage_log = str(setting.path)
    setting.path.unlink()
    setting.history.broken = True
    assert check() == []
    setting.history.broken = False
    assert check() == [] and set(setting.rows()) == {"1"}


def test_nothing_runs_without_the_option(setting: Setting) -> None:
    setting.state.config.usage_log = None
    setting.log.check(True)
    setting.state.config = None
    setting.log.check(True)
    assert setting.log._thread is None
    setting.log.stop()
    setting.log.join()


def test_thread_writes_and_ends_on_request(setting: Setting) -> None:
    setting.history.append(*life("1"))
    setting.log.check(True)
    thread = setting.log._thread
    assert thread is not None and thread.name == "ThreadPoolExecutor-usage-log"
    setting.log.check(True)
    setting.log.stop()
    setting.log.join()
    assert not thread.is_alive()
