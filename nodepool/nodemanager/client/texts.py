"""Cleaning of untrusted texts from slivers or other ends of connections."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Return the text in one line, without characters that a terminal would interpret."""
    return _CONTROL.sub("\ufffd", " ".join(text.split()) if _CONTROL.search(text) else text)
