from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.driver.utils import QuotaInformation

NAMES = st.sampled_from(["cores", "instances", "ram", "volumes", "volume-gb", "L-1216C47A"])
AMOUNTS = st.dictionaries(NAMES, st.integers(0, 10_000))
DEFAULTS = st.sampled_from([0, 1, math.inf])


def info(amounts: dict[str, int], default: float = 0) -> QuotaInformation:
    return QuotaInformation(default=default, **amounts)


def test_none_is_replaced_by_default() -> None:
    quota = QuotaInformation(cores=4, default=math.inf, gpus=None)
    assert quota.quota == {
        "compute": {"cores": 4, "instances": math.inf, "ram": math.inf, "gpus": math.inf}
    }
    assert quota.default == math.inf
    assert str(quota) == str(quota.quota)


@pytest.mark.spec("DRV-14.28: add and subtract treat missing keys with each side's own default")
def test_missing_keys_take_each_sides_default() -> None:
    limits = QuotaInformation(cores=8, instances=20, default=math.inf)
    limits.subtract(QuotaInformation(cores=2, instances=1, ram=8192, default=0, volumes=1))
    assert limits.get_resources() == {
        "cores": 6,
        "instances": 19,
        "ram": math.inf,
        "volumes": math.inf,
    }

    finite = QuotaInformation(cores=8, instances=20, ram=100)
    finite.subtract(QuotaInformation(instances=1, volumes=2))
    assert finite.get_resources() == {"cores": 8, "instances": 19, "ram": 100, "volumes": -2}
    assert not finite.non_negative()

    finite = QuotaInformation(cores=1, volumes=5)
    finite.add(QuotaInformation(cores=1, default=1))
    assert finite.get_resources() == {"cores": 2, "instances": 1, "ram": 1, "volumes": 6}


def test_unlimited_need_on_a_limited_side_is_negative() -> None:
    limits = QuotaInformation(cores=8, instances=1, ram=1)
    limits.subtract(QuotaInformation(default=math.inf, cores=0, instances=0, ram=0))
    assert limits.non_negative()
    limits.subtract(QuotaInformation(default=math.inf))
    assert not limits.non_negative()


def test_unlimited_stays_unlimited() -> None:
    limits = QuotaInformation(default=math.inf)
    limits.subtract(QuotaInformation(default=math.inf))
    assert limits.get_resources() == {"cores": math.inf, "instances": math.inf, "ram": math.inf}


def test_quota_is_built_from_resources() -> None:
    quota = QuotaInformation.from_resources(
        {"cores": 4, "instances": 1, "ram": None, "volume-gb": 80}
    )
    assert quota.get_resources() == {"cores": 4, "instances": 1, "ram": 0, "volume-gb": 80}
    assert json.loads(json.dumps(quota.get_resources())) == quota.get_resources()


def test_copies_are_independent_and_keep_subclass_and_extra_attributes() -> None:
    class Special(QuotaInformation):
        pass

    quota = Special(cores=1)
    quota.note = "kept"  # type: ignore[attr-defined]
    other = copy.deepcopy({"a": quota})["a"]
    other.subtract(QuotaInformation(cores=5))
    assert (quota.get_resources()["cores"], other.get_resources()["cores"]) == (1, -4)
    assert type(other) is Special
    assert other.note == "kept"


@given(AMOUNTS, AMOUNTS, DEFAULTS, DEFAULTS)
def test_arithmetic_agrees_with_the_definition(
    mine: dict[str, int], theirs: dict[str, int], own_default: float, other_default: float
) -> None:
    a, b = info(mine, own_default), info(theirs, other_default)
    names = set(a.get_resources()) | set(b.get_resources())
    before = {name: a.get_resources().get(name, own_default) for name in names}
    others = {name: b.get_resources().get(name, other_default) for name in names}

    total = copy.deepcopy(a)
    total.add(b)
    assert {name: total.get_resources().get(name, own_default) for name in names} == {
        name: before[name] + others[name] for name in names
    }
    rest = copy.deepcopy(a)
    rest.subtract(b)
    for name in names:
        expected = math.inf if before[name] == math.inf else before[name] - others[name]
        assert rest.get_resources().get(name, own_default) == expected
    assert rest.non_negative() == all(v >= 0 for v in rest.get_resources().values())


@given(AMOUNTS, AMOUNTS)
def test_adding_and_subtracting_the_same_changes_nothing(
    mine: dict[str, int], theirs: dict[str, int]
) -> None:
    quota = info(mine)
    quota.add(info(theirs))
    quota.subtract(info(theirs))
    left = quota.get_resources()
    assert {name: value for name, value in left.items() if value} == {
        n: v for n, v in mine.items() if v
    }


def test_parts_of_cores() -> None:
    """What fits in decimals fits: 19 times 0.1 into 1.9."""
    left, used = QuotaInformation(cores=1.9), QuotaInformation()
    for _ in range(19):
        used.add(QuotaInformation(cores=0.1))
        left.subtract(QuotaInformation(cores=0.1))
        assert left.non_negative()
    assert (used.quota["compute"]["cores"], left.quota["compute"]["cores"]) == (1.9, 0.0)
    left.subtract(QuotaInformation(cores=0.1))
    assert not left.non_negative()
    left = QuotaInformation(cores=math.inf)
    left.subtract(QuotaInformation(cores=0.1))
    assert left.quota["compute"]["cores"] == math.inf
