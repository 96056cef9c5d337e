"""Offers that are sold out, as the launchers of a provider remember them (DRV-7.9)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from nodepool import exceptions
from nodepool.cloud import ErrorKind
from nodepool.cloud.sold_out import SoldOut

LOG = logging.getLogger("nodepool.test")


class Size(NamedTuple):
    name: str

    def describe(self) -> str:
        return self.name


ONE, TWO = Size("one"), Size("two")


class Shared:
    """What the launchers share, with writes that the test lets succeed."""

    def __init__(self, now: list[float]) -> None:
        self.now = now
        self.until: dict[str, float] = {}
        self.answers: list[Callable[[], object]] = []

    def left(self) -> dict[str, float]:
        return {name: until - self.now[0] for name, until in self.until.items()}

    def write(self, left: Mapping[str, float], written: Callable[[], object]) -> None:
        until = {name: self.now[0] + seconds for name, seconds in left.items()}

        def succeed() -> None:
            self.until = until
            written()

        self.answers.append(succeed)

    def settle(self) -> None:
        while self.answers:
            self.answers.pop(0)()


class Two:
    """The memories of two launchers."""

    def __init__(self) -> None:
        self.now = [0.0]
        self.shared = Shared(self.now)
        self.first, self.second = (SoldOut[Size](100, lambda: self.now[0]) for _ in range(2))
        for each in (self.first, self.second):
            each.share(self.shared.left, self.shared.write)


@pytest.fixture
def two() -> Two:
    return Two()


def test_refused_offer_is_skipped_before_and_after_it_is_shared(two: Two) -> None:
    two.first.refused(ONE)
    assert two.first.order([ONE, TWO]) == [TWO]
    assert two.second.order([ONE, TWO]) == [ONE, TWO]
    two.shared.settle()
    assert two.first.order([ONE, TWO]) == two.second.order([ONE, TWO]) == [TWO]
    two.now[0] = 101.0
    two.shared.until.clear()
    assert two.first.order([ONE, TWO]) == [ONE, TWO]


def test_offer_that_worked_for_one_launcher_is_tried_by_the_other_that_found_it_sold_out(
    two: Two,
) -> None:
    two.first.refused(ONE)
    two.shared.settle()
    two.second.worked(ONE)
    two.shared.settle()
    assert two.first.order([ONE, TWO]) == [ONE, TWO]
    assert two.shared.until == {}


def test_success_of_an_offer_that_is_not_sold_out_writes_nothing(two: Two) -> None:
    two.first.worked(ONE)
    assert two.shared.answers == []


def test_lost_write_is_repeated_with_the_next_refusal(two: Two) -> None:
    two.first.refused(ONE)
    two.shared.answers.clear()
    assert two.first.order([ONE, TWO]) == [TWO]
    two.first.refused(TWO)
    two.shared.settle()
    assert sorted(two.shared.until) == ["one", "two"]


def test_entries_of_the_other_launcher_are_kept(two: Two) -> None:
    two.first.refused(ONE)
    two.shared.settle()
    two.now[0] = 10.0
    two.second.refused(TWO)
    two.shared.settle()
    assert two.shared.until == {"one": 100.0, "two": 110.0}
    assert two.first.order([ONE, TWO]) == [ONE], "the one refused longest ago"


def test_refusal_during_a_write_is_not_forgotten(two: Two) -> None:
    two.first.refused(ONE)
    two.now[0] = 50.0
    two.first.refused(ONE)
    two.shared.answers.pop(0)()
    assert two.first.left() == {"one": 100.0}


def test_accepted_machine_that_is_refused_later_is_tried_elsewhere_until_all_are_sold_out() -> None:
    memory: SoldOut[Size] = SoldOut()
    assert memory.next_after(ONE, [ONE, TWO])
    assert not memory.next_after(TWO, [ONE, TWO])
    assert not memory.next_after(ONE, [ONE])


def test_acceptance_that_is_no_success_keeps_an_offer_sold_out() -> None:
    memory: SoldOut[Size] = SoldOut()
    for offer in (ONE, TWO):
        memory.refused(offer)

    def attempt(offer: Size) -> str:
        return offer.name

    def kind_of(_error: BaseException) -> ErrorKind:
        return ErrorKind.CAPACITY

    tried = memory.try_in_order([ONE, TWO], attempt, kind_of, "here", LOG, settled=False)
    assert tried == ("one", ONE)
    assert sorted(memory.left()) == ["one", "two"]
    assert memory.try_in_order([ONE, TWO], attempt, kind_of, "here", LOG) == ("one", ONE)
    assert sorted(memory.left()) == ["two"]


def test_refusal_of_all_offers_names_each(caplog: pytest.LogCaptureFixture) -> None:
    def attempt(offer: Size) -> None:
        raise RuntimeError(f"no {offer.name}")

    with pytest.raises(exceptions.QuotaException, match="one: no one; two: no two"):
        SoldOut[Size]().try_in_order([ONE, TWO], attempt, lambda _: ErrorKind.QUOTA, "here", LOG)
