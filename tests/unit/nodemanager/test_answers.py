"""Answers of node managers are checked before anything uses them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nodepool.driver.nodemanager.answers import check, metadata_of
from nodepool.nodemanager.client.rpc import RpcError
from tests.support.nodemanager.fake_host import CAPACITY, SLIVER

ODD: list[Any] = [math.nan, math.inf, -1, "lots", [1, 2], 1 << 60, True, None, {}]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("key", ["cores", "memory", "disk", "slivers", "cpu"])
def test_capacity_with_an_impossible_amount_is_refused(key: str, odd: Any) -> None:
    with pytest.raises(RpcError, match=rf"GetCapacity\.{key} must be"):
        check("GetCapacity", (), {**CAPACITY, key: odd})
    if key != "cores":
        with pytest.raises(RpcError, match=r"GetCapacity\.allocated"):
            check("GetCapacity", (), {**CAPACITY, "allocated": {**CAPACITY["allocated"], key: odd}})


@pytest.mark.parametrize(
    "changes",
    [
        {"allocated": [1, 2]},
        {"default": 5},
        {"default": {"memory": 1}},
        {"images": "a"},
        {"images": [1]},
        {"group": 7},
        {"cores": 0},
        {"cores": 1.5},
        {"host": "a\nb"},
    ],
    ids=repr,
)
def test_capacity_with_a_part_of_the_wrong_type_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RpcError, match=rf"GetCapacity.*{next(iter(changes))}"):
        check("GetCapacity", (), {**CAPACITY, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": None},
        {"name": 5},
        {"metadata": [1]},
        {"effective": {"nm_mem_limit": "x"}},
        {"ssh_port": 70000},
        {"ssh_port": 2.5},
        {"host_keys": "key"},
        {"host_keys": ["a\nother.example ssh-rsa AAAA"]},
        {"username": {}},
        {"username": "a{{b}}"},
        {"ssh_address": "h{%x%}"},
        {"ssh_address": "a b"},
        {"expiry": math.nan},
        {"state": 1},
    ],
    ids=repr,
)
def test_sliver_with_a_bad_part_is_refused(changes: dict[str, Any]) -> None:
    sliver = {**SLIVER, **changes}
    for method, arguments, answer in (
        ("ListSlivers", (), [SLIVER, sliver]),
        ("PutRecord", ({"name": "s"},), sliver),
        ("WaitSliver", ("s", "ready", 1), sliver),
    ):
        with pytest.raises(RpcError, match=next(iter(changes))):
            check(method, arguments, answer)


@pytest.mark.parametrize("answer", [None, "x", 5, {}, [5], [[]], [{"state": "ready"}]], ids=repr)
def test_list_that_is_none_is_refused(answer: Any) -> None:
    with pytest.raises(RpcError):
        check("ListSlivers", (), answer)


def test_answer_about_another_sliver_is_refused() -> None:
    with pytest.raises(RpcError, match="must be 'mine'"):
        check("PutRecord", ({"name": "mine"},), SLIVER)


def test_good_answers_pass() -> None:
    check("GetCapacity", (), CAPACITY)
    check(
        "GetCapacity",
        (),
        {
            key: value
            for key, value in CAPACITY.items()
            if key not in ("default", "images", "group")
        },
    )
    check("ListSlivers", (), [SLIVER, {"name": "absent", "state": "absent", "error": ""}])
    check("GetConsole", ("s",), object())
    assert (
        metadata_of({"metadata": {"a": 5, "b": "x"}}) == {"a": "5", "b": "x"}
        and metadata_of({}) == {}
    )
