"""XML-RPC texts with whole numbers of 64 bits: rates and sizes do not fit into the 32 of the standard (nodemanager.md C.5)."""

from __future__ import annotations

import xmlrpc.client
from collections.abc import Sequence
from typing import Any


class _Marshaller(xmlrpc.client.Marshaller):
    dispatch = dict(xmlrpc.client.Marshaller.dispatch)

    def dump_whole(self, value: int, write: Any) -> None:
        kind = "int" if -(2**31) <= value < 2**31 else "i8"
        if not -(2**63) <= value < 2**63:
            raise OverflowError(f"{value} has more than 64 bits")
        write(f"<value><{kind}>{value}</{kind}></value>\n")

    dispatch[int] = dump_whole  # type: ignore[assignment]


def _values(values: Sequence[Any]) -> str:
    text: str = _Marshaller("utf-8", False).dumps(tuple(values))
    return text


def call(method: str, arguments: Sequence[Any]) -> bytes:
    """The text of a call.

    :raises TypeError: an argument has no form in XML-RPC (None, for example).
    :raises OverflowError: a number is too large.
    """
    name = xmlrpc.client.escape(method)
    return (f"<?xml version='1.0'?>\n<methodCall>\n<methodName>{name}</methodName>\n{_values(arguments)}</methodCall>\n"
            ).encode("utf-8", "replace")


def response(result: Any) -> bytes:
    """The text of an answer; raises as :func:`call`."""
    return f"<?xml version='1.0'?>\n<methodResponse>\n{_values((result,))}</methodResponse>\n".encode("utf-8", "replace")


def fault(code: int, text: str) -> bytes:
    """The text of a refusal."""
    return xmlrpc.client.dumps(xmlrpc.client.Fault(code, text), methodresponse=True).encode("utf-8", "replace")
