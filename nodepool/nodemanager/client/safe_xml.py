"""Parses untrusted XML: no entities, and a document type only where needed (NM-C.5).

Without declarations of entities a document cannot expand or refer to other documents.
"""

from __future__ import annotations

import xml.parsers.expat
from typing import Any


class UnsafeXml(ValueError):
    """The document contains a refused declaration or is not well-formed; see the text."""


def parser(types: bool = False) -> Any:
    """Return an expat parser whose ``Parse`` raises UnsafeXml at such declarations.

    :param types: a document type without entities is fine.
    """

    def refuse(*_: object) -> None:
        raise UnsafeXml("a document type or entities are refused")

    found: Any = xml.parsers.expat.ParserCreate()
    if not types:
        found.StartDoctypeDeclHandler = refuse
    found.EntityDeclHandler = refuse
    found.ExternalEntityRefHandler = refuse
    return found


def check(document: bytes, types: bool = False) -> None:
    """Read it once for nothing else.

    :raises UnsafeXml: see there.
    """
    try:
        parser(types).Parse(document, True)
    except xml.parsers.expat.ExpatError as error:
        raise UnsafeXml(f"not well-formed: {error}") from None
