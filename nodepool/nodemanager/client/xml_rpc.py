"""XML-RPC with 64-bit integers for rates and sizes; the standard has only 32 (NM-C.5).

Characters that XML does not support (control characters, as consoles print them) are replaced; None
inside of values is ``<nil/>``.
"""

from __future__ import annotations

import re
import xmlrpc.client
from collections.abc import Callable, Sequence
from typing import Any

from nodepool.nodemanager.client import safe_xml

#: Levels of arrays and structs in a call.
MAX_DEPTH = 32
#: Minimum bytes of a call per element, and the elements allowed in any case: elements cost far
#: more time than characters.  The densest honest text is a list of nil values, 11 bytes each.
BYTES_PER_ELEMENT = 10
MIN_ELEMENTS = 64
_IMPOSSIBLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _escape(text: str) -> str:
    return xmlrpc.client.escape(_IMPOSSIBLE.sub("\ufffd", text)).replace("\r", "&#13;")


class _Marshaller(xmlrpc.client.Marshaller):
    dispatch = dict(xmlrpc.client.Marshaller.dispatch)

    def dump_whole(self, value: int, write: Callable[[str], object]) -> None:
        kind = "int" if -(2**31) <= value < 2**31 else "i8"
        if not -(2**63) <= value < 2**63:
            raise OverflowError(f"{value} has more than 64 bits")
        write(f"<value><{kind}>{value}</{kind}></value>\n")

    def dump_text(self, value: str, write: Callable[[str], object]) -> None:
        write(f"<value><string>{_escape(value)}</string></value>\n")

    def dump_dictionary(self, value: dict[str, Any], write: Callable[[str], object]) -> None:
        self.dump_struct(value, write, _escape)

    dispatch[int] = dump_whole  # type: ignore[assignment]
    dispatch[str] = dump_text  # type: ignore[assignment]
    dispatch[dict] = dump_dictionary  # type: ignore[assignment]


class _Unmarshaller(xmlrpc.client.Unmarshaller):
    """Limits elements and nesting while reading, as later readers of the values may recurse."""

    def __init__(self, elements: int) -> None:
        super().__init__(use_builtin_types=True)
        self._levels = 0
        self._left = elements

    def start(self, tag: str, attrs: dict[str, Any]) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many elements for its length")
        if tag in ("array", "struct"):
            self._levels += 1
            if self._levels > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} levels of arrays and structs")
        super().start(tag, attrs)

    def end(self, tag: str, *rest: object) -> None:
        if tag in ("array", "struct"):
            self._levels -= 1
        super().end(tag, *rest)
        # It would be given to each of the elements around it, too: a text in a thousand of them, a
        # thousand copies.
        self._data: list[str] = []


def _values(values: Sequence[Any]) -> str:
    text: str = _Marshaller("utf-8", True).dumps(tuple(values))
    return text


def call(method: str, arguments: Sequence[Any]) -> bytes:
    """Return the text of a call.

    :raises TypeError: an argument cannot be represented in XML-RPC.
    :raises OverflowError: a number is too large.
    """
    text = (
        f"<methodCall>\n<methodName>{_escape(method)}</methodName>\n{_values(arguments)}</"
        "methodCall>\n"
    )
    return f"<?xml version='1.0'?>\n{text}".encode("utf-8", "replace")


def response(result: object) -> bytes:
    """Return the text of an answer; raises as :func:`call`."""
    return (
        f"<?xml version='1.0'?>\n<methodResponse>\n{_values((result,))}</methodResponse>\n".encode(
            "utf-8", "replace"
        )
    )


def fault(code: int, text: str) -> bytes:
    """Return the text of a refusal."""
    return (
        "<?xml version='1.0'?>\n<methodResponse>\n<fault>\n<value><struct>\n<member><name>"
        "faultCode</name>\n"
        f"<value><int>{code}</int></value></member>\n<member><name>faultString</name>\n"
        f"<value><string>{_escape(text)}</string></value></member>\n</struct></value>\n</fault>\n</"
        "methodResponse>\n"
    ).encode("utf-8", "replace")


def parse_call(body: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return method and arguments.

    :raises ValueError: not a call, has a document type (required for entities), or has too many
        elements.
    """
    target = _Unmarshaller(MIN_ELEMENTS + len(body) // BYTES_PER_ELEMENT)
    target.xml("", None)  # expat has decoded it
    parser = safe_xml.parser()
    parser.StartElementHandler = target.start
    parser.EndElementHandler = target.end
    parser.CharacterDataHandler = target.data
    try:
        parser.Parse(body, True)
        arguments = target.close()
        method = target.getmethodname()
    except Exception as error:
        raise ValueError(f"not an XML-RPC call: {str(error)[:200]}") from None
    if not method:
        raise ValueError("not an XML-RPC call: no method")
    return method, tuple(arguments)
