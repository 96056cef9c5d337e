"""XML-RPC texts with whole numbers of 64 bits: rates and sizes do not fit into the 32 of the standard (nodemanager.md C.5).

What XML cannot carry (control characters, as consoles print them) is replaced; None inside of values is ``<nil/>``.
"""

from __future__ import annotations

import re
import xmlrpc.client
from collections.abc import Sequence
from typing import Any

#: Levels of arrays and structs in a call.
MAX_DEPTH = 32
_IMPOSSIBLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _escape(text: str) -> str:
    return xmlrpc.client.escape(_IMPOSSIBLE.sub("\ufffd", text)).replace("\r", "&#13;")


class _Marshaller(xmlrpc.client.Marshaller):
    dispatch = dict(xmlrpc.client.Marshaller.dispatch)

    def dump_whole(self, value: int, write: Any) -> None:
        kind = "int" if -(2**31) <= value < 2**31 else "i8"
        if not -(2**63) <= value < 2**63:
            raise OverflowError(f"{value} has more than 64 bits")
        write(f"<value><{kind}>{value}</{kind}></value>\n")

    def dump_text(self, value: str, write: Any) -> None:
        write(f"<value><string>{_escape(value)}</string></value>\n")

    def dump_dictionary(self, value: dict[str, Any], write: Any) -> None:
        self.dump_struct(value, write, _escape)

    dispatch[int] = dump_whole  # type: ignore[assignment]
    dispatch[str] = dump_text  # type: ignore[assignment]
    dispatch[dict] = dump_dictionary  # type: ignore[assignment]


class _Unmarshaller(xmlrpc.client.Unmarshaller):
    """With a limit for nesting: what reads the values later may recurse."""

    _levels = 0

    def start(self, tag: str, attrs: Any) -> None:
        if tag in ("array", "struct"):
            self._levels += 1
            if self._levels > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} levels of arrays and structs")
        super().start(tag, attrs)

    def end(self, tag: str, *rest: Any) -> None:
        if tag in ("array", "struct"):
            self._levels -= 1
        super().end(tag, *rest)


def _values(values: Sequence[Any]) -> str:
    text: str = _Marshaller("utf-8", True).dumps(tuple(values))
    return text


def call(method: str, arguments: Sequence[Any]) -> bytes:
    """The text of a call.

    :raises TypeError: an argument has no form in XML-RPC.
    :raises OverflowError: a number is too large.
    """
    text = f"<methodCall>\n<methodName>{_escape(method)}</methodName>\n{_values(arguments)}</methodCall>\n"
    return f"<?xml version='1.0'?>\n{text}".encode("utf-8", "replace")


def response(result: Any) -> bytes:
    """The text of an answer; raises as :func:`call`."""
    return f"<?xml version='1.0'?>\n<methodResponse>\n{_values((result,))}</methodResponse>\n".encode("utf-8", "replace")


def fault(code: int, text: str) -> bytes:
    """The text of a refusal."""
    return (f"<?xml version='1.0'?>\n<methodResponse>\n<fault>\n<value><struct>\n<member><name>faultCode</name>\n"
            f"<value><int>{code}</int></value></member>\n<member><name>faultString</name>\n"
            f"<value><string>{_escape(text)}</string></value></member>\n</struct></value>\n</fault>\n</methodResponse>\n"
            ).encode("utf-8", "replace")


def parse_call(body: bytes) -> tuple[str, tuple[Any, ...]]:
    """Method and arguments.

    :raises ValueError: it is no call, or has a document type or entities.
    """
    from defusedxml.common import DefusedXmlException
    from defusedxml.xmlrpc import DefusedExpatParser

    target = _Unmarshaller(use_builtin_types=True)
    parser = DefusedExpatParser(target, forbid_dtd=True)
    try:
        parser.feed(body)
        parser.close()
        arguments = target.close()
        method = target.getmethodname()
    except DefusedXmlException:
        raise ValueError("a document type or entities are refused") from None
    except Exception as error:
        raise ValueError(f"not an XML-RPC call: {str(error)[:200]}") from None
    if not method:
        raise ValueError("not an XML-RPC call: no method")
    return method, tuple(arguments)
