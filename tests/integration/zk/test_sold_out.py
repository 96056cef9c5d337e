"""Sold-out offers that the launchers of a provider share by a record (DRV-7.9, ZK-7.10)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from nodepool.cloud.sold_out import SoldOut
from nodepool.driver.statemachine.shared_offers import SharedOffers
from nodepool.zk import paths
from nodepool.zk.mirror import notes
from nodepool.zk.records import RecordError
from nodepool.zk.sold_out import MEMORY, MOST, SoldOutOffers
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for

NAME = "cloud a/b"
PATH = f"{paths.NOTES}/sold-out:cloud%20a%2Fb"


class Size(NamedTuple):
    name: str

    def describe(self) -> str:
        return self.name


ONE, TWO = Size("one"), Size("two")


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


class Launchers:
    """The memories of two launchers on one ZooKeeper."""

    def __init__(self, chroot: Chroot) -> None:
        self.clock = Clock()
        self.facades = [ZooKeeper(chroot.connect()) for _ in range(2)]
        self.first, self.second = (self._made(facade) for facade in self.facades)

    def _made(self, facade: ZooKeeper) -> SoldOut[Size]:
        assert facade.wait_synced(20)
        memory: SoldOut[Size] = SoldOut(clock=self.clock.monotonic)
        shared = SharedOffers(facade, NAME, self.clock)
        memory.share(shared.left, shared.write)
        return memory

    def both(self, *names: str) -> None:
        """Wait until both know of exactly these offers, and nothing is only in memory."""
        wait_for(
            lambda: all(
                [*memory.left()] == [*names] and not memory._until
                for memory in (self.first, self.second)
            ),
            what=f"both know of {names}",
        )

    def stored(self) -> Any:
        kazoo = self.facades[0].kazoo_client
        return json.loads(kazoo.get(PATH)[0]) if kazoo.exists(PATH) else None


@pytest.fixture
def two(zk_chroot: Chroot) -> Launchers:
    return Launchers(zk_chroot)


def test_one_launcher_does_not_try_what_the_other_found_sold_out(two: Launchers) -> None:
    two.first.refused(ONE)
    assert two.first.order([ONE, TWO]) == [TWO]
    two.both("one")
    assert two.second.order([ONE, TWO]) == [TWO]
    assert two.stored() == {"offers": {"one": 1e9 + MEMORY}}
    two.clock.now += MEMORY
    two.both()


def test_record_is_deleted_when_its_last_offer_works(two: Launchers) -> None:
    two.first.refused(ONE)
    two.both("one")
    two.second.worked(ONE)
    two.both()
    assert two.stored() is None


def test_launchers_that_find_different_offers_sold_out_know_both(two: Launchers) -> None:
    two.first.refused(ONE)
    two.both("one")
    two.second.refused(TWO)
    two.both("one", "two")


def test_refusals_before_the_mirror_knows_the_record_are_shared(two: Launchers) -> None:
    names = [f"size {number}" for number in range(20)]
    for name in names:
        two.first.refused(Size(name))
    two.both(*sorted(names))
    two.first.worked(Size(names[0]))
    two.first.refused(Size(names[0]))
    two.both(*sorted(names))


def test_late_answer_to_an_earlier_write_does_not_undo_a_later_one(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = two.facades[0].writer
    submit = writer.submit
    held: list[Any] = []
    answers: list[Any] = []

    def hold_the_second(txn: Any, callback: Any) -> None:
        number = len(answers) + len(held)

        def answered(*answer: Any) -> None:
            if number == 1:
                held.append(lambda: callback(*answer))
            else:
                callback(*answer)
                answers.append(answer)

        submit(txn, answered)

    monkeypatch.setattr(writer, "submit", hold_the_second)
    two.first.refused(ONE)
    wait_for(lambda: answers, what="the creation")
    with monkeypatch.context() as late:
        late.setattr(SharedOffers, "_stored", lambda _self: None)
        two.first.refused(TWO)
    wait_for(lambda: held, what="the answer that the record exists")
    two.first.refused(Size("three"))
    wait_for(lambda: len(answers) == 2, what="the third write")
    held[0]()
    wait_for(lambda: len(answers) == 3, what="the write instead of the second")
    two.both("one", "three", "two")


def test_record_that_another_launcher_created_meanwhile_is_replaced(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes.write(two.facades[1].kazoo_client, SoldOutOffers(NAME, {"two": 1e9 + 9}))
    two.both("two")
    monkeypatch.setattr(SharedOffers, "_stored", lambda _self: None)
    two.first.refused(ONE)
    monkeypatch.undo()
    two.both("one")


def test_record_that_was_deleted_meanwhile_is_created_again(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedOffers, "_stored", lambda _self: SoldOutOffers(NAME))
    two.first.refused(ONE)
    monkeypatch.undo()
    two.both("one")


def test_record_that_does_not_exist_need_not_be_deleted(two: Launchers) -> None:
    done: list[int] = []
    SharedOffers(two.facades[0], NAME, two.clock).write({}, lambda: done.append(1))
    wait_for(lambda: done, what="it counts as written")


@pytest.mark.parametrize("data", [b"?", b'{"offers": ["one"]}', b""])
def test_damaged_record_is_replaced_by_the_next_refusal(two: Launchers, data: bytes) -> None:
    two.facades[0].kazoo_client.create(PATH, data, makepath=True)
    wait_for(lambda: PATH in two.facades[0].note_tree.bad, what="it is reported")
    assert two.first.order([ONE, TWO]) == [ONE, TWO]
    two.first.refused(ONE)
    two.both("one")
    assert not two.facades[0].note_tree.bad


def test_offer_that_could_not_be_shared_is_shared_with_the_next_one(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise RuntimeError("the client is closed")

    monkeypatch.setattr(two.facades[0].writer, "submit", refuse)
    two.first.refused(ONE)
    assert two.first.order([ONE, TWO]) == [TWO]
    monkeypatch.undo()
    two.first.refused(TWO)
    two.both("one", "two")


def test_launcher_killed_before_it_wrote_loses_only_the_memory(
    two: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.facades[0].writer, "submit", lambda *_args: None)
    two.first.refused(ONE)
    successor = two._made(two.facades[0])
    assert successor.order([ONE, TWO]) == [ONE, TWO]
    monkeypatch.undo()
    successor.refused(ONE)
    wait_for(lambda: two.second.order([ONE, TWO]) == [TWO])


def test_entries_of_wrong_clocks_count_for_a_limited_time() -> None:
    record = SoldOutOffers(NAME, {"past": 999.0, "soon": 1010.0, "ahead": 1500.0, "far": 9999.0})
    assert record.left(1000.0) == {"soon": 10.0, "ahead": MEMORY}
    assert record.left(1501.0) == {}
    assert record.left(9700.0) == {"far": 299.0}


def test_invalid_entries_are_ignored_and_entries_limited() -> None:
    values = {
        "offers": {
            "good": 5,
            "text": "soon",
            "never": float("nan"),
            "before": -1,
            "late": 1e12,
            "none": None,
        }
    }
    assert SoldOutOffers.parse(NAME, values).until == {"good": 5.0}
    many = SoldOutOffers.parse(NAME, {"offers": {f"{n}": n for n in range(2 * MOST)}})
    assert [*many.until] == [f"{n}" for n in range(MOST, 2 * MOST)]
    assert len(SoldOutOffers(NAME, {f"{n}": n for n in range(2 * MOST)}).values()["offers"]) == MOST
    for broken in ({}, {"offers": None}):
        with pytest.raises(RecordError):
            SoldOutOffers.parse(NAME, broken)
