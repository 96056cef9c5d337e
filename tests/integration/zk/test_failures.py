"""Failed launches: records that several launchers count in, and one trial at a time (LAU-9.6)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.launcher.failures import HOUR, LaunchFailures
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.failures import MEMORY, MOST, Attempt, Failures
from nodepool.zk.mirror import notes
from nodepool.zk.records import RecordError
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


class Launchers:
    """The failures as two launchers count them."""

    def __init__(self, chroot: Chroot) -> None:
        self.clock = Clock()
        self.facades = [ZooKeeper(chroot.connect()) for _ in range(2)]
        self.each = [self._made(facade) for facade in self.facades]

    def _made(self, facade: ZooKeeper) -> LaunchFailures:
        failures = LaunchFailures(lambda: facade, self.clock.time)
        facade.note_tree.listeners.append(lambda: failures.changed(facade.note_tree))
        assert facade.wait_synced(20)
        failures.changed(facade.note_tree)
        return failures

    def stored(self) -> list[Failures]:
        return self.facades[0].readNotes(Failures)

    def fail(self, times: int, by: int = 0) -> None:
        for _ in range(times):
            self.clock.now += 1
            self.each[by].failed(PROVIDER, "small", "no key")

    def settled(self, times: int) -> bool:
        """Return whether both mirrors have this many failures, and nothing is to be written."""
        return all(
            not each._waiting
            and not each._sent
            and sum(len(record.times) for record, _ in each._stored.values()) == times
            for each in self.each
        )


PROVIDER: Any = SimpleNamespace(
    name="cloud a/b",
    provider={"name": "cloud a/b"},
    max_launch_failures_per_hour=5,
    getSupportedLabels=lambda: {"small"},
)


@pytest.fixture
def two(zk_chroot: Chroot) -> Launchers:
    return Launchers(zk_chroot)


def test_launchers_that_write_concurrently_lose_no_failure(two: Launchers) -> None:
    def many(by: int) -> None:
        for number in range(20):
            error = f"{by} {number}"
            two.each[by]._add((PROVIDER.name, "small"), Attempt("x", 1e9 + number + by / 2, error))

    threads = [threading.Thread(target=many, args=(by,)) for by in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: two.settled(40))


def test_failures_count_before_they_are_written(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.each[0], "_write", lambda _key: None)
    two.fail(5)
    assert two.each[0].blocked(PROVIDER, ["small"]) is not None
    assert two.stored() == []
    monkeypatch.undo()
    two.each[0].flush()
    wait_for(lambda: two.settled(5))
    assert two.each[1].blocked(PROVIDER, ["small"]) is not None


def test_launcher_whose_clock_is_hours_ahead_counts_the_failures_of_others(two: Launchers) -> None:
    state = LauncherState(SimpleNamespace(time=lambda: two.clock.now + 2 * HOUR, monotonic=float))
    state.server_time.measured(two.clock.now, 0.0)
    two.each[1]._now = state.launch_failures._now
    for launcher in (0, 1):
        two.fail(5, by=launcher)
        wait_for(lambda: two.settled(5))
        for each in two.each:
            assert each.blocked(PROVIDER, ["small"]) is not None, "not even a trial"
        two.each[launcher].succeeded(PROVIDER, "small")
        wait_for(lambda: two.settled(0))


def test_failure_that_another_launcher_counted_meanwhile_is_kept(two: Launchers) -> None:
    two.fail(1)
    wait_for(lambda: two.settled(1))
    stored = two.each[0]._stored
    two.fail(1, by=1)
    wait_for(lambda: two.settled(2))
    two.each[0]._stored = stored  # as before the mirror has heard of it
    two.fail(1)
    wait_for(lambda: not two.each[0]._sent)
    two.each[0].changed(two.facades[0].note_tree)
    wait_for(lambda: two.settled(3))


def test_record_that_was_deleted_meanwhile_is_created_again(two: Launchers) -> None:
    two.fail(4)
    wait_for(lambda: two.settled(4))
    stored = two.each[0]._stored
    notes.remove(two.facades[1].kazoo_client, two.stored()[0])
    wait_for(lambda: not two.each[0]._stored)
    two.each[0]._stored = stored  # as before the mirror has heard of it
    two.fail(1)
    wait_for(lambda: not two.each[0]._sent)
    two.each[0].changed(two.facades[0].note_tree)
    wait_for(lambda: two.settled(1))


def test_only_one_launcher_starts_a_trial(two: Launchers) -> None:
    two.fail(5)
    wait_for(lambda: two.settled(5))
    assert two.each[1].blocked(PROVIDER, ["small"]) is not None
    two.clock.now += HOUR
    trials = [each.trials(PROVIDER, ["small"]) for each in two.each]
    assert [each.blocked(PROVIDER, ["small"]) for each in two.each] == [None, None]
    for facade, writes, request_id in zip(two.facades, trials, ("200-1", "200-2"), strict=True):
        node = zk.Node()
        node.state, node.provider, node.type, node.allocated_to = (
            zk.INIT,
            PROVIDER.name,
            ["small"],
            request_id,
        )
        txn = Txn(facade.kazoo_client)
        txn.create(f"{paths.NODES}/", node.serialize(), sequence=True)
        for write in writes:
            txn.set(*write)
        if request_id == "200-1":
            facade.writer.run(txn)
        else:
            with pytest.raises(TransactionFailed, match="BadVersionError"):
                facade.writer.run(txn)
    # Whoever knows the new version knows the node, or that it is being read.
    wait_for(lambda: two.each[1].trials(PROVIDER, ["small"]) != trials[1])
    found = two.each[1].blocked(PROVIDER, ["small"], "200-2")
    assert found is not None and found[1].code is Code.LAUNCHES_FAIL
    wait_for(lambda: two.each[0].blocked(PROVIDER, ["small"], "200-1") is None)


def test_node_that_is_being_read_may_be_a_trial(two: Launchers) -> None:
    two.fail(5)
    wait_for(lambda: two.settled(5))
    two.clock.now += HOUR
    tree = two.facades[0].node_tree
    tree.reading[f"{paths.NODES}/0000000009"] = 1
    assert two.each[0].blocked(PROVIDER, ["small"]) is not None
    del tree.reading[f"{paths.NODES}/0000000009"]
    assert two.each[0].blocked(PROVIDER, ["small"]) is None


def test_request_for_several_nodes_waits_until_all_may_fail(two: Launchers) -> None:
    one = two.each[0]
    for _ in range(5):
        two.clock.now += 600
        one.failed(PROVIDER, "small", "no key")
    began = two.clock.now
    for wait, most in ((1199, 0), (1200, 1), (1800, 2), (3599, 4), (3600, 99)):
        two.clock.now = began + wait
        allowed = [n for n in (1, 2, 3, 4, 5, 99) if one.blocked(PROVIDER, ["small"] * n) is None]
        assert max(allowed, default=0) == most, wait


def test_other_configurations_and_labels_count_for_themselves(two: Launchers) -> None:
    two.fail(5)
    keys = {"name": "cloud", "x": {1: "a", "b": None}}
    other: Any = SimpleNamespace(**{**vars(PROVIDER), "provider": keys})
    assert two.each[0].blocked(PROVIDER, ["small", "big"]) is not None
    assert two.each[0].blocked(PROVIDER, ["big"]) is None
    assert two.each[0].blocked(other, ["small"]) is None
    wait_for(lambda: two.settled(5))
    two.each[1].succeeded(other, "small")
    two.each[1].failed(other, "small", "x")
    wait_for(lambda: two.settled(6))
    two.each[1].succeeded(other, "small")
    wait_for(lambda: two.settled(5))
    two.each[0].succeeded(PROVIDER, "small")
    wait_for(lambda: two.stored() == [])


def test_old_records_are_deleted(two: Launchers) -> None:
    two.fail(2)
    wait_for(lambda: two.settled(2))
    two.each[1].expire()
    two.clock.now += MEMORY + 1
    assert len(two.stored()) == 1
    two.each[1].expire()
    wait_for(lambda: two.stored() == [])


def test_unwritable_attempts_are_bounded(two: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two.each[0], "_write", lambda _key: None)
    two.fail(3 * MOST)
    assert [len(each) for each in two.each[0]._waiting.values()] == [MOST]
    record = Failures("p", "l")
    for number in range(3 * MOST):
        record = record.after(Attempt("x", float(number), "e" * 10_000))
    assert len(record.times) == MOST and len(record.error) == 400
    assert Failures.parse(record.name, record.values()) == record


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cloud", {"failures": []}),
        (" small", {"failures": []}),
        ("cloud small", {}),
        ("cloud small", {"failures": {}}),
        ("cloud small", {"failures": [1.0]}),
        ("cloud small", {"failures": [[float("nan"), "x"]]}),
        ("cloud small", {"failures": [["1", "x"]]}),
        ("cloud small", {"failures": [[1e12, "x"]]}),
        ("cloud small", {"failures": [[1.0, None]]}),
    ],
)
def test_invalid_record_is_refused(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        Failures.parse(name, values)
