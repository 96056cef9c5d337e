"""Names and labels that Kubernetes accepts (KUB-4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

#: Valid names of namespaces and pods, and values of labels.
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?\Z")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z"
)
LONGEST_NAME, LONGEST_VALUE = 63, 63
#: Digits of a node id, and the dash before it.
ID_LENGTH = 11


def name_trouble(name: str, longest: int = LONGEST_NAME) -> str | None:
    """Return why it cannot be the name of a namespace or pod."""
    if not _DNS_LABEL.match(name):
        return (
            f"{name!r} cannot be a name in Kubernetes: lower-case letters, digits and dashes "
            "only, no dash at the ends"
        )
    if len(name) > longest:
        return f"{name!r} is too long for a name in Kubernetes: at most {longest} characters here"
    return None


def value_trouble(value: str) -> str | None:
    """Return why it cannot be the value of a Kubernetes label."""
    if len(value) > LONGEST_VALUE or not _LABEL_VALUE.match(value):
        return (
            f"{value!r} cannot be the value of a Kubernetes label: at most {LONGEST_VALUE} "
            "letters, digits, '-', '_' and '.', "
            "of which the first and the last is a letter or digit"
        )
    return None


def labels_trouble(labels: dict[str, Any], only_keys: Iterable[str] = ()) -> str | None:
    """Return why these cannot be labels; values of *only_keys* are not known yet."""
    for key in (*labels, *only_keys):
        if not _LABEL_KEY.match(str(key)) or len(str(key).rpartition("/")[2]) > LONGEST_VALUE:
            return f"{key!r} cannot be the name of a Kubernetes label"
    return next(
        (trouble for value in labels.values() if (trouble := value_trouble(str(value)))), None
    )
