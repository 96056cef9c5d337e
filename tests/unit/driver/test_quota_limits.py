"""Limits of a provider: how long they count, and how they are renewed (DRV-6.4, LAU-8.1)."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.driver.utils import QuotaInformation
from nodepool.reasons import Code, because
from tests.conftest import wait_for
from tests.support.clock import HandClock

ONE = {"instances": 1}


class Provider(QuotaSupport):
    log = logging.getLogger("test")
    provider = SimpleNamespace(name="p")
    clock: HandClock

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.instances = 5
        self.asked = 0
        self.error: BaseException | None = None
        #: The cloud answers while this is set.
        self.answering = threading.Event()
        self.answering.set()

    def getProviderLimits(self) -> QuotaInformation:
        self.asked += 1
        assert self.answering.wait(20)
        if self.error is not None:
            raise self.error
        return QuotaInformation(instances=self.instances, default=math.inf)

    def unmanagedQuotaUsed(self) -> QuotaInformation:
        return QuotaInformation(instances=1)

    def fits_one(self, used: int = 0, launch: bool = True) -> bool:
        return self.short_of_limits(ONE, [{"instances": used}], launch) is None

    def settled(self) -> None:
        wait_for(
            lambda: self._renewal is None or self._renewal.done(), what="the end of the renewal"
        )


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider()
    assert provider.fits_one()
    yield provider
    provider.answering.set()
    provider.settled()


def left(provider: Provider) -> float:
    return provider.estimatedNodepoolQuota().get_resources()["instances"]


@pytest.mark.spec("DRV-6.4: if fetching limits fails and an older value exists, use that")
def test_older_limits_apply_when_the_cloud_reports_none(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    assert (left(provider), provider.asked) == (4, 1)
    provider.instances = 3
    provider.invalidateQuotaCache()
    assert (left(provider), provider.asked) == (2, 2)
    provider.error = TimeoutError("limits did not succeed within 120 s")
    provider.invalidateQuotaCache()
    assert (left(provider), provider.asked) == (2, 3)
    assert "using an older value: TimeoutError: limits did not succeed" in caplog.text
    provider.clock.now += 301
    assert (left(provider), provider.asked) == (2, 4)


def test_the_first_question_fails_as_the_cloud_does() -> None:
    provider = Provider()
    provider.error = TimeoutError("limits did not succeed within 120 s")
    with pytest.raises(TimeoutError):
        provider.fits_one()


def test_nobody_waits_for_a_renewal(provider: Provider) -> None:
    provider.answering.clear()
    provider.instances = 8
    provider.clock.now += 301
    assert provider.fits_one(used=3), "the older value counts"
    with pytest.raises(LimitsPending):
        provider.fits_one(used=4)  # perhaps the cloud would take it now
    with pytest.raises(LimitsPending):
        provider.fits_one(used=4, launch=False)
    woken = threading.Event()
    provider.when_limits_known(woken.set)
    wait_for(lambda: provider.asked == 2)
    assert not woken.is_set()
    provider.answering.set()
    assert woken.wait(20)
    assert provider.fits_one(used=4)
    assert not provider.fits_one(used=7)
    assert provider.asked == 2


def test_no_launch_after_a_refusal_until_the_limits_are_known(provider: Provider) -> None:
    provider.answering.clear()
    provider.invalidateQuotaCache()
    assert provider.asked == 1, "asked when it matters"
    for _ in range(3):
        with pytest.raises(LimitsPending):
            provider.fits_one()
    assert provider.fits_one(launch=False), "an old answer does for what needs no launch"
    wait_for(lambda: provider.asked == 2)
    provider.instances = 1
    provider.answering.set()
    provider.settled()
    assert not provider.fits_one()
    assert provider.asked == 2


def test_a_refusal_during_a_renewal_counts(provider: Provider) -> None:
    """The limits under way may be from before it."""
    provider.answering.clear()
    provider.invalidateQuotaCache()
    with pytest.raises(LimitsPending):
        provider.fits_one()
    wait_for(lambda: provider.asked == 2)
    provider.invalidateQuotaCache()
    provider.answering.set()
    provider.settled()
    with pytest.raises(LimitsPending):
        provider.fits_one()
    provider.settled()
    assert provider.fits_one()
    assert provider.asked == 3


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.spec("issue 11, 2: errors at every call of a driver concern its provider alone")
@pytest.mark.parametrize(
    "error",
    [TimeoutError("no answer"), SystemExit(3), Unspeakable()],
    ids=lambda e: type(e).__name__,
)
def test_a_cloud_that_reports_no_quota_is_asked_now_and_then(
    provider: Provider, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        provider.clock.now += seconds

    provider._quota_stopping.wait = rest  # type: ignore[method-assign, assignment]
    provider.error = error
    for expected in (0.0, provider.RENEWAL_PAUSE):
        provider.invalidateQuotaCache()
        with pytest.raises(LimitsPending):
            provider.fits_one()
        provider.settled()
        assert provider.fits_one(used=3), "the older value counts"
        assert not provider.fits_one(used=4)
        assert rests.pop() == expected
        assert type(error).__name__ in caplog.text
    provider.error, provider.instances = None, 8
    provider.clock.now += provider.RENEWAL_PAUSE
    with pytest.raises(LimitsPending):
        provider.fits_one(used=4)
    provider.settled()
    assert provider.fits_one(used=4)


def test_who_asks_when_no_renewal_is_under_way_is_woken_immediately(provider: Provider) -> None:
    woken = threading.Event()
    provider.when_limits_known(woken.set)
    assert woken.is_set()


MILLI = 1000


@given(st.integers(1, 2500), st.integers(1, 250), st.data())
@example(1900, 100, None)
def test_as_many_fractions_fit_as_in_whole_numbers(
    limit: int, need: int, data: st.DataObject | None
) -> None:
    """Amounts are added in any order and split over usage, promises and estimates."""
    provider, limits = Provider(), QuotaInformation(cores=limit / MILLI, default=math.inf)
    parts = [QuotaInformation(default=0) for _ in range(3)]
    one = QuotaInformation(cores=need / MILLI)
    nodes = 0
    while True:
        short = provider.fits(one.get_resources(), limits, [part.get_resources() for part in parts])
        if short is not None:
            break
        nodes += 1
        parts[data.draw(st.integers(0, 2)) if data is not None else nodes % 3].add(one)
    assert nodes == limit // need
    left = limit - nodes * need
    assert str(short.left) == str(left / MILLI)


def test_nineteen_nodes_of_a_tenth_fill_one_point_nine_cores_whatever_the_order_of_additions() -> (
    None
):
    provider, limits = Provider(), QuotaInformation(cores=1.9, default=math.inf)
    one = {"cores": 0.1}
    for used, promised in ((i, 18 - i) for i in range(19)):
        parts = [{"cores": 0.1}] * used + [{"cores": 0.1 * promised}]
        assert provider.fits(one, limits, parts) is None
        short = provider.fits(one, limits, [*parts, one])
        assert short is not None and (short.needed, short.left, short.limit) == (0.1, 0, 1.9)


def test_limit_below_what_is_in_use_leaves_nothing() -> None:
    short = Provider().fits(
        {"instances": 1}, QuotaInformation(instances=7, default=math.inf), [{"instances": 8}]
    )
    assert short is not None
    reason = because(Code.POOL_LIMIT, name="main", **short._asdict())
    assert str(reason) == "pool main, instances: 1 needed, 0 of 7 left"
    assert reason.at("cloud-main").headline == "Limit of pool cloud-main: 8 of 7 instances in use"


def test_limits_that_a_request_waits_for_are_renewed_when_they_are_old(provider: Provider) -> None:
    woken = threading.Event()
    provider.clock.now += provider.WAITING_AGE - 1
    provider.limits_are_waited_for(woken.set)
    provider.settled()
    assert provider.asked == 1 and not woken.is_set()
    provider.clock.now += 1
    provider.limits_are_waited_for(woken.set)
    assert woken.wait(10) and provider.asked == 2
