"""Promised resources: sums by provider, pool and tenant."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.zk.mirror.reservations import Reservations

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("reserve"),
            st.integers(0, 5),
            st.sampled_from(["p1", "p2", None]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["t", None]),
            st.dictionaries(
                st.sampled_from(["cores", "ram", "instances"]), st.integers(0, 9), max_size=3
            ),
        ),
        st.tuples(st.just("release"), st.integers(0, 7)),
    ),
    max_size=40,
)


@pytest.mark.spec("LAU-8.4, LAU-8.6: accepted but unrecorded nodes count")
@given(OPERATIONS)
def test_sums_equal_those_of_a_model(operations: list[tuple[Any, ...]]) -> None:
    reservations, model = Reservations(), dict[Any, tuple[Any, ...]]()
    for kind, key, *values in operations:
        if kind == "reserve":
            reservations.reserve(key, *values)
            model[key] = tuple(values)
        else:
            reservations.release(key)
            model.pop(key, None)
        for provider in ("p1", "p2"):
            assert positive(reservations.provider(provider)) == total(
                model, lambda v, p=provider: v[0] == p
            )
            for pool in ("a", "b"):
                assert positive(reservations.provider(provider, pool)) == total(
                    model, lambda v, p=provider, q=pool: v[0] == p and v[1] == q
                )
        assert positive(reservations.tenant("t")) == total(model, lambda v: v[2] == "t")


def positive(sums: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in sums.items() if amount}


def total(model: dict[Any, tuple[Any, ...]], wanted: Any) -> dict[str, float]:
    result: Counter[str] = Counter()
    for values in model.values():
        if wanted(values):
            result.update(values[3])
    return {name: amount for name, amount in result.items() if amount}


def test_a_new_promise_replaces_the_old_one() -> None:
    reservations = Reservations()
    reservations.reserve("k", "p", "main", "t", {"cores": 4, "instances": 1})
    reservations.reserve("k", "p", "main", "t", {"cores": 2})
    assert positive(reservations.provider("p")) == {"cores": 2}
    reservations.release("k")
    reservations.release("k")
    assert positive(reservations.provider("p", "main")) == positive(reservations.tenant("t")) == {}
    assert reservations.provider("unknown") == reservations.tenant("unknown") == {}
