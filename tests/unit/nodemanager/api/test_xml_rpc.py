"""Texts of calls and answers."""

from __future__ import annotations

import contextlib
import tracemalloc
import xmlrpc.client
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.nodemanager.client import xml_rpc

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(VALUES, max_size=4))
def test_calls_survive_a_round_trip(arguments: list[Any]) -> None:
    assert xml_rpc.parse_call(xml_rpc.call("M", arguments)) == ("M", tuple(arguments))


@given(st.text(), st.integers(0, 1000))
def test_any_text_can_be_reported(text: str, code: int) -> None:
    """Control characters, lone surrogates: whatever a console printed."""
    ((result,), _) = xmlrpc.client.loads(xml_rpc.response({text: [text]}))
    assert len(next(iter(result))) == len(text)
    with pytest.raises(xmlrpc.client.Fault) as caught:
        xmlrpc.client.loads(xml_rpc.fault(code, text))
    assert caught.value.faultCode == code
    assert len(caught.value.faultString) == len(text)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_call_is_refused_cleanly(body: bytes) -> None:
    with pytest.raises(ValueError):
        xml_rpc.parse_call(body)


@pytest.mark.spec("NM-C.5: numbers of 64 bits")
def test_numbers_have_64_bits() -> None:
    assert b"<i8>1000000000000</i8>" in xml_rpc.response(10**12)
    assert b"<int>5</int>" in xml_rpc.response(5)
    with pytest.raises(OverflowError):
        xml_rpc.response(2**63)


@pytest.mark.spec("issue 10, F5: elements and copies of texts are bounded while a call is read")
@pytest.mark.parametrize(
    "body",
    [
        b"<methodCall><methodName>Help</methodName><params>" + b"<value/>" * 120_000,
        b"<methodCall><methodName>Help</methodName><params>"
        + b"<string>" * 20_000
        + b"x\n" * 100_000
        + b"</string>" * 20_000
        + b"</params></methodCall>",
    ],
)
def test_memory_for_reading_a_call_is_bounded(body: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            xml_rpc.parse_call(body)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="too many elements"):
        xml_rpc.parse_call(b"<a>" + b"<value/>" * 8000 + b"</a>")


def test_many_small_values() -> None:
    """What our own client makes of the smallest values is not an attack."""
    for value in (None, "", 0, [], {}, True):
        arguments = [[value] * 5000]
        assert xml_rpc.parse_call(xml_rpc.call("M", arguments)) == ("M", tuple(arguments))
